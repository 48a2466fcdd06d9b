"""The domains of a search space, and the functions with which users create them: `uniform`, `choice` and so on."""

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

from prefect_tune.core.display_text import describe_signature_mismatch, is_utf8_encodable
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import is_finite, is_number, short_repr, to_plain_keys, to_plain_scalar
from prefect_tune.core.values import HasJsonForm

# A numeric domain is a function from a quantile to a value. Its bounds are like Ray's: without a step, `high` is
# exclusive. With a step `q`, both ends belong to the domain and must be multiples of `q`; then a value is drawn from
# half a step below `low` to half a step above `high`, and rounded to the nearest multiple, so that the ends are as
# likely as their neighbors.

Scale: TypeAlias = Literal["linear", "log"]

_QUANTILE_COUNT = 1 << 53  # the number of different quantiles, and of the steps that a float can tell apart
_MAX_INTEGER = 1 << 64
_MAX_SIGMAS = 10  # more than enough: with quantiles of 53 bits, no value is over 8.3 standard deviations from the mean
_TOLERANCE = 1e-9  # relative tolerance: 0.1 * 3 counts as a multiple of 0.1


class _SpaceNode(HasJsonForm):
    """A part of a space that is not plain JSON: a domain, or a value that a function computes."""

    __slots__ = ()

    def to_json_form(self) -> object:
        from prefect_tune.core.search.space_json import space_node_to_json

        return space_node_to_json(self, "space")


@dataclass(frozen=True, slots=True)
class Float(_SpaceNode):
    """A real number from `low` to below `high`; if `q` is set, a multiple of `q` from `low` to `high`."""

    low: float
    high: float
    scale: Scale = "linear"
    q: float | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high") if self.q is None else ("low", "high", "q"):
            object.__setattr__(self, name, _require_finite_field(self, name))
        _check_bounds(self, max(abs(self.low), abs(self.high)))

    def __repr__(self) -> str:
        return _format_call(*get_constructor_call(self))

    def draw_at(self, quantile: float) -> float:
        """Return the value below which the fraction `quantile` of all draws lies; `quantile` is in [0, 1)."""
        if self.q is not None:
            half = self.q / 2
            return self.nearest_value(_interpolate(self.low - half, self.high + half, self.scale, quantile))
        max_value = math.nextafter(self.high, -math.inf)
        return min(max(_interpolate(self.low, self.high, self.scale, quantile), self.low), max_value)

    def nearest_value(self, value: float) -> float:
        """Return the nearest value of the domain: from `low` to `high`, and a multiple of `q` if `q` is set."""
        clipped = min(max(float(value), self.low), self.high)
        return clipped if self.q is None else min(max(_round_to_multiple(clipped, self.q), self.low), self.high)

    def contains(self, value: object) -> bool:
        """Return whether a configuration may have `value`; without `q`, `high` is accepted, although never drawn."""
        if not is_number(value) or not self.low <= value <= self.high:
            return False
        return self.q is None or _is_multiple(value, self.q)


@dataclass(frozen=True, slots=True)
class Integer(_SpaceNode):
    """An integer from `low` to below `high`; if `q` is set, a multiple of `q` from `low` to `high`."""

    low: int
    high: int
    scale: Scale = "linear"
    q: int | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high") if self.q is None else ("low", "high", "q"):
            value = to_plain_scalar(getattr(self, name))
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidInput(f"{short_repr(self)}: expected a whole number for {name}, found {short_repr(value)}")
            if abs(value) > _MAX_INTEGER:
                raise InvalidInput(f"{short_repr(self)}: expected at most 2^64 for {name}, found {short_repr(value)}")
            object.__setattr__(self, name, value)
        _check_bounds(self, 0)  # integers are exact: any number of steps is valid

    def __repr__(self) -> str:
        return _format_call(*get_constructor_call(self))

    @property
    def step(self) -> int:
        """The distance between neighbors: `q`, or 1."""
        return self.q or 1

    @property
    def max_value(self) -> int:
        """The largest value."""
        return self.high - 1 if self.q is None else self.high

    def draw_at(self, quantile: float) -> int:
        if self.scale == "linear":
            count = (self.max_value - self.low) // self.step + 1
            return self.low + count * int(quantile * _QUANTILE_COUNT) // _QUANTILE_COUNT * self.step
        if self.q is not None:
            return self.nearest_value(_interpolate(self.low - self.q / 2, self.high + self.q / 2, "log", quantile))
        value = _interpolate(self.low, self.high, "log", quantile)
        return min(max(math.floor(value), self.low), self.max_value)  # rounded down, as in Ray

    def nearest_value(self, value: float) -> int:
        clipped = Fraction(min(max(value, self.low), self.max_value))
        return round(clipped / self.step) * self.step

    def contains(self, value: object) -> bool:
        """Return whether a configuration may have `value` here; 3.0 counts as an integer."""
        return is_number(value) and self.nearest_value(value) == value


