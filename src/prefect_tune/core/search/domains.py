"""The domains of a search space, and the functions with which users write them: `uniform`, `choice` and so on."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from itertools import accumulate, chain
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import is_finite, is_number, plain_keys, plain_scalar, shown
from prefect_tune.core.shown_text import is_unicode, other_signature
from prefect_tune.core.values import HasJsonForm

# Numeric domains of a search space: each is a function from a quantile to a value.
#
# Bounds are as in Ray: without a step the high end is exclusive. With a step `q` both ends belong to the domain and
# must be multiples of `q`; a value is a draw from half a step below `low` to half a step above `high`, rounded to the
# nearest multiple, so that the ends are as likely as their neighbors.

Scale: TypeAlias = Literal["linear", "log"]

_RESOLUTION = 1 << 53  # the number of quantiles, and of the steps that a float can distinguish
_LARGEST_INTEGER = 1 << 64
_FARTHEST_SIGMAS = 10  # quantiles of 53 bits are within 8.3
_CLOSE = 1e-9  # relative tolerance: 0.1 * 3 counts as a multiple of 0.1


class _SpaceNode(HasJsonForm):
    """A part of a space that is not plain JSON."""

    __slots__ = ()

    def json_form(self) -> object:
        from prefect_tune.core.search.space_json import node_to_json

        return node_to_json(self, "space")


@dataclass(frozen=True, slots=True)
class Float(_SpaceNode):
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
        within = min(max(float(value), self.low), self.high)
        return within if self.q is None else min(max(_multiple(within, self.q), self.low), self.high)

    def contains(self, value: object) -> bool:
        """Return whether a configuration may have `value` here. `high` is accepted although it is never drawn."""
        if not is_number(value) or not self.low <= value <= self.high:
            return False
        return self.q is None or _is_multiple(value, self.q)


@dataclass(frozen=True, slots=True)
class Integer(_SpaceNode):
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
class Normal(_SpaceNode):
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
        return float(value) if self.q is None else _multiple(value, self.q)

    def contains(self, value: object) -> bool:
        """Return whether a configuration may have `value` here: any number, or any multiple of `q` if that is given."""
        return is_number(value) and (self.q is None or _is_multiple(value, self.q))


Range: TypeAlias = Float | Integer | Normal
"""A numeric domain: `at(quantile)` draws, `nearest(value)` rounds, `contains(value)` checks."""


def _finite(domain: Range, name: str) -> float:
    value = plain_scalar(getattr(domain, name))
    if is_number(value):
        return float(value)
    hint = "; YAML reads 1e-4 as text, and 1.0e-4 as a number" if isinstance(value, str) else ""
    raise InvalidInput(f"{shown(domain)}: expected a finite number for {name}, found {shown(value)}{hint}")


def _whole(domain: Range, name: str) -> int:
    value = plain_scalar(getattr(domain, name))
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{shown(domain)}: expected a whole number for {name}, found {shown(value)}")
    if abs(value) > _LARGEST_INTEGER:
        raise InvalidInput(f"{shown(domain)}: expected at most 2^64 for {name}, found {shown(value)}")
    return value


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


_DEEPEST = 100  # readers of JSON stop at about 200
_NO_JSON = (
    "a configuration is JSON: Unicode text, finite numbers, true, false, null, lists and objects. Convert the value "
    "(str(path), member.value, array.tolist()), and convert it back in the trainable. For a class or function, use a "
    "name that the trainable looks up"
)


@dataclass(frozen=True, slots=True)
class Choice(_SpaceNode):
    """One of the options. An option that holds domains is a nested space, drawn only when it is chosen."""

    options: tuple[object, ...]
    weights: tuple[float, ...] | None = None
    """The relative probability of each option; None for equal ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _options(self.options, "choice"))
        if any(map(has_grid, self.options)):
            raise InvalidInput(
                f"{self!r}: expected options without grid_search, since a grid tries all values and a choice one; "
                "make the outer one a grid_search too, or the inner one a choice"
            )
        if self.weights is not None:
            object.__setattr__(self, "weights", _weights(self))

    def __repr__(self) -> str:
        weights = "" if self.weights is None else f", weights={list(self.weights)}"
        return f"choice({list(self.options)}{weights})"

    def at(self, quantile: float) -> int:
        """Return the index of the option at `quantile`, in [0, 1), of the distribution."""
        if self.weights is None:
            return int(quantile * len(self.options))
        ends = list(accumulate(self.weights))
        last_with_weight = bisect_left(ends, ends[-1])
        return min(bisect_right(ends, quantile * ends[-1]), last_with_weight)


