"""Resolve a search space to a configuration.

A parameter's name is its path in the space: `lr`, `model.depth`, `layers[0].units`, and `model?1.depth` for a
parameter that is drawn only if the choice `model` takes its option 1. The search passes a function that draws by
name; this module knows the order of the draws and their dependencies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast, overload

from prefect_tune.core import seeded_random
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import is_number
from prefect_tune.core.search.domains import (
    Branch,
    Choice,
    Domain,
    Float,
    Grid,
    Integer,
    Normal,
    SampleFrom,
    domains_in,
    frozen,
)

Draw: TypeAlias = Callable[[str, Domain], float]
"""Draws a parameter by its name: a value of a range, or the index of an option of a choice or a grid."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_NOTHING: Mapping[str, object] = {}
_MOST_DRAWS = 100


def valid_space(space: object) -> dict[str, object]:
    """Return a copy of a space in which everything but domains is plain JSON.

    Raises:
        InvalidInput: it is not an object, or holds a value that a configuration cannot hold.
    """
    copied = frozen(space, "space")
    if isinstance(copied, dict):
        return copied
    raise InvalidInput(f"space: expected an object of parameters, such as {{'lr': uniform(0, 1)}}, found {space!r}")


def resolve(space: Mapping[str, object], draw: Draw, fixed: Mapping[str, object] = _NOTHING) -> dict[str, object]:
    """Return a configuration of a valid `space`: each parameter that it needs is drawn once.

    A parameter in `fixed` is not drawn: `fixed` has its value, or the index of its option, by its name.

    Raises:
        InvalidInput: a function of `sample_from` reads a missing parameter, depends on itself, or returns no JSON.
    """
    resolution = _Resolution(space, draw, fixed)
    return {key: resolution.value(node, below("", key)) for key, node in space.items()}


def below(name: str, key: str | int) -> str:
    """Return the name of the node under `key`, or at an index, of the part of the space called `name`."""
    if isinstance(key, int):
        return f"{name}[{key}]"
    shown = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
    return f"{name}.{shown}" if name else shown


def option(name: str, index: int) -> str:
    """Return the name of an option of the choice or grid called `name`."""
    return f"{name}?{index}"


def require_drawable(space: Mapping[str, object], seed: int) -> None:
    """Call all functions of `sample_from` in a valid `space`, for the draws of trial 0 and some others.

    The others take each option that is a space of its own: a function may read what only some options have.

    Raises:
        InvalidInput: as `resolve`.
    """
    if not any(isinstance(each, SampleFrom) for each in domains_in(space)):
        return
    for number, fixed in enumerate([_NOTHING, *_branches(space, "")][:_MOST_DRAWS]):
        resolve(space, draw_of_trial(seed, number), fixed)


def draw_of_trial(seed: int, number: int) -> Draw:
    """Return what draws each parameter of a trial: by the seed, the trial's number and the parameter's name alone."""
    return lambda name, domain: domain.at(seeded_random.uniform(seed, "space", number, name))


def _branches(node: object, name: str) -> Iterator[dict[str, object]]:
    """Yield what leads to each option that is an object or a list: the indexes of options, by parameter."""
    match node:
        case dict():
            for key, child in node.items():
                yield from _branches(child, below(name, key))
        case list():
            for index, child in enumerate(node):
                yield from _branches(child, below(name, index))
        case Choice() | Grid():
            weights = node.weights if isinstance(node, Choice) else None
            for index, child in enumerate(node.options):
                if isinstance(child, dict | list | Choice | Grid) and (weights is None or weights[index]):
                    yield {name: index}
                    yield from ({name: index, **each} for each in _branches(child, option(name, index)))
        case _:
            return