@dataclass(frozen=True, slots=True)
class Normal(_SpaceNode):
    """A normally distributed number, rounded to the nearest multiple of `q` if `q` is set."""

    mean: float = 0.0
    sd: float = 1.0
    q: float | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "sd") if self.q is None else ("mean", "sd", "q"):
            object.__setattr__(self, name, _require_finite_field(self, name))
        if self.sd <= 0:
            raise InvalidInput(f"{self!r}: expected sd > 0, found {self.sd!r}; a constant needs no domain")
        max_distance = abs(self.mean) + _MAX_SIGMAS * self.sd
        if math.isinf(max_distance):
            raise InvalidInput(f"{self!r}: expected draws that a float can hold, found some beyond 1e308")
        if self.q is not None:
            _check_step(self.q, max_distance, self)

    def __repr__(self) -> str:
        return _format_call(*get_constructor_call(self))

    def draw_at(self, quantile: float) -> float:
        inner = min(quantile + 0.5 / _QUANTILE_COUNT, 1 - 1 / _QUANTILE_COUNT)  # at 0 and 1, values are infinite
        return self.nearest_value(NormalDist(self.mean, self.sd).inv_cdf(inner))

    def nearest_value(self, value: float) -> float:
        return float(value) if self.q is None else _round_to_multiple(value, self.q)

    def contains(self, value: object) -> bool:
        """Return whether a configuration may have `value` here: any number, or any multiple of `q` if `q` is set."""
        return is_number(value) and (self.q is None or _is_multiple(value, self.q))


Range: TypeAlias = Float | Integer | Normal
"""A numeric domain: `draw_at(quantile)` draws, `nearest_value(value)` rounds, `contains(value)` checks."""


def get_constructor_call(domain: Range) -> tuple[str, tuple[float, ...]]:
    """Return the name and the arguments of the call that creates `domain`."""
    if isinstance(domain, Normal):
        name, numbers = "randn", (domain.mean, domain.sd)
    else:
        name = ("log" if domain.scale == "log" else "") + ("uniform" if isinstance(domain, Float) else "randint")
        numbers = (domain.low, domain.high)
    return (name, numbers) if domain.q is None else (f"q{name}", (*numbers, domain.q))


def _require_finite_field(domain: Range, name: str) -> float:
    value = to_plain_scalar(getattr(domain, name))
    if is_number(value):
        return float(value)
    hint = "; YAML reads 1e-4 as text, and 1.0e-4 as a number" if isinstance(value, str) else ""
    raise InvalidInput(f"{short_repr(domain)}: expected a finite number for {name}, found {short_repr(value)}{hint}")


def _check_bounds(domain: Float | Integer, max_distance: float) -> None:
    """Raise if the bounds or the step are invalid, or if there are over 2^53 steps from 0 to `max_distance`."""
    if domain.low > domain.high:
        name, (low, high, *step) = get_constructor_call(domain)
        raise InvalidInput(
            f"{domain!r}: expected low < high, found low={low!r} and high={high!r}; did you mean "
            f"{_format_call(name, (high, low, *step))}?"
        )
    if domain.q is None and domain.low == domain.high:
        raise InvalidInput(f"{domain!r}: expected low < high, since high is exclusive; a constant needs no domain")
    if domain.scale == "log" and domain.low <= 0:
        raise InvalidInput(f"{domain!r}: expected low > 0, since its logarithm is drawn, found {domain.low!r}")
    if domain.q is not None:
        _check_step(domain.q, max_distance, domain)
        if not (domain.contains(domain.low) and domain.contains(domain.high)):
            raise InvalidInput(
                f"{domain!r}: expected multiples of q={domain.q!r} for low and high, because both can be drawn; "
                "change the ends or the step"
            )


