"""Asynchronous successive halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning")."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, takewhile
from typing import Literal, TypeAlias

from prefect_tune.core import seeded_random
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import convert_fields, is_at_least, is_count
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.schedulers.base import (
    Continue,
    Decision,
    Pause,
    Schedule,
    Scheduler,
    Stop,
    TrialReport,
    loss_of,
    metric_arguments,
    reported_value,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import TrialId

# Rungs: the steps at which trials are compared, and the losses of the trials that have reached them.

RungEntry: TypeAlias = tuple[float, int, TrialId]
"""A trial on a rung: its loss there, and the number of trials before it, so that of equals the earlier is better."""


def ladder(first: int, max_t: int, reduction_factor: float) -> Iterator[int]:
    """Return `first` times each power of `reduction_factor`, rounded up as in Ray, below `max_t`."""
    steps = (math.ceil(first * reduction_factor**power) for power in count())
    return takewhile(lambda step: step < max_t, steps)


@dataclass(slots=True)
class Rung:
    """The trials that have reached a step, best first, and those of them that are paused there.

    Both lists are kept sorted, so that finding a rank takes logarithmic time.
    """

    step: int
    reached: list[tuple[float, int]] = field(default_factory=list)
    paused: list[RungEntry] = field(default_factory=list)

    def admit(self, trial: TrialId, loss: float) -> RungEntry:
        """Add a trial that has reached the rung, not paused."""
        place = (loss, len(self.reached), trial)
        insort(self.reached, place[:2])
        return place

    def hold(self, place: RungEntry) -> None:
        """Mark an admitted trial as paused here."""
        insort(self.paused, place)

    def release(self, place: RungEntry) -> None:
        """Mark a paused trial as not paused; its loss stays."""
        del self.paused[bisect_left(self.paused, place)]

    def rank(self, place: RungEntry) -> int:
        """Return the number of trials at the rung that are better."""
        return bisect_left(self.reached, place[:2])

    def quota(self, reduction_factor: float) -> int:
        """Return the number of trials to promote: the best 1 / `reduction_factor`."""
        return int(len(self.reached) / reduction_factor)

    def cutoff(self, reduction_factor: float) -> float | None:
        """Return the loss that the best 1 / `reduction_factor` do not exceed, interpolated; None for an empty rung."""
        if not self.reached:
            return None
        position = (len(self.reached) - 1) / reduction_factor
        below, share = int(position), position % 1
        low, high = self.reached[below][0], self.reached[min(below + 1, len(self.reached) - 1)][0]
        return low + (high - low) * share

    def promotable(self, reduction_factor: float) -> TrialId | None:
        """Return the best paused trial if it is to be promoted, else None."""
        if self.paused and self.rank(self.paused[0]) < self.quota(reduction_factor):
            return self.paused[0][2]
        return None


# ASHA's brackets, and each trial's position on its ladder of rungs; shared by both variants.


@dataclass(slots=True)
class Climb:
    """A trial's position: the rungs of its bracket, and the index of the highest it was compared at (-1: none)."""

    rungs: Sequence[Rung]
    reached: int = -1
    stopped: Stop | None = None
    paused: tuple[Rung, RungEntry] | None = None
    """The rung and the place at which it is paused; None while it is not."""

    def at(self, step: int) -> int:
        """Return the index of the highest rung at or below `step`; -1 for none."""
        return bisect_right(self.rungs, step, key=lambda rung: rung.step) - 1

    def ahead(self, step: int) -> int | None:
        """Return the step of the next rung after `step`; None at the end of the ladder."""
        steps = (rung.step for rung in self.rungs[self.reached + 1 :])
        return next((each for each in steps if each > step), None)


@dataclass(frozen=True, slots=True)
class Brackets:
    """Ladders of rungs; each trial is assigned to one."""

    ladders: Sequence[Sequence[int]]
    max_t: int
    reduction_factor: float
    seed: int
    rungs: Sequence[Sequence[Rung]] = field(init=False)

    def __post_init__(self) -> None:
        rungs = [[Rung(step) for step in ladder] for ladder in self.ladders]
        object.__setattr__(self, "rungs", rungs)

    def enter(self, number: int) -> Climb:
        """Assign trial `number` to a bracket, drawn so that all brackets train about the same number of steps."""
        if len(self.rungs) == 1:
            return Climb(self.rungs[0])
        sizes = [self.reduction_factor ** len(rungs) / (len(rungs) + 1) for rungs in self.rungs]
        ends = list(accumulate(sizes))
        share = seeded_random.uniform(self.seed, "asha-bracket", number) * ends[-1]
        return Climb(self.rungs[bisect_right(ends, share, hi=len(ends) - 1)])


