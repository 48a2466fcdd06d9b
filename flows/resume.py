"""Go on with a search by its name alone: everything else is in its journal."""

from __future__ import annotations

from typing import Any

from prefect import flow

from prefect_tune.blocks import StorageTarget, resolve_target
from prefect_tune.core.errors import InvalidInput, JournalCorrupt, ResumeFailed, UnknownVersion
from prefect_tune.core.experiment import Experiment
from prefect_tune.flows.asked import from_settings
from prefect_tune.flows.results import Results
from prefect_tune.flows.search import searched
from prefect_tune.tasks.experiment_state import read_experiment

__all__ = ["resume"]


@flow(name="resume", persist_result=False)
def resume(
    experiment: str,
    *,
    target: StorageTarget | str,
    rerun_errored: bool = False,
    num_samples: int | None = None,
    stop: Any = None,
    space: dict[str, Any] | None = None,
    max_concurrent_trials: int | None = None,
    time_budget_seconds: float | None = None,
    trainable: Any = None,
    scheduler: Any = None,
    search: Any = None,
) -> Results:
    """Go on with the search `experiment` as its journal describes it; what is given here is changed.

    It is `tune` with the same experiment name, for whoever has no code at hand: a form, a schedule, a
    command line. Nothing is ever started afresh: an experiment that is not there is an error.

    Args:
        experiment: its name on the target.
        target: where it lives: a block, a `"block-type/name"` slug, or a URI.
        rerun_errored: try trials again that errored.
        num_samples: more samples than before: the search goes on where it ended.
        stop: a larger budget for each trial: those that met the old criterion go on.
        space: another space for the trials to come; earlier ones stay data.
        max_concurrent_trials: how many train at once from now on.
        time_budget_seconds: after so long in this run everything saves and ends; running it again goes on.
        trainable: needed where the experiment was begun with an object that has no import path.
        scheduler: likewise; another one than before decides from now on.
        search: likewise; another one than before proposes from now on.

    Returns:
        Results: as `tune` does.

    Raises:
        ResumeFailed: there is no such experiment, or it cannot be read. Nothing was started.
        InvalidInput: its journal does not hold all that is needed; the message says what to pass.
        Superseded: another run has taken the experiment over.
    """
    where = resolve_target(target)
    state = _found(where, experiment)
    changed = {
        name: value
        for name, value in {
            "num_samples": num_samples,
            "stop": stop,
            "space": space,
            "max_concurrent_trials": max_concurrent_trials,
            "trainable": trainable,
            "scheduler": scheduler,
            "search": search,
        }.items()
        if value is not None
    }
    run = {
        "target": where,
        "experiment": experiment,
        "rerun_errored": rerun_errored,
        "time_budget_seconds": time_budget_seconds,
    }
    return searched(from_settings(state.settings, run, changed))


def _found(target: StorageTarget, experiment: str) -> Experiment:
    try:
        state = read_experiment(target, experiment)
    except (JournalCorrupt, UnknownVersion) as error:
        raise ResumeFailed(f"experiment {experiment!r} at {target.uri}: {error}. Nothing was started afresh") from error
    if not state.number:
        raise ResumeFailed(f"there is no experiment {experiment!r} at {target.uri}. Nothing was started")
    if not state.settings:
        raise InvalidInput(
            f"experiment {experiment!r} at {target.uri} is no search: go on with it by pt.durable_trainable(...)"
        )
    return state
