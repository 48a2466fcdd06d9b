"""How the trials of an experiment stand among themselves, by their last reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from prefect_tune.core.experiment import Experiment
from prefect_tune.core.objective import Mode, Objective, objective_of
from prefect_tune.core.ranking import losses_in
from prefect_tune.core.trial import Trial

__all__ = ["best_first", "best_of", "objective_in"]


def objective_in(settings: Mapping[str, object]) -> Objective | None:
    """Return what an experiment with these settings compares its trials by."""
    metric = cast("str | list[str] | None", settings.get("metric"))
    return objective_of(metric, cast("Mode | list[Mode]", settings.get("mode", "min")))


def best_first(trials: Sequence[Trial], objective: Objective | None) -> Sequence[Trial]:
    """Return the trials by their last reports, the best first, those that cannot be compared last."""
    if objective is None:
        return trials
    losses = {each.trial: losses_in(each.metrics, objective) for each in trials}
    return sorted(trials, key=lambda each: (losses[each.trial] is None, losses[each.trial] or ()))


def best_of(state: Experiment) -> Trial | None:
    """Return the trial whose last report is the best; None where nothing can be compared."""
    objective = objective_in(state.settings)
    first = next(iter(best_first(list(state.trials.values()), objective)), None)
    is_comparable = first and objective and losses_in(first.metrics, objective)
    return first if is_comparable else None
