"""The importance of each parameter, estimated from the trials of an experiment.

For each parameter by itself: the share of the variance of the trials' ranks that lies between groups of alike values,
less what chance alone would give. That is epsilon squared (Kelley 1935, "An unbiased correlation ratio measure") of the
Kruskal-Wallis test (1952), with numbers grouped by quantiles. It needs no model and no random numbers, detects
relations that are not monotonic, is robust against outliers, and is near 0 for parameters without effect. It does not
show interactions between parameters; Optuna's fANOVA does, but needs a second of imports and a random forest each time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby

FEWEST = 8
"""With fewer trials no importance is given."""
_EACH = 4
"""The least number of trials per group, on average."""
_MOST_GROUPS = 8


def importances(parameters: Mapping[str, Sequence[object]], losses: Sequence[float]) -> Mapping[str, float]:
    """Return for each parameter a share from 0 to 1, the largest first.

    Args:
        parameters: the value of each trial; None where it has none.
        losses: of the same trials.
    """
    if len(losses) < FEWEST:
        return {}
    ranks = _ranks(losses)
    shares = {name: _epsilon_squared(_groups(values), ranks) for name, values in parameters.items()}
    return dict(sorted(shares.items(), key=lambda pair: -pair[1]))


def _epsilon_squared(groups: Sequence[Hashable], ranks: Sequence[float]) -> float:
    members: dict[Hashable, list[float]] = {}
    for group, rank in zip(groups, ranks, strict=True):
        members.setdefault(group, []).append(rank)
    count, mean = len(ranks), sum(ranks) / len(ranks)
    total = sum((each - mean) ** 2 for each in ranks)
    if len(members) < 2 or len(members) >= count or not total:
        return 0.0
    between = sum(len(each) * (sum(each) / len(each) - mean) ** 2 for each in members.values())
    return max(0.0, 1 - (1 - between / total) * (count - 1) / (count - len(members)))


def _groups(values: Sequence[object]) -> Sequence[Hashable]:
    """Numbers by quantiles; everything else, and few different numbers, by what it is."""
    numbers = sorted(each for each in values if isinstance(each, int | float) and not isinstance(each, bool))
    count = max(2, min(_MOST_GROUPS, len(values) // _EACH))
    if len(set(numbers)) <= count:
        return [str(each) for each in values]
    edges = [numbers[len(numbers) * each // count] for each in range(1, count)]
    return [_group(each, edges) for each in values]


def _group(value: object, edges: Sequence[float]) -> Hashable:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bisect_right(edges, value)
    return str(value)


def _ranks(values: Sequence[float]) -> Sequence[float]:
    """Return ranks from 1; equal values get their mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, before = [0.0] * len(values), 0
    for _, alike in groupby(order, key=values.__getitem__):
        places = list(alike)
        for place in places:
            ranks[place] = before + (len(places) + 1) / 2
        before += len(places)
    return ranks
