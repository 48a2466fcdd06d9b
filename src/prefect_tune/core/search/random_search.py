"""Random and grid search: try each grid point `num_samples` times, and draw all other parameters each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prefect_tune.core.display_text import pluralize
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import convert_scalar_fields, is_integer_at_least, short_repr
from prefect_tune.core.search.base import Exhausted, Proposed, Search, SearchState, Space, Suggestion
from prefect_tune.core.search.domains import Grid, find_domains, has_grid
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.space import (
    accepts_value,
    child_path,
    get_fixed_parameters,
    includes_json,
    make_draw_function,
    option_path,
    resolve_space,
    validate_initial_points,
    validate_space,
)

# Grid points are numbered, not listed: each point, even of nested and conditional grids, has a number in mixed radix.
# Parameters are sorted by name (the first changes fastest), so the order of keys in a space or a journal is irrelevant.


def extract_grids(node: object) -> object:
    """Return a part of a space, reduced to its grids. The functions below take such a result as `node`."""
    match node:
        case dict():
            return {key: extract_grids(node[key]) for key in sorted(node) if has_grid(node[key])}
        case list() if has_grid(node):
            return [extract_grids(child) for child in node]
        case Grid():
            return node
        case _:
            return None


def count_grid_points(node: object) -> int:
    """Return the number of grid points in a part of a space; 1 if this part has no grid."""
    if isinstance(node, Grid):
        return sum(map(count_grid_points, node.options))
    count = 1
    for _, child in _iter_children(node):
        count *= count_grid_points(child)
    return count


def iter_grid_choices(point: int, node: object, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield the options of grid point number `point`: the name of each grid that it uses, and the option's index."""
    if isinstance(node, Grid):
        index, first = next(pair for pair in reversed([*enumerate(_first_point_numbers(node))]) if pair[1] <= point)
        yield name, index
        yield from iter_grid_choices(point - first, node.options[index], option_path(name, index))
    for key, child in _iter_children(node):
        point, inner = divmod(point, count_grid_points(child))
        yield from iter_grid_choices(inner, child, child_path(name, key))


def find_grid_points(value: object, node: object) -> list[int]:
    """Return the numbers of the grid points that produce `value`, usually one; an empty list if no point does."""
    if isinstance(node, Grid):
        pairs = zip(_first_point_numbers(node), node.options, strict=True)
        return [
            first + point
            for first, part in pairs
            if accepts_value(part, value)
            for point in find_grid_points(value, extract_grids(part))
        ]
    points, base = [0], 1
    for key, child in _iter_children(node):
        if isinstance(key, str):
            children = [value[key]] if isinstance(value, Mapping) and key in value else []
        else:
            children = [value[key]] if isinstance(value, list | tuple) and key < len(value) else []
        inner_points = [inner for part in children for inner in find_grid_points(part, child)]
        points = [point + base * inner for inner in inner_points for point in points]
        base *= count_grid_points(child)
    return points


def _first_point_numbers(grid: Grid) -> list[int]:
    """For each option of a grid, return the number of the first point that has the option."""
    return list(accumulate(map(count_grid_points, grid.options[:-1]), initial=0))


def _iter_children(node: object) -> Iterator[tuple[str | int, object]]:
    """Yield the keys and children of a part of a space, in the order in which grid points are numbered."""
    match node:
        case dict():
            yield from sorted(node.items())
        case list():
            yield from enumerate(node)
        case _:
            return


DEFAULT_NUM_SAMPLES = 10
"""The default of `num_samples`, except for a space whose only domains are grids."""
UNLIMITED = -1
"""The value of `num_samples` for a search without limit; a stopper or another limit ends the experiment."""


def get_default_num_samples(space: Space) -> int:
    """Return 1 if the only domains are grids (repetitions would be equal), else 10. Raises like `validate_space`."""
    domains = list(find_domains(validate_space(space)))
    return 1 if domains and all(isinstance(domain, Grid) for domain in domains) else DEFAULT_NUM_SAMPLES


def validate_num_samples(count: object) -> None:
    """Raise `InvalidInput` unless `count` is a number of samples, `UNLIMITED`, or None."""
    if count is not None and (not is_integer_at_least(count, UNLIMITED) or count == 0):
        raise InvalidInput(f"num_samples: expected 1 or more, or -1 for no limit, found {short_repr(count)}")


