"""Say an error once that several trials have in common."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from prefect_tune.core.experiment.failure_policy import error_in
from prefect_tune.core.experiment.trial_transitions import Trial

_FRAME = re.compile(r'^[ \t]*File "(.+)", line (\d+)', re.MULTILINE)
_PACKAGE = "prefect_tune"
_NAMES = 3


def error_of(reason: str) -> str:
    """Return the error of a trial in one line, with the last line of code outside this package, if there is one.

    Such as `KeyError: 'lr' (train.py:9)`.
    """
    error = error_in(reason)
    frames = [(PurePath(path), line) for path, line in _FRAME.findall(reason)]
    if not (users := [each for each in frames if _PACKAGE not in each[0].parts]):
        return error
    path, line = users[-1]
    return f"{error} ({path.name}:{line})"


def errors_by_cause(trials: Iterable[Trial]) -> Sequence[tuple[str, Sequence[Trial]]]:
    """Return each different error of these errored trials with its trials, the most frequent error first."""
    causes: dict[str, list[Trial]] = defaultdict(list)
    for each in trials:
        causes[error_of(each.reason)].append(each)
    return sorted(causes.items(), key=lambda cause: -len(cause[1]))


def names_of(trials: Sequence[Trial]) -> str:
    """Return the names of the first trials, and how many more there are: `00000, 00001, 00002 and 5 more`."""
    more = len(trials) - _NAMES
    named = ", ".join(each.trial for each in trials[:_NAMES])
    return f"{named} and {more} more" if more > 0 else named
