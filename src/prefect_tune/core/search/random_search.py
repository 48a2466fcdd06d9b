"""Random search and grid search in one: each point of the grid, `num_samples` times, the rest drawn anew each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prefect_tune.core import draws
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.objective import Objective
from prefect_tune.core.search.domains import Grid, domains_in
from prefect_tune.core.search.grid import choices_at, grids_of, point_count, points_of
from prefect_tune.core.search.points import fixed_by, valid_points
from prefect_tune.core.search.reading import holds
from prefect_tune.core.search.search import Exhausted, Proposals, Proposed, Search, Space, Suggestion
from prefect_tune.core.search.space import Draw, resolve, valid_space

__all__ = ["DEFAULT_SAMPLES", "ENDLESS", "RandomSearch", "default_samples"]

DEFAULT_SAMPLES = 10
"""The default of `num_samples` for a space in which something is drawn."""
ENDLESS = -1
"""As `num_samples`: until something else ends the experiment."""


def default_samples(space: Space) -> int:
    """Return the default of `num_samples`: 1 for a grid alone, whose repetitions would be the same trials, else 10.

    Raises:
        InvalidInput: the space is none.
    """
    domains = list(domains_in(valid_space(space)))
    return 1 if domains and all(isinstance(each, Grid) for each in domains) else DEFAULT_SAMPLES


@dataclass(frozen=True, slots=True)
class RandomSearch(Search):
    """Try every point of the grid `num_samples` times; without a grid, `num_samples` configurations.

    A draw hangs on the seed, the trial's number and the parameter's name only, so whoever resumes proposes the
    same, and the draws of a parameter stay when others come or go. What was tried already counts: of the grid the
    points come next that were tried least often, also after `num_samples` or the grid has grown, and with earlier
    trials from elsewhere. Results change nothing.
    """

    num_samples: int | None = None
    """How often each point of the grid is tried; -1 for without end; None for `default_samples` of the space."""
    points_to_evaluate: Sequence[Mapping[str, object]] = ()
    """Configurations that come first, and count as samples. What one leaves out is drawn, or next in the grid."""
    constant_grid_search: bool = field(default=False, kw_only=True)
    """Draw once for each sample of the whole grid, so that its points differ in nothing else."""

    def __post_init__(self) -> None:
        count: object = self.num_samples
        is_count = isinstance(count, int) and not isinstance(count, bool) and (count >= 1 or count == ENDLESS)
        if count is not None and not is_count:
            raise InvalidInput(f"num_samples: expected 1 or more, or -1 for without end, found {count!r}")
        object.__setattr__(self, "points_to_evaluate", valid_points(self.points_to_evaluate))

    def begin(self, space: Space, objective: Objective | None, seed: int) -> Proposals:
        """Return the proposals for `space`; no objective is needed.

        Raises:
            InvalidInput: the space is none, or a point to evaluate does not lie in it.
        """
        del objective
        return _RandomProposals(self, valid_space(space), self._samples_of(space), seed)

    def trial_count(self, space: Space) -> int | None:
        """Return how many samples of how many points there are."""
        samples = self._samples_of(space)
        return None if samples == ENDLESS else samples * point_count(grids_of(valid_space(space)))

    def _samples_of(self, space: Space) -> int:
        return default_samples(space) if self.num_samples is None else self.num_samples


class _RandomProposals(Proposals):
    """Which points are still to come. A proposal is told to itself as a recalled one is: both leave the same."""

    def __init__(self, search: RandomSearch, space: dict[str, object], samples: int, seed: int) -> None:
        self._space = space
        self._seed = seed
        self._waiting = [(point, fixed_by(point, space)) for point in search.points_to_evaluate]
        self._grids = grids_of(space)
        self._points = point_count(self._grids)
        self._samples = samples
        self._draws_per_sample = search.constant_grid_search
        self._times: Counter[int] = Counter()  # how often each point of the grid was tried
        self._next = 0  # the place in the list of all points, repeated for ever

    def suggest(self, number: int) -> Suggestion:
        if not self._waiting and self._next >= self._points * self._samples > 0:
            of_a_grid = f"{self._samples} samples of each of {self._points} grid points"
            return Exhausted(of_a_grid if self._points > 1 else f"samples drawn: {self._samples} of {self._samples}")
        given = self._waiting[0][1] if self._waiting else {}
        fixed = {**dict(choices_at(self._next % self._points, self._grids)), **given}
        config = resolve(self._space, self._drawing(number), fixed)
        self.recall(number, config)
        return Proposed(config)

    def recall(self, number: int, config: Mapping[str, object]) -> None:
        del number  # what was tried counts, not when
        given = (index for index, (point, _) in enumerate(self._waiting) if holds(config, point))
        if (index := next(given, None)) is not None:
            del self._waiting[index]
        if points := points_of(config, self._grids):
            self._times[min(points, key=lambda point: (self._times[point], point))] += 1
        while self._times[self._next % self._points] > self._next // self._points:
            self._next += 1

    def _drawing(self, number: int) -> Draw:
        index = self._next // self._points if self._draws_per_sample else number
        return lambda name, domain: domain.at(draws.uniform(self._seed, "space", index, name))
