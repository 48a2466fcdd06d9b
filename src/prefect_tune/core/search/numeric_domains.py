"""Numeric domains of a search space: each is a function from a quantile to a value.

Bounds are as in Ray: without a step the high end is exclusive. With a step `q` both ends belong to the domain and must
be multiples of `q`; a value is a draw from half a step below `low` to half a step above `high`, rounded to the nearest
multiple, so that the ends are as likely as their neighbors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from statistics import NormalDist
from typing import Literal, TypeAlias

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.numbers import is_number, shown

__all__ = ["Float", "Integer", "Normal", "Range", "Scale"]

Scale: TypeAlias = Literal["linear", "log"]

_RESOLUTION = 1 << 53  # the number of quantiles, and of the steps that a float can distinguish
_LARGEST_INTEGER = 1 << 64
_FARTHEST_SIGMAS = 10  # quantiles of 53 bits are within 8.3
_CLOSE = 1e-9  # relative tolerance: 0.1 * 3 counts as a multiple of 0.1


@dataclass(frozen=True, slots=True)
class Float:
    """A real number from `low` to `high`: a multiple of `q` if that is given, otherwise below `high`."""

    low: float
    high: float
    scale: Scale = "linear"
    q: float | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high") if self.q is None else ("low", "high", "q"):
            object.__setattr__(self, name, _finite(self, name))
        _check_order(self)
        if self.q is not None:
            _check_step(self.q, max(abs(self.low), abs(self.high)), self)
            _check_multiples(self, _is_multiple(self.low, self.q) and _is_multiple(self.high, self.q))

    @property
    def call(self) -> tuple[str, tuple[float, ...]]:
        """The name and the arguments that make it."""
        return _call("uniform", self.scale, (self.low, self.high), self.q)

    def __repr__(self) -> str:
        return _shown(*self.call)

    def at(self, quantile: float) -> float:
        """Return the value below which the share `quantile`, in [0, 1), of all draws lies."""
        if self.q is not None:
            half = self.q / 2
            return self.nearest(_between(self.low - half, self.high + half, self.scale, quantile))
        below = math.nextafter(self.high, -math.inf)
        return min(max(_between(self.low, self.high, self.scale, quantile), self.low), below)

    def nearest(self, value: float) -> float:
        """Return the value of the domain nearest to `value`: a multiple of `q`, and within both ends."""
        within = min(max(value, self.low), self.high)
        return within if self.q is None else min(max(_multiple(within, self.q), self.low), self.high)

    def contains(self, value: object) -> bool:
        """Return whether a configuration may have `value` here. `high` is accepted although it is never drawn."""
        if not is_number(value) or not self.low <= value <= self.high:
            return False
        return self.q is None or _is_multiple(value, self.q)


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer from `low` to `last`: a multiple of `q` up to `high` if `q` is given, otherwise below `high`."""

    low: int
    high: int
    scale: Scale = "linear"
    q: int | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high") if self.q is None else ("low", "high", "q"):
            object.__setattr__(self, name, _whole(self, name))
        _check_order(self)
        if self.q is not None:
            _check_step(self.q, 0, self)
            _check_multiples(self, self.low % self.q == 0 and self.high % self.q == 0)

    @property
    def call(self) -> tuple[str, tuple[float, ...]]:
        """The name and the arguments that make it."""
        return _call("randint", self.scale, (self.low, self.high), self.q)

    def __repr__(self) -> str:
        return _shown(*self.call)

    @property
    def step(self) -> int:
        """The distance of two neighbors: `q`, or 1."""
        return self.q or 1

    @property
    def last(self) -> int:
        """The largest value."""
        return self.high - 1 if self.q is None else self.high

    def at(self, quantile: float) -> int:
        """Return the value below which the share `quantile`, in [0, 1), of all draws lies."""
        if self.scale == "linear":
            count = (self.last - self.low) // self.step + 1
            return self.low + count * int(quantile * _RESOLUTION) // _RESOLUTION * self.step
        if self.q is not None:
            return self.nearest(_between(self.low - self.q / 2, self.high + self.q / 2, "log", quantile))
        value = _between(self.low, self.high, "log", quantile)
        return min(max(math.floor(value), self.low), self.last)  # the fraction is cut off, as Ray does

    def nearest(self, value: float) -> int:
        """Return the value of the domain nearest to `value`: a multiple of `q`, and within both ends."""
        within = Fraction(min(max(value, self.low), self.last))
        return round(within / self.step) * self.step

    def contains(self, value: object) -> bool:
        """Return whether a configuration may have `value` here; 3.0 counts as an integer."""
        return is_number(value) and self.nearest(value) == value


