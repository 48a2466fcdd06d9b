"""The median stopping rule (Golovin et al. 2017, "Google Vizier"), with running averages as in Ray."""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import convert_scalar_fields, is_integer_at_least
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import (
    Continue,
    Decision,
    Pause,
    Schedule,
    Scheduler,
    Stop,
    TrialReport,
    compute_loss,
    loss_to_metric,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import TrialId


@dataclass(frozen=True, slots=True)
class MedianStopping(Scheduler):
    """Prune a trial whose best result is worse than the median of the other trials' averages up to the same step.

    Every `interval` steps, from `grace_period` on, the trial's best loss since its first step is compared with the
    median of the mean losses (since `grace_period`) of the other trials that have reached the same step. While fewer
    than `min_samples_required` others have reached it, the trial continues. Best and mean losses use only every
    `interval`-th report; with `interval=1`, training waits for a decision at each step. For an example, see `ASHA`.

    With `min_time_slice`, a trial that cannot be compared yet gives up its slot after that many steps, and resumes when
    enough others have reached its step. So comparisons start early even with few slots. A pause needs checkpoints.

    Args:
        grace_period: the step of the first comparison.
        min_samples_required: the number of other trials that a comparison needs.
        interval: the number of steps between two comparisons of a trial.
        min_time_slice: the number of steps after which a trial pauses if it cannot be compared yet; None: no pauses.
    """

    grace_period: int = 1
    min_samples_required: int = 3
    interval: int = 1
    min_time_slice: int | None = None

    def __post_init__(self) -> None:
        convert_scalar_fields(self)
        counts = (self.grace_period, self.min_samples_required, self.interval, self.min_time_slice or 1)
        if self.min_time_slice == 0 or not all(is_integer_at_least(count, 1) for count in counts):
            raise InvalidInput(f"{self}: expected whole numbers from 1 on; min_time_slice=None pauses no trial")

    def begin(self, objective: Objective, seed: int) -> Schedule:
        del seed
        return _MedianStoppingSchedule(self, objective)


@dataclass(slots=True)
class _TrialHistory:
    """The losses of one trial, and the steps at which the trial got and released its slot."""

    last_milestone_index: int
    """The index of the last milestone with a decision; before the first decision, the index for step 0."""
    loss_count: int = 0
    loss_sum: float = 0.0
    """The sum of the losses from `grace_period` on; there are `loss_count` of them."""
    best_loss: float = math.inf
    """The best loss since the first step."""
    slot_since_step: int = 0
    """The step at which the trial got its present slot."""
    paused_at_step: int | None = None
    """The step at which the trial was paused; None while it is not paused."""
    stop_decision: Stop | None = None

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / self.loss_count


class _MedianStoppingSchedule(Schedule):
    """The mean losses of all trials at each milestone, sorted, so that the median is in the middle."""

    def __init__(self, rule: MedianStopping, objective: Objective) -> None:
        self._rule = rule
        self._objective = objective
        self._means: defaultdict[int, array[float]] = defaultdict(lambda: array("d"))
        self._progress: dict[TrialId, _TrialHistory] = {}
        self._paused: dict[TrialId, None] = {}
        self._lacks_new_trials = False

    def on_trial_added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        del config
        self._lacks_new_trials = False
        self._progress.setdefault(trial, _TrialHistory(self._find_milestone_index(0))).stop_decision = None

    def next_milestone(self, trial: TrialId, step: int) -> int | None:
        index = max(self._progress[trial].last_milestone_index, self._find_milestone_index(step)) + 1
        return self._rule.grace_period + index * self._rule.interval

    def decide(self, report: TrialReport) -> Decision:
        progress, step = self._progress[report.trial], report.report.step
        loss, index = compute_loss(report, self._objective), self._find_milestone_index(step)
        if index <= progress.last_milestone_index:
            return self._repeat_decision(progress)
        self.on_trial_resumed(report.trial)  # a trial that reports is no longer paused
        if progress.loss_count:  # at milestones that the trial passed without a report, its mean so far counts
            for passed_index in range(progress.last_milestone_index + 1, index):
                insort(self._means[passed_index], progress.mean_loss)
        progress.last_milestone_index = index
        progress.best_loss = min(progress.best_loss, loss)
        if index < 0:
            return Continue()
        progress.loss_count += 1
        progress.loss_sum += loss
        decision = self._decide_by_median(report.trial, progress, step)
        insort(self._means[index], progress.mean_loss)
        return decision

    def next_trial_to_resume(self) -> TrialId | None:
        milestones = {trial: self._progress[trial].last_milestone_index for trial in self._paused}
        for trial, index in milestones.items():
            if len(self._means[index]) > self._rule.min_samples_required:  # `>`, as the trial's own mean is included
                return trial
        return min(milestones, key=milestones.__getitem__, default=None) if self._lacks_new_trials else None

    def on_trial_resumed(self, trial: TrialId) -> None:
        progress = self._progress[trial]
        if progress.paused_at_step is not None:
            progress.slot_since_step, progress.paused_at_step = progress.paused_at_step, None
            del self._paused[trial]

    def on_no_new_trial(self) -> None:
        self._lacks_new_trials = True

    def on_trial_ended(self, trial: TrialId) -> None:
        """Remove an ended trial from the paused trials. Other trials are still compared with its losses."""
        self.on_trial_resumed(trial)

    def _find_milestone_index(self, step: int) -> int:
        """Return the index of the last milestone at or before `step`: 0 at `grace_period`, negative earlier."""
        return (step - self._rule.grace_period) // self._rule.interval

    def _repeat_decision(self, progress: _TrialHistory) -> Decision:
        if progress.paused_at_step is not None:
            return Pause(reason=make_reason("waits-for-others", step=progress.paused_at_step))
        return progress.stop_decision or Continue()

    def _decide_by_median(self, trial: TrialId, progress: _TrialHistory, step: int) -> Decision:
        others = self._means[progress.last_milestone_index]
        if len(others) < self._rule.min_samples_required:
            time_slice = self._rule.min_time_slice
            if time_slice is None or step - progress.slot_since_step < time_slice:
                return Continue()
            progress.paused_at_step = step
            self._paused[trial] = None
            return self._repeat_decision(progress)
        middle = len(others) // 2
        median = (others[middle] + others[~middle]) / 2
        if progress.best_loss <= median:
            return Continue()
        values = [loss_to_metric(value, self._objective) for value in (progress.best_loss, median)]
        result = {"metric": self._objective.metrics[0], "best": values[0], "median": values[1]}
        progress.stop_decision = Stop(reason=make_reason("median", **result, step=step, count=len(others)))
        return progress.stop_decision
