"""Read the entries of a journal by their numbers, and verify each one."""

from __future__ import annotations

from collections.abc import Iterable

from prefect_tune.core.checkpoints.commit import ParallelMap
from prefect_tune.core.errors import JournalCorrupt, ObjectNotFound
from prefect_tune.core.journal_events.journal_entry import Entry
from prefect_tune.core.storage.documents import read_document, unseal
from prefect_tune.core.storage.layout import JournalKey, number_in
from prefect_tune.core.storage.object_store import Buffer, ObjectStore

__all__ = ["decode_entry", "entries_after", "read_if_there", "read_listed"]


def entries_after(
    store: ObjectStore, key: JournalKey, beyond: int, side_by_side: ParallelMap
) -> Iterable[tuple[Entry, Buffer]]:
    """Yield the entries after `beyond`, read by number up to the first absent one: a stale listing hides none."""
    folder = key.entries
    listed = store.list(folder, after=key.entry_path(beyond) if beyond else "")
    last = max((beyond, *(number_in(folder, each.path) or 0 for each in listed)))
    # Lazily: a foreign file named like the ten-billionth entry must not make a list of ten billion paths.
    paths = (key.entry_path(number) for number in range(beyond + 1, last + 1))
    for path, data in side_by_side(lambda path: (path, read_listed(store, path)), paths):
        yield decode_entry(data, path), data
    while (late := read_if_there(store, path := key.entry_path(last := last + 1))) is not None:
        yield decode_entry(late, path), late


def read_listed(store: ObjectStore, path: str) -> Buffer:
    """Return the bytes of an entry that must exist; raise JournalCorrupt where it does not."""
    if (data := read_if_there(store, path)) is None:
        raise JournalCorrupt(f"{path}: entries after it exist, and it is missing")
    return data


def read_if_there(store: ObjectStore, path: str) -> Buffer | None:
    """Return an entry's bytes; None where there is no object; raise JournalCorrupt where it is too large for one."""
    try:
        return read_document(store, path, JournalCorrupt)
    except ObjectNotFound:
        return None


def decode_entry(data: Buffer, path: str) -> Entry:
    """Return the entry of that path; raise JournalCorrupt where it is damaged, or has another number."""
    entry = unseal(Entry, data, path, JournalCorrupt)
    if entry.number != number_in(path.rpartition("/")[0], path):
        raise JournalCorrupt(f"{path}: holds entry {entry.number}")
    return entry
