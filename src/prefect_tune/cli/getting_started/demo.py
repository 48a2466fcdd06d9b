"""The command `demo`: train, kill, resume, and compare."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from prefect_tune.cli.shared.app import command


@command
def demo(
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Target of the demo. Default: a temporary folder.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=4, help="Training steps of each run.")] = 24,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the files it writes.")] = False,
) -> None:
    """Train, kill the run in the middle of an upload, resume it, and compare the results bit for bit."""
    from rich.console import Console

    from prefect_tune.demo.run_demo import Demo

    os.environ.setdefault("DO_NOT_TRACK", "1")  # no telemetry from a demo
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what it wrote is removed
    if not Demo(target, steps, keep).run(Console(highlight=False)):
        raise typer.Exit(1)
