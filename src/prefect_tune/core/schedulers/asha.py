"""Asynchronous successive halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning")."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, takewhile
from typing import Literal, NamedTuple

from prefect_tune.core import seeded_random
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import convert_scalar_fields, is_integer_at_least, is_number_at_least
from prefect_tune.core.reasons import Reason, make_reason
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
    make_metric_reason_arguments,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import TrialId


class RungRecord(NamedTuple):
    """A trial at a rung: its loss, how many trials came earlier, and its id. Of equal losses, the earlier is better."""

    loss: float
    arrival: int
    trial: TrialId


@dataclass(slots=True)
class Rung:
    """The trials that reached a step, and those paused there; sorted, so that the place of a trial is found fast."""

    step: int
    losses: list[tuple[float, int]] = field(default_factory=list)  # (loss, arrival) of each trial that reached it
    paused: list[RungRecord] = field(default_factory=list)

    def add_trial(self, trial: TrialId, loss: float) -> RungRecord:
        """Add a trial that reached the rung; it is not marked as paused."""
        record = RungRecord(loss, len(self.losses), trial)
        insort(self.losses, record[:2])
        return record

    def mark_paused(self, record: RungRecord) -> None:
        insort(self.paused, record)

    def mark_resumed(self, record: RungRecord) -> None:
        """Mark a paused trial as no longer paused. Its loss stays at the rung."""
        del self.paused[bisect_left(self.paused, record)]

    def count_better_trials(self, record: RungRecord) -> int:
        """Return the number of better trials at the rung."""
        return bisect_left(self.losses, record[:2])

    def compute_promotion_quota(self, reduction_factor: float) -> int:
        """Return the number of trials to promote: 1 / `reduction_factor` of the trials that reached the rung."""
        return int(len(self.losses) / reduction_factor)

    def compute_cutoff_loss(self, reduction_factor: float) -> float | None:
        """Return the 1 / `reduction_factor` quantile of the rung's losses, interpolated; None for an empty rung."""
        if not self.losses:
            return None
        position = (len(self.losses) - 1) / reduction_factor
        below, share = int(position), position % 1
        low, high = self.losses[below][0], self.losses[min(below + 1, len(self.losses) - 1)][0]
        return low + (high - low) * share

    def find_promotable_trial(self, reduction_factor: float) -> TrialId | None:
        """Return the best paused trial if its place is within the quota; otherwise None."""
        if self.paused and self.count_better_trials(self.paused[0]) < self.compute_promotion_quota(reduction_factor):
            return self.paused[0].trial
        return None


@dataclass(slots=True)
class TrialProgress:
    """The position of a trial in its bracket."""

    rungs: Sequence[Rung]
    """The rungs of the trial's bracket."""
    rung_index: int = -1
    """The index of the rung at which the trial was last compared; -1 before the first comparison."""
    stop_decision: Stop | None = None
    paused_at: tuple[Rung, RungRecord] | None = None
    """The rung at which the trial is paused, and its record there; None while it is not paused."""

    def find_rung_index(self, step: int) -> int:
        """Return the index of the highest rung at or below `step`; -1 for none."""
        return bisect_right(self.rungs, step, key=lambda rung: rung.step) - 1

    def next_rung_step(self, step: int) -> int | None:
        """Return the step of the next rung after `step`; None after the last rung."""
        steps = (rung.step for rung in self.rungs[self.rung_index + 1 :])
        return next((rung_step for rung_step in steps if rung_step > step), None)


@dataclass(frozen=True, slots=True)
class Brackets:
    """The rungs of every bracket; each trial is assigned to one bracket."""

    rungs: Sequence[Sequence[Rung]]
    max_t: int
    reduction_factor: float
    seed: int

    def assign_trial(self, number: int) -> TrialProgress:
        """Draw the bracket of trial `number`, weighted so that all brackets train about the same number of steps."""
        if len(self.rungs) == 1:
            return TrialProgress(self.rungs[0])
        sizes = [self.reduction_factor ** len(rungs) / (len(rungs) + 1) for rungs in self.rungs]
        ends = list(accumulate(sizes))
        share = seeded_random.draw_uniform(self.seed, "asha-bracket", number) * ends[-1]
        return TrialProgress(self.rungs[bisect_right(ends, share, hi=len(ends) - 1)])


