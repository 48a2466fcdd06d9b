"""The commands of the panel *Getting started*: `demo`, `blocks register` and `blocks check`."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from prefect_tune.cli.app import PANELS, AsJson, Command, Group, Target, app, command

blocks = typer.Typer(cls=Group, help="Register and check the blocks of storage targets.", no_args_is_help=True)
app.add_typer(blocks, name="blocks", rich_help_panel=PANELS["getting_started"])


@blocks.command("register", cls=Command)
def register_blocks() -> None:
    """Register the block types with your Prefect server, so that its UI has their forms."""
    from prefect_tune.blocks import SyncConfig
    from prefect_tune.blocks.storage_target import StrictBlock
    from prefect_tune.blocks.targets import TARGET_TYPES
    from prefect_tune.deploy.api_client import prefect_server

    kinds: tuple[type[StrictBlock], ...] = (*TARGET_TYPES, SyncConfig)
    with prefect_server("blocks"):
        for kind in kinds:
            kind.register_type_and_schema()
            print(kind.get_block_type_slug())


@blocks.command("check", cls=Command)
def check_target(target: Target, as_json: AsJson = False) -> None:
    """Write, read, list and delete a test object, and print in one line whether TARGET works."""
    from prefect_tune.blocks import resolve_target

    found = resolve_target(target).check()
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(found.message, file=sys.stdout if found.ok else sys.stderr)
    if not found.ok:
        raise typer.Exit(1)


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
