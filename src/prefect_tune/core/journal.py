"""The experiment's numbered entries, each created only if absent: the history, and the owners' fence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from prefect_tune.core.commit import Mapper
from prefect_tune.core.errors import (
    AlreadyExists,
    InvalidInput,
    JournalCorrupt,
    ObjectNotFound,
    StoreUnavailable,
    Superseded,
)
from prefect_tune.core.events import Event, Opened, Owner
from prefect_tune.core.experiment import Entry, Experiment, apply, nothing_yet
from prefect_tune.core.layout import JournalKey, journal_key, number_in
from prefect_tune.core.sealed import seal, unseal
from prefect_tune.core.settle import create_or_recognize
from prefect_tune.core.store import Buffer, ObjectStore
from prefect_tune.core.values import Stamp, digest_of

__all__ = ["SNAPSHOT_EVERY", "append", "entries_beyond", "history", "load", "take_over", "write_snapshot"]

SNAPSHOT_EVERY = 64
_RACES = 16


def load(store: ObjectStore, journal: JournalKey | str, *, side_by_side: Mapper) -> Experiment:
    """Return the experiment as its journal tells it; an empty journal gives the empty experiment.

    Reads the newest snapshot and the entries after it: two listings and at most
    `2 + SNAPSHOT_EVERY` objects, as long as every snapshot was written.

    Raises:
        JournalCorrupt: an entry is missing, altered, or could not have happened.
        UnknownVersion: a newer prefect-tune wrote it.
    """
    experiment = _newest_snapshot(store, key := journal_key(journal))
    for entry, data in _entries(store, key, experiment.number, side_by_side):
        experiment = apply(experiment, entry, digest_of(data))
    return experiment


def history(store: ObjectStore, journal: JournalKey | str, *, side_by_side: Mapper) -> Sequence[Entry]:
    """Return every entry from the first: for curves, timelines, and whoever wants to know why."""
    return [entry for entry, _ in _entries(store, journal_key(journal), 0, side_by_side)]


def entries_beyond(
    store: ObjectStore, journal: JournalKey | str, number: int, *, side_by_side: Mapper
) -> Sequence[Entry]:
    """Return the entries after `number`, for whoever has taken in those before.

    Raises:
        JournalCorrupt: an entry is missing or altered.
    """
    return [entry for entry, _ in _entries(store, journal_key(journal), number, side_by_side)]


def append(store: ObjectStore, experiment: Experiment, events: Sequence[Event], stamp: Stamp) -> Experiment:
    """Write the next entry, and return the experiment after it. What it returns is durable.

    The events are taken as they will be read back (a tuple in a config becomes a list), so that who
    goes on now and who resumes later see the same.

    Raises:
        InvalidInput: an event holds what JSON cannot say, or could not be read back; nothing was written.
        Superseded: somebody else has written the next entry: the experiment is theirs.
        CommitUnknown: the target did not say; call again with the same stamp.
        JournalCorrupt: the events cannot follow; nothing was written.
        StoreUnavailable: the entry before it is not there any more, or the target is not to be had.
    """
    entry = Entry(
        number=experiment.number + 1,
        epoch=experiment.epoch + any(isinstance(event, Opened) for event in events),
        previous=experiment.digest,
        write_id=stamp.write_id,
        at=stamp.at,
        events=tuple(events),
    )
    path = experiment.key.entry_path(entry.number)
    data = seal(entry)
    result = apply(experiment, unseal(Entry, data, path, InvalidInput), digest_of(data))
    _require_predecessor(store, experiment)
    try:
        create_or_recognize(store, path, data)
    except AlreadyExists as exists:
        raise _superseded(store, experiment, path) from exists
    return result


def _require_predecessor(store: ObjectStore, experiment: Experiment) -> None:
    """An unmounted disk or a deleted experiment accepts writes too, and what is acknowledged there is lost."""
    before = experiment.number and experiment.key.entry_path(experiment.number)
    if before and store.size(before) is None:
        raise StoreUnavailable(
            f"{before}: the journal's last entry is gone, so nothing is written after it. Is the target still "
            "mounted, and the experiment still there?"
        )


def take_over(  # noqa: PLR0913  the last is for those who have more to say in the same entry
    store: ObjectStore,
    journal: JournalKey | str,
    owner: Owner,
    stamp: Stamp,
    *,
    side_by_side: Mapper,
    also: Callable[[Experiment], Sequence[Event]] = lambda _: (),
) -> Experiment:
    """Open the experiment for `owner`: a new epoch. The same entry holds what `also` says of the state it opens.

    Racing with an owner that still writes, or with another opener, it reads on and tries the next
    number: the last to open is the owner, and every other's next write fails.

    Raises:
        Superseded: others kept opening it first.
    """
    key = journal_key(journal)
    lost: Superseded | None = None
    for _ in range(_RACES):
        found = load(store, key, side_by_side=side_by_side)
        if found.opened_at and _opened_by(store, found, stamp):
            return found  # an earlier try of this very call succeeded, and its reply was lost
        opened = Opened(experiment=key.experiment, trial=key.trial, epoch=found.epoch + 1, owner=owner)
        try:
            return append(store, found, [opened, *also(found)], stamp)
        except Superseded as race:
            lost = race
    raise Superseded(f"{key}: lost {_RACES} races to open it") from lost


def _opened_by(store: ObjectStore, found: Experiment, stamp: Stamp) -> bool:
    path = found.key.entry_path(found.opened_at)
    return _decode(store.read(path), path).write_id == stamp.write_id


def write_snapshot(store: ObjectStore, experiment: Experiment) -> None:
    """Save the fold of all entries so far, so that opening reads little. Losing it costs only time."""
    path = experiment.key.snapshot_path(experiment.number)
    with suppress(AlreadyExists):  # the fold of the same entries: what is there is what we would write
        create_or_recognize(store, path, seal(experiment))


def _newest_snapshot(store: ObjectStore, key: JournalKey) -> Experiment:
    """The newest snapshot that verifies; the journal is the truth, so a damaged one is passed over."""
    folder = key.snapshots
    numbers = (number_in(folder, each.path) for each in store.list(folder))
    for number in sorted((number for number in numbers if number), reverse=True):
        try:
            return _read_snapshot(store, key, number)
        except (JournalCorrupt, ObjectNotFound):
            continue
    return nothing_yet(key)


def _read_snapshot(store: ObjectStore, key: JournalKey, number: int) -> Experiment:
    path = key.snapshot_path(number)
    found = unseal(Experiment, store.read(path), path, JournalCorrupt)
    if (found.key, found.number) != (key, number):
        raise JournalCorrupt(f"{path}: holds the first {found.number} entries of {found.key}")
    return found


def _entries(store: ObjectStore, key: JournalKey, beyond: int, side_by_side: Mapper) -> Iterable[tuple[Entry, Buffer]]:
    """Entries are read by number, up to the first that is absent: a listing that lags behind hides none."""
    folder = key.entries
    listed = store.list(folder, after=key.entry_path(beyond) if beyond else "")
    last = max((beyond, *(number_in(folder, each.path) or 0 for each in listed)))
    # One by one: a foreign file named like the ten-billionth entry must not be believed.
    paths = (key.entry_path(number) for number in range(beyond + 1, last + 1))
    for path, data in side_by_side(lambda path: (path, _read_listed(store, path)), paths):
        yield _decode(data, path), data
    while (late := _read_if_there(store, path := key.entry_path(last := last + 1))) is not None:
        yield _decode(late, path), late


def _read_listed(store: ObjectStore, path: str) -> Buffer:
    data = _read_if_there(store, path)
    if data is None:
        raise JournalCorrupt(f"{path}: entries after it exist, and it is missing")
    return data


def _read_if_there(store: ObjectStore, path: str) -> Buffer | None:
    try:
        return store.read(path)
    except ObjectNotFound:
        return None


def _decode(data: Buffer, path: str) -> Entry:
    entry = unseal(Entry, data, path, JournalCorrupt)
    if entry.number != number_in(path.rpartition("/")[0], path):
        raise JournalCorrupt(f"{path}: holds entry {entry.number}")
    return entry


def _superseded(store: ObjectStore, experiment: Experiment, path: str) -> Superseded:
    winner = _decode(store.read(path), path)
    opened = next((event for event in winner.events if isinstance(event, Opened)), None)
    by = str(opened.owner) if opened else f"epoch {winner.epoch}"
    return Superseded(
        f"{experiment.key}: epoch {experiment.epoch} has ended; it was taken over at "
        f"{winner.at} by {by}. Stop here: it goes on there, and everything that was committed is kept"
    )