@dataclass(frozen=True, slots=True)
class Grid(_SpaceNode):
    """Each of the options in turn, combined with each of every other grid. An option may be a nested space."""

    options: tuple[object, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _options(self.options, "grid_search"))

    def __repr__(self) -> str:
        return f"grid_search({list(self.options)})"

    def at(self, quantile: float) -> int:
        """Return an index as a choice does, for a search that draws from grids, too."""
        return int(quantile * len(self.options))


@dataclass(frozen=True, slots=True)
class SampleFrom(_SpaceNode):
    """A value that `function` computes from the configuration resolved so far."""

    function: Callable[[Mapping[str, Any]], object]
    path: str | None = None
    """`package.module:name`, if the function was given by its name."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidInput(f"sample_from: expected a function of the configuration, found {self.function!r}")
        if found := other_signature(self.function, 1):
            raise InvalidInput(f"sample_from: expected a function of one argument, the configuration, found {found}")

    def __repr__(self) -> str:
        return f"sample_from({self.path or getattr(self.function, '__qualname__', self.function)})"


Branch: TypeAlias = Choice | Grid
"""A domain of options: a draw is the index of one."""
Domain: TypeAlias = Range | Branch


def uniform(low: float, high: float) -> Float:
    """Draw a number uniformly from [low, high)."""
    return Float(low, high)


def quniform(low: float, high: float, q: float) -> Float:
    """Draw a multiple of `q` uniformly from [low, high]; both ends are multiples."""
    return Float(low, high, q=_step(q, "quniform"))


def loguniform(low: float, high: float) -> Float:
    """Draw a number from [low, high) whose logarithm is uniform; `low` > 0."""
    return Float(low, high, "log")


def qloguniform(low: float, high: float, q: float) -> Float:
    """Draw as `loguniform` and round to a multiple of `q`, from [low, high]; both ends are multiples."""
    return Float(low, high, "log", _step(q, "qloguniform"))


def randint(low: int, high: int) -> Integer:
    """Draw an integer uniformly from [low, high)."""
    return Integer(low, high)


def qrandint(low: int, high: int, q: int = 1) -> Integer:
    """Draw a multiple of `q` uniformly from [low, high]; both ends are multiples."""
    return Integer(low, high, q=_step(q, "qrandint"))


def lograndint(low: int, high: int) -> Integer:
    """Draw an integer: a number from [low, high) whose logarithm is uniform, rounded down; `low` > 0."""
    return Integer(low, high, "log")


def qlograndint(low: int, high: int, q: int = 1) -> Integer:
    """Draw a number whose logarithm is uniform and round to a multiple of `q`, from [low, high]."""
    return Integer(low, high, "log", _step(q, "qlograndint"))


def randn(mean: float = 0.0, sd: float = 1.0) -> Normal:
    """Draw a normally distributed number, with this `mean` and the standard deviation `sd`."""
    return Normal(mean, sd)


def qrandn(mean: float, sd: float, q: float) -> Normal:
    """Draw as `randn` with `mean` and `sd`, rounded to a multiple of `q`."""
    return Normal(mean, sd, _step(q, "qrandn"))


def choice(options: Sequence[object], weights: Sequence[float] | None = None) -> Choice:
    """Draw one of `options`, uniformly or by `weights`. An option that holds domains is a conditional space."""
    return Choice(_sequence(options, "choice"), None if weights is None else _sequence(weights, "weights"))


def grid_search(values: Sequence[object]) -> Grid:
    """Try each of `values`, combined with each of every other grid, once per sample."""
    return Grid(_sequence(values, "grid_search"))


def sample_from(function: Callable[[Mapping[str, Any]], object]) -> SampleFrom:
    """Compute a value from the others: `sample_from(lambda config: 2 * config["width"])`.

    `config` is the whole configuration; a value is resolved when the function reads it. The function must not draw
    random numbers: put them into a domain that it reads, so that a resumed experiment gets the same ones.
    """
    return SampleFrom(function)


def as_dicts(node: object, levels: int = _DEEPEST) -> object:
    """Return part of a configuration or space with its dataclasses and mappings as dicts, and plain scalars.

    Domains stay as they are, and so does what is no value of JSON, which `frozen` refuses.

    Raises:
        InvalidInput: a mapping has two keys that are equal as text.
    """
    if isinstance(node, HasJsonForm) or levels <= 0:
        return node
    if is_dataclass(node) and not isinstance(node, type):
        node = {each.name: getattr(node, each.name) for each in fields(node)}
    if isinstance(node, Mapping):
        return {key: as_dicts(value, levels - 1) for key, value in plain_keys(node, "a mapping").items()}
    if isinstance(node, MutableSequence | tuple) and not isinstance(node, bytearray):
        return [as_dicts(value, levels - 1) for value in node]
    return plain_scalar(node)


def frozen(node: object, where: str, levels: int = _DEEPEST) -> object:
    """Return a copy of part of a space: domains as they are, everything else plain JSON.

    Raises:
        InvalidInput: it holds a value that JSON cannot represent; the message begins with its place, below `where`.
    """
    if isinstance(node, Domain | SampleFrom):
        return node
    if levels <= 0:
        raise InvalidInput(f"{where[:80]}…: expected at most {_DEEPEST} levels, found more: {_NO_JSON}")
    if is_dataclass(node):
        node = as_dicts(node, levels)
    match plain := plain_scalar(node):
        case None | bool():
            return plain
        case str() if is_unicode(plain):
            return plain
        case int() | float() if is_finite(plain):
            return plain
        case Mapping():
            named = plain_keys(plain, where)
            if wrong := [key for key in named if not (isinstance(key, str) and is_unicode(key))]:
                raise InvalidInput(f"{where}: expected text for a key, as JSON has it, found {wrong[0]!a}")
            return {key: frozen(value, f"{where}.{key}", levels - 1) for key, value in named.items()}
        case MutableSequence() | tuple() if not isinstance(plain, bytearray):
            return [frozen(value, f"{where}[{index}]", levels - 1) for index, value in enumerate(plain)]
        case _:
            pass
    what = f"{where}: expected a value or a domain, found {shown(node)} ({type(node).__name__}): {_NO_JSON}"
    computed = ". To compute the value of each trial: pt.sample_from(lambda config: ...)" if callable(node) else ""
    raise InvalidInput(f"{what}{computed}")


def domains_in(node: object) -> Iterator[Domain | SampleFrom]:
    """Yield every domain in a part of a space, those in options included."""
    match node:
        case dict():
            yield from chain.from_iterable(map(domains_in, node.values()))
        case list():
            yield from chain.from_iterable(map(domains_in, node))
        case Choice() | Grid():
            yield node
            yield from chain.from_iterable(map(domains_in, node.options))
        case Float() | Integer() | Normal() | SampleFrom():
            yield node
        case _:
            return


def has_grid(node: object) -> bool:
    """Return whether a part of a space holds a grid."""
    return any(isinstance(each, Grid) for each in domains_in(node))


def _options(options: Sequence[object], name: str) -> tuple[object, ...]:
    if not options:
        raise InvalidInput(f"{name}([]): expected at least one option")
    return tuple(frozen(option, f"{name}: option {index}") for index, option in enumerate(options))


def _weights(domain: Choice) -> tuple[float, ...]:
    weights = [weight for each in domain.weights or () if is_number(weight := plain_scalar(each)) and weight >= 0]
    if len(weights) != len(domain.options) or len(weights) != len(domain.weights or ()):
        raise InvalidInput(f"{domain!r}: expected a weight >= 0 for each of {len(domain.options)} options")
    if not 0 < sum(weights) < float("inf"):
        raise InvalidInput(f"{domain!r}: expected weights with a finite sum above 0")
    return tuple(map(float, weights))


def _sequence(values: Sequence[Any], name: str) -> tuple[Any, ...]:
    if isinstance(values, str | bytes | Mapping | AbstractSet) or not hasattr(values, "__iter__"):
        raise InvalidInput(f"{name}: expected a list, found {values!r}: a text is one value, and a set has no order")
    return tuple(values)


def _step(q: Any, name: str) -> Any:
    if q is None:
        raise InvalidInput(f"{name}: expected a step q > 0, found None; without a step the name has no q")
    return q
