"""The commands `blocks register`, `blocks check` and `demo`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from prefect_tune.cli.app import START, AsJson, Target, app

__all__ = ["blocks"]

blocks = typer.Typer(help="The blocks that describe storage targets.", no_args_is_help=True)
app.add_typer(blocks, name="blocks", rich_help_panel=START)


@app.command(rich_help_panel=START)
def demo(
    target: Annotated[str | None, typer.Option(help="Target of the demo. Default: a temporary folder.")] = None,
    steps: Annotated[int, typer.Option(min=4, help="Training steps of each run.")] = 24,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the files it writes.")] = False,
) -> None:
    """Train, kill the run in the middle of an upload, resume it, and compare the results bit for bit."""
    from rich.console import Console

    from prefect_tune.demo.run_demo import DemoOptions, run_demo

    os.environ.setdefault("DO_NOT_TRACK", "1")  # no telemetry from a demo
    if not run_demo(DemoOptions(target=target, steps=steps, keep=keep), Console(highlight=False)):
        raise typer.Exit(1)


@blocks.command("register")
def register_blocks() -> None:
    """Register the block types with your Prefect server, so that its UI has their forms."""
    from prefect_tune.blocks import SyncConfig
    from prefect_tune.blocks.strict_block import StrictBlock
    from prefect_tune.blocks.target_types import TARGET_TYPES
    from prefect_tune.prefect_api.api_client import or_said

    kinds: tuple[type[StrictBlock], ...] = (*TARGET_TYPES, SyncConfig)
    with or_said("blocks"):
        for kind in kinds:
            kind.register_type_and_schema()
            print(kind.get_block_type_slug())


@blocks.command("check")
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
