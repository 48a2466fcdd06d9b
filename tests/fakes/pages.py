"""Pages of documentation, and the code in them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Python blocks share one namespace, as in a script that is read from top to bottom. `make` prints its commands only.
_DRIVER = """
import json, subprocess, sys
make = 'make() { command make --no-print-directory -n -C "$PAGES_ROOT" "$@" > /dev/null; }'
for language, code in json.loads(sys.stdin.read()):
    print(f"--- {language}\\n{code}", flush=True)
    if language == "python":
        exec(compile(code, "<page>", "exec"), globals())
    else:
        subprocess.run(["bash", "-euo", "pipefail", "-c", f"{make}\\n{code}"], check=True, stdin=subprocess.DEVNULL)
"""


@dataclass(frozen=True)
class Block:
    """A block of code."""

    language: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [Block(*found.groups()) for found in _FENCED.finditer(page.read_text())]


def run_blocks(
    blocks: Sequence[Block], directory: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run Python and Bash blocks, one after the other, in `directory`."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-c", _DRIVER],
        input=json.dumps([(block.language, block.code) for block in blocks]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=directory,
        env={**os.environ, **environment, "PATH": path, "PAGES_ROOT": str(ROOT)},
    )
