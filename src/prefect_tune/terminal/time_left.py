"""Estimate the time that a search has left: its remaining steps, at the pace of its steps, on its slots."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Status, Trial, newest_checkpoint
from prefect_tune.terminal.promotion_estimate import Promotions, TrialStanding

_MANY = 50
"""From this number of waiting trials per slot on, the slots are taken to end at the same time."""


@dataclass
class AttemptTimes:
    """The times of one attempt's reports, in seconds of a monotonic clock."""

    began: float
    from_step: int
    first: tuple[float, int] | None = None
    """The time and the step of the first report; the last one of those that arrived at the same time."""
    last: tuple[float, int] | None = None
    ended: float | None = None

    def report(self, step: int, now: float) -> None:
        """Take in a report; one that is not newer than the last is known already."""
        if step <= self.step:
            return
        if self.first is None or self.first[0] == now:
            self.first = now, step
        self.last = now, step

    @property
    def step(self) -> int:
        """The last step."""
        return self.last[1] if self.last else self.from_step

    def between_reports(self) -> tuple[float, int]:
        """Return the time between the first and the last report, and the number of steps in it."""
        if self.first is None or self.last is None:
            return 0.0, 0
        return self.last[0] - self.first[0], self.last[1] - self.first[1]

    def until_first_report(self) -> tuple[float, int]:
        """Return the time until the first report, and the number of steps in it."""
        return (self.first[0] - self.began, self.first[1] - self.from_step) if self.first else (0.0, 0)


@dataclass(frozen=True)
class ExpectedWork:
    """The expected extent of a search."""

    trial_count: int
    step_count: int | None
    """The most steps that a trial trains; None if unknown."""
    slot_count: int
    promotions: Promotions | None = None
    """How paused trials are promoted; None if none are, or if that is unknown."""


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

    def of_attempt(self, from_step: int, until: float) -> float:
        return self.start_seconds + max(0.0, until - from_step) * self.step_seconds


def seconds_left(
    work: ExpectedWork, trials: Sequence[Trial], attempts: Mapping[str, Sequence[AttemptTimes]], now: float
) -> float | None:
    """Return the seconds until all trials have ended; None while no step has been measured.

    A step takes as long as the steps of this run, and before its first one as long as those of earlier runs. Steps
    after a waiting trial's newest checkpoint are trained again. Running trials train `step_count` steps, and new ones
    as many as the finished ones on average. A paused trial trains no more, unless `work.promotions` says how many do:
    then the slots share the expected steps and starts, which take no less time than the steps of the best trial alone.

    Args:
        work: the expected extent.
        trials: all trials so far.
        attempts: by trial, its attempts in this run; of a running trial the last one is the present one.
        now: on the clock of `attempts`.
    """
    costs = _costs(work, trials, [each for of_trial in attempts.values() for each in of_trial])
    if costs is None:
        return None
    if work.promotions is not None:
        return _left_with_promotions(work, work.promotions, costs, _standings(trials, attempts))
    running = [_left_of(attempts[each.trial][-1], costs, now) for each in trials if each.status is Status.RUNNING]
    waiting = [*_waiting(trials, costs)]
    new = max(0, work.trial_count - len(trials)), costs.of_attempt(0, costs.length)
    return _end_of_last(running, waiting, new, work.slot_count)


def _standings(trials: Sequence[Trial], attempts: Mapping[str, Sequence[AttemptTimes]]) -> Sequence[TrialStanding]:
    return [TrialStanding(_next_start(each, attempts), each.phase in ENDED) for each in trials]


def _next_start(trial: Trial, attempts: Mapping[str, Sequence[AttemptTimes]]) -> int:
    """Return the step from which a trial trains next."""
    if trial.status is Status.RUNNING:
        return attempts[trial.trial][-1].step
    newest = newest_checkpoint(trial)
    return trial.step if trial.phase in ENDED else newest.step if newest else 0


def _left_with_promotions(
    work: ExpectedWork, promotions: Promotions, costs: _Costs, standings: Sequence[TrialStanding]
) -> float:
    steps, starts = promotions.left(work.trial_count, standings)
    together = (steps * costs.step_seconds + starts * costs.start_seconds) / work.slot_count
    return max(together, promotions.alone(standings) * costs.step_seconds)


def _costs(work: ExpectedWork, trials: Sequence[Trial], attempts: Sequence[AttemptTimes]) -> _Costs | None:
    finished = [each for each in trials if each.phase in ENDED and each.status is not Status.ERRORED]
    steps = [each.step for each in finished if each.step]
    length = fmean(steps) if steps else work.promotions.most if work.promotions else work.step_count
    step_seconds = _step_seconds(trials, attempts)
    if length is None or step_seconds is None:
        return _costs_without_steps(attempts)
    starts = [each.until_first_report() for each in attempts if each.first]
    start_seconds = fmean(max(0.0, seconds - count * step_seconds) for seconds, count in starts) if starts else 0.0
    return _Costs(step_seconds, start_seconds, length, work.step_count or length)


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
    if attempt.last is None:
        return max(0.0, costs.of_attempt(attempt.from_step, costs.most) - (now - attempt.began))
    return max(0.0, (costs.most - attempt.step) * pace - min(pace, now - attempt.last[0]))


def _waiting(trials: Sequence[Trial], costs: _Costs) -> Iterator[float]:
    for each in trials:
        if each.phase is Phase.PENDING:
            newest = newest_checkpoint(each)
            yield costs.of_attempt(newest.step if newest else 0, costs.most if each.attempt else costs.length)


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
