"""The exit code and output of a call of the command line, in this process or one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO


@dataclass(frozen=True)
class CommandResult:
    code: object
    out: str
    err: str


Run = Callable[..., CommandResult]

PROGRAM = [sys.executable, "-c", "import sys; from prefect_tune.cli import main; sys.argv[0] = 'prefect-tune'; main()"]


def run_in_process(*arguments: object, stdout: IO[str] | None = None, **environment: str) -> CommandResult:
    """Call the command line in a process of its own, with more environment; `stdout` is captured unless it is given."""
    process = subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        env={**os.environ, **environment},
        stdout=stdout or subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return CommandResult(process.returncode, process.stdout or "", process.stderr)
