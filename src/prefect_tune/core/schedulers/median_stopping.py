"""The median stopping rule (Golovin et al. 2017, "Google Vizier"), with running averages as in Ray."""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import convert_fields, is_count
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import (
    Continue,
    Decision,
    Pause,
    Schedule,
    Scheduler,
    Stop,
    TrialReport,
    loss_of,
    reported_value,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import TrialId


@dataclass(frozen=True, slots=True)
class MedianStopping(Scheduler):
    """Stop a trial whose best result is worse than the median of the others' averages up to the same step.

    From `grace_period` on, every `interval` steps, a trial is compared with the others that have reached that step: its
    best loss so far with the median of their mean losses from `grace_period` to that step. While fewer than
    `min_samples_required` others have reached it, the trial continues. The best counts from the first step on. Both
    cover only every `interval`-th report, so that `interval=1` covers every step, and costs a decision at every step.

    With `min_time_slice`, a trial with too few others to compare with gives its slot away after that many steps, and
    continues when there are enough: so comparisons start early with fewer slots than trials. It needs checkpoints.

    Args:
        grace_period: the step of the first comparison.
        min_samples_required: how many other trials a comparison needs.
        interval: steps between two comparisons of a trial.
        min_time_slice: steps after which a trial with too few others gives its slot away. Default: never.
    """

    grace_period: int = 1
    min_samples_required: int = 3
    interval: int = 1
    min_time_slice: int | None = None

    def __post_init__(self) -> None:
        convert_fields(self)
        counts = (self.grace_period, self.min_samples_required, self.interval, self.min_time_slice or 1)
        if self.min_time_slice == 0 or not all(is_count(each, 1) for each in counts):
            raise InvalidInput(
                f"{self}: expected whole numbers from 1 on; min_time_slice=None for trials that keep their slots"
            )

    def begin(self, objective: Objective, seed: int) -> Schedule:
        del seed
        return _MedianStoppingSchedule(self, objective)


@dataclass(slots=True)
class _Curve:
    """A trial's losses, summarized."""

    judged: int
    """The index of the last milestone at which it was decided on; before the first one, that of step 0."""
    count: int = 0
    total: float = 0.0
    """Of the losses since the grace period, of which there are `count`."""
    best: float = math.inf
    """Of all losses."""
    slot_since: int = 0
    """The step at which it got its present slot."""
    paused_at: int | None = None
    """The step at which it was paused; None while it is not."""
    stopped: Stop | None = None

    @property
    def mean(self) -> float:
        return self.total / self.count


class _MedianStoppingSchedule(Schedule):
    """The mean losses of all trials at each milestone, sorted: the median is in the middle."""

    def __init__(self, rule: MedianStopping, objective: Objective) -> None:
        self._rule = rule
        self._objective = objective
        self._means: defaultdict[int, array[float]] = defaultdict(lambda: array("d"))
        self._curves: dict[TrialId, _Curve] = {}
        self._paused: dict[TrialId, None] = {}
        self._no_more = False

    def added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        del config
        self._no_more = False
        self._curves.setdefault(trial, _Curve(self._number(0))).stopped = None

    def milestone(self, trial: TrialId, step: int) -> int | None:
        number = max(self._curves[trial].judged, self._number(step)) + 1
        return self._rule.grace_period + number * self._rule.interval

    def decide(self, report: TrialReport) -> Decision:
        curve, step = self._curves[report.trial], report.report.step
        loss, number = loss_of(report, self._objective), self._number(step)
        if number <= curve.judged:
            return self._again(curve)
        self.resumed(report.trial)  # it reports, so it was not paused, even if the last answer to it was a pause
        if curve.count:  # it has passed milestones without a report: its mean so far counts there
            for passed in range(curve.judged + 1, number):
                insort(self._means[passed], curve.mean)
        curve.judged = number
        curve.best = min(curve.best, loss)
        if number < 0:
            return Continue()
        curve.count += 1
        curve.total += loss
        decision = self._judged(report.trial, curve, step)
        insort(self._means[number], curve.mean)
        return decision

    def resume_next(self) -> TrialId | None:
        # A paused trial is counted at its milestone too: it needs that many others.
        needed, means = self._rule.min_samples_required, self._means
        ready = next((trial for trial in self._paused if len(means[self._curves[trial].judged]) > needed), None)
        if ready or not self._no_more:
            return ready
        return min(self._paused, key=lambda trial: self._curves[trial].judged, default=None)

    def resumed(self, trial: TrialId) -> None:
        curve = self._curves[trial]
        if curve.paused_at is not None:
            curve.slot_since, curve.paused_at = curve.paused_at, None
            del self._paused[trial]

    def exhausted(self) -> None:
        self._no_more = True

    def ended(self, trial: TrialId) -> None:
        """Remove the trial from the paused ones; its losses stay, for comparisons."""
        self.resumed(trial)

    def _number(self, step: int) -> int:
        """Return the last milestone at or before `step`, counted from 0 at `grace_period`; below 0 before that."""
        return (step - self._rule.grace_period) // self._rule.interval

    def _again(self, curve: _Curve) -> Decision:
        if curve.paused_at is not None:
            return Pause(reason=make_reason("waits-for-others", step=curve.paused_at))
        return curve.stopped or Continue()

    def _judged(self, trial: TrialId, curve: _Curve, step: int) -> Decision:
        others = self._means[curve.judged]
        if len(others) < self._rule.min_samples_required:
            longest = self._rule.min_time_slice
            if longest is None or step - curve.slot_since < longest:
                return Continue()
            curve.paused_at = step
            self._paused[trial] = None
            return self._again(curve)
        middle = len(others) // 2
        median = (others[middle] + others[~middle]) / 2
        if curve.best <= median:
            return Continue()
        best, needed = reported_value(curve.best, self._objective), reported_value(median, self._objective)
        result = {"metric": self._objective.metrics[0], "best": best, "median": needed}
        curve.stopped = Stop(reason=make_reason("median", **result, step=step, count=len(others)))
        return curve.stopped