class RungSchedule(Schedule):
    """Compares each trial once at each rung, by the trial's first report at or after the step of the rung.

    A report that passes several rungs counts only at the highest, because lower rungs have losses of earlier steps.
    """

    def __init__(self, brackets: Brackets, objective: Objective) -> None:
        self._brackets = brackets
        self._objective = objective
        self._progress: dict[TrialId, TrialProgress] = {}

    def on_trial_added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        del config
        if trial not in self._progress:
            self._progress[trial] = self._brackets.assign_trial(len(self._progress))
        self._progress[trial].stop_decision = None

    def next_milestone(self, trial: TrialId, step: int) -> int | None:
        return self._progress[trial].next_rung_step(step) or max(self._brackets.max_t, step + 1)

    def decide(self, report: TrialReport) -> Decision:
        progress, step = self._progress[report.trial], report.report.step
        loss = compute_loss(report, self._objective)
        if step >= self._brackets.max_t:
            return Stop(reason=make_reason("step-limit", step=step, limit=self._brackets.max_t), early=False)
        index = progress.find_rung_index(step)
        if index <= progress.rung_index:
            return self._repeat_decision(progress)
        progress.rung_index = index
        return self._decide_at_rung(report.trial, progress, loss)

    @abstractmethod
    def _decide_at_rung(self, trial: TrialId, progress: TrialProgress, loss: float) -> Decision:
        """Decide on a trial that reached a rung for the first time."""

    @abstractmethod
    def _repeat_decision(self, progress: TrialProgress) -> Decision:
        """Return the decision for a trial that was already compared at this rung, and now repeats lost steps."""


class StoppingSchedule(RungSchedule):
    """Prunes a trial whose loss is above the 1 / `reduction_factor` quantile of the earlier trials at the rung.

    It decides like Ray's AsyncHyperBandScheduler. The quantile is interpolated. The first trial at a rung continues;
    so does a trial whose loss equals the quantile.
    """

    def on_trial_ended(self, trial: TrialId) -> None:
        del trial  # its losses stay at the rungs, so that later trials are compared with them

    def _decide_at_rung(self, trial: TrialId, progress: TrialProgress, loss: float) -> Decision:
        rung = progress.rungs[progress.rung_index]
        cutoff, judge_count = rung.compute_cutoff_loss(self._brackets.reduction_factor), len(rung.losses)
        rung.add_trial(trial, loss)
        if cutoff is None or loss <= cutoff:
            return Continue()
        result = make_metric_reason_arguments(loss, self._objective)
        result |= {"step": rung.step, "cutoff": loss_to_metric(cutoff, self._objective), "judges": judge_count}
        progress.stop_decision = Stop(reason=make_reason("cutoff", **result))
        return progress.stop_decision

    def _repeat_decision(self, progress: TrialProgress) -> Decision:
        return progress.stop_decision or Continue()


class PromotionSchedule(RungSchedule):
    """Pauses every trial at each rung; a free slot goes to the highest rung with a promotable trial (Algorithm 2).

    A trial that reaches a rung continues without a pause if a free slot would go to it. Even a small search trains one
    trial to the end, unless trials fail: the best trial of the highest rung with paused trials resumes if no new trial
    is available, every trial is paused or ended, and no trial was ever resumed from the last rung of its bracket.
    """

    def __init__(self, brackets: Brackets, objective: Objective) -> None:
        super().__init__(brackets, objective)
        rungs = [rung for bracket in brackets.rungs for rung in bracket]
        self._rungs_descending = sorted(rungs, key=lambda rung: -rung.step)
        self._active_trials: set[TrialId] = set()  # the trials that are neither paused nor ended
        self._lacks_new_trials = False
        self._has_promoted_to_end = False  # whether a trial has continued after the last rung of its bracket

    def on_trial_added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        super().on_trial_added(trial, config)
        self._active_trials.add(trial)
        self._lacks_new_trials = False

    def next_trial_to_resume(self) -> TrialId | None:
        promotable = self._find_promotable_trial()
        if promotable or self._has_promoted_to_end or self._active_trials or not self._lacks_new_trials:
            return promotable
        return next((rung.paused[0].trial for rung in self._rungs_descending if rung.paused), None)

    def on_trial_resumed(self, trial: TrialId) -> None:
        self._clear_pause(trial)
        progress = self._progress[trial]
        self._has_promoted_to_end |= progress.rung_index == len(progress.rungs) - 1
        self._active_trials.add(trial)

    def next_trial_to_stop(self) -> tuple[TrialId, Stop] | None:
        if not self._active_trials and self._lacks_new_trials and self.next_trial_to_resume() is None:
            for rung in reversed(self._rungs_descending):
                if rung.paused:
                    return rung.paused[-1].trial, Stop(reason=self._place_reason(rung, rung.paused[-1]))
        return None

    def on_no_new_trial(self) -> None:
        self._lacks_new_trials = True

    def on_trial_ended(self, trial: TrialId) -> None:
        self._clear_pause(trial)
        self._active_trials.discard(trial)

    def _decide_at_rung(self, trial: TrialId, progress: TrialProgress, loss: float) -> Decision:
        self._clear_pause(trial)  # a trial that reports is no longer paused at an earlier rung
        rung = progress.rungs[progress.rung_index]
        record = rung.add_trial(trial, loss)
        progress.paused_at = (rung, record)
        rung.mark_paused(record)
        self._active_trials.discard(trial)
        if self._find_promotable_trial() == trial:
            self.on_trial_resumed(trial)
            return Continue()
        return Pause(reason=self._place_reason(rung, record))

    def _repeat_decision(self, progress: TrialProgress) -> Decision:
        return Pause(reason=self._place_reason(*progress.paused_at)) if progress.paused_at else Continue()

    def _clear_pause(self, trial: TrialId) -> None:
        progress = self._progress[trial]
        if progress.paused_at:
            rung, record = progress.paused_at
            rung.mark_resumed(record)
            progress.paused_at = None

    def _find_promotable_trial(self) -> TrialId | None:
        trials = (rung.find_promotable_trial(self._brackets.reduction_factor) for rung in self._rungs_descending)
        return next((trial for trial in trials if trial), None)

    def _place_reason(self, rung: Rung, record: RungRecord) -> Reason:
        """Return a reason with the trial's place among the trials that reached the rung."""
        return make_reason(
            "rank-promoted",
            **make_metric_reason_arguments(record.loss, self._objective),
            step=rung.step,
            rank=rung.count_better_trials(record) + 1,
            ranked=len(rung.losses),
            quota=rung.compute_promotion_quota(self._brackets.reduction_factor),
        )


