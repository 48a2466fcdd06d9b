"""Stoppers of a trial and of a whole experiment: each is a deterministic function of the journal's events, in order.

Pass them as `stop`, combined by `|`: `MaxSteps(100) | MaxFailures(5)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import pstdev
from typing import Any, ClassVar, TypeAlias

from prefect_tune.core.display_text import describe_signature_mismatch, did_you_mean
from prefect_tune.core.errors import BadStop, InvalidInput
from prefect_tune.core.metrics import (
    convert_scalar_fields,
    is_integer_at_least,
    is_number,
    is_number_at_least,
    short_repr,
    to_plain_keys,
    to_plain_scalar,
)
from prefect_tune.core.reasons import AnyReason, make_reason
from prefect_tune.core.renamed import RenamedMembers
from prefect_tune.core.search.objective import Mode, Objective, make_objective
from prefect_tune.core.search.space_json import NamedOptions
from prefect_tune.core.values import StepReport, TrialId, get_metric, iter_leaves

RAY_EQUIVALENTS = {"training_iteration": "'step'", "time_total_s": "pt.MaxTime(seconds)"}
"""Ray Tune's names for values that every report has, each with the equivalent in this package."""


class Stopper(NamedOptions, RenamedMembers, ABC):
    """Stops a trial. A stopper needs no state, because it gets all reports of the trial, oldest first."""

    _renamed: ClassVar[Mapping[str, str]] = {"why_stop": "stop_reason", "looks_back": "needs_history"}

    @property
    def needs_history(self) -> bool:
        """Whether the stopper needs more than the last report; if no stopper does, a resume reads fewer reports."""
        return True

    @property
    def step_count(self) -> int | None:
        """The maximum number of steps of a trial; None if unknown."""
        return None

    @abstractmethod
    def stop_reason(self, reports: Sequence[StepReport]) -> AnyReason | None:
        """Return why the trial stops after the last of `reports`; None to continue."""

    def __or__(self, other: StopCriteria) -> Stopper:
        """Return a stopper that stops as soon as this one or `other` does; `other` can also be limits or a function."""
        return AnyOf((self, as_stopper(other)))


@dataclass(frozen=True, slots=True)
class Never(Stopper):
    """Train until the trainable returns."""

    needs_history = False

    def stop_reason(self, reports: Sequence[StepReport]) -> AnyReason | None:
        del reports
        return None


@dataclass(frozen=True, slots=True)
class AnyOf(Stopper):
    """Stop as soon as one of several stoppers does."""

    stoppers: tuple[Stopper, ...]

    @property
    def needs_history(self) -> bool:
        return any(stopper.needs_history for stopper in self.stoppers)

    @property
    def step_count(self) -> int | None:
        return min((count for part in self.stoppers if (count := part.step_count) is not None), default=None)

    def stop_reason(self, reports: Sequence[StepReport]) -> AnyReason | None:
        return next((reason for stopper in self.stoppers if (reason := stopper.stop_reason(reports))), None)

    def to_json_form(self) -> object:
        return [stopper.to_json_form() for stopper in self.stoppers]


@dataclass(frozen=True, slots=True)
class MaxSteps(Stopper):
    """Stop after this many steps. A step that a resume repeats counts once.

    ```python
    stop = pt.MaxSteps(100) | pt.MaxTime(3600) | pt.Plateau("loss", std=0.01)
    stop |= pt.MaxFailures(5) | pt.TrialBudget(200) | pt.TimeBudget(86400) | pt.ExperimentPlateau(top=5)
    ```
    """

    steps: int = field(metadata={"example": 100})
    needs_history = False

    def __post_init__(self) -> None:
        _convert_count_field(self, self.steps, "step")

    @property
    def step_count(self) -> int | None:
        return self.steps

    def stop_reason(self, reports: Sequence[StepReport]) -> AnyReason | None:
        step = reports[-1].step
        return make_reason("step-limit", step=step, limit=self.steps) if step >= self.steps else None


