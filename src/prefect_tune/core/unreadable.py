"""One object that cannot be read is told of, and keeps nobody from looking at the others."""

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
    UnknownVersion,
)
from prefect_tune.core.journal import load
from prefect_tune.core.layout import JournalKey
from prefect_tune.core.store import ObjectStore

__all__ = ["Unreadable", "unless_unreadable"]

_Result = TypeVar("_Result")
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What could not be looked at, and why."""

    folder: str
    """Where on the target it lies."""
    why: str
    trial: str | None = None
    is_damage: bool = False
    """Whether it was read, and is a journal that does not hold together."""


def unless_unreadable(
    store: ObjectStore, place: JournalKey, folder: str, act: Callable[[], _Result]
) -> _Result | Unreadable:
    """Return `act()`, or why what it reads below `folder`, which is `place`'s, cannot be read while other things can.

    What fails is done once more: `act` may be called twice.

    Raises:
        StoreUnavailable, StoreRefused: nothing of the target can be had, or there is no time any more.
    """
    why = ""
    for _ in range(_TRIES):
        try:
            return act()
        except (JournalCorrupt, UnknownVersion) as error:
            is_damage = isinstance(error, JournalCorrupt) and _is_there(store, place.experiment)
            return Unreadable(folder, str(error), place.trial, is_damage=is_damage)
        except DeadlineExceeded:
            raise
        except (StoreUnavailable, StoreRefused, CommitUnknown) as error:
            why = f"{type(error).__name__}: {error}"
            store.size(JournalKey(experiment=place.experiment).entry_path(1))  # where all of it is away, this says so
    return Unreadable(folder, why, place.trial)


def _is_there(store: ObjectStore, experiment: str) -> bool:
    """What is being deleted is not damaged."""
    try:
        state = load(store, experiment, side_by_side=map)
    except JournalCorrupt:
        return False
    return state.number > 0 and not state.is_removed
