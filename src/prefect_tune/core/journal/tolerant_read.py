"""Turn a failure to read one object into a result, so that maintenance continues with the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from prefect_tune.core.errors import (
    CommitUnknown,
    DeadlineExceeded,
    JournalCorrupt,
    StoreRefused,
    StoreUnavailable,
    Superseded,
    UnknownVersion,
)
from prefect_tune.core.journal.journal import load
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore

__all__ = ["Unreadable", "unless_unreadable"]

_Result = TypeVar("_Result")
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that could not be read, and the reason."""

    folder: str
    """Its folder on the target."""
    why: str
    trial: str | None = None
    is_damage: bool = False
    """Whether it is a journal that was read and is corrupt."""


def unless_unreadable(
    store: ObjectStore, place: JournalKey, folder: str, act: Callable[[], _Result]
) -> _Result | Unreadable:
    """Return `act()`, or, if it cannot read the objects in `folder` (of the journal `place`), an `Unreadable`.

    After a failure of the store `act` is called a second time.

    Raises:
        StoreUnavailable, StoreRefused: other objects of the target cannot be read either, or the time is up.
    """
    why = ""
    for _ in range(_TRIES):
        try:
            return act()
        except (JournalCorrupt, UnknownVersion) as error:
            is_damage = isinstance(error, JournalCorrupt) and _is_there(store, place.of_experiment)
            return Unreadable(folder, str(error), place.trial, is_damage=is_damage)
        except DeadlineExceeded:
            raise
        except (StoreUnavailable, StoreRefused, CommitUnknown) as error:
            why = f"{type(error).__name__}: {error}"
            store.size(place.of_experiment.entry_path(1))  # raises if the target is unavailable
    return Unreadable(folder, why, place.trial)


def _is_there(store: ObjectStore, experiment: JournalKey) -> bool:
    """Return whether the experiment exists and is not being deleted: a journal being deleted is not damaged."""
    try:
        state = load(store, experiment, side_by_side=map)
    except (JournalCorrupt, Superseded):
        return False
    return state.number > 0 and not state.is_removed
