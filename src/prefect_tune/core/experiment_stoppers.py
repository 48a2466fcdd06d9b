"""When a whole experiment has had enough: functions of what its journal tells, told in the journal's order.

They are given as `stop`, combined by `|` with stoppers of single trials: `MaxSteps(100) | MaxFailures(5)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from statistics import pstdev
from typing import TypeAlias

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.objective import Mode, Objective, objective_of
from prefect_tune.core.ranking import losses_in
from prefect_tune.core.stoppers import AnyOf, Never, Stopper, some_time
from prefect_tune.core.values import StepReport, TrialId

__all__ = [
    "End",
    "ExperimentPlateau",
    "ExperimentStopper",
    "MaxFailures",
    "NoMore",
    "Tallies",
    "Tally",
    "TimeBudget",
    "TrialBudget",
    "Verdict",
    "of_experiment",
    "of_trials",
]


@dataclass(frozen=True, slots=True)
class NoMore:
    """No new trial is begun; those that there are train to their ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Every trial saves and ends; who opens the experiment with another stopper goes on."""

    reason: str


Verdict: TypeAlias = NoMore | End | None


class Tally(ABC):
    """What a stopper of an experiment has been told: now, or once more when it is resumed. Each call is O(1)."""

    def added(self, trial: TrialId) -> None:
        """Hear of a new trial, or of one that had ended and goes on."""
        del trial

    def trained(self, trial: TrialId, seconds: float) -> None:
        """Hear for how long a trial has trained, up to the newest step that counts."""
        del trial, seconds

    def ended(self, trial: TrialId, report: StepReport | None, *, failed: bool) -> None:
        """Hear that a trial is over, with its last report."""
        del trial, report, failed

    @abstractmethod
    def verdict(self) -> Verdict:
        """Return whether it is enough; None to go on."""


class ExperimentStopper(Stopper):
    """Ends an experiment. Frozen; its state is the `Tally` that it begins."""

    @property
    def looks_back(self) -> bool:
        return False

    def why_stop(self, reports: Sequence[StepReport]) -> str | None:
        """No single trial is stopped by it."""
        del reports
        return None

    @abstractmethod
    def begin(self, objective: Objective | None) -> Tally:
        """Return the tally of an experiment that has no trial yet.

        Args:
            objective: what the search compares its trials by, where it does.

        Raises:
            InvalidInput: it needs one.
        """


def of_trials(stopper: Stopper) -> Stopper:
    """Return the part of `stopper` that ends single trials."""
    parts = [each for each in _parts(stopper) if not isinstance(each, ExperimentStopper)]
    if len(parts) < 2:
        return parts[0] if parts else Never()
    return AnyOf(tuple(parts))


def of_experiment(stopper: Stopper) -> Sequence[ExperimentStopper]:
    """Return the parts of `stopper` that end the experiment."""
    return [each for each in _parts(stopper) if isinstance(each, ExperimentStopper)]


def _parts(stopper: Stopper) -> Sequence[Stopper]:
    if isinstance(stopper, AnyOf):
        return list(chain.from_iterable(_parts(each) for each in stopper.stoppers))
    return [stopper]


class Tallies(Tally):
    """Several, of which any can say that it is enough."""

    def __init__(self, tallies: Sequence[Tally]) -> None:
        self._tallies = tallies

    def added(self, trial: TrialId) -> None:
        for each in self._tallies:
            each.added(trial)

    def trained(self, trial: TrialId, seconds: float) -> None:
        for each in self._tallies:
            each.trained(trial, seconds)

    def ended(self, trial: TrialId, report: StepReport | None, *, failed: bool) -> None:
        for each in self._tallies:
            each.ended(trial, report, failed=failed)

    def verdict(self) -> Verdict:
        """An end comes before the end of new trials."""
        verdicts = [each.verdict() for each in self._tallies]
        ends = [each for each in verdicts if isinstance(each, End)]
        return next(iter([*ends, *(each for each in verdicts if each)]), None)


@dataclass(frozen=True, slots=True)
class MaxFailures(ExperimentStopper):
    """End the experiment once so many of its trials have errored, for good: their own retries are spent.

    Trials that are tried again (`rerun_errored`) are not counted any more.
    """

    failures: int
    """How many, at least 1."""

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise InvalidInput(f"MaxFailures({self.failures}): expected at least 1 trial")

    def begin(self, objective: Objective | None) -> Tally:
        del objective
        return _Failures(self.failures)


class _Failures(Tally):
    def __init__(self, most: int) -> None:
        self._most = most
        self._failed: set[TrialId] = set()

    def added(self, trial: TrialId) -> None:
        self._failed.discard(trial)

    def ended(self, trial: TrialId, report: StepReport | None, *, failed: bool) -> None:
        del report
        if failed:
            self._failed.add(trial)

    def verdict(self) -> Verdict:
        if len(self._failed) < self._most:
            return None
        return End(f"{len(self._failed)} trials have errored, of MaxFailures({self._most})")


@dataclass(frozen=True, slots=True)
class TrialBudget(ExperimentStopper):
    """Begin no more than so many trials, whatever the search would still propose."""

    trials: int

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InvalidInput(f"TrialBudget({self.trials}): expected at least 1 trial")

    def begin(self, objective: Objective | None) -> Tally:
        del objective
        return _Trials(self.trials)


class _Trials(Tally):
    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[TrialId] = set()

    def added(self, trial: TrialId) -> None:
        self._known.add(trial)

    def verdict(self) -> Verdict:
        spent = len(self._known) >= self._most
        return NoMore(f"the trial budget of {self._most} is spent") if spent else None


@dataclass(frozen=True, slots=True)
class TimeBudget(ExperimentStopper):
    """End the experiment after so much training time, summed over its trials and over all of its runs.

    What is counted is what the journal knows: a trial's time is told with its checkpoints, when it ends, and
    every `sync_period`. Steps that were lost, and are trained again, count once. A plain number is one of seconds.
    """

    time: timedelta

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", some_time(self.time, "TimeBudget"))

    def begin(self, objective: Objective | None) -> Tally:
        del objective
        return _Time(self.time)


class _Time(Tally):
    def __init__(self, most: timedelta) -> None:
        self._most = most
        self._seconds: dict[TrialId, float] = {}
        self._sum = 0.0

    def trained(self, trial: TrialId, seconds: float) -> None:
        self._sum += seconds - self._seconds.get(trial, 0.0)
        self._seconds[trial] = seconds

    def verdict(self) -> Verdict:
        spent = timedelta(seconds=self._sum)
        return End(f"its trials have trained for {spent}, of {self._most}") if spent >= self._most else None


@dataclass(frozen=True, slots=True)
class ExperimentPlateau(ExperimentStopper):
    """End the experiment when its best trials are all as good as each other: more of them bring nothing new.

    Ray's ExperimentPlateauStopper, of trials in place of results: of the `top` best values with which trials
    have finished, the standard deviation is at most `std`, and was for `patience` more trials that finished.

    Args:
        metric: default: what the search compares by, its first where it has several.
        mode: goes with `metric`.
    """

    metric: str | None = None
    std: float = 0.001
    top: int = 10
    mode: Mode = "min"
    patience: int = 0

    def __post_init__(self) -> None:
        if self.std < 0 or self.top < 2 or self.patience < 0:
            raise InvalidInput(f"{self}: expected std >= 0, top >= 2, patience >= 0")

    def begin(self, objective: Objective | None) -> Tally:
        by = objective if self.metric is None else objective_of(self.metric, self.mode)
        if by is None:
            raise InvalidInput("ExperimentPlateau: of which metric? Name it: ExperimentPlateau(metric='loss')")
        return _Best(self, by)


class _Best(Tally):
    def __init__(self, plateau: ExperimentPlateau, objective: Objective) -> None:
        self._plateau = plateau
        self._objective = objective
        self._losses: dict[TrialId, float] = {}
        self._sorted: list[float] = []
        self._settled = 0  # how many trials in a row have finished and found it settled

    def added(self, trial: TrialId) -> None:
        if (loss := self._losses.pop(trial, None)) is not None:
            self._sorted.remove(loss)

    def ended(self, trial: TrialId, report: StepReport | None, *, failed: bool) -> None:
        losses = losses_in(report.metrics, self._objective) if report and not failed else None
        if losses is None:
            return
        self._losses[trial] = losses[0]
        insort(self._sorted, losses[0])
        enough = len(self._sorted) >= self._plateau.top
        self._settled = self._settled + 1 if enough and self._spread() <= self._plateau.std else 0

    def _spread(self) -> float:
        return pstdev(self._sorted[: self._plateau.top])

    def verdict(self) -> Verdict:
        if self._settled <= self._plateau.patience:
            return None
        name = self._objective.metrics[0]
        return End(f"{name} of the best {self._plateau.top} trials has settled: ± {self._spread():g}")
