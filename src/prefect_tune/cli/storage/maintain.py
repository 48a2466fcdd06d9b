"""The command `maintain`: run the flow `maintain` in this process."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from prefect_tune.cli.shared.app import AsJson, Target, command
from prefect_tune.cli.shared.flow_errors import short_errors
from prefect_tune.cli.shared.open_target import existing_place
from prefect_tune.core.errors import DamageFound

if TYPE_CHECKING:
    from prefect_tune.maintenance.report import MaintenanceReport

_DAMAGE = 4


@command
def maintain(
    target: Target,
    experiments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="EXPERIMENT", help="Names or patterns of experiments. Default: all.", show_default=False
        ),
    ] = None,
    verify: Annotated[Literal["sample", "all", "none"], typer.Option(help="Which checkpoints to verify.")] = "sample",
    share: Annotated[
        str, typer.Option(metavar="1/N", help="The sample: another part each day, all in N days.")
    ] = "1/7",
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Prune finished experiments to the last N.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report only; change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify checkpoints, quarantine damaged ones, delete unneeded objects; safe beside running experiments.

    Exits with 4 if it found damage.
    """
    from prefect_tune.core.experiment.retention import Retention

    existing_place(target)
    with short_errors("stopped; run it again to maintain the rest"):
        from prefect_tune.flows.maintain import maintain as flow

        retention = None if keep_last is None else Retention(last=keep_last)
        alarm = ""
        try:
            report = flow(
                target, experiments=experiments, verify=verify, share=share, retention=retention, dry_run=dry_run
            )
        except DamageFound as found:
            alarm, report = str(found), cast("MaintenanceReport", found.report)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print(report.summary)
    if alarm:
        print(f"prefect-tune: {alarm}", file=sys.stderr)
        raise typer.Exit(_DAMAGE)