class Climbing(Schedule):
    """Compares each trial once at each rung, by its report at the rung's step or the first one after it.

    A report that passes several rungs at once counts at the highest of them only: at the lower ones it would be
    compared with losses of earlier steps.
    """

    def __init__(self, brackets: Brackets, objective: Objective) -> None:
        self._brackets = brackets
        self._objective = objective
        self._climbs: dict[TrialId, Climb] = {}

    def added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        del config
        if trial not in self._climbs:
            self._climbs[trial] = self._brackets.enter(len(self._climbs))
        self._climbs[trial].stopped = None

    def milestone(self, trial: TrialId, step: int) -> int | None:
        return self._climbs[trial].ahead(step) or max(self._brackets.max_t, step + 1)

    def decide(self, report: TrialReport) -> Decision:
        climb, step = self._climbs[report.trial], report.report.step
        loss = loss_of(report, self._objective)
        if step >= self._brackets.max_t:
            return Stop(reason=make_reason("step-limit", step=step, limit=self._brackets.max_t), early=False)
        index = climb.at(step)
        if index <= climb.reached:
            return self._again(climb)
        climb.reached = index
        return self._compared(report.trial, climb, loss)

    @abstractmethod
    def _compared(self, trial: TrialId, climb: Climb, loss: float) -> Decision:
        """Decide on a trial that has reached a rung for the first time."""

    @abstractmethod
    def _again(self, climb: Climb) -> Decision:
        """Decide on a trial that repeats lost steps, up to a rung at which it was compared already."""


# ASHA, stopping variant: a trial that is not among the best 1 / eta of those before it at a rung is stopped.


class StoppingSchedule(Climbing):
    """Stops a trial whose loss is above the 1 / eta quantile of those that reached the rung before it.

    Decides as Ray's AsyncHyperBandScheduler does: the quantile is interpolated; the first trial at a rung, and one
    that equals the quantile, continue.
    """

    def ended(self, trial: TrialId) -> None:
        """Change nothing: the trial's losses at the rungs stay, for comparisons."""
        del trial

    def _compared(self, trial: TrialId, climb: Climb, loss: float) -> Decision:
        rung = climb.rungs[climb.reached]
        cutoff, before = rung.cutoff(self._brackets.reduction_factor), len(rung.reached)
        rung.admit(trial, loss)
        if cutoff is None or loss <= cutoff:
            return Continue()
        result = metric_arguments(loss, self._objective)
        cutoff_value = reported_value(cutoff, self._objective)
        climb.stopped = Stop(reason=make_reason("cutoff", **result, step=rung.step, cutoff=cutoff_value, judges=before))
        return climb.stopped

    def _again(self, climb: Climb) -> Decision:
        return climb.stopped or Continue()


# ASHA, promotion variant: every trial pauses at each rung, and the best 1 / eta continue as slots become free.


class PromotionSchedule(Climbing):
    """Algorithm 2 of Li et al. 2020: a free slot goes to the highest rung with a promotable trial.

    A trial that is promotable when it reaches the rung continues without a pause. When no new trial is available and
    no trial is running, and none was ever promoted from a highest rung, the best trial of the highest rung with a
    paused one is resumed, so that even a small search trains one trial to the end. Then paused trials are stopped.
    """

    def __init__(self, brackets: Brackets, objective: Objective) -> None:
        super().__init__(brackets, objective)
        rungs = [rung for bracket in brackets.rungs for rung in bracket]
        self._highest_first = sorted(rungs, key=lambda rung: -rung.step)
        self._running: set[TrialId] = set()
        self._no_more = False
        self._has_finalist = False

    def added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        super().added(trial, config)
        self._running.add(trial)
        self._no_more = False

    def resume_next(self) -> TrialId | None:
        if (promotable := self._promotable()) or self._has_finalist or self._running or not self._no_more:
            return promotable
        return next((rung.paused[0][2] for rung in self._highest_first if rung.paused), None)

    def resumed(self, trial: TrialId) -> None:
        self._release(trial)
        climb = self._climbs[trial]
        self._has_finalist |= climb.reached == len(climb.rungs) - 1
        self._running.add(trial)

    def stop_next(self) -> tuple[TrialId, Stop] | None:
        if self._running or not self._no_more or self.resume_next() is not None:
            return None
        rung = next((rung for rung in reversed(self._highest_first) if rung.paused), None)
        if rung is None:
            return None
        return rung.paused[-1][2], Stop(reason=self._rank_reason(rung, rung.paused[-1]))

    def exhausted(self) -> None:
        self._no_more = True

    def ended(self, trial: TrialId) -> None:
        self._release(trial)
        self._running.discard(trial)

    def _compared(self, trial: TrialId, climb: Climb, loss: float) -> Decision:
        self._release(trial)  # it reports, so it was not paused, even if the last answer to it was a pause
        rung = climb.rungs[climb.reached]
        place = rung.admit(trial, loss)
        climb.paused = (rung, place)
        rung.hold(place)
        self._running.discard(trial)
        if self._promotable() == trial:
            self.resumed(trial)
            return Continue()
        return Pause(reason=self._rank_reason(rung, place))

    def _again(self, climb: Climb) -> Decision:
        return Pause(reason=self._rank_reason(*climb.paused)) if climb.paused else Continue()

    def _release(self, trial: TrialId) -> None:
        climb = self._climbs[trial]
        if climb.paused:
            rung, place = climb.paused
            rung.release(place)
            climb.paused = None

    def _promotable(self) -> TrialId | None:
        found = (rung.promotable(self._brackets.reduction_factor) for rung in self._highest_first)
        return next((trial for trial in found if trial), None)

    def _rank_reason(self, rung: Rung, place: RungEntry) -> Reason:
        """Return the reason of a decision: the trial's rank among the trials that have reached the rung."""
        return make_reason(
            "rank-promoted",
            **metric_arguments(place[0], self._objective),
            step=rung.step,
            rank=rung.rank(place) + 1,
            ranked=len(rung.reached),
            quota=rung.quota(self._brackets.reduction_factor),
        )