@dataclass(frozen=True, slots=True)
class Normal:
    """A normally distributed number, rounded to the nearest multiple of `q` if that is given."""

    mean: float = 0.0
    sd: float = 1.0
    q: float | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "sd") if self.q is None else ("mean", "sd", "q"):
            object.__setattr__(self, name, _finite(self, name))
        if self.sd <= 0:
            raise InvalidInput(f"{self!r}: expected sd > 0, found {self.sd!r}; one single value is a constant")
        farthest = abs(self.mean) + _FARTHEST_SIGMAS * self.sd
        if math.isinf(farthest):
            raise InvalidInput(f"{self!r}: expected draws that a float can hold, found some beyond 1e308")
        if self.q is not None:
            _check_step(self.q, farthest, self)

    @property
    def call(self) -> tuple[str, tuple[float, ...]]:
        """The name and the arguments that make it."""
        return _call("randn", "linear", (self.mean, self.sd), self.q)

    def __repr__(self) -> str:
        return _shown(*self.call)

    def at(self, quantile: float) -> float:
        """Return the value below which the share `quantile`, in [0, 1), of all draws lies."""
        inside = min(quantile + 0.5 / _RESOLUTION, 1 - 1 / _RESOLUTION)  # at 0 and 1 it is infinite
        return self.nearest(NormalDist(self.mean, self.sd).inv_cdf(inside))

    def nearest(self, value: float) -> float:
        """Return `value`, rounded to the nearest multiple of `q` if that is given."""
        return value if self.q is None else _multiple(value, self.q)

    def contains(self, value: object) -> bool:
        """Return whether a configuration may have `value` here: any number, or any multiple of `q` if that is given."""
        return is_number(value) and (self.q is None or _is_multiple(value, self.q))


Range: TypeAlias = Float | Integer | Normal
"""A numeric domain: `at(quantile)` draws, `nearest(value)` rounds, `contains(value)` checks."""


def _finite(domain: Range, name: str) -> float:
    value: object = getattr(domain, name)
    if is_number(value):
        return float(value)
    hint = "; YAML reads 1e-4 as text, and 1.0e-4 as a number" if isinstance(value, str) else ""
    raise InvalidInput(f"{shown(domain)}: expected a finite number for {name}, found {shown(value)}{hint}")


def _whole(domain: Range, name: str) -> int:
    value: object = getattr(domain, name)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidInput(f"{shown(domain)}: expected a whole number for {name}, found {shown(value)}")
    if abs(int(value)) > _LARGEST_INTEGER:
        raise InvalidInput(f"{shown(domain)}: expected at most 2^64 for {name}, found {shown(value)}")
    return int(value)


def _check_order(domain: Float | Integer) -> None:
    if domain.low > domain.high:
        name, (low, high, *step) = domain.call
        raise InvalidInput(
            f"{domain!r}: expected low < high, found low={low!r} and high={high!r}; did you mean "
            f"{_shown(name, (high, low, *step))}?"
        )
    if domain.q is None and domain.low == domain.high:
        raise InvalidInput(f"{domain!r}: expected low < high, since high is exclusive; one single value is a constant")
    if domain.scale == "log" and domain.low <= 0:
        raise InvalidInput(f"{domain!r}: expected low > 0, since its logarithm is drawn, found {domain.low!r}")


def _check_step(q: float, farthest: float, domain: Range) -> None:
    if q <= 0:
        raise InvalidInput(f"{domain!r}: expected q > 0, found {q!r}; without a step the name has no q")
    if farthest / _RESOLUTION > q:
        raise InvalidInput(f"{domain!r}: expected at most 2^53 steps from 0 to the ends, found a finer q, {q!r}")


def _check_multiples(domain: Range, are_multiples: bool) -> None:  # noqa: FBT001 - the fact that is checked
    if not are_multiples:
        raise InvalidInput(
            f"{domain!r}: expected multiples of q={domain.q!r} for low and high, which both can be drawn; "
            "move the ends, or choose another step"
        )


def _between(low: float, high: float, scale: Scale, quantile: float) -> float:
    """Return the value at `quantile`; a float's rounding may put it slightly outside of the ends."""
    if scale == "log":
        return math.exp(_between(math.log(low), math.log(high), "linear", quantile))
    return low * (1 - quantile) + high * quantile  # without high - low, which may be infinite


def _multiple(value: float, q: float) -> float:
    step = Fraction(repr(q))  # its decimal form: three steps of 0.1 are 0.3, not 0.30000000000000004
    return float(round(Fraction(value) / step) * step)


def _is_multiple(value: float, q: float) -> bool:
    return math.isclose(_multiple(value, q), value, rel_tol=_CLOSE, abs_tol=_CLOSE * q)


def _call(name: str, scale: Scale, numbers: tuple[float, ...], q: float | None) -> tuple[str, tuple[float, ...]]:
    kind = ("" if q is None else "q") + ("log" if scale == "log" else "") + name
    return kind, numbers if q is None else (*numbers, q)


def _shown(name: str, arguments: tuple[float, ...]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"