@dataclass(frozen=True, slots=True)
class ASHA(Scheduler):
    """Train many trials for few steps, and few trials to the end: at each rung, only the best continue.

    Rungs are the steps `grace_period`, `grace_period` * `reduction_factor` and so on, rounded up, below `max_t`. ASHA
    is asynchronous: a trial is compared with the trials that reached the rung earlier.

    `variant="promotion"`, the default, is the algorithm of the paper. Every trial pauses at each rung. A free slot goes
    to the best paused trial that is among the best 1 / `reduction_factor` of its rung; if there is none, a new trial
    starts. This variant needs checkpoints, and trains fewer steps for the same result. It corrects early mistakes,
    because a trial may be promoted later. `variant="stopping"` is Ray's AsyncHyperBandScheduler: it prunes the worse
    trials of a rung, pauses no trial, and needs no checkpoints.

    Several `brackets` protect against misleading early results: each bracket begins one rung higher than the one
    before, and trials are distributed over the brackets in the proportions of Hyperband.

    ```python
    scheduler = pt.ASHA(max_t=81, grace_period=3)
    scheduler = pt.Hyperband(max_t=81)
    scheduler = pt.MedianStopping(grace_period=10)
    scheduler = pt.OptunaPruner(optuna.pruners.MedianPruner())
    ```

    Args:
        max_t: the step at which a trial ends at the latest.
        grace_period: the step of the first rung.
        reduction_factor: the ratio of a rung's step to the previous rung's; 1 / `reduction_factor` of trials continue.
        brackets: the number of brackets.
        variant: `promotion` pauses the trials of a rung that are not the best; `stopping` ends them.
    """

    max_t: int = field(metadata={"example": 81})
    grace_period: int = 1
    reduction_factor: float = 3
    brackets: int = 1
    variant: Literal["promotion", "stopping"] = "promotion"

    def __post_init__(self) -> None:
        convert_scalar_fields(self)
        if not (is_integer_at_least(self.max_t, 1) and is_integer_at_least(self.grace_period, 1)):
            raise InvalidInput(f"{self}: expected max_t and grace_period in whole steps, 1 or more")
        if self.grace_period > self.max_t:
            raise InvalidInput(f"{self}: expected a grace_period of at most max_t={self.max_t}")
        if not is_number_at_least(self.reduction_factor, 2):
            raise InvalidInput(f"{self}: expected a reduction_factor of 2 or more")
        limit = len(self._compute_rung_steps()) + 1
        if not (is_integer_at_least(self.brackets, 1) and self.brackets <= limit):
            raise InvalidInput(f"{self}: expected 1 to {limit} brackets: there are {limit - 1} rungs below max_t")
        if self.variant not in {"stopping", "promotion"}:
            raise InvalidInput(f"{self}: expected variant 'promotion' or 'stopping'")

    def begin(self, objective: Objective, seed: int) -> Schedule:
        steps = self._compute_rung_steps()
        rungs = [[Rung(step) for step in steps[skipped:]] for skipped in range(self.brackets)]
        schedule = PromotionSchedule if self.variant == "promotion" else StoppingSchedule
        return schedule(Brackets(rungs, self.max_t, self.reduction_factor, seed), objective)

    def _compute_rung_steps(self) -> Sequence[int]:
        steps = (math.ceil(self.grace_period * self.reduction_factor**power) for power in count())
        return list(takewhile(lambda step: step < self.max_t, steps))  # rounded up, as in Ray
