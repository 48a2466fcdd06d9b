"""The training that a search with `ASHA(variant="promotion")` has left: paused trials of which some are promoted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import Scheduler
from prefect_tune.core.schedulers.rungs import ladder

_MORE = 0.4


@dataclass(frozen=True, slots=True)
class TrialStanding:
    """How far a trial is."""

    step: int
    is_ended: bool
    """Whether it trains no more; a paused trial may."""


@dataclass(frozen=True, slots=True)
class Promotions:
    """The rungs of a search that promotes paused trials."""

    rungs: tuple[int, ...]
    """The steps at which trials pause, ascending."""
    reduction_factor: float
    most: int
    """The step at which every trial ends."""

    def left(self, trial_count: int, standings: Sequence[TrialStanding]) -> tuple[int, int]:
        """Return the expected numbers of steps to train, and of attempts to start.

        Of `n` trials that reach a rung, the best `n / reduction_factor` train to the next one, at least one of them,
        since the search trains its best trial to the end. As they are promoted before all `n` are there, later ones
        take the place of some, and make about `0.4 * sqrt(n)` more (Li et al. 2020 give the order; the factor was
        measured in simulated searches of 9 to 200 trials: their mean was met within 25 %, a single one within 60 %).

        Args:
            trial_count: of the whole search.
            standings: of the trials so far.
        """
        expected, steps, starts = max(trial_count, len(standings)), 0, 0
        able = expected - sum(each.is_ended for each in standings)
        for begin, end in pairwise((0, *self.rungs, self.most)):
            here = [each for each in standings if each.step > begin or begin == 0]
            steps += sum(end - each.step for each in here if each.step < end and not each.is_ended)
            steps += (expected - len(here)) * (end - begin)
            starts += expected - len(here)
            beyond = [each for each in standings if each.step > end]
            promoted = max(1, int(expected / self.reduction_factor + _MORE * sqrt(expected)))
            most = len(beyond) + able - sum(not each.is_ended for each in beyond)
            expected = max(len(beyond), min(promoted, most))
        return steps, starts

    def alone(self, standings: Sequence[TrialStanding]) -> int:
        """Return the most steps that one trial has to train: to its next rung, or the best one to the end.

        A trial of an earlier run may have paused beyond the end: a resume may bring another stop criterion.
        """
        open_ones = [each.step for each in standings if not each.is_ended]
        ends = (*self.rungs, self.most)
        to_next = [min((end - step for end in ends if end >= step), default=0) for step in open_ones]
        if open_ones and max(each.step for each in standings) < self.most:
            to_next.append(self.most - max(open_ones))
        return max(to_next, default=0)


def promotions_of(scheduler: Scheduler | None, step_count: int | None) -> Promotions | None:
    """Return the rungs of a promotion search; None for other schedulers, and for several brackets.

    Args:
        scheduler: of the search.
        step_count: the step at which a stop criterion ends every trial; None if there is none.
    """
    if not isinstance(scheduler, ASHA) or scheduler.variant != "promotion" or scheduler.brackets > 1:
        return None
    most = min(scheduler.max_t, step_count or scheduler.max_t)
    rungs = tuple(ladder(scheduler.grace_period, most, scheduler.reduction_factor))
    return Promotions(rungs, scheduler.reduction_factor, most)
