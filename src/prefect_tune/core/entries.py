"""The entries of a journal as objects: read by their numbers, and believed only when they are what they say."""

from __future__ import annotations

from collections.abc import Iterable

from prefect_tune.core.commit import Mapper
from prefect_tune.core.errors import JournalCorrupt, ObjectNotFound
from prefect_tune.core.experiment import Entry
from prefect_tune.core.layout import JournalKey, number_in
from prefect_tune.core.sealed import unseal
from prefect_tune.core.store import Buffer, ObjectStore

__all__ = ["decode_entry", "entries_after", "read_if_there", "read_listed"]


def entries_after(
    store: ObjectStore, key: JournalKey, beyond: int, side_by_side: Mapper
) -> Iterable[tuple[Entry, Buffer]]:
    """Entries are read by number, up to the first that is absent: a listing that lags behind hides none."""
    folder = key.entries
    listed = store.list(folder, after=key.entry_path(beyond) if beyond else "")
    last = max((beyond, *(number_in(folder, each.path) or 0 for each in listed)))
    # One by one: a foreign file named like the ten-billionth entry must not be believed.
    paths = (key.entry_path(number) for number in range(beyond + 1, last + 1))
    for path, data in side_by_side(lambda path: (path, read_listed(store, path)), paths):
        yield decode_entry(data, path), data
    while (late := read_if_there(store, path := key.entry_path(last := last + 1))) is not None:
        yield decode_entry(late, path), late


def read_listed(store: ObjectStore, path: str) -> Buffer:
    """Return an entry that must be there; JournalCorrupt where it is not."""
    if (data := read_if_there(store, path)) is None:
        raise JournalCorrupt(f"{path}: entries after it exist, and it is missing")
    return data


def read_if_there(store: ObjectStore, path: str) -> Buffer | None:
    """Return what lies there; None where nothing does."""
    try:
        return store.read(path)
    except ObjectNotFound:
        return None


def decode_entry(data: Buffer, path: str) -> Entry:
    """Return the entry of that path; JournalCorrupt where it is damaged, or another's."""
    entry = unseal(Entry, data, path, JournalCorrupt)
    if entry.number != number_in(path.rpartition("/")[0], path):
        raise JournalCorrupt(f"{path}: holds entry {entry.number}")
    return entry
