"""Helpers of all schedulers: a report's loss, its display, and checks of arguments."""

from __future__ import annotations

from prefect_tune.core import numbers
from prefect_tune.core.schedulers.base import TrialReport
from prefect_tune.core.search.objective import Objective

__all__ = ["is_count", "is_number", "loss_of", "shown"]


def loss_of(trial_report: TrialReport, objective: Objective) -> float:
    """Return the loss that the trial is compared by; smaller is better.

    Raises:
        BadMetric: the report lacks the metric, or it is not a finite number.
    """
    return objective.loss(trial_report.report.metrics, f"trial {trial_report.trial!r}, step {trial_report.report.step}")


def shown(loss: float, objective: Objective) -> str:
    """Return the loss as the user reported it: the metric's name and its value."""
    value = loss if objective.modes[0] == "min" else -loss
    return f"{objective.metrics[0]} = {value:g}"


def is_count(value: object, at_least: int) -> bool:
    """Return whether `value` is an integer of `at_least`; False for True and 3.0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def is_number(value: object, at_least: float) -> bool:
    """Return whether `value` is a finite number of `at_least`; False for True."""
    return isinstance(value, int | float) and numbers.is_number(value) and at_least <= value
