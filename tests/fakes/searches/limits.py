"""The limits of a run, with the options that a test passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.parameters.plan_checks import SearchLimits
from prefect_tune.parameters.search_plan import SearchPlan


def limits_of(
    max_concurrent_trials: int, *, has_had_enough: Callable[[Trial], bool] = lambda _: True, **options: Any
) -> SearchLimits:
    plan = SearchPlan(trainable=print, target="/nowhere", experiment="e", **options)
    return SearchLimits(plan, max_concurrent_trials, has_had_enough=has_had_enough)