class _Resolution:
    """One configuration while it is being resolved."""

    def __init__(self, space: Mapping[str, object], draw: Draw, fixed: Mapping[str, object]) -> None:
        self._space = space
        self._draw = draw
        self._known = dict(fixed)  # by name: drawn, computed or fixed values
        self._computing: list[str] = []

    def value(self, node: object, name: str) -> object:
        """Return the configuration's value for a part of the space."""
        match node:
            case dict():
                return {key: self.value(child, below(name, key)) for key, child in node.items()}
            case list():
                return [self.value(child, below(name, index)) for index, child in enumerate(node)]
            case Choice() | Grid():
                return self.value(*self.chosen(node, name))
            case Float() | Integer() | Normal():
                return self._drawn(node, name)
            case SampleFrom():
                if name not in self._known:
                    self._known[name] = self._call(node, name)
                return self._known[name]
            case _:
                return node

    @property
    def reader(self) -> str:
        """The name of the value whose function runs now."""
        return self._computing[-1]

    def chosen(self, node: object, name: str) -> tuple[object, str]:
        """Return the option that a choice or a grid takes, and its name; other nodes as they are."""
        while isinstance(node, Branch):
            index = int(self._drawn(node, name))
            node, name = node.options[index], option(name, index)
        return node, name

    def _drawn(self, domain: Domain, name: str) -> float:
        if name not in self._known:
            self._known[name] = self._draw(name, domain)
        value = self._known[name]
        assert isinstance(value, int | float), name  # noqa: S101 - fixed values were read from the same space
        return value

    def _call(self, node: SampleFrom, name: str) -> object:
        if name in self._computing:
            circle = " -> ".join([*self._computing[self._computing.index(name) :], name])
            raise InvalidInput(f"sample_from at {name}: it depends on itself, {circle}: compute one from other values")
        self._computing.append(name)
        try:
            returned = node.function(_Config(self, self._space, ""))
        except Exception as error:
            if isinstance(error, InvalidInput) or len(self._computing) > 1:  # the function that reads it may catch it
                raise
            line = error.__traceback__.tb_next if error.__traceback__ else None  # that of the function itself
            where = f" ({line.tb_frame.f_code.co_filename}, line {line.tb_lineno})" if line else ""
            raise InvalidInput(
                f"sample_from at {name}: its function raised {type(error).__name__}: {error}{where}"
            ) from error
        finally:
            self._computing.pop()
        value = frozen(returned, f"sample_from at {name}")
        if any(domains_in(value)):
            raise InvalidInput(
                f"sample_from at {name}: expected a value, found {returned!r}: draw in a parameter of its own, such as "
                "uniform(0, 1), and compute from that"
            )
        return value


class _Config(Mapping[str, object]):
    """The configuration as a function of `sample_from` sees it: a value is resolved when it is read."""

    def __init__(self, resolution: _Resolution, node: Mapping[str, object], name: str) -> None:
        self._resolution = resolution
        self._node = node
        self._name = name

    def __getitem__(self, key: str) -> object:
        if key not in self._node:
            raise InvalidInput(
                f"sample_from at {self._resolution.reader}: there is no {below(self._name, key)}, only "
                f"{sorted(self._node)}; for a parameter of only some choices use config.get(...)"
            )
        node, name = self._resolution.chosen(self._node[key], below(self._name, key))
        return _Config(self._resolution, node, name) if isinstance(node, dict) else self._resolution.value(node, name)

    def __contains__(self, key: object) -> bool:
        return key in self._node

    @overload
    def get(self, key: str, /) -> object: ...

    @overload
    def get(self, key: str, /, default: object) -> object: ...

    def get(self, key: str, /, default: object = None) -> object:
        return self[key] if key in self._node else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._node)

    def __len__(self) -> int:
        return len(self._node)


# Invert a space: find the draws that give a configuration, to replay earlier trials and to fix initial points.


@dataclass(frozen=True, slots=True)
class Found:
    """The draw, or the computed value, of a parameter: a value, or the index of an option."""

    name: str
    node: Domain | SampleFrom
    drawn: object


@dataclass(frozen=True, slots=True)
class Misfit:
    """A part of the configuration that the space cannot give."""

    name: str
    expected: str
    found: object


@dataclass(frozen=True, slots=True)
class Missing:
    """A parameter that the configuration leaves out."""

    name: str


Reading: TypeAlias = Found | Misfit | Missing

