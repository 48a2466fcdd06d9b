"""Tell a journal that is being deleted from one that is damaged: entries are missing in both."""

from __future__ import annotations

from prefect_tune.core.entries import decode_entry, read_if_there
from prefect_tune.core.errors import JournalCorrupt
from prefect_tune.core.events import RemovalBegun, RemovalGivenUp
from prefect_tune.core.layout import JournalKey, number_in
from prefect_tune.core.store import ObjectStore

__all__ = ["is_deletion"]

_TAIL = 64
"""After an entry that says that its journal is being deleted come guests' entries, and few of them."""


def is_deletion(store: ObjectStore, key: JournalKey) -> bool:
    """Return whether a deletion explains what is missing of the journal `key`.

    The entries that are left say that it is being deleted; or no blob is left that they could tell of: that is what
    a write leaves that arrives when everything has been deleted.
    """
    numbers = sorted(number for each in store.list(key.entries) if (number := number_in(key.entries, each.path)))
    for number in reversed(numbers[-_TAIL:]):
        said = _said_of_removal(store, key, number)
        if said is not None:
            return isinstance(said, RemovalBegun)
    return not any("/blobs/" in each.path for each in store.list(key.folder))


def _said_of_removal(store: ObjectStore, key: JournalKey, number: int) -> RemovalBegun | RemovalGivenUp | None:
    path = key.entry_path(number)
    try:
        entry = None if (data := read_if_there(store, path)) is None else decode_entry(data, path)
    except JournalCorrupt:
        return None
    said = [each for each in entry.events if isinstance(each, RemovalBegun | RemovalGivenUp)] if entry else []
    return said[-1] if said else None