@dataclass(frozen=True, slots=True)
class MaxTime(Stopper):
    """Stop after this training time, summed over all attempts; a plain number means seconds. See `MaxSteps`."""

    time: timedelta = field(metadata={"example": 3600, "json": "seconds"})
    needs_history = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", _as_timedelta(self.time, "MaxTime"))

    def stop_reason(self, reports: Sequence[StepReport]) -> AnyReason | None:
        seconds, limit = reports[-1].trained_seconds, self.time.total_seconds()
        return make_reason("time-limit", seconds=seconds, limit=limit) if seconds >= limit else None


@dataclass(frozen=True, slots=True)
class Plateau(Stopper):
    """Stop when the last `reports` values of `metric` have a standard deviation of at most `std`; see `MaxSteps`.

    Like Ray's TrialPlateauStopper, it never stops a trial before `grace` reports.
    """

    metric: str = field(metadata={"example": "loss"})
    std: float = 0.01
    reports: int = 4
    grace: int = 4

    def __post_init__(self) -> None:
        _convert_plateau_fields(self, reports=2, grace=0)

    def stop_reason(self, reports: Sequence[StepReport]) -> AnyReason | None:
        values = [_require_metric_value(report.metrics, self.metric) for report in reports[-self.reports :]]
        if len(reports) < max(self.grace, self.reports):
            return None
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        return make_reason("plateau", metric=self.metric, mean=mean, spread=spread) if spread <= self.std else None


@dataclass(frozen=True, slots=True)
class _MetricLimits(Stopper):
    """Stop once a reported value reaches its limit, like Ray's `stop`; the name `step` stands for the step's number."""

    limits: tuple[tuple[str, float], ...]
    needs_history = False

    @property
    def step_count(self) -> int | None:
        limit = dict(self.limits).get("step", math.inf)
        return max(1, math.ceil(limit)) if math.isfinite(limit) else None

    def stop_reason(self, reports: Sequence[StepReport]) -> AnyReason | None:
        last = reports[-1]
        for name, limit in self.limits:
            if name == "step":
                if last.step >= limit:
                    return make_reason("step-limit", step=last.step, limit=limit)
            elif (value := _require_metric_value(last.metrics, name)) >= limit:
                return make_reason("metric-limit", metric=name, value=value, limit=limit)
        return None

    def to_json_form(self) -> object:
        return dict(self.limits)


@dataclass(frozen=True, slots=True)
class _StopFunction(Stopper):
    """Stop when the user's function returns a true value; the function gets the step's metrics, including `step`."""

    function: Callable[[Mapping[str, object]], object]
    needs_history = False

    def stop_reason(self, reports: Sequence[StepReport]) -> AnyReason | None:
        is_met = self.function({**reports[-1].metrics, "step": reports[-1].step})
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return make_reason("stop-function", name=name) if is_met else None


StopCriteria: TypeAlias = (
    "Stopper | Mapping[str, float] | Callable[[Mapping[str, Any]], object] | Sequence[StopCriteria] | None"
)


def as_stopper(stop: StopCriteria) -> Stopper:
    """Return the stopper for `stop`: `{metric: limit}` (stop at `>=`), a function, a stopper, a list of these, or None.

    Raises:
        InvalidInput: `stop` is none of these, or a limit is not a number.
    """
    if stop is None:
        return Never()
    if isinstance(stop, Stopper):
        return stop
    if isinstance(stop, Mapping):
        return _MetricLimits(tuple(_parse_limit(name, limit) for name, limit in to_plain_keys(stop, "stop").items()))
    if isinstance(stop, Sequence) and not isinstance(stop, str | bytes):
        return AnyOf(tuple(map(as_stopper, stop)))
    if callable(stop) and not isinstance(stop, type):
        if signature := describe_signature_mismatch(stop, 1):
            raise InvalidInput(f"stop: expected a function of one argument (the metrics of a step), found {signature}")
        return _StopFunction(stop)
    raise InvalidInput(f"stop={stop!r}: expected {{'step': 100}} or other limits, a function, or a stopper")


def _parse_limit(name: object, limit: object) -> tuple[str, float]:
    if not isinstance(name, str):
        raise InvalidInput(f"stop: expected the name of a metric, found {short_repr(name)}")
    limit = to_plain_scalar(limit)
    if not is_number(limit):
        raise InvalidInput(f"stop: limit of {name!r}: expected a finite number, found {short_repr(limit)}")
    if name == "step" and limit <= 0:
        raise InvalidInput(f"stop: limit of 'step': expected more than 0, since the first step is 1, found {limit!r}")
    return name, float(limit)


