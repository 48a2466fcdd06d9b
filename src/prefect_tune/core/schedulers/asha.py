"""Asynchronous successive halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.schedulers.asha_brackets import Brackets
from prefect_tune.core.schedulers.asha_promotion import PromotionSchedule
from prefect_tune.core.schedulers.asha_stopping import StoppingSchedule
from prefect_tune.core.schedulers.base import Schedule, Scheduler
from prefect_tune.core.schedulers.common import is_count, is_number
from prefect_tune.core.schedulers.rungs import ladder
from prefect_tune.core.search.objective import Objective

__all__ = ["ASHA"]


@dataclass(frozen=True, slots=True)
class ASHA(Scheduler):
    """Train many trials for a few steps and few to the end: at each rung only the best 1 / `reduction_factor` continue.

    Rungs are the steps `grace_period`, times `reduction_factor`, times that again, and so on below `max_t`, where
    every trial ends; fractions are rounded up. It is asynchronous: a trial is compared with those that reached the rung
    before it.

    `variant="stopping"` stops a trial that is not good enough, for good, and never pauses (Ray's
    AsyncHyperBandScheduler). `variant="promotion"` pauses every trial at each rung, and gives a free slot to the best
    paused trial that is among the best 1 / `reduction_factor` of its rung; if there is none, a new trial starts (the
    algorithm of the paper). It needs checkpoints, trains fewer steps for the same result, and corrects early
    mistakes: a trial that was not promoted at first may be promoted later.

    With more than one of the `brackets`, trials are distributed over ladders that begin one rung higher each, in the
    proportions of Hyperband: a hedge against misleading early results.

    Args:
        max_t: the step at which every trial ends.
        grace_period: the step of the first rung.
        reduction_factor: how many times as many steps the next rung has; 1 / `reduction_factor` of a rung continue.
        brackets: the number of ladders.
        variant: `stopping` ends the other trials of a rung; `promotion` pauses them.
    """

    max_t: int = field(metadata={"example": 81})
    grace_period: int = 1
    reduction_factor: float = 3
    brackets: int = 1
    variant: Literal["stopping", "promotion"] = "stopping"

    def __post_init__(self) -> None:
        numbers = is_count(self.max_t, 1) and is_count(self.grace_period, 1) and is_number(self.reduction_factor, 2)
        if not (numbers and self.grace_period <= self.max_t):
            raise InvalidInput(
                f"{self}: expected 1 <= grace_period <= max_t, in whole steps, and reduction_factor >= 2"
            )
        most = len(self._ladder(0)) + 1
        if not (is_count(self.brackets, 1) and self.brackets <= most):
            raise InvalidInput(f"{self}: expected 1 to {most} brackets: there are {most - 1} rungs below max_t")
        if self.variant not in {"stopping", "promotion"}:
            raise InvalidInput(f"{self}: expected variant 'stopping' or 'promotion'")

    def begin(self, objective: Objective, seed: int) -> Schedule:
        ladders = [self._ladder(skipped) for skipped in range(self.brackets)]
        brackets = Brackets(ladders, self.max_t, self.reduction_factor, seed)
        if self.variant == "promotion":
            return PromotionSchedule(brackets, objective)
        return StoppingSchedule(brackets, objective)

    def _ladder(self, skipped: int) -> Sequence[int]:
        return tuple(ladder(self.grace_period, self.max_t, self.reduction_factor))[skipped:]
