"""Explain why trials cannot be ranked, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from prefect_tune.core.experiment.ranking import scored
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.models import first_line, metric_in
from prefect_tune.core.search.objective import Objective

__all__ = ["why_none"]

Curves = Mapping[str, Sequence[Mapping[str, object]]]


def why_none(trials: Collection[Trial], objective: Objective, scope: str, curves: Callable[[], Curves]) -> str:
    """Return why none of the trials can be ranked by `scope`.

    Args:
        curves: reads all reports of all trials; called only if their last reports do not explain it.
    """
    errored = [each.trial for each in trials if each.status is Status.ERRORED]
    names = sorted({name for each in trials for name in each.metrics})
    if said := _as_text(trials, objective):
        return said
    if scope == "last" and names and any(scored(curve, objective, "best") for curve in curves().values()):
        return f"the last reports have {names}; scope='best' looks at all reports"
    if errored and len(errored) == len(trials):
        first = next(iter(trials))
        return f"all {len(trials)} errored, the first because {first_line(first.reason)}; see results.errors"
    return f"their reports have {names}" if names else "nothing was reported"


def _as_text(trials: Collection[Trial], objective: Objective) -> str:
    for each in trials:
        found = {name: metric_in(each.metrics, name) for name in objective.metrics}
        texts = {name: value for name, value in found.items() if isinstance(value, str)}
        if texts:
            return f"trial {each.trial} reported {list(texts)} as text: {', '.join(map(repr, texts.values()))}"
    return ""