def trial_stop_reason(stopper: Stopper, reports: Sequence[StepReport]) -> AnyReason | None:
    """Return why a trial stops after the last of its `reports`; None to continue. Raises the stopper's errors."""
    if reports[-1].metrics.get("done") is True:
        return make_reason("done-reported")
    return stopper.stop_reason(reports)


def _as_timedelta(value: object, where: str) -> timedelta:
    """Convert a timedelta or a number of seconds to a timedelta.

    Raises:
        InvalidInput: the value is neither, or not positive.
    """
    time: object = to_plain_scalar(value)
    if is_number(time):
        with suppress(OverflowError):
            time = timedelta(seconds=time)
    if isinstance(time, timedelta) and time > timedelta(0):
        return timedelta(days=time.days, seconds=time.seconds, microseconds=time.microseconds)
    raise InvalidInput(f"{where}: expected a positive timedelta or number of seconds, found {short_repr(value)}")


def collect_metric_limits(stopper: Stopper) -> Mapping[str, float]:
    """Return the limits by metric, at or above which the stopper stops; `step` stands for the step's number."""
    if isinstance(stopper, AnyOf):
        return {name: limit for part in stopper.stoppers for name, limit in collect_metric_limits(part).items()}
    return dict(stopper.limits) if isinstance(stopper, _MetricLimits) else {}


def _convert_count_field(stopper: MaxSteps | MaxFailures | TrialBudget, count: object, noun: str) -> None:
    """Convert `count`, the only field of a stopper, to a Python int; raise unless it is an integer of at least 1."""
    convert_scalar_fields(stopper)
    if not is_integer_at_least(to_plain_scalar(count), 1):
        name = type(stopper).__name__
        raise InvalidInput(f"{name}({short_repr(count)}): expected at least 1 {noun}, as a whole number")


def _convert_plateau_fields(stopper: Plateau | ExperimentPlateau, **minimums: int) -> None:
    """Convert the fields to Python values; require `std` >= 0, and an integer >= its minimum in each of `minimums`."""
    convert_scalar_fields(stopper)
    are_integers = all(is_integer_at_least(getattr(stopper, name), minimum) for name, minimum in minimums.items())
    if not (is_number_at_least(stopper.std, 0) and are_integers):
        limits = ", ".join(f"{name} >= {minimum}" for name, minimum in minimums.items())
        raise InvalidInput(f"{stopper}: expected std >= 0, {limits}, the last two as whole numbers")


def _require_metric_value(metrics: Mapping[str, object], name: str) -> float:
    value = get_metric(metrics, name)
    if isinstance(value, int | float):
        return float(value)
    names = sorted(leaf for leaf, _ in iter_leaves(metrics))
    hint = did_you_mean(name, ["step", *names])
    if (equivalent := RAY_EQUIVALENTS.get(name)) is not None:
        hint = f"; Ray Tune's {name} is {equivalent} here"
    raise BadStop(f"stop: expected metric {name!r} in each report, found only {names}{hint}")


# Stoppers of a whole experiment.


@dataclass(frozen=True, slots=True)
class StopProposing:
    """Start no new trial; existing trials train to their ends."""

    reason: AnyReason


@dataclass(frozen=True, slots=True)
class StopExperiment:
    """Every trial saves and ends; a later run with another stopper can continue the experiment."""

    reason: AnyReason


StopperDecision: TypeAlias = StopProposing | StopExperiment | None


class StopperState(RenamedMembers, ABC):
    """The state of a stopper. A resume repeats all calls, but only the newest training times. Calls must be fast."""

    _renamed: ClassVar[Mapping[str, str]] = {
        "added": "on_trial_added",
        "ended": "on_trial_ended",
        "trained": "on_training_time",
    }

    def on_trial_added(self, trial: TrialId) -> None:
        """Record a new trial, or an ended trial that continues."""
        del trial

    def on_training_time(self, trial: TrialId, seconds: float) -> None:
        """Record a trial's training time in seconds, up to its newest step."""
        del trial, seconds

    def on_trial_ended(self, trial: TrialId, report: StepReport | None, *, failed: bool) -> None:
        """Record that a trial has ended, with its last report."""
        del trial, report, failed

    @abstractmethod
    def verdict(self) -> StopperDecision:
        """Return how to end the experiment; None to continue."""


