"""What the schedulers of this folder have in common: the loss they compare by, how they show it, what they accept."""

from __future__ import annotations

from prefect_tune.core import numbers
from prefect_tune.core.objective import Objective
from prefect_tune.core.schedulers.scheduler import TrialReport

__all__ = ["is_count", "is_number", "loss_of", "shown"]


def loss_of(told: TrialReport, objective: Objective) -> float:
    """Return what the trial is compared by; smaller is better.

    Raises:
        BadMetric: the report does not have it, or it is not a finite number.
    """
    return objective.loss(told.report.metrics, f"trial {told.trial!r}, step {told.report.step}")


def shown(loss: float, objective: Objective) -> str:
    """Return the loss as the user reported it: the metric's name and its value."""
    value = loss if objective.modes[0] == "min" else -loss
    return f"{objective.metrics[0]} = {value:g}"


def is_count(value: object, at_least: int) -> bool:
    """Whether `value` is a whole number of steps, trials or the like; True and 3.0 are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def is_number(value: object, at_least: float) -> bool:
    """Whether `value` is a finite number; True is none."""
    return isinstance(value, int | float) and numbers.is_number(value) and at_least <= value
