"""Summarize an experiment: trials by status, the best trial, settings for display."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.ranking import ranked
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.search.objective import Mode, Objective, objective_of

__all__ = [
    "best_first",
    "best_of",
    "counted",
    "is_search",
    "kind_of",
    "named",
    "objective_in",
    "shown_settings",
    "trial_named",
]


_HAS_SECRETS = "trial_job_variables"
_SHOWN_NAMES = {"code": "code_fingerprint", "only_in_code": "not_stored"}
_MASK = "********"
_REFERENCE = re.compile(r"\{\{\s*prefect\.(blocks|variables)\.[^{}]+\}\}")


def is_search(state: Experiment) -> bool:
    """Return whether `state` is a search; an experiment of `durable_trainable` has one trial and no settings."""
    return bool(state.settings) or len(state.trials) > 1


def kind_of(state: Experiment) -> str:
    """Return "search" or "training": trials of a flow of one's own, however many, are trainings."""
    return "search" if state.settings or any(trial.apart for trial in state.trials.values()) else "training"


def counted(state: Experiment) -> Mapping[str, int]:
    """Return the number of trials by status, in the order of `Status`."""
    found = Counter(each.status for each in state.trials.values())
    return {str(status): found[status] for status in Status if found[status]}


def trial_named(state: Experiment, given: str) -> Trial:
    """Return the trial that a person names: by its name, or by its number alone, `8` for `00008`.

    Raises:
        InvalidInput: there is no such trial.
    """
    if given in state.trials:
        return state.trials[given]
    names = list(state.trials)
    if same := [name for name in names if name.isdecimal() and given.isdecimal() and int(name) == int(given)]:
        return state.trials[same[0]]
    there = f" ({names[0]} to {names[-1]})" if len(names) > 1 else ""
    raise InvalidInput(f"experiment {state.name!r}: there is no trial {given!r} among its {len(names)}{there}")


def objective_in(settings: Mapping[str, object]) -> Objective | None:
    """Return the objective in these settings; None where they name no metric."""
    metric = cast("str | list[str] | None", settings.get("metric"))
    return objective_of(metric, cast("Mode | list[Mode]", settings.get("mode", "min")))


def shown_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return `settings` for display, with the text values of job variables masked: they may be secrets.

    Numbers are shown, and so are references to saved blocks, such as `{{ prefect.blocks.secret.wandb }}`.
    """
    return {
        _SHOWN_NAMES.get(name, name): _masked(value) if name == _HAS_SECRETS else value
        for name, value in settings.items()
    }


def _masked(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _masked(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(each) for each in value]
    return _MASK if isinstance(value, str) and not _REFERENCE.fullmatch(value) else value


def best_first(trials: Sequence[Trial], objective: Objective | None) -> Sequence[Trial]:
    """Return the trials by their last reports, best first; trials that cannot be compared come last."""
    compared = {each.trial: each for each, _ in ranked(trials, objective)}
    return [*compared.values(), *(each for each in trials if each.trial not in compared)]


def best_of(state: Experiment) -> Trial | None:
    """Return the trial whose last report is the best; None where no trial can be compared.

    The last report counts even if the trial errored, as for `Results.best`; `named` marks that.
    """
    return next((each for each, _ in ranked(state.trials.values(), objective_in(state.settings))), None)


def named(trial: str, status: str) -> str:
    """Return the name of the best trial, followed by `, errored` where it has errored."""
    return f"{trial}, errored" if status == Status.ERRORED else trial
