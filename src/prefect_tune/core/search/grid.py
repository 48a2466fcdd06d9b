"""Number the points of a grid without listing them: a point of nested and conditional grids is a mixed-base number.

The alphabetically first parameter changes fastest: the order does not depend on the order of keys in the space, or in
its copy in a journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prefect_tune.core.search.config_inverse import agrees
from prefect_tune.core.search.domains import Grid, has_grid
from prefect_tune.core.search.space import below, option

__all__ = ["choices_at", "grids_of", "point_count", "points_of"]


def grids_of(node: object) -> object:
    """Return a part of a space reduced to its grids: the input of the other functions of this module."""
    match node:
        case dict():
            return {key: grids_of(node[key]) for key in sorted(node) if has_grid(node[key])}
        case list() if has_grid(node):
            return [grids_of(child) for child in node]
        case Grid():
            return node
        case _:
            return None


def point_count(node: object) -> int:
    """Return the number of points of the grids in a part of a space; 1 without any grid."""
    if isinstance(node, Grid):
        return sum(map(point_count, node.options))
    count = 1
    for _, child in _children(node):
        count *= point_count(child)
    return count


def choices_at(point: int, node: object, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield the name of each grid that point number `point` fixes, and the index of its option."""
    if isinstance(node, Grid):
        index, first = next(each for each in reversed(list(enumerate(_firsts(node)))) if each[1] <= point)
        yield name, index
        yield from choices_at(point - first, node.options[index], option(name, index))
    for key, child in _children(node):
        point, inner = divmod(point, point_count(child))
        yield from choices_at(inner, child, below(name, key))


def points_of(value: object, node: object) -> list[int]:
    """Return the numbers of the points that give `value`: usually one, none if it is not in this grid."""
    if isinstance(node, Grid):
        pairs = zip(_firsts(node), node.options, strict=True)
        return [
            first + point for first, each in pairs if agrees(each, value) for point in points_of(value, grids_of(each))
        ]
    points, base = [0], 1
    for key, child in _children(node):
        inner = [each for held in _held(value, key) for each in points_of(held, child)]
        points = [point + base * each for each in inner for point in points]
        base *= point_count(child)
    return points


def _firsts(grid: Grid) -> list[int]:
    """Return the number of the first point of each option."""
    return list(accumulate(map(point_count, grid.options[:-1]), initial=0))


def _children(node: object) -> Iterator[tuple[str | int, object]]:
    """Yield the keys and children of a part of a space, in the order of the grid."""
    match node:
        case dict():
            yield from sorted(node.items())
        case list():
            yield from enumerate(node)
        case _:
            return


def _held(value: object, key: str | int) -> Iterator[object]:
    """Yield the configuration's value under `key`, if it has one."""
    if isinstance(key, str) and isinstance(value, Mapping) and key in value:
        yield value[key]
    if isinstance(key, int) and isinstance(value, list | tuple) and key < len(value):
        yield value[key]