def _check_step(q: float, max_distance: float, domain: Range) -> None:
    if q <= 0:
        raise InvalidInput(f"{domain!r}: expected q > 0, found {q!r}; for no step, use the function without the q")
    if max_distance / _QUANTILE_COUNT > q:
        raise InvalidInput(f"{domain!r}: expected at most 2^53 steps from 0 to the ends, found q={q!r}")


def _interpolate(low: float, high: float, scale: Scale, quantile: float) -> float:
    """Return the value at `quantile`; float rounding may put it slightly outside of the ends."""
    if scale == "log":
        return math.exp(_interpolate(math.log(low), math.log(high), "linear", quantile))
    return low * (1 - quantile) + high * quantile  # avoids high - low, which may be infinite


def _round_to_multiple(value: float, q: float) -> float:
    step = Fraction(repr(q))  # decimal, so that three steps of 0.1 are 0.3, not 0.30000000000000004
    return float(round(Fraction(value) / step) * step)


def _is_multiple(value: float, q: float) -> bool:
    return math.isclose(_round_to_multiple(value, q), value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * q)


def _format_call(name: str, arguments: tuple[float, ...]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


_MAX_DEPTH = 100  # JSON parsers reject more than about 200 levels
_JSON_HINT = (
    "a configuration is JSON: Unicode text, finite numbers, true, false, null, lists and objects. Convert the value "
    "(str(path), member.value, array.tolist()), and convert it back in the trainable. For a class or function, use a "
    "name that the trainable looks up"
)


@dataclass(frozen=True, slots=True)
class Choice(_SpaceNode):
    """One of the options. An option with domains is a nested space, drawn only if this option is chosen."""

    options: tuple[object, ...]
    weights: tuple[float, ...] | None = None
    """The relative probability of each option; None if all are equal."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _to_plain_options(self.options, "choice"))
        if any(map(has_grid, self.options)):
            raise InvalidInput(
                f"{self!r}: expected options without grid_search, since a grid tries all values and a choice only one; "
                "make the outer domain a grid_search too, or the inner domain a choice"
            )
        if self.weights is None:
            return
        weights = [weight for weight in map(to_plain_scalar, self.weights) if is_number(weight) and weight >= 0]
        if not len(weights) == len(self.weights) == len(self.options):
            raise InvalidInput(f"{self!r}: expected a weight >= 0 for each of {len(self.options)} options")
        if not 0 < sum(weights) < float("inf"):
            raise InvalidInput(f"{self!r}: expected weights with a finite sum above 0")
        object.__setattr__(self, "weights", tuple(map(float, weights)))

    def __repr__(self) -> str:
        weights = "" if self.weights is None else f", weights={list(self.weights)}"
        return f"choice({list(self.options)}{weights})"

    def draw_at(self, quantile: float) -> int:
        """Return the index of the option that `quantile`, a number in [0, 1), selects."""
        if self.weights is None:
            return int(quantile * len(self.options))
        ends = list(accumulate(self.weights))
        last_with_weight = bisect_left(ends, ends[-1])
        return min(bisect_right(ends, quantile * ends[-1]), last_with_weight)


@dataclass(frozen=True, slots=True)
class Grid(_SpaceNode):
    """Tries each option, combined with every option of all other grids. An option may be a nested space."""

    options: tuple[object, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _to_plain_options(self.options, "grid_search"))

    def __repr__(self) -> str:
        return f"grid_search({list(self.options)})"

    def draw_at(self, quantile: float) -> int:
        """Return the index of an option, like `Choice.draw_at`; some searches draw from grids, too."""
        return int(quantile * len(self.options))


@dataclass(frozen=True, slots=True)
class SampleFrom(_SpaceNode):
    """A value that `function` computes from other values of the configuration."""

    function: Callable[[Mapping[str, Any]], object]
    path: str | None = None
    """`package.module:name` if the user passed the function by its name; otherwise None."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidInput(f"sample_from: expected a function of the configuration, found {self.function!r}")
        if signature := describe_signature_mismatch(self.function, 1):
            raise InvalidInput(f"sample_from: expected a function of one argument, the config, found {signature}")

    def __repr__(self) -> str:
        return f"sample_from({self.path or getattr(self.function, '__qualname__', self.function)})"


Branch: TypeAlias = Choice | Grid
"""A domain of options: a draw is the index of an option."""
Domain: TypeAlias = Range | Branch


def uniform(low: float, high: float) -> Float:
    """Draw a number uniformly from [low, high).

    ```python
    space = {
        "lr": pt.loguniform(1e-4, 0.1),
        "dropout": pt.uniform(0, 0.5),
        "layers": pt.choice([1, 2, 4]),
        "batch": pt.grid_search([32, 64]),
    }
    ```
    """
    return Float(low, high)


def quniform(low: float, high: float, q: float) -> Float:
    """Draw a multiple of `q` uniformly from [low, high]; both ends must be multiples, too; see `uniform`."""
    return Float(low, high, q=_require_step(q, "quniform"))


def loguniform(low: float, high: float) -> Float:
    """Draw a number whose logarithm is uniform, from [low, high) with `low` > 0; see `uniform`."""
    return Float(low, high, "log")


def qloguniform(low: float, high: float, q: float) -> Float:
    """Draw like `loguniform`, and round to a multiple of `q` in [low, high]; see `uniform`."""
    return Float(low, high, "log", _require_step(q, "qloguniform"))


def randint(low: int, high: int) -> Integer:
    """Draw an integer uniformly from [low, high); see `uniform`."""
    return Integer(low, high)


def qrandint(low: int, high: int, q: int = 1) -> Integer:
    """Draw a multiple of `q` uniformly from [low, high]; both ends must be multiples, too; see `uniform`."""
    return Integer(low, high, q=_require_step(q, "qrandint"))


def lograndint(low: int, high: int) -> Integer:
    """Draw a number whose logarithm is uniform, from [low, high) with `low` > 0, and round it down; see `uniform`."""
    return Integer(low, high, "log")


def qlograndint(low: int, high: int, q: int = 1) -> Integer:
    """Draw a number whose logarithm is uniform, and round it to a multiple of `q` in [low, high]; see `uniform`."""
    return Integer(low, high, "log", _require_step(q, "qlograndint"))


def randn(mean: float = 0.0, sd: float = 1.0) -> Normal:
    """Draw a normally distributed number, with this `mean` and the standard deviation `sd`; see `uniform`."""
    return Normal(mean, sd)


def qrandn(mean: float, sd: float, q: float) -> Normal:
    """Draw like `randn` with `mean` and `sd`, rounded to a multiple of `q`; see `uniform`."""
    return Normal(mean, sd, _require_step(q, "qrandn"))


def choice(options: Sequence[object], weights: Sequence[float] | None = None) -> Choice:
    """Draw one of `options`, with `weights` if given; see `uniform`. An option with domains is a conditional space."""
    return Choice(_require_list(options, "choice"), None if weights is None else _require_list(weights, "weights"))


def grid_search(values: Sequence[object]) -> Grid:
    """Try each of `values`, combined with every value of all other grids, `num_samples` times; see `uniform`."""
    return Grid(_require_list(values, "grid_search"))


def sample_from(function: Callable[[Mapping[str, Any]], object]) -> SampleFrom:
    """Compute a value from other values of the configuration.

    ```python
    space = {"width": pt.randint(1, 9), "depth": pt.sample_from(lambda config: 2 * config["width"])}
    ```

    `config` is the whole configuration; a value is resolved when the function reads it. The function must not draw
    random numbers. Let a domain draw them, and read them from `config`, so that a resume gives the same numbers.
    """
    return SampleFrom(function)


def convert_to_dicts(node: object, levels: int = _MAX_DEPTH) -> object:
    """Copy a part of a configuration or space as dicts (also of dataclasses), lists and plain scalars.

    Domains, and values that are not JSON, stay unchanged. Raises `InvalidInput` if two keys of a mapping become equal.
    """
    if isinstance(node, HasJsonForm) or levels <= 0:
        return node
    if is_dataclass(node) and not isinstance(node, type):
        node = {field.name: getattr(node, field.name) for field in fields(node)}
    if isinstance(node, Mapping):
        return {key: convert_to_dicts(value, levels - 1) for key, value in to_plain_keys(node, "a mapping").items()}
    if isinstance(node, MutableSequence | tuple) and not isinstance(node, bytearray):
        return [convert_to_dicts(value, levels - 1) for value in node]
    return to_plain_scalar(node)


def to_plain_node(node: object, where: str, levels: int = _MAX_DEPTH) -> object:
    """Return a copy of a part of a space: domains stay unchanged, all other values become plain JSON.

    Raises:
        InvalidInput: JSON cannot represent a value; the message begins with `where`, followed by the value's path.
    """
    if isinstance(node, Domain | SampleFrom):
        return node
    if levels <= 0:
        raise InvalidInput(f"{where[:80]}…: expected at most {_MAX_DEPTH} levels, found more: {_JSON_HINT}")
    if is_dataclass(node):
        node = convert_to_dicts(node, levels)
    match plain := to_plain_scalar(node):
        case None | bool():
            return plain
        case str() if is_utf8_encodable(plain):
            return plain
        case int() | float() if is_finite(plain):
            return plain
        case Mapping():
            mapping = to_plain_keys(plain, where)
            if invalid_keys := [key for key in mapping if not (isinstance(key, str) and is_utf8_encodable(key))]:
                raise InvalidInput(f"{where}: expected text for a key, as in JSON, found {invalid_keys[0]!a}")
            return {key: to_plain_node(value, f"{where}.{key}", levels - 1) for key, value in mapping.items()}
        case MutableSequence() | tuple() if not isinstance(plain, bytearray):
            return [to_plain_node(value, f"{where}[{index}]", levels - 1) for index, value in enumerate(plain)]
        case _:
            pass
    hint = ". To compute the value of each trial: pt.sample_from(lambda config: ...)" if callable(node) else ""
    message = f"{where}: expected a value or a domain, found {short_repr(node)} ({type(node).__name__}): {_JSON_HINT}"
    raise InvalidInput(f"{message}{hint}")


def find_domains(node: object) -> Iterator[Domain | SampleFrom]:
    """Yield every domain in a part of a space, and in the options of its domains."""
    match node:
        case dict():
            yield from chain.from_iterable(map(find_domains, node.values()))
        case list():
            yield from chain.from_iterable(map(find_domains, node))
        case Choice() | Grid():
            yield node
            yield from chain.from_iterable(map(find_domains, node.options))
        case Float() | Integer() | Normal() | SampleFrom():
            yield node
        case _:
            return


def has_grid(node: object) -> bool:
    """Return whether a part of a space contains a grid."""
    return any(isinstance(domain, Grid) for domain in find_domains(node))


def _to_plain_options(options: Sequence[object], name: str) -> tuple[object, ...]:
    if not options:
        raise InvalidInput(f"{name}([]): expected at least one option")
    return tuple(to_plain_node(option, f"{name}: option {index}") for index, option in enumerate(options))


def _require_list(values: Sequence[Any], name: str) -> tuple[Any, ...]:
    if isinstance(values, str | bytes | Mapping | AbstractSet) or not hasattr(values, "__iter__"):
        raise InvalidInput(f"{name}: expected a list, found {values!r}; a text is one value, and a set has no order")
    return tuple(values)


def _require_step(q: Any, name: str) -> Any:
    if q is None:
        raise InvalidInput(f"{name}: expected a step q > 0, found None; for no step, use the function without the q")
    return q
