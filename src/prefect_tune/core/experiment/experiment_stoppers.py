"""Stoppers of a whole experiment: deterministic functions of its journal, fed in the journal's order.

Pass them as `stop`, combined by `|` with stoppers of single trials: `MaxSteps(100) | MaxFailures(5)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from statistics import pstdev
from typing import TypeAlias

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.ranking import losses_in
from prefect_tune.core.experiment.trial_stoppers import AnyOf, Never, Stopper, some_time
from prefect_tune.core.models import StepReport, TrialId
from prefect_tune.core.search.objective import Mode, Objective, objective_of

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
    """Start no new trial; the existing trials train to their ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Every trial saves and ends; a later run with another stopper continues the experiment."""

    reason: str


Verdict: TypeAlias = NoMore | End | None


class Tally(ABC):
    """The state of an experiment's stopper, fed live or replayed on a resume. Each call is O(1)."""

    def added(self, trial: TrialId) -> None:
        """Record a new trial, or one that had ended and continues."""
        del trial

    def trained(self, trial: TrialId, seconds: float) -> None:
        """Record a trial's training time in seconds, up to its newest step."""
        del trial, seconds

    def ended(self, trial: TrialId, report: StepReport | None, *, failed: bool) -> None:
        """Record that a trial has ended, with its last report."""
        del trial, report, failed

    @abstractmethod
    def verdict(self) -> Verdict:
        """Return how to end the experiment; None to continue."""


class ExperimentStopper(Stopper):
    """Ends an experiment. Frozen; its state is the `Tally` that `begin` returns."""

    @property
    def looks_back(self) -> bool:
        return False

    def why_stop(self, reports: Sequence[StepReport]) -> str | None:
        """Return None: it stops no single trial."""
        del reports
        return None

    @abstractmethod
    def begin(self, objective: Objective | None) -> Tally:
        """Return the tally of an experiment that has no trial yet.

        Args:
            objective: the objective of the search; None where it has none.

        Raises:
            InvalidInput: the stopper needs an objective, and there is none.
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
    """Several tallies, any of which can end the experiment."""

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
        """Return the first `End`, else the first `NoMore`, else None."""
        verdicts = [each.verdict() for each in self._tallies]
        ends = [each for each in verdicts if isinstance(each, End)]
        return next(iter([*ends, *(each for each in verdicts if each)]), None)


@dataclass(frozen=True, slots=True)
class MaxFailures(ExperimentStopper):
    """End the experiment once this many of its trials have errored, with their own retries spent.

    Trials that are retried (`rerun_errored`) are no longer counted.
    """

    failures: int = field(metadata={"example": 3})
    """The number of errored trials, at least 1."""

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
    """Start at most this many trials, even if the search would propose more."""

    trials: int = field(metadata={"example": 200})

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InvalidInput(f"TrialBudget({self.trials}): expected at least 1 trial")

    def begin(self, objective: Objective | None) -> Tally:
        del objective
        return _TrialTally(self.trials)


class _TrialTally(Tally):
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
    """End the experiment after this training time, summed over its trials and over all of its runs.

    The time counted is that in the journal: it is updated when a trial commits a checkpoint, when it ends, and
    every `sync_period`. Steps that were lost and are trained again count once. A plain number means seconds.
    """

    time: timedelta = field(metadata={"example": 3600, "json": "seconds"})

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
    """End the experiment when its best trials are about equally good, so that more trials are unlikely to be better.

    As Ray's ExperimentPlateauStopper, but over trials instead of results: the standard deviation of the `top` best
    last values of finished trials is at most `std`, and has stayed so for `patience` more finished trials.

    Args:
        metric: default: the (first) metric that the search compares by.
        mode: `min` or `max`, for `metric`.
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
            raise InvalidInput("ExperimentPlateau: expected a metric, found none: ExperimentPlateau(metric='loss')")
        return _Best(self, by)


class _Best(Tally):
    def __init__(self, plateau: ExperimentPlateau, objective: Objective) -> None:
        self._plateau = plateau
        self._objective = objective
        self._losses: dict[TrialId, float] = {}
        self._sorted: list[float] = []
        self._settled = 0  # how many trials in a row have finished with the best values settled

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
