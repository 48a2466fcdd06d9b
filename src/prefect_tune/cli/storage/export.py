"""The command `export`: write a checkpoint to a plain directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from prefect_tune.cli.shared.app import AsJson, ExperimentName, Target, command
from prefect_tune.cli.shared.open_target import chosen_trials, live_checkpoints, opened, trials_today
from prefect_tune.core.errors import CheckpointNotFound, InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import best_of, is_search
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.storage.layout import CheckpointKey


@command
def export(
    target: Target,
    experiment: ExperimentName,
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIRECTORY", help="A directory that is new, empty, or holds this checkpoint.", show_default=False
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="Step of the checkpoint. Default: the newest.", show_default=False),
    ] = None,
    trial: Annotated[
        str | None,
        typer.Option(metavar="TRIAL", help="Trial. Default: the best one by its last report.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint to DIRECTORY: its files, as the trainable saved them.

    DIRECTORY must be new or empty, or hold this checkpoint and nothing else, as after an interrupted export.
    Without --trial it is the trial whose last report is the best, as in `show`.
    The best model that events and alerts announce may be another one:
    pass the trial and step of the event as --trial and --step.
    """
    from prefect_tune.blocks import resolve_existing

    with opened(target, experiment) as (store, state):
        (chosen,) = trials_today(store, state, [_trial(state, trial)])
        key = _checkpoint(state, chosen, step)
    resolve_existing(target).checkpoint(key).to_directory(directory)
    if as_json:
        print(json.dumps({"trial": key.trial.trial, "step": key.step, "directory": str(directory)}, indent=2))
        return
    named = f"{chosen.trial}{' (errored)' * (chosen.status is Status.ERRORED)} " if is_search(state) else ""
    print(f"{named}step {key.step}: in {directory}")


def _trial(state: Experiment, trial: str | None) -> Trial:
    trials = chosen_trials(state, trial)
    best = best_of(state) if trial is None and len(trials) > 1 else next(iter(trials), None)
    if best is None:
        raise InvalidInput(
            f"experiment {state.name!r}: its {len(trials)} trials have no best one; name a trial: --trial"
        )
    return best


def _checkpoint(state: Experiment, trial: Trial, step: int | None) -> CheckpointKey:
    live = live_checkpoints(state, trial)
    fitting = [key for key in live if step in (None, key.step)]
    if not fitting:
        steps = ", ".join(str(key.step) for key in live) or "none"
        wanted = "" if step is None else f" of step {step}"
        searched = f"experiment {state.name!r}" + (f", trial {trial.trial!r}" if is_search(state) else "")
        errored = ", which has errored" * (trial.status is Status.ERRORED)
        raise CheckpointNotFound(f"{searched}{errored}: there is no checkpoint{wanted}; there are: {steps}")
    return fitting[-1]
