"""The commands of the panel *Getting started*: `demo`, `drill`, `blocks register` and `blocks check`."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_tune.cli.app import (
    PANELS,
    AsJson,
    Command,
    Group,
    Target,
    add_working_directory_to_path,
    app,
    command,
    exit_without_verdict,
    option_without_default,
)
from prefect_tune.core.errors import InvalidInput, TuneError

if TYPE_CHECKING:
    from prefect_tune.drills.plan import DrillPlan

blocks = typer.Typer(cls=Group, help="Register and check the blocks of storage targets.", no_args_is_help=True)
app.add_typer(blocks, name="blocks", rich_help_panel=PANELS["getting_started"])


@blocks.command("register", cls=Command)
def register_blocks() -> None:
    """Register the block types with your Prefect server, so that its UI shows their forms."""
    from prefect_tune.blocks import SyncConfig
    from prefect_tune.blocks.storage_target import StrictBlock
    from prefect_tune.blocks.targets import TARGET_TYPES
    from prefect_tune.prefect_api.api_client import open_server_client

    kinds: tuple[type[StrictBlock], ...] = (*TARGET_TYPES, SyncConfig)
    with open_server_client("blocks"):
        for kind in kinds:
            kind.register_type_and_schema()
            print(kind.get_block_type_slug())


@blocks.command("check", cls=Command)
def check_target(target: Target, as_json: AsJson = False) -> None:
    """Write, read, list and delete a test object, and print in one line whether TARGET works."""
    from prefect_tune.blocks import resolve_target

    check = resolve_target(target).check()
    if as_json:
        print(json.dumps(asdict(check), indent=2))
    else:
        print(check.message, file=sys.stdout if check.ok else sys.stderr)
    if not check.ok:
        raise typer.Exit(1)


@command
def demo(
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Target of the demo. Default: a temporary folder.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=4, help="Training steps of each run.")] = 24,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the files that the demo writes.")] = False,
) -> None:
    """Run a drill with an included model: train, kill the run during an upload, resume it, compare."""
    from prefect_tune.demo import make_demo_plan

    _run_drill(make_demo_plan(steps), target, keep=keep, as_json=False)


@command
def drill(
    trainable: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="The trainable: a function or a class.", show_default=False)
    ],
    *,
    config: Annotated[
        list[str] | None,
        option_without_default("--config", "NAME=VALUE", "A value of the configuration, as JSON or text; repeatable."),
    ] = None,
    target: Annotated[
        str | None,
        option_without_default("--target", "TARGET", "Where the runs store checkpoints. Default: a temporary folder."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=2, help="Training steps of each run.")] = 12,
    kills: Annotated[int, typer.Option(metavar="N", min=1, help="How many times the second run is killed.")] = 3,
    at: Annotated[
        str | None, option_without_default("--at", "STEP,STEP", "Kill after these steps, not after random ones.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random steps.")] = 0,
    save_every: Annotated[
        int | None,
        option_without_default("--save-every", "N", "A class saves every N steps. Default: steps / 4.", at_least=1),
    ] = None,
    processes_per_trial: Annotated[
        int, typer.Option(metavar="N", min=1, help="Processes that train together (DDP, FSDP).")
    ] = 1,
    failure_hours: Annotated[
        float, typer.Option(metavar="HOURS", help="Mean time between failures, for the advice on saving.")
    ] = 24.0,
    as_json: AsJson = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what the runs write to the target.")] = False,
) -> None:
    """Train MODULE:NAME undisturbed, then again with kills and resumes, and compare the runs bit for bit.

    Exits with 0 if the runs are equal, with 1 if they differ, and with 2 if the drill could not run.
    """
    from prefect_tune.cli.search import parse_name_value_pairs
    from prefect_tune.drills.plan import make_drill_plan

    try:
        steps_at = [int(step) for step in at.split(",")] if at else []
    except ValueError:
        raise InvalidInput(f"--at {at!r}: expected steps, such as 3,7") from None
    add_working_directory_to_path()
    plan = make_drill_plan(
        trainable,
        parse_name_value_pairs(config or (), "--config") or {},
        steps,
        save_every,
        kills=kills,
        at=steps_at,
        seed=seed,
        hours_between_failures=failure_hours,
        processes=processes_per_trial,
    )
    _run_drill(plan, target, keep=keep, as_json=as_json)


def _run_drill(plan: DrillPlan, target: str | None, *, keep: bool, as_json: bool) -> None:
    """Run a drill, print its report, and exit with 1 if the runs differ, or with 2 if the drill could not run."""
    from rich.console import Console

    from prefect_tune.drills.run_drill import run_drill_in_terminal

    os.environ.setdefault("DO_NOT_TRACK", "1")  # a drill sends no telemetry
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # so that the drill removes its files
    try:
        report = run_drill_in_terminal(plan, target, Console(highlight=False, stderr=as_json), keep=keep)
    except TuneError as error:
        exit_without_verdict(error)
    if as_json:
        print(json.dumps(report.fields(), indent=2))
    if not report.is_exact:
        raise typer.Exit(1)
