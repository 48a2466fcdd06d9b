"""The command `delete`: delete an experiment with everything it has on its target."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_tune.cli.shared.app import AsJson, ExperimentName, Target, command
from prefect_tune.cli.shared.open_target import existing_place
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.models import plural, shown_size

if TYPE_CHECKING:
    from prefect_tune.maintenance.delete_experiment import ExperimentContents


@command
def delete(
    target: Target,
    experiment: ExperimentName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask. Needed where there is no terminal.")] = False,
    even_if_running: Annotated[
        bool, typer.Option("--even-if-running", help="Delete it although a run may own it; that run then fails.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete an experiment for good: its journal, all checkpoints and results.

    It asks first, and says what would be deleted. It refuses while a run owns it,
    and while another experiment, such as a fork, needs its checkpoints.
    """
    from rich.console import Console

    from prefect_tune.maintenance.delete_experiment import contents_of, delete_experiment

    if not yes and not sys.stdin.isatty():
        raise InvalidInput(
            f"delete {experiment}: there is no terminal to confirm it on: add --yes; nothing was deleted"
        )
    existing_place(target)
    found = contents_of(experiment, target=target, even_if_running=even_if_running)
    if not yes:
        question = f"Delete experiment {experiment!r} at {target} for good: {_said(found)}?"
        if not typer.confirm(question, err=as_json):
            print("nothing was deleted", file=sys.stderr)
            raise typer.Exit(1)
    with Console(stderr=True).status(f"{experiment}: deleting {found.object_count:,} objects"):
        count = delete_experiment(experiment, target=target, even_if_running=even_if_running)
    if as_json:
        print(json.dumps(_as_json(found, count), indent=2))
    else:
        print(f"deleted: {experiment}: {_said(found)}")


def _said(found: ExperimentContents) -> str:
    trials = plural(found.trial_count, "trial", "trials")
    checkpoints = plural(found.checkpoint_count, "checkpoint", "checkpoints")
    return (
        f"{trials}, {checkpoints}, {shown_size(found.size_bytes)} in {plural(found.object_count, 'object', 'objects')}"
    )


def _as_json(found: ExperimentContents, deleted_count: int) -> dict[str, object]:
    return {
        "experiment": found.experiment,
        "trial_count": found.trial_count,
        "checkpoint_count": found.checkpoint_count,
        "size_bytes": found.size_bytes,
        "deleted_count": deleted_count,
    }