@dataclass(frozen=True, slots=True)
class RandomSearch(Search):
    """Try every point of the grid `num_samples` times; without a grid, try `num_samples` configurations.

    A draw depends only on the seed, the trial's number and the parameter's name. So a resumed search proposes the same
    trials, and a change of one parameter does not change the draws of others. Metrics have no effect. Trials of earlier
    runs count as tries, even if `num_samples` or the space has changed; grid points with the fewest tries come next.

    ```python
    search = pt.RandomSearch(20, points_to_evaluate=[{"lr": 0.01}])
    search = pt.OptunaSearch("TPESampler", num_samples=40)
    search = pt.Repeated(search, times=3, index_as="seed")
    ```
    """

    num_samples: int | None = field(default=None, metadata={"example": 20})
    """The number of tries of each grid point. -1: no limit. None: 1 if the space's only domains are grids, else 10."""
    points_to_evaluate: Sequence[Mapping[str, object]] = ()
    """Configurations to try first; they count as samples. Omitted parameters are drawn, or taken from the grid."""
    constant_grid_search: bool = field(default=False, kw_only=True)
    """Whether to draw random parameters only once per pass over the grid, so that all points of a pass share them."""

    def __post_init__(self) -> None:
        convert_scalar_fields(self)
        validate_num_samples(self.num_samples)
        object.__setattr__(self, "points_to_evaluate", validate_initial_points(self.points_to_evaluate))

    def begin(self, space: Space, objective: Objective | None, seed: int) -> SearchState:
        """Ignore `objective`. Raises `InvalidInput` also if one of `points_to_evaluate` is outside of `space`."""
        del objective
        return _RandomSearchState(self, validate_space(space), self._resolve_num_samples(space), seed)

    def trial_count(self, space: Space) -> int | None:
        """Return the number of samples times the number of grid points; None if the number of samples has no limit."""
        samples = self._resolve_num_samples(space)
        return None if samples == UNLIMITED else samples * count_grid_points(extract_grids(validate_space(space)))

    def _resolve_num_samples(self, space: Space) -> int:
        return get_default_num_samples(space) if self.num_samples is None else self.num_samples


class _RandomSearchState(SearchState):
    """The points that are left to try. `suggest` records its proposals in the same way as a resume does: as tries."""

    def __init__(self, search: RandomSearch, space: dict[str, object], samples: int, seed: int) -> None:
        self._space = space
        self._seed = seed
        self._initial_points = [(point, get_fixed_parameters(point, space)) for point in search.points_to_evaluate]
        self._grids = extract_grids(space)
        self._point_count = count_grid_points(self._grids)
        self._samples = samples
        self._shares_draws = search.constant_grid_search
        self._try_counts: Counter[int] = Counter()  # tries of each grid point
        self._next_point = 0  # an index into the endlessly repeated list of all grid points

    def suggest(self, number: int) -> Suggestion:
        if not self._initial_points and self._next_point >= self._point_count * self._samples > 0:
            samples = pluralize(self._samples, "sample", "samples")
            reason = f"{samples} of each of {self._point_count:,} grid points"
            return Exhausted(reason if self._point_count > 1 else f"samples drawn: {self._samples} of {self._samples}")
        initial = self._initial_points[0][1] if self._initial_points else {}
        fixed = {**dict(iter_grid_choices(self._next_point % self._point_count, self._grids)), **initial}
        index = self._next_point // self._point_count if self._shares_draws else number
        config = resolve_space(self._space, make_draw_function(self._seed, index), fixed)
        self.restore_trial(number, config)
        return Proposed(config)

    def restore_trial(self, number: int, config: Mapping[str, object]) -> None:
        del number  # the configuration alone determines which grid point was tried
        matches = (index for index, (point, _) in enumerate(self._initial_points) if includes_json(config, point))
        if (index := next(matches, None)) is not None:
            del self._initial_points[index]
        if points := find_grid_points(config, self._grids):
            self._try_counts[min(points, key=lambda point: (self._try_counts[point], point))] += 1
        while self._try_counts[self._next_point % self._point_count] > self._next_point // self._point_count:
            self._next_point += 1
