"""How the trials of an experiment stand, and which is the best. What is heavy is imported when it is used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from prefect_tune.core.experiment import Experiment
    from prefect_tune.core.objective import Objective
    from prefect_tune.core.trial import Trial

__all__ = ["best_first", "best_of", "counted", "is_search", "named", "objective_in", "shown_settings"]


_HAS_SECRETS = "trial_job_variables"
_MASK = "********"
_REFERENCE = re.compile(r"\{\{\s*prefect\.(blocks|variables)\.[^{}]+\}\}")


def is_search(state: Experiment) -> bool:
    """Return whether it is one of many trials; `durable_trainable` makes those of one, and keeps no settings."""
    return bool(state.settings) or len(state.trials) > 1


def counted(state: Experiment) -> Mapping[str, int]:
    """Return how many trials have which status, in the order in which a trial comes to them."""
    from prefect_tune.core.trial import Status

    found = Counter(each.status for each in state.trials.values())
    return {str(status): found[status] for status in Status if found[status]}


def objective_in(settings: Mapping[str, object]) -> Objective | None:
    """Return what an experiment with these settings compares its trials by."""
    from prefect_tune.core.objective import Mode, objective_of

    metric = cast("str | list[str] | None", settings.get("metric"))
    return objective_of(metric, cast("Mode | list[Mode]", settings.get("mode", "min")))


def shown_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return what is to be shown of them: of the variables of a job their names, since many a value is a key.

    Numbers are shown, and references to a saved block, such as `{{ prefect.blocks.secret.wandb }}`.
    """
    return {name: _masked(value) if name == _HAS_SECRETS else value for name, value in settings.items()}


def _masked(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _masked(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(each) for each in value]
    return _MASK if isinstance(value, str) and not _REFERENCE.fullmatch(value) else value


def best_first(trials: Sequence[Trial], objective: Objective | None) -> Sequence[Trial]:
    """Return the trials by their last reports, the best first, those that cannot be compared last."""
    from prefect_tune.core.ranking import ranked

    compared = {each.trial: each for each, _ in ranked(trials, objective)}
    return [*compared.values(), *(each for each in trials if each.trial not in compared)]


def best_of(state: Experiment) -> Trial | None:
    """Return the trial whose last report is the best; None where nothing can be compared.

    What it reported counts, whatever became of it, as for `Results.best`; `named` says where it has errored.
    """
    from prefect_tune.core.ranking import ranked

    return next((each for each, _ in ranked(state.trials.values(), objective_in(state.settings))), None)


def named(trial: str, status: str) -> str:
    """Return the name of a trial that is the best, with a word of warning where it has errored."""
    return f"{trial}, errored" if status == "errored" else trial
