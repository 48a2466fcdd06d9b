"""Random and grid search: each point of the grid `num_samples` times, with all other parameters drawn each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import convert_fields, is_count, shown
from prefect_tune.core.search.base import Exhausted, Proposals, Proposed, Search, Space, Suggestion
from prefect_tune.core.search.domains import Grid, domains_in, has_grid
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.space import (
    agrees,
    below,
    draw_of_trial,
    fixed_by,
    holds,
    option,
    resolve,
    valid_points,
    valid_space,
)
from prefect_tune.core.shown_text import plural

# Number the points of a grid without listing them: a point of nested and conditional grids is a mixed-base number.
#
# The alphabetically first parameter changes fastest: the order does not depend on the order of keys in the space, or in
# its copy in a journal.


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
        if isinstance(key, str):
            held = [value[key]] if isinstance(value, Mapping) and key in value else []
        else:
            held = [value[key]] if isinstance(value, list | tuple) and key < len(value) else []
        inner = [each for part in held for each in points_of(part, child)]
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


DEFAULT_SAMPLES = 10
"""The default of `num_samples` for a space with random parameters."""
ENDLESS = -1
"""As `num_samples`: no limit, until a stopper or a limit ends the experiment."""


def default_samples(space: Space) -> int:
    """Return the default of `num_samples`: 1 for a space with grids only, whose repetitions are equal trials, else 10.

    Raises:
        InvalidInput: the space is invalid.
    """
    domains = list(domains_in(valid_space(space)))
    return 1 if domains and all(isinstance(each, Grid) for each in domains) else DEFAULT_SAMPLES


def require_samples(count: object) -> None:
    """Return if `count` is a number of samples, `ENDLESS`, or None. Raises `InvalidInput` otherwise."""
    if count is not None and not is_count(count, 1) and not (is_count(count, ENDLESS) and count == ENDLESS):
        raise InvalidInput(f"num_samples: expected 1 or more, or -1 for no limit, found {shown(count)}")


@dataclass(frozen=True, slots=True)
class RandomSearch(Search):
    """Try every point of the grid `num_samples` times; without a grid, `num_samples` configurations.

    A draw depends only on the seed, the trial's number and the parameter's name, so that a resumed search proposes the
    same, and a parameter's draws stay when other parameters are added or removed. Earlier trials count: the grid
    points that were tried least often come next, also after `num_samples` or the grid has grown, and after a change of
    the space. Reported metrics have no effect.
    """

    num_samples: int | None = field(default=None, metadata={"example": 20})
    """How often each point of the grid is tried; -1 for no limit; None for `default_samples` of the space."""
    points_to_evaluate: Sequence[Mapping[str, object]] = ()
    """Configurations that come first, and count as samples. A parameter left out is drawn, or next in the grid."""
    constant_grid_search: bool = field(default=False, kw_only=True)
    """Draw random parameters once for each sample of the whole grid, so that its points differ in the grid only."""

    def __post_init__(self) -> None:
        convert_fields(self)
        require_samples(self.num_samples)
        object.__setattr__(self, "points_to_evaluate", valid_points(self.points_to_evaluate))

    def begin(self, space: Space, objective: Objective | None, seed: int) -> Proposals:
        """Return the proposals for `space`; no objective is needed.

        Raises:
            InvalidInput: the space is invalid, or a point to evaluate is outside of it.
        """
        del objective
        return _RandomProposals(self, valid_space(space), self._samples_of(space), seed)

    def trial_count(self, space: Space) -> int | None:
        """Return the number of samples times the number of grid points; None for samples without end."""
        samples = self._samples_of(space)
        return None if samples == ENDLESS else samples * point_count(grids_of(valid_space(space)))

    def _samples_of(self, space: Space) -> int:
        return default_samples(space) if self.num_samples is None else self.num_samples


class _RandomProposals(Proposals):
    """The points that are still to come. A proposal is recorded with `recall`, as on a resume: the state is equal."""

    def __init__(self, search: RandomSearch, space: dict[str, object], samples: int, seed: int) -> None:
        self._space = space
        self._seed = seed
        self._waiting = [(point, fixed_by(point, space)) for point in search.points_to_evaluate]
        self._grids = grids_of(space)
        self._points = point_count(self._grids)
        self._samples = samples
        self._draws_per_sample = search.constant_grid_search
        self._times: Counter[int] = Counter()  # how often each point of the grid was tried
        self._next = 0  # the index in the endlessly repeated list of all points

    def suggest(self, number: int) -> Suggestion:
        if not self._waiting and self._next >= self._points * self._samples > 0:
            of_a_grid = f"{plural(self._samples, 'sample', 'samples')} of each of {self._points:,} grid points"
            return Exhausted(of_a_grid if self._points > 1 else f"samples drawn: {self._samples} of {self._samples}")
        given = self._waiting[0][1] if self._waiting else {}
        fixed = {**dict(choices_at(self._next % self._points, self._grids)), **given}
        index = self._next // self._points if self._draws_per_sample else number
        config = resolve(self._space, draw_of_trial(self._seed, index), fixed)
        self.recall(number, config)
        return Proposed(config)

    def recall(self, number: int, config: Mapping[str, object]) -> None:
        del number  # only the configuration counts, not its number
        given = (index for index, (point, _) in enumerate(self._waiting) if holds(config, point))
        if (index := next(given, None)) is not None:
            del self._waiting[index]
        if points := points_of(config, self._grids):
            self._times[min(points, key=lambda point: (self._times[point], point))] += 1
        while self._times[self._next % self._points] > self._next // self._points:
            self._next += 1
