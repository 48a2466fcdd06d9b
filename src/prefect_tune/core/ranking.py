"""Which trial is the best: by its last report, its best one, or a mean of them; with several metrics, which are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.objective import Objective

if TYPE_CHECKING:
    from prefect_tune.core.trial import Trial

__all__ = ["Losses", "front", "losses_in", "needs_curve", "ranked", "scored", "smallest_first", "valid_scope"]

Losses: TypeAlias = tuple[float, ...]
"""One number for each metric, smaller is better."""
_Key = TypeVar("_Key")
_MEAN_OF_LAST = re.compile(r"last-([1-9]\d*)-avg")


def valid_scope(scope: str) -> str:
    """Return `scope` if it is one: `last`, `best` (or `all`), `avg`, `last-5-avg` with any number.

    Raises:
        InvalidInput: it is none.
    """
    if scope in {"last", "best", "all", "avg"} or _MEAN_OF_LAST.fullmatch(scope):
        return scope
    raise InvalidInput(f"scope {scope!r}: expected 'last', 'best' (or 'all'), 'avg' or 'last-5-avg' with any number")


def needs_curve(scope: str) -> bool:
    """Return whether the last report does not say enough."""
    return scope != "last"


def scored(curve: Sequence[Mapping[str, object]], objective: Objective, scope: str) -> Losses | None:
    """Return what a trial is compared by, from the metrics of its reports; None where there is nothing to compare.

    A report that lacks a metric, or has text in its place, is passed over.
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
    """Return the metrics that are compared, so that smaller is better; None where one is missing."""
    try:
        return objective.losses(metrics, "the report")
    except BadMetric:
        return None


def ranked(trials: Iterable[Trial], objective: Objective | None) -> list[tuple[Trial, Losses]]:
    """Return those that can be compared by their last reports, the best first; of equals the one proposed first.

    `trials` are in the order in which they were proposed. Without an objective none can be compared.
    """
    if objective is None:
        return []
    return smallest_first((each, losses_in(each.metrics, objective)) for each in trials)


def smallest_first(scores: Iterable[tuple[_Key, Losses | None]]) -> list[tuple[_Key, Losses]]:
    """Return those of which there is something to compare, the best first; of equals the one that comes first."""
    compared = [(key, losses) for key, losses in scores if losses is not None]
    return sorted(compared, key=lambda pair: pair[1])


def _mean(found: Sequence[Losses]) -> Losses:
    return tuple(sum(column) / len(found) for column in zip(*found, strict=True))


def front(scores: Iterable[tuple[_Key, Losses]]) -> list[_Key]:
    """Return those that no other beats in one metric without being beaten in another: the Pareto front, in order.

    Of equals all are on it. Sorted by the first metric, so the first of them is the best by that one.
    """
    kept: list[tuple[_Key, Losses]] = []
    for key, losses in smallest_first(scores):  # whoever dominates comes before
        if not any(_dominates(other, losses) for _, other in kept):
            kept.append((key, losses))
    return [key for key, _ in kept]


def _dominates(one: Losses, other: Losses) -> bool:
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
