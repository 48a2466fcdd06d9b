"""Estimate the time that a search has left: its remaining steps, at the pace of its steps, on its slots."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean

from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Status, Trial, newest_checkpoint
from prefect_tune.core.messages.live_status import AttemptTimes
from prefect_tune.core.schedulers.asha import ASHA, ladder
from prefect_tune.core.schedulers.base import Scheduler
from prefect_tune.core.schedulers.median_stopping import MedianStopping
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.objective import Objective

_MANY = 50
"""From this number of waiting trials per slot on, the slots are taken to end at the same time."""


@dataclass(frozen=True)
class SearchEstimate:
    """The expected extent of a search, as far as it is known at its start."""

    experiment: str
    objective: Objective | None = None
    trial_count: int | None = None
    """Total number of trials, including those of earlier runs."""
    step_count: int | None = None
    """The most steps that a trial trains."""
    time: timedelta | None = None
    """The time budget of this run."""
    slot_count: int = 1
    """The number of trials that train at a time."""
    pauses: Sequence[int] = ()
    """The steps at which the scheduler pauses trials to promote some, and the last one; empty for other schedulers."""
    is_training: bool = False
    """Whether it is a single training, not a search."""
    resumes_paused: bool = False
    """Whether every paused trial trains on, as in a population that takes turns."""


@dataclass(frozen=True)
class _Costs:
    step_seconds: float
    """Of one step."""
    start_seconds: float
    """Of an attempt until its first step begins."""
    length: float
    """The number of steps of a new trial."""
    most: float
    """The number of steps after which a running trial ends."""
    pauses: Sequence[int] = ()

    def of_attempt(self, from_step: int, until: float) -> float:
        return self.start_seconds + max(0.0, until - from_step) * self.step_seconds

    def until(self, from_step: int, step: int = 0) -> float:
        """Return the step after which an attempt from `from_step`, now at `step`, pauses or ends."""
        return next((each for each in self.pauses if each > from_step and each >= step), self.most)


def seconds_left(
    outlook: SearchEstimate, trials: Sequence[Trial], attempts: Mapping[str, Sequence[AttemptTimes]], now: float
) -> float | None:
    """Return the seconds until all trials have ended; None while no step is measured, or the number of trials unknown.

    A step takes as long as the steps of this run, and before its first one as long as those of earlier runs. Steps
    after a waiting trial's newest checkpoint are trained again. Running trials train `step_count` steps, and new ones
    as many as the finished ones on average; where trials are promoted, both train until their next pause. A paused
    trial trains no more, unless all are resumed: where some are, this is the least time.

    Args:
        trials: all trials so far.
        attempts: by trial, its attempts in this run; of a running trial the last one is the present one.
        now: on the clock of `attempts`.
    """
    costs = _costs(outlook, trials, [each for of_trial in attempts.values() for each in of_trial])
    if costs is None or outlook.trial_count is None:
        return None
    running = [_left_of(attempts[each.trial][-1], costs, now) for each in trials if each.status is Status.RUNNING]
    waiting = [*_waiting(outlook, trials, costs)]
    new = max(0, outlook.trial_count - len(trials)), costs.of_attempt(0, costs.length)
    return _end_of_last(running, waiting, new, outlook.slot_count)


def _costs(outlook: SearchEstimate, trials: Sequence[Trial], attempts: Sequence[AttemptTimes]) -> _Costs | None:
    finished = [each for each in trials if each.phase in ENDED and each.status is not Status.ERRORED]
    steps = [each.step for each in finished if each.step]
    length = next(iter(outlook.pauses), None) or (fmean(steps) if steps else outlook.step_count)
    step_seconds = _step_seconds(trials, attempts)
    if length is None or step_seconds is None:
        return _costs_without_steps(attempts)
    starts = [each.until_first_report() for each in attempts if each.first]
    start_seconds = fmean(max(0.0, seconds - count * step_seconds) for seconds, count in starts) if starts else 0.0
    return _Costs(step_seconds, start_seconds, length, outlook.step_count or length, outlook.pauses)


def _costs_without_steps(attempts: Sequence[AttemptTimes]) -> _Costs | None:
    """Return the average time of the attempts that have ended, as the cost of one step."""
    ended = [each.ended - each.began for each in attempts if each.ended is not None]
    return _Costs(fmean(ended), 0.0, 1, 1) if ended else None


def _step_seconds(trials: Sequence[Trial], attempts: Sequence[AttemptTimes]) -> float | None:
    for measured in (
        [each.between_reports() for each in attempts],
        [each.until_first_report() for each in attempts],
        [(each.trained_seconds, each.step) for each in trials],
    ):
        if steps := sum(count for _, count in measured):
            return sum(seconds for seconds, _ in measured) / steps
    return None


def _left_of(attempt: AttemptTimes, costs: _Costs, now: float) -> float:
    """Return the seconds that a running attempt has left, at its own pace if that is known."""
    seconds, steps = attempt.between_reports()
    pace = seconds / steps if steps else costs.step_seconds
    until = costs.until(attempt.from_step, attempt.step)
    if attempt.last is None:
        return max(0.0, costs.of_attempt(attempt.from_step, until) - (now - attempt.began))
    return max(0.0, (until - attempt.step) * pace - min(pace, now - attempt.last[0]))


def _waiting(outlook: SearchEstimate, trials: Sequence[Trial], costs: _Costs) -> Iterator[float]:
    for each in trials:
        if each.phase is Phase.PENDING or (each.phase is Phase.PAUSED and outlook.resumes_paused):
            newest = newest_checkpoint(each)
            step = newest.step if newest else 0
            yield costs.of_attempt(step, costs.until(step) if each.attempt else costs.length)


def _end_of_last(running: Sequence[float], waiting: Sequence[float], new: tuple[int, float], slot_count: int) -> float:
    """Return when the last trial ends, if each waiting one takes the first slot that becomes free."""
    slots = [*running, *[0.0] * (slot_count - len(running))]
    count, seconds = new
    if len(waiting) + count > _MANY * len(slots):
        return (sum(slots) + sum(waiting) + count * seconds) / len(slots)
    heapq.heapify(slots)
    for each in [*waiting, *[seconds] * count]:
        heapq.heapreplace(slots, slots[0] + each)
    return max(slots)


def resumes_paused(scheduler: Scheduler | None) -> bool:
    """Return whether a scheduler resumes every trial that it pauses, if only to end it."""
    return isinstance(scheduler, PBT | MedianStopping)


def pauses_of(scheduler: Scheduler | None) -> Sequence[int]:
    """Return the steps at which a scheduler pauses trials to promote some, and its last step; empty for others."""
    if not isinstance(scheduler, ASHA) or scheduler.variant != "promotion":
        return ()
    return [*ladder(scheduler.grace_period, scheduler.max_t, scheduler.reduction_factor), scheduler.max_t]
