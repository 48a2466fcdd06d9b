"""Stoppers of a single trial: pure functions of its reports."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

from prefect_tune.core.did_you_mean import did_you_mean
from prefect_tune.core.errors import BadStop, InvalidInput
from prefect_tune.core.function_calls import other_signature
from prefect_tune.core.models import StepReport, leaves, metric_in
from prefect_tune.core.numbers import is_number, shown

__all__ = [
    "RAYS_NAMES",
    "AnyOf",
    "MaxSteps",
    "MaxTime",
    "Never",
    "Plateau",
    "Stopper",
    "as_stopper",
    "limits_in",
    "metrics_needed",
    "some_time",
]

RAYS_NAMES = {"training_iteration": "'step'", "time_total_s": "pt.MaxTime(seconds)"}
"""Ray Tune's names of values that each report has, and their equivalents here."""


class Stopper(ABC):
    """Ends a trial. It gets every report of the trial's history, oldest first, and has no state of its own."""

    @property
    def looks_back(self) -> bool:
        """Whether it needs more than the last report; if no stopper does, a resume reads less."""
        return True

    @property
    def step_count(self) -> int | None:
        """The number of steps after which it stops at the latest; None where that is not known beforehand."""
        return None

    @abstractmethod
    def why_stop(self, reports: Sequence[StepReport]) -> str | None:
        """Return why the trial is to stop after the last of `reports`; None to continue."""

    def __or__(self, other: Stopper) -> Stopper:
        """Stop as soon as either would."""
        return AnyOf((self, other))


@dataclass(frozen=True, slots=True)
class Never(Stopper):
    """Train until the trainable ends by itself."""

    looks_back = False

    def why_stop(self, reports: Sequence[StepReport]) -> str | None:
        del reports
        return None


@dataclass(frozen=True, slots=True)
class AnyOf(Stopper):
    """Stop as soon as one of several would."""

    stoppers: tuple[Stopper, ...]

    @property
    def looks_back(self) -> bool:
        return any(each.looks_back for each in self.stoppers)

    @property
    def step_count(self) -> int | None:
        return min((each.step_count for each in self.stoppers if each.step_count is not None), default=None)

    def why_stop(self, reports: Sequence[StepReport]) -> str | None:
        return next((why for each in self.stoppers if (why := each.why_stop(reports))), None)


@dataclass(frozen=True, slots=True)
class MaxSteps(Stopper):
    """Stop after this many steps; a step that a resume repeats counts once."""

    steps: int = field(metadata={"example": 100})
    looks_back = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InvalidInput(f"MaxSteps({self.steps}): expected at least 1 step")

    @property
    def step_count(self) -> int | None:
        return self.steps

    def why_stop(self, reports: Sequence[StepReport]) -> str | None:
        return f"step {reports[-1].step} of {self.steps}" if reports[-1].step >= self.steps else None


@dataclass(frozen=True, slots=True)
class MaxTime(Stopper):
    """Stop after this training time, summed over all attempts; a plain number means seconds."""

    time: timedelta = field(metadata={"example": 3600, "json": "seconds"})
    looks_back = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", some_time(self.time, "MaxTime"))

    def why_stop(self, reports: Sequence[StepReport]) -> str | None:
        trained = timedelta(seconds=reports[-1].trained_seconds)
        return f"trained for {trained}, of {self.time}" if trained >= self.time else None


@dataclass(frozen=True, slots=True)
class Plateau(Stopper):
    """Stop when the last `reports` values of `metric` have a standard deviation of at most `std`.

    Ray's TrialPlateauStopper: the first `grace` reports are never judged.
    """

    metric: str = field(metadata={"example": "loss"})
    std: float = 0.01
    reports: int = 4
    grace: int = 4

    def __post_init__(self) -> None:
        if self.std < 0 or self.reports < 2 or self.grace < 0:
            raise InvalidInput(f"{self}: expected std >= 0, reports >= 2, grace >= 0")

    def why_stop(self, reports: Sequence[StepReport]) -> str | None:
        values = [_number(report.metrics, self.metric) for report in reports[-self.reports :]]
        if len(reports) < max(self.grace, self.reports):
            return None
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        return f"{self.metric} has settled at {mean:g} ± {spread:g}" if spread <= self.std else None


