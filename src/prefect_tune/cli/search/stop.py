"""The command `stop`: stop a trial or a whole search, from another terminal or machine."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from prefect_tune.cli.shared.app import AsJson, ExperimentName, Target, TrialName, command
from prefect_tune.cli.shared.open_target import existing_place
from prefect_tune.core.texts import visible


@command
def stop(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, for the journal.", show_default=False)] = "",
    wait_seconds: Annotated[
        float, typer.Option(min=0, metavar="S", help="How long to wait for the end; 0: do not wait.")
    ] = 60,
    as_json: AsJson = False,
) -> None:
    """Stop a running search, after every trial has saved; with --trial, end one of its trials for good.

    The search checks TARGET for requests every few seconds. Exits with 1 if it has not answered.
    """
    from prefect_tune.tuner.stopping.send_stop_request import stop as send_stop_request

    existing_place(target)
    outcome = send_stop_request(experiment, target=target, trial=trial, reason=reason, wait_seconds=wait_seconds)
    done = outcome.status in ("stopped", "had-ended", "stopping")
    if as_json:
        print(json.dumps({"status": outcome.status, "message": outcome.message}, indent=2))
    else:
        print(visible(outcome.message), file=sys.stdout if done else sys.stderr)
    if not done and wait_seconds:
        raise typer.Exit(1)