@dataclass(frozen=True, slots=True)
class ASHA(Scheduler):
    """Train many trials for a few steps and few to the end: at each rung only the best 1 / `reduction_factor` continue.

    Rungs are the steps `grace_period`, times `reduction_factor`, times that again, and so on below `max_t`, where
    every trial ends; fractions are rounded up. It is asynchronous: a trial is compared with those that reached the rung
    before it.

    `variant="promotion"`, the default, pauses every trial at each rung, and gives a free slot to the best paused trial
    that is among the best 1 / `reduction_factor` of its rung; if there is none, a new trial starts (the algorithm of
    the paper). It needs checkpoints, trains fewer steps for the same result, and corrects early mistakes: a trial that
    was not promoted at first may be promoted later. `variant="stopping"` stops a trial that is not good enough, for
    good, and never pauses (Ray's AsyncHyperBandScheduler): for a trainable that saves no checkpoints.

    With more than one of the `brackets`, trials are distributed over ladders that begin one rung higher each, in the
    proportions of Hyperband: a hedge against misleading early results.

    Args:
        max_t: the step at which every trial ends.
        grace_period: the step of the first rung.
        reduction_factor: how many times as many steps the next rung has; 1 / `reduction_factor` of a rung continue.
        brackets: the number of ladders.
        variant: `promotion` pauses the other trials of a rung; `stopping` ends them.
    """

    max_t: int = field(metadata={"example": 81})
    grace_period: int = 1
    reduction_factor: float = 3
    brackets: int = 1
    variant: Literal["promotion", "stopping"] = "promotion"

    def __post_init__(self) -> None:
        convert_fields(self)
        if not (is_count(self.max_t, 1) and is_count(self.grace_period, 1)):
            raise InvalidInput(f"{self}: expected max_t and grace_period in whole steps, 1 or more")
        if self.grace_period > self.max_t:
            raise InvalidInput(f"{self}: expected a grace_period of at most max_t, which is {self.max_t}")
        if not is_at_least(self.reduction_factor, 2):
            raise InvalidInput(f"{self}: expected a reduction_factor of 2 or more")
        most = len(self._ladder(0)) + 1
        if not (is_count(self.brackets, 1) and self.brackets <= most):
            raise InvalidInput(f"{self}: expected 1 to {most} brackets: there are {most - 1} rungs below max_t")
        if self.variant not in {"stopping", "promotion"}:
            raise InvalidInput(f"{self}: expected variant 'promotion' or 'stopping'")

    def begin(self, objective: Objective, seed: int) -> Schedule:
        ladders = [self._ladder(skipped) for skipped in range(self.brackets)]
        brackets = Brackets(ladders, self.max_t, self.reduction_factor, seed)
        if self.variant == "promotion":
            return PromotionSchedule(brackets, objective)
        return StoppingSchedule(brackets, objective)

    def _ladder(self, skipped: int) -> Sequence[int]:
        return tuple(ladder(self.grace_period, self.max_t, self.reduction_factor))[skipped:]
