"""Hyperband (Li et al. 2018): synchronous successive halving, in brackets whose first rungs are at different steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import convert_scalar_fields, is_integer_at_least, is_number_at_least
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
    make_metric_reason_arguments,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import TrialId


@dataclass(slots=True)
class Bracket:
    """A group of trials, compared when all of them have reached a rung; only the best continue to the next rung.

    A trial that ends before the rung keeps its place in the bracket, and counts as the worst.
    """

    size: int
    """The number of trials that the bracket takes; after `close`, the number of trials that it has."""
    steps: Sequence[int]
    """The steps of the rungs. Training ends at the last rung, without a comparison."""
    reduction_factor: float
    rung_index: int = 0
    """The index of the present rung, that is, of the rung to which the trials now train."""
    trial_count: int = 0
    """At the first rung, the number of trials that entered the bracket; later, the number promoted to the rung."""
    training: set[TrialId] = field(default_factory=set)
    """The trials that have not reached the present rung; some of them may wait for a slot."""
    reached: dict[TrialId, float] = field(default_factory=dict)
    """The losses of the trials that reached the present rung, in the order of arrival."""

    @property
    def is_full(self) -> bool:
        """Whether the bracket takes no more trials."""
        return self.rung_index > 0 or self.trial_count >= self.size

    @property
    def is_rung_complete(self) -> bool:
        """Whether the bracket is full, each trial reached the present rung or ended, and at least one reached it."""
        return self.is_full and not self.training and bool(self.reached)

    def add_trial(self, trial: TrialId) -> None:
        self.trial_count += 1
        self.training.add(trial)

    def record_loss(self, trial: TrialId, loss: float) -> None:
        """Record that a trial reached the present rung with this loss."""
        self.training.discard(trial)
        self.reached[trial] = loss

    def remove_trial(self, trial: TrialId) -> None:
        """Remove an ended trial; its place stays taken."""
        self.training.discard(trial)
        self.reached.pop(trial, None)

    def find_best_trial(self) -> TrialId | None:
        """Return the best trial at the present rung (of equal trials, the first to arrive); None for an empty rung."""
        return min(self.reached, key=self.reached.__getitem__, default=None)

    def close(self) -> None:
        """Take no more trials."""
        self.size = self.trial_count

    def promote_best_trials(self) -> Sequence[TrialId]:
        """Advance to the next rung. Return the ranked trials: the first `trial_count` continue, and the others end."""
        ranking = sorted(self.reached, key=self.reached.__getitem__)
        self.trial_count = max(1, int(self.trial_count / self.reduction_factor))
        self.rung_index += 1
        self.training = set(ranking[: self.trial_count])
        self.reached = {}
        return ranking


@dataclass(frozen=True, slots=True)
class Hyperband(Scheduler):
    """Compare whole groups: a rung is decided when all trials of its bracket have reached it. `ASHA` has an example.

    Trials fill one bracket after the other; after the last bracket, the brackets repeat. The first bracket has many
    trials, and its first rung is at few steps. The last bracket has few trials, which all train `max_t` steps. At each
    rung, the best 1 / `reduction_factor` of the trials continue, but at least one trial. A trial at a rung pauses until
    the rung is decided; the trials of the next bracket use its slot. When there are no new trials, the bracket that is
    being filled is decided with the trials that it has.

    `brackets` returns each bracket's number of trials and first rung: (81, 1), (34, 3), (15, 9), (8, 27) and (5, 81)
    for `max_t=81` and `reduction_factor=3`.

    Args:
        max_t: the step at which every trial ends.
        reduction_factor: each rung's step divided by the previous one's. 1 / `reduction_factor` of the trials continue.
    """

    max_t: int = field(metadata={"example": 81})
    reduction_factor: float = 3

    def __post_init__(self) -> None:
        convert_scalar_fields(self)
        if not (is_integer_at_least(self.max_t, 1) and is_number_at_least(self.reduction_factor, 2)):
            raise InvalidInput(f"{self}: expected max_t >= 1, in whole steps, and reduction_factor >= 2")

    @property
    def brackets(self) -> Sequence[tuple[int, int]]:
        """The number of trials of each bracket, and the step of its first rung."""
        return [(size, rungs[0]) for size, rungs in self._make_bracket_plans()]

    def begin(self, objective: Objective, seed: int) -> Schedule:
        del seed
        return _HyperbandSchedule(self._make_bracket_plans(), self.reduction_factor, objective)

    def _make_bracket_plans(self) -> Sequence[tuple[int, Sequence[int]]]:
        """Return the size and the rungs of each bracket, the largest bracket first."""
        powers = [self.reduction_factor**0]
        while powers[-1] * self.reduction_factor <= self.max_t:
            powers.append(powers[-1] * self.reduction_factor)
        rungs = [int(self.max_t / power) for power in powers]
        sizes = [ceil(len(powers) * power / (halvings + 1)) for halvings, power in enumerate(powers)]
        return [(sizes[halvings], rungs[halvings::-1]) for halvings in reversed(range(len(powers)))]


class _HyperbandSchedule(Schedule):
    """The brackets, and the trials that wait to be resumed or stopped because their rung is decided."""

    def __init__(
        self, plans: Sequence[tuple[int, Sequence[int]]], reduction_factor: float, objective: Objective
    ) -> None:
        self._bracket_plans = plans
        self._reduction_factor = reduction_factor
        self._objective = objective
        self._max_t = plans[0][1][-1]
        self._bracket_count = 0
        self._filling_bracket: Bracket | None = None
        self._bracket_by_trial: dict[TrialId, Bracket] = {}
        self._to_resume: OrderedDict[TrialId, None] = OrderedDict()
        self._to_stop: OrderedDict[TrialId, Stop] = OrderedDict()
        self._lacks_new_trials = False

    def on_trial_added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        del config
        self._lacks_new_trials = False
        if self._filling_bracket is None or self._filling_bracket.is_full:
            size, steps = self._bracket_plans[self._bracket_count % len(self._bracket_plans)]
            self._filling_bracket = Bracket(size, steps, self._reduction_factor)
            self._bracket_count += 1
        self._filling_bracket.add_trial(trial)
        self._bracket_by_trial[trial] = self._filling_bracket

    def next_milestone(self, trial: TrialId, step: int) -> int | None:
        bracket = self._bracket_by_trial.get(trial)
        return max(bracket.steps[bracket.rung_index] if bracket else self._max_t, step + 1)

    def decide(self, report: TrialReport) -> Decision:
        loss, step = compute_loss(report, self._objective), report.report.step
        bracket = self._bracket_by_trial.get(report.trial)
        if bracket is None or step >= self._max_t:
            self.on_trial_ended(report.trial)
            return Stop(reason=make_reason("step-limit", step=step, limit=self._max_t), early=False)
        if report.trial in bracket.training and report.trial not in self._to_resume:
            if step < bracket.steps[bracket.rung_index]:
                return Continue()
            bracket.record_loss(report.trial, loss)
            self._decide_rung_if_complete(bracket)
        return self._decide_at_rung(report.trial, bracket)

    def next_trial_to_resume(self) -> TrialId | None:
        bracket = self._filling_bracket
        if self._to_resume or not (self._lacks_new_trials and bracket) or bracket.is_full or bracket.training:
            return self._get_first_to_resume()
        return bracket.find_best_trial()  # no new trial can fill the bracket, so resume a trial, which decides the rung

    def on_trial_resumed(self, trial: TrialId) -> None:
        bracket = self._bracket_by_trial.get(trial)
        # If the trial resumes before its rung is decided (no new trials, or a changed scheduler), close the bracket.
        if bracket and trial in bracket.reached and not bracket.is_full:
            bracket.close()
            self._decide_rung_if_complete(bracket)
        self._to_resume.pop(trial, None)

    def next_trial_to_stop(self) -> tuple[TrialId, Stop] | None:
        return next(iter(self._to_stop.items()), None)

    def on_no_new_trial(self) -> None:
        self._lacks_new_trials = True

    def on_trial_ended(self, trial: TrialId) -> None:
        self._to_resume.pop(trial, None)
        self._to_stop.pop(trial, None)
        if bracket := self._bracket_by_trial.pop(trial, None):
            bracket.remove_trial(trial)
            self._decide_rung_if_complete(bracket)

    def _decide_at_rung(self, trial: TrialId, bracket: Bracket) -> Decision:
        """Decide on a trial that reached its rung."""
        if stop := self._to_stop.get(trial):
            self.on_trial_ended(trial)
            return stop
        if trial == self._get_first_to_resume():
            self.on_trial_resumed(trial)
            return Continue()
        step, others = bracket.steps[bracket.rung_index], len(bracket.training)
        if trial not in bracket.reached:
            return Pause(reason=make_reason("waits-for-slot", step=step))
        if not bracket.is_full:
            others += bracket.size - bracket.trial_count
        return Pause(reason=make_reason("waits-for-others", step=step, others=others))

    def _decide_rung_if_complete(self, bracket: Bracket) -> None:
        if not bracket.is_rung_complete:
            return
        losses, step = bracket.reached, bracket.steps[bracket.rung_index]
        ranking = bracket.promote_best_trials()
        for rank, trial in enumerate(ranking):
            if rank < bracket.trial_count:
                self._to_resume[trial] = None
            else:
                result = make_metric_reason_arguments(losses[trial], self._objective)
                ranks = {"rank": rank + 1, "ranked": len(ranking), "quota": bracket.trial_count}
                self._to_stop[trial] = Stop(reason=make_reason("rank-continued", **result, step=step, **ranks))

    def _get_first_to_resume(self) -> TrialId | None:
        return next(iter(self._to_resume), None)
