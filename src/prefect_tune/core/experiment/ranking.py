"""Rank trials: by their last report wherever one is called the best, by other reports only where a scope is given.

The last report is that of the newest checkpoint, which `Results.checkpoint` and `export` return; the best of all
reports favours noisy and long trials, may not be saved, and is known only from the learning curves. Checkpoints are
ranked by the report that they were saved with: `best_saved`, for retention too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, assert_never, get_args

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.search.objective import Objective

if TYPE_CHECKING:
    from prefect_tune.core.experiment.trial_transitions import Trial
    from prefect_tune.core.journal_events.experiment_events import CheckpointRef

__all__ = [
    "Losses",
    "Scope",
    "best_label",
    "best_saved",
    "front",
    "losses_in",
    "ranked",
    "scored",
    "smallest_first",
    "valid_scope",
]

Scope: TypeAlias = Literal["last", "all", "avg", "last-5-avg", "last-10-avg"]
"""The reports by which trials are compared, in Ray Tune's words: the last one, the best of all, or a mean."""

Losses: TypeAlias = tuple[float, ...]
"""One number for each metric, smaller is better."""
_Key = TypeVar("_Key")


def best_label(objective: Objective) -> str:
    """Return what the best trial is called where people read it; of several metrics it names the one that decides."""
    return "best by last report" if len(objective.metrics) == 1 else f"best {objective.metrics[0]} by last report"


def valid_scope(scope: Scope) -> Scope:
    """Return `scope`. Raises `InvalidInput` if it is none."""
    if scope in get_args(Scope):
        return scope
    raise InvalidInput(f"scope {scope!r}: expected one of {', '.join(map(repr, get_args(Scope)))}")


def scored(curve: Sequence[Mapping[str, object]], objective: Objective, scope: Scope) -> Losses | None:
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
        case "all":
            return min(found)
        case "avg":
            return _mean(found)
        case "last-5-avg":
            return _mean(found[-5:])
        case "last-10-avg":
            return _mean(found[-10:])
        case _:
            assert_never(scope)


def losses_in(metrics: Mapping[str, object], objective: Objective) -> Losses | None:
    """Return the objective's metrics, so that smaller is better; None where one is missing or no number."""
    try:
        return objective.losses(metrics, "the report")
    except BadMetric:
        return None


def ranked(trials: Iterable[Trial], objective: Objective | None) -> list[tuple[Trial, Losses]]:
    """Return the trials that can be compared by their last reports, best first; of equals, the one proposed first.

    But a trial that inherits its last report comes after equal ones that made theirs. `trials` are in the order in
    which they were proposed. Without an objective the result is empty.
    """
    if objective is None:
        return []
    in_order = sorted(trials, key=lambda each: each.inherits)
    return smallest_first((each, losses_in(each.metrics, objective)) for each in in_order)


def smallest_first(scores: Iterable[tuple[_Key, Losses | None]]) -> list[tuple[_Key, Losses]]:
    """Return the pairs that have losses, best first; of equals, the one that comes first in `scores`."""
    compared = [(key, losses) for key, losses in scores if losses is not None]
    return sorted(compared, key=lambda pair: pair[1])


def best_saved(checkpoints: Iterable[CheckpointRef], objective: Objective) -> list[CheckpointRef]:
    """Return the checkpoints whose report has the metrics, best first; of equals, the one that comes first."""
    return [each for each, _ in smallest_first((each, losses_in(each.metrics, objective)) for each in checkpoints)]


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
