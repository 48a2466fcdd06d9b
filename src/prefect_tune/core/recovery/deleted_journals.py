"""Distinguish a journal that is being deleted from a damaged one: entries are missing in both."""

from __future__ import annotations

from prefect_tune.core.errors import JournalCorrupt
from prefect_tune.core.journal.read_entries import decode_entry, read_if_there
from prefect_tune.core.journal_events.experiment_events import RemovalBegun, RemovalGivenUp
from prefect_tune.core.storage.layout import JournalKey, number_in
from prefect_tune.core.storage.object_store import ObjectStore

_TAIL = 64
"""How many of the last entries are searched: after a `RemovalBegun` come only few entries of external writers."""


def is_deletion(store: ObjectStore, key: JournalKey) -> bool:
    """Return whether a deletion explains the missing entries of the journal `key`.

    True if the newest remaining `RemovalBegun` or `RemovalGivenUp` is a `RemovalBegun`; or, without either, if no
    blob is left: then a late write has arrived after everything was deleted.
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
