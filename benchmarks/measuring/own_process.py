"""Measure in a process of its own: its memory and imports are those of the measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).parents[2]
_TAIL = 3000


def measured_by(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module of the benchmarks, and return the JSON object that is the last line it prints.

    Raises:
        RuntimeError: it failed; the message is the end of its errors.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, check=False, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-_TAIL:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