_MISFIT = 2
_DISTANCE: Mapping[type[Reading], int] = {Found: 0, Missing: 1, Misfit: _MISFIT}
"""How far a reading is from an exact match: a parameter is left out, or does not fit."""


def read(space: Mapping[str, object], config: Mapping[str, object]) -> Iterator[Reading]:
    """Yield a reading of `config`, which may be of another space, for each part of a valid `space`.

    For a choice the first option that gives exactly this value is taken; else the first that gives all that is there.
    """
    return _object(space, config, "")


def agrees(node: object, value: object) -> bool:
    """Return whether this part of a space can give `value`, which may leave parameters out."""
    return not any(isinstance(each, Misfit) for each in _read(node, value, ""))


def holds(value: object, part: object) -> bool:
    """Return whether a JSON value equals `part`, except that its objects may have more keys."""
    if isinstance(value, Mapping) and isinstance(part, Mapping):
        return all(key in value and holds(value[key], part[key]) for key in part)
    if isinstance(value, list | tuple) and isinstance(part, list | tuple):
        return len(value) == len(part) and all(map(holds, value, part))
    return is_same(value, part)


def is_same(one: object, other: object) -> bool:
    """Return whether two JSON values are equal: 1 equals 1.0, and not true."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def _read(node: object, value: object, name: str) -> Iterator[Reading]:
    match node:
        case dict() if isinstance(value, Mapping):
            yield from _object(node, value, name)
        case list() if isinstance(value, list | tuple) and len(value) == len(node):
            for index, child in enumerate(node):
                yield from _read(child, value[index], below(name, index))
        case Choice() | Grid():
            readings = [list(_read(each, value, option(name, index))) for index, each in enumerate(node.options)]
            distances = [max((_DISTANCE[type(each)] for each in each_reading), default=0) for each_reading in readings]
            if (nearest := min(distances)) == _MISFIT:
                yield Misfit(name, repr(node), value)
            else:
                index = distances.index(nearest)
                yield Found(name, node, index)
                yield from readings[index]
        case Float() | Integer() | Normal():
            if is_number(value) and node.contains(value):
                yield Found(name, node, int(value) if isinstance(node, Integer) else float(value))
            else:
                yield Misfit(name, repr(node), value)
        case SampleFrom():
            yield Found(name, node, value)
        case _:  # a constant, or a value of another JSON type
            if not is_same(node, value):
                yield Misfit(name, repr(node), value)


def _object(node: Mapping[str, object], value: Mapping[str, object], name: str) -> Iterator[Reading]:
    for key, child in node.items():
        if key in value:
            yield from _read(child, value[key], below(name, key))
        else:
            yield Missing(below(name, key))
    for key in value:
        if key not in node:
            yield Misfit(below(name, key), f"one of {sorted(node)}", value[key])


# Initial points: configurations of the user that a search tries first.

Point = Mapping[str, object]


def valid_points(points: Sequence[Point]) -> tuple[dict[str, object], ...]:
    """Return a copy of `points_to_evaluate` as plain JSON.

    Raises:
        InvalidInput: a point is not an object of plain values.
    """
    copied = [frozen(point, f"points_to_evaluate[{index}]") for index, point in enumerate(points)]
    for index, point in enumerate(copied):
        if not isinstance(point, dict) or any(domains_in(point)):
            raise InvalidInput(
                f"points_to_evaluate[{index}]: expected a configuration of plain values, found {points[index]!r}"
            )
    return tuple(cast("list[dict[str, object]]", copied))


def fixed_by(point: Point, space: Mapping[str, object]) -> dict[str, object]:
    """Return the values and option indexes that the point fixes, by the names of the parameters.

    Raises:
        InvalidInput: the point is outside of the space.
    """
    readings = list(read(space, point))
    for each in readings:
        if isinstance(each, Misfit):
            raise InvalidInput(
                f"points_to_evaluate: {each.name}: expected {each.expected}, found {each.found!r}, "
                f"in {dict(point)!r}; correct the point, or widen the space"
            )
    return {each.name: each.drawn for each in readings if isinstance(each, Found)}