@dataclass(frozen=True, slots=True)
class _AtLeast(Stopper):
    """Stop once a reported value is at its limit or above it, as Ray's `stop`; `step` means the step itself."""

    limits: tuple[tuple[str, float], ...]
    looks_back = False

    @property
    def step_count(self) -> int | None:
        limit = dict(self.limits).get("step", math.inf)
        return max(1, math.ceil(limit)) if math.isfinite(limit) else None

    def why_stop(self, reports: Sequence[StepReport]) -> str | None:
        last = reports[-1]
        for name, limit in self.limits:
            value = float(last.step) if name == "step" else _number(last.metrics, name)
            if value >= limit:
                return f"{name} = {value:g} reached {limit:g}"
        return None


@dataclass(frozen=True, slots=True)
class _Function(Stopper):
    """Stop when the user's function of the step's metrics (with `step` among them) returns a true value."""

    function: Callable[[Mapping[str, object]], object]
    looks_back = False

    def why_stop(self, reports: Sequence[StepReport]) -> str | None:
        said = self.function({**reports[-1].metrics, "step": reports[-1].step})
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"{name} returned a true value" if said else None


StopCriteria: TypeAlias = (
    "Stopper | Mapping[str, float] | Callable[[Mapping[str, Any]], object] | Sequence[StopCriteria] | None"
)


def as_stopper(stop: StopCriteria) -> Stopper:
    """Return the stopper that `stop` means: `{metric: limit}` (stop at `>=`), a function, several, or None.

    Raises:
        InvalidInput: it is none of these, or a limit is not a number.
    """
    if stop is None:
        return Never()
    if isinstance(stop, Stopper):
        return stop
    if isinstance(stop, Mapping):
        return _AtLeast(tuple((str(name), _limit(name, limit)) for name, limit in stop.items()))
    if isinstance(stop, Sequence) and not isinstance(stop, str | bytes):
        return AnyOf(tuple(as_stopper(each) for each in stop))
    if callable(stop):
        if found := other_signature(stop, 1):
            raise InvalidInput(f"stop: expected a function of one argument, the metrics of a step, found {found}")
        return _Function(stop)
    raise InvalidInput(f"stop={stop!r}: expected {{'step': 100}} or other limits, a function, or a stopper")


def some_time(given: object, where: str) -> timedelta:
    """Return a time, given as such or as a number of seconds.

    Raises:
        InvalidInput: it is neither, or not positive.
    """
    try:
        is_seconds = isinstance(given, int | float) and not isinstance(given, bool)
        time = timedelta(seconds=given) if is_seconds else given  # type: ignore[arg-type]  # mypy forgets what it is
    except (OverflowError, ValueError):
        time = None
    if isinstance(time, timedelta) and time > timedelta(0):
        return time
    raise InvalidInput(f"{where}: expected a positive number of seconds or timedelta, found {shown(given)}")


def limits_in(stopper: Stopper) -> Mapping[str, float]:
    """Return by metric the limits at or above which it stops; `step` is the step itself."""
    if isinstance(stopper, AnyOf):
        return {name: limit for each in stopper.stoppers for name, limit in limits_in(each).items()}
    return dict(stopper.limits) if isinstance(stopper, _AtLeast) else {}


def metrics_needed(stopper: Stopper) -> frozenset[str]:
    """Return the metrics without which a report makes it raise `BadStop`."""
    match stopper:
        case AnyOf(stoppers=several):
            return frozenset().union(*map(metrics_needed, several))
        case Plateau(metric=name):
            return frozenset({name})
        case _:
            return frozenset(limits_in(stopper)) - {"step"}


def _limit(name: object, limit: object) -> float:
    is_limit = isinstance(limit, float) and math.isinf(limit)  # inf is never reached, -inf at once
    if not isinstance(limit, int | float) or not (is_limit or is_number(limit)):
        raise InvalidInput(f"stop: limit of {name!r}: expected a number, found {shown(limit)}")
    if name == "step" and limit <= 0:
        raise InvalidInput(f"stop: limit of 'step': expected more than 0, since the first step is 1, found {limit!r}")
    return float(limit)


def _number(metrics: Mapping[str, object], name: str) -> float:
    value = metric_in(metrics, name)
    if isinstance(value, int | float):
        return float(value)
    found = sorted(each for each, _ in leaves(metrics))
    is_rays = name in RAYS_NAMES
    hint = f"; Ray Tune's {name} is {RAYS_NAMES[name]} here" if is_rays else did_you_mean(name, ["step", *found])
    raise BadStop(f"stop: expected metric {name!r} in each report, found only {found}{hint}")
