"""Rank trials by their last report, their best one, or a mean of reports; find the Pareto front of several metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.search.objective import Objective

if TYPE_CHECKING:
    from prefect_tune.core.experiment.trial_transitions import Trial

__all__ = ["Losses", "front", "losses_in", "needs_curve", "ranked", "scored", "smallest_first", "valid_scope"]

Losses: TypeAlias = tuple[float, ...]
"""One number for each metric, smaller is better."""
_Key = TypeVar("_Key")
_MEAN_OF_LAST = re.compile(r"last-([1-9]\d*)-avg")


def valid_scope(scope: str) -> str:
    """Return `scope` if it is valid: `last`, `best` (or `all`), `avg`, `last-5-avg` with any number.

    Raises:
        InvalidInput: it is none of these.
    """
    if scope in {"last", "best", "all", "avg"} or _MEAN_OF_LAST.fullmatch(scope):
        return scope
    raise InvalidInput(f"scope {scope!r}: expected 'last', 'best' (or 'all'), 'avg' or 'last-5-avg' with any number")


def needs_curve(scope: str) -> bool:
    """Return whether `scope` needs reports before the last one."""
    return scope != "last"


def scored(curve: Sequence[Mapping[str, object]], objective: Objective, scope: str) -> Losses | None:
    """Return a trial's score from the metrics of its reports; None where no report has all metrics.

    A report that lacks a metric, or has a text in its place, is skipped; with scope `last` the result is None
    if the last report is such a one.
    """
    found = [losses for metrics in curve if (losses := losses_in(metrics, objective)) is not None]
    if not found:
        return None
    match scope:
        case "last":
            return losses_in(curve[-1], objective)
        case "best" | "all":
            return min(found)
        case "avg":
            return _mean(found)
        case _:
            window = _MEAN_OF_LAST.fullmatch(valid_scope(scope))
            return _mean(found[-int(window[1]) :]) if window else None


def losses_in(metrics: Mapping[str, object], objective: Objective) -> Losses | None:
    """Return the objective's metrics, so that smaller is better; None where one is missing or no number."""
    try:
        return objective.losses(metrics, "the report")
    except BadMetric:
        return None


def ranked(trials: Iterable[Trial], objective: Objective | None) -> list[tuple[Trial, Losses]]:
    """Return the trials that can be compared by their last reports, best first; of equals, the one proposed first.

    `trials` are in the order in which they were proposed. Without an objective the result is empty.
    """
    if objective is None:
        return []
    return smallest_first((each, losses_in(each.metrics, objective)) for each in trials)


def smallest_first(scores: Iterable[tuple[_Key, Losses | None]]) -> list[tuple[_Key, Losses]]:
    """Return the pairs that have losses, best first; of equals, the one that comes first in `scores`."""
    compared = [(key, losses) for key, losses in scores if losses is not None]
    return sorted(compared, key=lambda pair: pair[1])


def _mean(found: Sequence[Losses]) -> Losses:
    return tuple(sum(column) / len(found) for column in zip(*found, strict=True))


def front(scores: Iterable[tuple[_Key, Losses]]) -> list[_Key]:
    """Return the keys of the Pareto front: no other is at least as good in every metric and better in one.

    Equal ones are all on it. Sorted by the first metric, best first.
    """
    kept: list[tuple[_Key, Losses]] = []
    for key, losses in smallest_first(scores):  # one that dominates it comes before it
        if not any(_dominates(other, losses) for _, other in kept):
            kept.append((key, losses))
    return [key for key, _ in kept]


def _dominates(one: Losses, other: Losses) -> bool:
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
