"""The domains of a search space, and the functions with which users write them: `uniform`, `choice` and so on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate, chain
from numbers import Integral
from typing import Any, TypeAlias

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.function_calls import other_signature
from prefect_tune.core.numbers import is_finite, is_number, shown
from prefect_tune.core.search.numeric_domains import Float, Integer, Normal, Range
from prefect_tune.core.texts import is_unicode

__all__ = [
    "Branch",
    "Choice",
    "Domain",
    "Grid",
    "SampleFrom",
    "as_dicts",
    "choice",
    "domains_in",
    "frozen",
    "grid_search",
    "has_grid",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "sample_from",
    "uniform",
]

_DEEPEST = 100  # readers of JSON stop at about 200
_NO_JSON = (
    "a configuration is JSON: Unicode text, finite numbers, true, false, null, lists and objects. For a class or "
    "function, use a name that the trainable looks up"
)


@dataclass(frozen=True, slots=True)
class Choice:
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
class Grid:
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
class SampleFrom:
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
    """Return part of a configuration or space with its dataclasses and mappings as dicts; domains stay as they are."""
    if isinstance(node, Domain | SampleFrom) or levels <= 0:
        return node
    if is_dataclass(node) and not isinstance(node, type):
        node = {each.name: getattr(node, each.name) for each in fields(node)}
    if isinstance(node, Mapping):
        return {key: as_dicts(value, levels - 1) for key, value in node.items()}
    if isinstance(node, MutableSequence | tuple) and not isinstance(node, bytearray):
        return [as_dicts(value, levels - 1) for value in node]
    return node


def frozen(node: object, where: str, levels: int = _DEEPEST) -> object:
    """Return a copy of part of a space: domains as they are, everything else plain JSON.

    Raises:
        InvalidInput: it holds a value that JSON cannot represent; the message begins with its place, below `where`.
    """
    if isinstance(node, Domain | SampleFrom) or node is None or isinstance(node, bool):
        return node
    if levels <= 0:
        raise InvalidInput(f"{where[:80]}…: expected at most {_DEEPEST} levels, found more: {_NO_JSON}")
    if is_dataclass(node):
        node = as_dicts(node, levels)
    if isinstance(node, Mapping):
        return {_key(key, where): frozen(value, f"{where}.{key}", levels - 1) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [frozen(value, f"{where}[{index}]", levels - 1) for index, value in enumerate(node)]
    if isinstance(node, str) and is_unicode(node):
        return str(node)
    if isinstance(node, Integral) and is_finite(whole := int(node)):
        return whole
    if is_number(node):
        return float(node)
    raise InvalidInput(
        f"{where}: expected a value or a domain, found {shown(node)} ({type(node).__name__}): {_NO_JSON}"
    )


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


def _key(key: object, where: str) -> str:
    if isinstance(key, str) and is_unicode(key):
        return str(key)
    raise InvalidInput(f"{where}: expected text for a key, as JSON has it, found {key!a}")


def _options(options: Sequence[object], name: str) -> tuple[object, ...]:
    if not options:
        raise InvalidInput(f"{name}([]): expected at least one option")
    return tuple(frozen(option, f"{name}: option {index}") for index, option in enumerate(options))


def _weights(domain: Choice) -> tuple[float, ...]:
    weights = domain.weights or ()
    if len(weights) != len(domain.options) or not all(is_number(each) and each >= 0 for each in weights):
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
