"""ASHA's brackets, and each trial's position on its ladder of rungs; shared by both variants."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prefect_tune.core import seeded_random
from prefect_tune.core.models import TrialId
from prefect_tune.core.schedulers.base import Decision, Schedule, Stop, TrialReport
from prefect_tune.core.schedulers.common import loss_of
from prefect_tune.core.schedulers.rungs import Rung, RungEntry
from prefect_tune.core.search.objective import Objective

__all__ = ["Brackets", "Climb", "Climbing"]


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
            return Stop(reason=f"step {step} of {self._brackets.max_t}", early=False)
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
