"""Resolve a search space to a configuration.

A parameter's name is its path in the space: `lr`, `model.depth`, `layers[0].units`, and `model?1.depth` for a
parameter that is drawn only if option 1 of the choice `model` is drawn. The search passes a function that draws one
parameter by its name. This module draws a parameter before it computes the values that depend on the parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

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
    find_domains,
    to_plain_node,
)

Draw: TypeAlias = Callable[[str, Domain], float]
"""Takes a parameter's name and domain; draws a value of a range, or the index of an option of a choice or grid."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_NOTHING_FIXED: Mapping[str, object] = {}
_MAX_TRIAL_DRAWS = 100


def validate_space(space: object) -> dict[str, object]:
    """Return a copy of a space in which everything except domains is plain JSON.

    Raises:
        InvalidInput: the space is not an object, or has a value that a configuration cannot have.
    """
    copy = to_plain_node(space, "space")
    if isinstance(copy, dict):
        return copy
    raise InvalidInput(f"space: expected an object of parameters, such as {{'lr': uniform(0, 1)}}, found {space!r}")


def resolve_space(
    space: Mapping[str, object], draw: Draw, fixed: Mapping[str, object] = _NOTHING_FIXED
) -> dict[str, object]:
    """Return a configuration of a valid `space`. Each parameter that the configuration needs is drawn once.

    Parameters in `fixed` are not drawn. `fixed` maps their names to their values, or to the indexes of their options.

    Raises:
        InvalidInput: a function of `sample_from` fails, reads a missing parameter or its own value, or returns no JSON.
    """
    resolver = _SpaceResolver(space, draw, fixed)
    return {key: resolver.resolve_node(node, child_path("", key)) for key, node in space.items()}


def child_path(name: str, key: str | int) -> str:
    """Return the path of the child `key` of the node whose path is `name`."""
    if isinstance(key, int):
        return f"{name}[{key}]"
    text = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
    return f"{name}.{text}" if name else text


def option_path(name: str, index: int) -> str:
    """Return the path of option `index` of the choice or grid whose path is `name`."""
    return f"{name}?{index}"


def check_sample_functions(space: Mapping[str, object], seed: int) -> None:
    """Test all functions of `sample_from` in a valid `space` by resolving some configurations.

    Resolve the configuration of trial 0, and one for each option that is a nested space (99 at most), because a
    function may read parameters that only this option has. Raises like `resolve_space`.
    """
    if not any(isinstance(domain, SampleFrom) for domain in find_domains(space)):
        return
    for number, fixed in enumerate([_NOTHING_FIXED, *_iter_selections(space, "")][:_MAX_TRIAL_DRAWS]):
        resolve_space(space, make_draw_function(seed, number), fixed)


def make_draw_function(seed: int, number: int) -> Draw:
    """Return the draw function of trial `number`. A draw depends only on `seed`, `number` and the parameter's name."""
    return lambda name, domain: domain.draw_at(seeded_random.draw_uniform(seed, "space", number, name))


def _iter_selections(node: object, name: str) -> Iterator[dict[str, object]]:
    """For each option that is an object, list, choice or grid, yield the option indexes that select it, by name."""
    match node:
        case dict():
            for key, child in node.items():
                yield from _iter_selections(child, child_path(name, key))
        case list():
            for index, child in enumerate(node):
                yield from _iter_selections(child, child_path(name, index))
        case Choice() | Grid():
            weights = node.weights if isinstance(node, Choice) else None
            for index, child in enumerate(node.options):
                if isinstance(child, dict | list | Choice | Grid) and (weights is None or weights[index]):
                    yield {name: index}
                    yield from ({name: index, **inner} for inner in _iter_selections(child, option_path(name, index)))
        case _:
            return


