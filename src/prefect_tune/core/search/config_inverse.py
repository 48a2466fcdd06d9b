"""Invert a space: find the draws that give a configuration, to replay earlier trials and to fix initial points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from prefect_tune.core.numbers import is_number
from prefect_tune.core.search.domains import Branch, Choice, Domain, Grid, SampleFrom
from prefect_tune.core.search.numeric_domains import Float, Integer, Normal, Range
from prefect_tune.core.search.space import below, option

__all__ = ["Found", "Misfit", "Missing", "Reading", "agrees", "holds", "is_same", "read"]


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
            yield from _branch(node, value, name)
        case Float() | Integer() | Normal():
            yield _number(node, value, name)
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


def _number(node: Range, value: object, name: str) -> Reading:
    if not is_number(value) or not node.contains(value):
        return Misfit(name, repr(node), value)
    return Found(name, node, int(value) if isinstance(node, Integer) else float(value))


def _branch(node: Branch, value: object, name: str) -> Iterator[Reading]:
    readings = [list(_read(each, value, option(name, index))) for index, each in enumerate(node.options)]
    distances = [_distance(each) for each in readings]
    nearest = min(distances)
    if nearest == _MISFIT:
        yield Misfit(name, repr(node), value)
    else:
        index = distances.index(nearest)
        yield Found(name, node, index)
        yield from readings[index]


def _distance(readings: list[Reading]) -> int:
    """Return 0 for an exact match, 1 if a parameter is left out, 2 if a part does not fit."""
    return max((_DISTANCE[type(each)] for each in readings), default=0)