class ExperimentStopper(Stopper):
    """Stops an experiment. The stopper itself has no state; `begin` returns a `StopperState` for one experiment."""

    @property
    def needs_history(self) -> bool:
        return False

    def stop_reason(self, reports: Sequence[StepReport]) -> AnyReason | None:
        """Return None, because this stopper does not stop a single trial."""
        del reports
        return None

    @abstractmethod
    def begin(self, objective: Objective | None) -> StopperState:
        """Return the state for an experiment without trials.

        Args:
            objective: the objective of the search; None if it has none.

        Raises:
            InvalidInput: the stopper needs an objective, and there is none.
        """


def extract_trial_stopper(stopper: Stopper) -> Stopper:
    """Return the part of `stopper` that stops single trials."""
    parts = [part for part in _flatten(stopper) if not isinstance(part, ExperimentStopper)]
    if len(parts) < 2:
        return parts[0] if parts else Never()
    return AnyOf(tuple(parts))


def extract_experiment_stoppers(stopper: Stopper) -> Sequence[ExperimentStopper]:
    """Return the parts of `stopper` that stop the experiment."""
    return [part for part in _flatten(stopper) if isinstance(part, ExperimentStopper)]


def _flatten(stopper: Stopper) -> Sequence[Stopper]:
    return [part for child in stopper.stoppers for part in _flatten(child)] if isinstance(stopper, AnyOf) else [stopper]


@dataclass(slots=True)
class CompositeState(StopperState):
    """The states of several stoppers, any of which can stop the experiment."""

    states: Sequence[StopperState]

    def on_trial_added(self, trial: TrialId) -> None:
        for state in self.states:
            state.on_trial_added(trial)

    def on_training_time(self, trial: TrialId, seconds: float) -> None:
        for state in self.states:
            state.on_training_time(trial, seconds)

    def on_trial_ended(self, trial: TrialId, report: StepReport | None, *, failed: bool) -> None:
        for state in self.states:
            state.on_trial_ended(trial, report, failed=failed)

    def verdict(self) -> StopperDecision:
        """Return the first `StopExperiment`; if there is none, the first `StopProposing`; None if all continue."""
        verdicts = [verdict for state in self.states if (verdict := state.verdict())]
        return next(
            (verdict for verdict in verdicts if isinstance(verdict, StopExperiment)), next(iter(verdicts), None)
        )


@dataclass(frozen=True, slots=True)
class MaxFailures(ExperimentStopper):
    """End the experiment once this many of its trials have errored, after their own retries.

    Trials that `rerun_errored` retries are no longer counted. See `MaxSteps`.
    """

    failures: int = field(metadata={"example": 3})
    """The number of errored trials."""

    def __post_init__(self) -> None:
        _convert_count_field(self, self.failures, "trial")

    def begin(self, objective: Objective | None) -> StopperState:
        del objective
        return _MaxFailuresState(self.failures)


@dataclass(slots=True)
class _MaxFailuresState(StopperState):
    limit: int
    errored: set[TrialId] = field(default_factory=set)

    def on_trial_added(self, trial: TrialId) -> None:
        self.errored.discard(trial)

    def on_trial_ended(self, trial: TrialId, report: StepReport | None, *, failed: bool) -> None:
        del report
        if failed:
            self.errored.add(trial)

    def verdict(self) -> StopperDecision:
        if (count := len(self.errored)) < self.limit:
            return None
        return StopExperiment(make_reason("failed-trials", count=count, limit=self.limit))


@dataclass(frozen=True, slots=True)
class TrialBudget(ExperimentStopper):
    """Start at most this many trials, even if the search would propose more; see `MaxSteps`."""

    trials: int = field(metadata={"example": 200})

    def __post_init__(self) -> None:
        _convert_count_field(self, self.trials, "trial")

    def begin(self, objective: Objective | None) -> StopperState:
        del objective
        return _TrialBudgetState(self.trials)