class _SpaceResolver:
    """Resolves a space to one configuration."""

    def __init__(self, space: Mapping[str, object], draw: Draw, fixed: Mapping[str, object]) -> None:
        self._space = space
        self._draw = draw
        self._values = dict(fixed)  # drawn, computed or fixed values, by name
        self._computing: list[str] = []

    def resolve_node(self, node: object, name: str) -> object:
        """Return the value that a part of the space has in the configuration."""
        match node:
            case dict():
                return {key: self.resolve_node(child, child_path(name, key)) for key, child in node.items()}
            case list():
                return [self.resolve_node(child, child_path(name, index)) for index, child in enumerate(node)]
            case Choice() | Grid():
                return self.resolve_node(*self.choose_option(node, name))
            case Float() | Integer() | Normal():
                return self._draw_value(node, name)
            case SampleFrom():
                if name not in self._values:
                    self._values[name] = self._call_function(node, name)
                return self._values[name]
            case _:
                return node

    @property
    def current_parameter(self) -> str:
        """The name of the parameter whose function is running."""
        return self._computing[-1]

    def choose_option(self, node: object, name: str) -> tuple[object, str]:
        """Return the drawn option of a choice or grid, and its path; return any other node unchanged."""
        while isinstance(node, Branch):
            index = int(self._draw_value(node, name))
            node, name = node.options[index], option_path(name, index)
        return node, name

    def _draw_value(self, domain: Domain, name: str) -> float:
        if name not in self._values:
            self._values[name] = self._draw(name, domain)
        value = self._values[name]
        assert isinstance(value, int | float), name  # noqa: S101 - fixed values come from the same space
        return value

    def _call_function(self, node: SampleFrom, name: str) -> object:
        if name in self._computing:
            cycle = " -> ".join([*self._computing[self._computing.index(name) :], name])
            raise InvalidInput(
                f"sample_from at {name}: the value depends on itself, {cycle}; compute one of these from other values"
            )
        self._computing.append(name)
        try:
            returned = node.function(_LazyConfig(self, self._space, ""))
        except Exception as error:
            if isinstance(error, InvalidInput) or len(self._computing) > 1:  # unchanged: an outer function may catch it
                raise
            frame = error.__traceback__.tb_next if error.__traceback__ else None  # the frame of the user's function
            where = f" ({frame.tb_frame.f_code.co_filename}, line {frame.tb_lineno})" if frame else ""
            raise InvalidInput(
                f"sample_from at {name}: its function raised {type(error).__name__}: {error}{where}"
            ) from error
        finally:
            self._computing.pop()
        value = to_plain_node(returned, f"sample_from at {name}")
        if any(find_domains(value)):
            raise InvalidInput(
                f"sample_from at {name}: expected a value, found {returned!r}; draw it in another parameter of the "
                "space, and compute the value from that parameter"
            )
        return value


class _LazyConfig(Mapping[str, object]):
    """The configuration that a function of `sample_from` receives. A value is resolved when the function reads it."""

    def __init__(self, resolver: _SpaceResolver, node: Mapping[str, object], name: str) -> None:
        self._resolver = resolver
        self._node = node
        self._name = name

    def __getitem__(self, key: str) -> object:
        if key not in self._node:
            raise InvalidInput(
                f"sample_from at {self._resolver.current_parameter}: there is no {child_path(self._name, key)}, only "
                f"{sorted(self._node)}; for a parameter that only some options have, use config.get(...)"
            )
        node, name = self._resolver.choose_option(self._node[key], child_path(self._name, key))
        if not isinstance(node, dict):
            return self._resolver.resolve_node(node, name)
        return _LazyConfig(self._resolver, node, name)

    def __contains__(self, key: object) -> bool:
        return key in self._node

    def get(self, key: str, /, default: object = None) -> object:
        return self[key] if key in self._node else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._node)

    def __len__(self) -> int:
        return len(self._node)


# Invert a space: find the draws that give a configuration, to replay earlier trials and to fix initial points.


@dataclass(frozen=True, slots=True)
class ParameterMatch:
    """A parameter of the configuration, with its drawn or computed value, or with the index of its drawn option."""

    name: str
    node: Domain | SampleFrom
    value: object


@dataclass(frozen=True, slots=True)
class ParameterMismatch:
    """A part of the configuration that the space cannot produce."""

    name: str
    expected: str
    actual: object


@dataclass(frozen=True, slots=True)
class ParameterOmission:
    """A parameter that the configuration omits."""

    name: str


ParameterReading: TypeAlias = ParameterMatch | ParameterMismatch | ParameterOmission

_MISMATCH_DISTANCE = 2
_DISTANCES: Mapping[type[ParameterReading], int] = {
    ParameterMatch: 0,
    ParameterOmission: 1,
    ParameterMismatch: _MISMATCH_DISTANCE,
}
"""The distance of a reading from an exact match: an omitted parameter is less of a difference than a mismatch."""


