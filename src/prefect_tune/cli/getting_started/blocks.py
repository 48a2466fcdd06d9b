"""The commands `blocks register` and `blocks check`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import typer

from prefect_tune.cli.shared.app import PANELS, AsJson, Command, Group, Target, app

blocks = typer.Typer(cls=Group, help="Register and check the blocks of storage targets.", no_args_is_help=True)
app.add_typer(blocks, name="blocks", rich_help_panel=PANELS["getting_started"])


@blocks.command("register", cls=Command)
def register_blocks() -> None:
    """Register the block types with your Prefect server, so that its UI has their forms."""
    from prefect_tune.blocks import SyncConfig
    from prefect_tune.blocks.strict_block import StrictBlock
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
