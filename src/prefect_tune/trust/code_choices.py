"""Find the settings in an experiment's journal that choose code to run or import, or a location to open."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from prefect_tune.core.search.space_json import space_from_json

_Finder: TypeAlias = "Callable[[Any], Iterator[CodeChoice]]"
_SAVED_BLOCK = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*/[^/\s]+")
_OUR_TRIAL_FLOW = "train-trial/"
"""A deployment of this flow runs `train_trial`: the Prefect server, not the target, defines what a deployment runs."""


@dataclass(frozen=True, slots=True)
class CodeChoice:
    """One object, location, command or deployment that the settings choose."""

    parameter: str
    """The parameter of `pt.tune` that chose it."""
    shown: str
    """Its text in a message."""
    name: str | None = None
    """`package.module:Name` if it is an importable object; None for a location, a command or a deployment."""


def code_choices(settings: Mapping[str, object], learned: Collection[str] = ()) -> Sequence[CodeChoice]:
    """Return all code and locations that `settings` choose; nothing is imported.

    Args:
        settings: those of the journal.
        learned: the experiments that the search has learned from already: their targets are not opened again.

    Raises:
        InvalidInput: the search space in the settings is invalid.
    """
    finders: dict[str, _Finder] = {**_FINDERS, "warm_start": partial(_places_to_learn_from, learned=learned)}
    return [choice for name, find in finders.items() if name in settings for choice in find(settings[name])]


def _trainable(given: Any) -> Iterator[CodeChoice]:
    yield CodeChoice("trainable", repr(given), str(given))


def _space(given: Any) -> Iterator[CodeChoice]:
    names: list[str] = []

    def load(name: str) -> Callable[[Mapping[str, Any]], object]:
        names.append(name)
        return lambda _: None

    space_from_json(given, load)
    return (CodeChoice("space", f"sample_from {name!r}", name) for name in names)


def _stop(given: Any) -> Iterator[CodeChoice]:
    return (CodeChoice("stop", repr(each), each) for each in _texts_in(given))


def _callbacks(given: Any) -> Iterator[CodeChoice]:
    if not isinstance(given, list | tuple):
        yield CodeChoice("callbacks", repr(given))
    yield from (CodeChoice("callbacks", repr(each), each) for each in _texts_in(given))


def _sync(given: Any) -> Iterator[CodeChoice]:
    if not isinstance(given, Mapping):
        return
    syncer, place = given.get("syncer", "auto"), given.get("upload_dir")
    if syncer not in ("auto", None):
        yield CodeChoice("sync", f"syncer {syncer!r}", str(syncer))
    if not (place is None or _is_saved_block(place)):
        yield CodeChoice("sync", f"upload_dir {place!r}")


def _job_variables(given: Any) -> Iterator[CodeChoice]:
    """Job variables choose code: `command` in a process pool, `image` in others. Values may be secret: show names."""
    if given:
        names = ", ".join(map(repr, given)) if isinstance(given, Mapping) else "no mapping"
        yield CodeChoice("trial_job_variables", names)


def _deployment(given: Any) -> Iterator[CodeChoice]:
    if not (isinstance(given, str) and given.startswith(_OUR_TRIAL_FLOW)):
        yield CodeChoice("trial_deployment", repr(given))


def _places_to_learn_from(given: Any, learned: Collection[str]) -> Iterator[CodeChoice]:
    """Yield the sources on other targets; a name without a target is on the experiment's own."""
    if not isinstance(given, list | tuple):
        yield CodeChoice("warm_start", repr(given))
    yield from (
        CodeChoice("warm_start", repr(each)) for each in _texts_in(given) if "/" in each and each not in learned
    )


def _is_saved_block(place: object) -> bool:
    """Whether `place` names a saved block: the user's own Prefect server, not the target, holds its location."""
    return isinstance(place, str) and _SAVED_BLOCK.fullmatch(place) is not None


def _texts_in(given: Any) -> Iterator[str]:
    """Yield the texts of a nested list; objects are skipped, since their keys are names of metrics or stoppers."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _texts_in(each)


_FINDERS: Mapping[str, _Finder] = {
    "trainable": _trainable,
    "space": _space,
    "stop": _stop,
    "callbacks": _callbacks,
    "sync": _sync,
    "trial_deployment": _deployment,
    "trial_job_variables": _job_variables,
}
DATA_ONLY = frozenset(
    {
        "metric",
        "mode",
        "num_samples",
        "search",
        "scheduler",
        "seed",
        "max_concurrent_trials",
        "resources_per_trial",
        "checkpoint",
        "retention",
        "failures",
        "fail_fast",
        "trials",
        "trial_tags",
        "concurrency_limits",
        "isolation",
        "reuse",
        "grace_period_seconds",
        "silence_timeout_seconds",
    }
)
"""The other settings of a journal: none of their values can name code, a file or a command."""


def examined_settings() -> Collection[str]:
    """Return the settings in which `code_choices` looks for code."""
    return {*_FINDERS, "warm_start"}