def interpret_config(space: Mapping[str, object], config: Mapping[str, object]) -> Iterator[ParameterReading]:
    """Yield a reading of `config` for each part of a valid `space`; `config` may come from another space.

    A choice is read as the first option that matches exactly, or else as the first that matches except for omissions.
    """
    return _interpret_object(space, config, "")


def accepts_value(node: object, value: object) -> bool:
    """Return whether a part of a space can produce `value`. The value may omit parameters."""
    return not any(isinstance(reading, ParameterMismatch) for reading in _interpret_node(node, value, ""))


def includes_json(value: object, partial: object) -> bool:
    """Return whether a JSON value equals `partial`; objects in the value may have additional keys."""
    if isinstance(value, Mapping) and isinstance(partial, Mapping):
        return all(key in value and includes_json(value[key], partial[key]) for key in partial)
    if isinstance(value, list | tuple) and isinstance(partial, list | tuple):
        return len(value) == len(partial) and all(map(includes_json, value, partial))
    return are_json_equal(value, partial)


def are_json_equal(one: object, other: object) -> bool:
    """Return whether two JSON values are equal: 1 equals 1.0, but not true."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_json_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_json_equal, one, other))
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def _interpret_node(node: object, value: object, name: str) -> Iterator[ParameterReading]:
    match node:
        case dict() if isinstance(value, Mapping):
            yield from _interpret_object(node, value, name)
        case list() if isinstance(value, list | tuple) and len(value) == len(node):
            for index, child in enumerate(node):
                yield from _interpret_node(child, value[index], child_path(name, index))
        case Choice() | Grid():
            readings = [
                list(_interpret_node(child, value, option_path(name, i))) for i, child in enumerate(node.options)
            ]
            distances = [max((_DISTANCES[type(reading)] for reading in row), default=0) for row in readings]
            if (nearest := min(distances)) == _MISMATCH_DISTANCE:
                yield ParameterMismatch(name, repr(node), value)
            else:
                index = distances.index(nearest)
                yield ParameterMatch(name, node, index)
                yield from readings[index]
        case Float() | Integer() | Normal():
            if is_number(value) and node.contains(value):
                yield ParameterMatch(name, node, int(value) if isinstance(node, Integer) else float(value))
            else:
                yield ParameterMismatch(name, repr(node), value)
        case SampleFrom():
            yield ParameterMatch(name, node, value)
        case _:  # a constant, or an object or list that the value does not fit
            if not are_json_equal(node, value):
                yield ParameterMismatch(name, repr(node), value)


def _interpret_object(node: Mapping[str, object], value: Mapping[str, object], name: str) -> Iterator[ParameterReading]:
    for key, child in node.items():
        if key in value:
            yield from _interpret_node(child, value[key], child_path(name, key))
        else:
            yield ParameterOmission(child_path(name, key))
    for key in value:
        if key not in node:
            yield ParameterMismatch(child_path(name, key), f"one of {sorted(node)}", value[key])


# Initial points: the user's configurations that a search tries first.

InitialPoint = Mapping[str, object]


def validate_initial_points(points: Sequence[InitialPoint]) -> tuple[dict[str, object], ...]:
    """Return `points_to_evaluate` as plain JSON; raise `InvalidInput` if a point is not a dict of plain values."""
    copies = [to_plain_node(point, f"points_to_evaluate[{index}]") for index, point in enumerate(points)]
    for index, point in enumerate(copies):
        if not isinstance(point, dict) or any(find_domains(point)):
            raise InvalidInput(
                f"points_to_evaluate[{index}]: expected a configuration of plain values, found {points[index]!r}"
            )
    return tuple(cast("list[dict[str, object]]", copies))


def get_fixed_parameters(point: InitialPoint, space: Mapping[str, object]) -> dict[str, object]:
    """Return the values and option indexes that `point` fixes, by parameter name.

    Raises:
        InvalidInput: the point is outside of the space.
    """
    readings = list(interpret_config(space, point))
    for reading in readings:
        if isinstance(reading, ParameterMismatch):
            raise InvalidInput(
                f"points_to_evaluate: {reading.name}: expected {reading.expected}, found {reading.actual!r}, "
                f"in {dict(point)!r}; correct the point, or widen the space"
            )
    return {reading.name: reading.value for reading in readings if isinstance(reading, ParameterMatch)}
