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
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"(?:[Ss]ave (?:this|it) as|This is|in) `([\w.]+\.py)`:?[^`]*\Z")

# Python blocks share one namespace, as in a script that is read from top to bottom.
_DRIVER = """
import json, subprocess, sys
from pathlib import Path
from textwrap import dedent
for language, code, file in json.loads(sys.stdin.read()):
    print(f"--- {file or language}\\n{code}", flush=True)
    if file:
        Path(file).write_text(code)
    elif language == "python":
        exec(compile(code, "<page>", "exec"), globals())
    else:
        subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True, stdin=subprocess.DEVNULL)
"""


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    file: str | None = None
    """The file in which the page tells its reader to save it."""


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text, blocks = page.read_text(), []
    for match in _FENCED.finditer(text):
        paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2]
        name = _FILE_NAME.search(paragraph) if match[2] == "python" else None
        blocks.append(Block(match[2], dedent(match[3]), name[1] if name else None))
    return blocks


def run_blocks(
    blocks: Sequence[Block], directory: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run Python and Bash blocks, one after the other, in `directory`; write those that have a file into it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-c", _DRIVER],
        input=json.dumps([(block.language, block.code, block.file) for block in blocks]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=directory,
        env={**os.environ, **environment, "PATH": path},
    )
