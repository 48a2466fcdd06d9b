"""Measure in a process of its own: its memory and imports are those of the measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).parents[2]
_TAIL = 3000


def measure_in_process(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module of the benchmarks, and return the JSON object that is the last line it prints.

    Raises:
        RuntimeError: it failed; the message is the end of its errors.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    process = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, check=False, text=True)
    if process.returncode:
        raise RuntimeError(process.stderr[-_TAIL:])
    measured: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return measured