@dataclass(slots=True)
class _TrialBudgetState(StopperState):
    limit: int
    trials: set[TrialId] = field(default_factory=set)

    def on_trial_added(self, trial: TrialId) -> None:
        self.trials.add(trial)

    def verdict(self) -> StopperDecision:
        return StopProposing(make_reason("trial-budget", limit=self.limit)) if len(self.trials) >= self.limit else None


@dataclass(frozen=True, slots=True)
class TimeBudget(ExperimentStopper):
    """End the experiment after this training time, summed over its trials and over all of its runs.

    A trial's time is counted when the trial commits a checkpoint or ends, and every `sync_period`. Lost steps that are
    trained again count once. A plain number means seconds. See `MaxSteps`.
    """

    time: timedelta = field(metadata={"example": 3600, "json": "seconds"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", _as_timedelta(self.time, "TimeBudget"))

    def begin(self, objective: Objective | None) -> StopperState:
        del objective
        return _TimeBudgetState(self.time)


@dataclass(slots=True)
class _TimeBudgetState(StopperState):
    limit: timedelta
    seconds: dict[TrialId, float] = field(default_factory=dict)
    total_seconds: float = 0.0

    def on_training_time(self, trial: TrialId, seconds: float) -> None:
        self.total_seconds += seconds - self.seconds.get(trial, 0.0)
        self.seconds[trial] = seconds

    def verdict(self) -> StopperDecision:
        if timedelta(seconds=self.total_seconds) < self.limit:
            return None
        limit_seconds = self.limit.total_seconds()
        return StopExperiment(make_reason("search-time-limit", seconds=self.total_seconds, limit=limit_seconds))


@dataclass(frozen=True, slots=True)
class ExperimentPlateau(ExperimentStopper):
    """End the experiment when its best trials are about equally good. See `MaxSteps`.

    It is like Ray's ExperimentPlateauStopper, but compares trials instead of results. Each finished trial counts with
    its last value. The experiment ends when the `top` best values have a standard deviation of at most `std`, and
    `patience` more finished trials do not change this. Further trials are then unlikely to be better.

    Args:
        metric: the metric to compare. Default: the first metric of the search's objective.
        mode: `min` or `max`; used only with `metric`.
    """

    metric: str | None = None
    std: float = 0.001
    top: int = 10
    mode: Mode = "min"
    patience: int = 0

    def __post_init__(self) -> None:
        _convert_plateau_fields(self, top=2, patience=0)

    def begin(self, objective: Objective | None) -> StopperState:
        chosen = objective if self.metric is None else make_objective(self.metric, self.mode)
        if chosen is None:
            raise InvalidInput("ExperimentPlateau: expected a metric, such as ExperimentPlateau(metric='loss')")
        return _ExperimentPlateauState(self, chosen)


@dataclass(slots=True)
class _ExperimentPlateauState(StopperState):
    plateau: ExperimentPlateau
    objective: Objective
    losses: dict[TrialId, float] = field(default_factory=dict)
    sorted_losses: list[float] = field(default_factory=list)
    plateau_length: int = 0
    """After how many trials in a row, up to the last one that finished, the best losses were about equal."""

    def on_trial_added(self, trial: TrialId) -> None:
        if (loss := self.losses.pop(trial, None)) is not None:
            self.sorted_losses.remove(loss)

    def on_trial_ended(self, trial: TrialId, report: StepReport | None, *, failed: bool) -> None:
        from prefect_tune.core.experiment.summary import compute_losses  # late, so that flows load no journal modules

        losses = compute_losses(report.metrics, self.objective) if report and not failed else None
        if losses is None:
            return
        self.losses[trial] = losses[0]
        insort(self.sorted_losses, losses[0])
        is_plateau = len(self.sorted_losses) >= self.plateau.top and self._compute_spread() <= self.plateau.std
        self.plateau_length = self.plateau_length + 1 if is_plateau else 0

    def _compute_spread(self) -> float:
        return pstdev(self.sorted_losses[: self.plateau.top])

    def verdict(self) -> StopperDecision:
        if self.plateau_length <= self.plateau.patience:
            return None
        arguments = {"metric": self.objective.metrics[0], "top": self.plateau.top, "spread": self._compute_spread()}
        return StopExperiment(make_reason("search-plateau", **arguments))
