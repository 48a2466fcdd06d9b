"""Warn of a name that is new on a target and similar to one that exists there: it may be misspelt."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.did_you_mean import did_you_mean
from prefect_tune.core.errors import TuneError
from prefect_tune.core.storage.experiment_listing import experiment_names

__all__ = ["similar_experiment", "similar_name"]

_SIMILAR = 0.75
"""The least similarity of two spellings of one name: that of `slow` and `slwo`."""
_LOOK = timedelta(seconds=5)
_COUNTED = re.compile(r"[^a-zA-Z]+|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])")
"""What differs within a series of names, such as `fold-a` and `fold-b` or `rate-0.1` and `rate-0.2`."""


def similar_experiment(target: StorageTarget, experiment: str) -> str:
    """Return as `similar_name`, of the experiments on `target`; empty too if they cannot be listed within 5 s."""
    with suppress(TuneError), target.open(timeout=_LOOK) as store:
        return similar_name(experiment, experiment_names(store))
    return ""


def similar_name(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'slow'?` if a known name may be what was meant; names of one series are not similar."""
    return did_you_mean(name, (each for each in known if _letters(each) != _letters(name)), _SIMILAR)


def _letters(name: str) -> str:
    return _COUNTED.sub("", name)
