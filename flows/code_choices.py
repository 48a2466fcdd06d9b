"""What the settings in an experiment's journal choose to be run, imported or opened."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from prefect_tune.core.search.space_json import space_from_json

__all__ = ["CodeChoice", "code_choices"]

_Finder: TypeAlias = "Callable[[Any], Iterator[CodeChoice]]"
_SAVED_BLOCK = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*/[^/\s]+")
_OUR_TRIAL_FLOW = "train-trial/"
"""A deployment of this flow runs `train_trial`: Prefect's server says what a deployment runs, and not the target."""


@dataclass(frozen=True, slots=True)
class CodeChoice:
    """One thing that settings choose."""

    parameter: str
    """Of `pt.tune`: what it was chosen by."""
    shown: str
    """For a message."""
    name: str | None = None
    """`package.module:Name`, where that is what they choose; else it is a place, a command or a deployment."""


def code_choices(settings: Mapping[str, object], learned: Collection[str] = ()) -> Sequence[CodeChoice]:
    """Return what `settings` choose; nothing is imported.

    Args:
        settings: of the journal.
        learned: the experiments that a search has learned from already: their places are not opened again.

    Raises:
        InvalidInput: they hold a space that is none.
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
    """Of a process pool `command` is one, of others `image`; their values may be secrets, and are not shown."""
    if given:
        names = ", ".join(map(repr, given)) if isinstance(given, Mapping) else "no mapping"
        yield CodeChoice("trial_job_variables", names)


def _deployment(given: Any) -> Iterator[CodeChoice]:
    if not (isinstance(given, str) and given.startswith(_OUR_TRIAL_FLOW)):
        yield CodeChoice("trial_deployment", repr(given))


def _places_to_learn_from(given: Any, learned: Collection[str]) -> Iterator[CodeChoice]:
    """A name alone is on the same target."""
    if not isinstance(given, list | tuple):
        yield CodeChoice("warm_start", repr(given))
    yield from (
        CodeChoice("warm_start", repr(each)) for each in _texts_in(given) if "/" in each and each not in learned
    )


def _is_saved_block(place: object) -> bool:
    """Whether it names a block of the person's own Prefect, which says where that is."""
    return isinstance(place, str) and _SAVED_BLOCK.fullmatch(place) is not None


def _texts_in(given: Any) -> Iterator[str]:
    """Yield the texts of a list of any depth; keys of an object are names of metrics or stoppers."""
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
