"""Read and append the numbered entries of a journal; each entry is created only if absent, which fences older owners.

The idea: the state of an experiment is the fold of its entries, which are numbered from 1. Each entry is one object,
created only if its number is free, and holds the digest of the previous entry. So the target itself decides which of
two writers is first. Processes need not know of each other, and there are no locks, leases or clocks.

    owner 1     1 OwnerChanged ─ 2 ─ 3 ─ 4     5 refused: owner 2 has written it → Superseded, owner 1 stops
    owner 2                              └─▶ 5 OwnerChanged ─ 6 ─ 7 …
    non-owner                                                     └─▶ 8 (events that a non-owner may add)

- **Owner.** The last `OwnerChanged` names the owner. A process becomes the owner only by appending `OwnerChanged`
  (`acquire_ownership`). Ownership does not expire. An owner learns that it was replaced when its next entry is refused.
- **Non-owners** append only `NonOwnerEvent`, to quarantine or retire checkpoints, with `append_as_non_owner`. The field
  `writer` marks their entries. An owner that finds such an entry applies it, and appends after it.
- **Write id.** The target may refuse to create an entry because an earlier try succeeded but its reply was lost. That
  try succeeded if the entry has the same bytes; in `acquire_ownership`, if the last term began with this write id.
- **Deletion.** A deletion removes entry 1 first. So an entry counts only once its writer has checked, after creating
  it, that entry 1 still exists: see `generations`.
- **Order.** An entry is durable before its effect: trials are answered, and bytes deleted, only once it is written.

Never replace an entry. Delete an entry only with its experiment. Never write an entry after a missing one, because
the folder of an unmounted disk would accept it. Never treat an unknown outcome as success or failure.

A snapshot caches the state of the experiment after an entry. A snapshot that does not match the entries is discarded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    InvalidInput,
    JournalCorrupt,
    ObjectNotFound,
    ResumeFailed,
    StoreRefused,
    StoreUnavailable,
    Superseded,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment, TrialMap, apply_entry, make_empty_experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import DeletionStarted, Entry, Event, NonOwnerEvent, Owner, OwnerChanged, Writer
from prefect_tune.core.storage.documents import (
    MAX_DOCUMENT_BYTES,
    Document,
    read_document,
    seal,
    seal_and_read_back,
    unseal,
    verify_document,
)
from prefect_tune.core.storage.generations import require_not_deleted
from prefect_tune.core.storage.layout import JournalKey, document_number
from prefect_tune.core.storage.object_store import Buffer, ObjectStore, create_idempotently, require_conditional_create
from prefect_tune.core.values import Digest, WriteStamp, hash_bytes, parse_json

_MAX_RACES = 16


# Read the entries of a journal by number, verify each one, and fold them.


def _read_if_exists(store: ObjectStore, path: str) -> Buffer | None:
    """Return an entry's bytes, or None if the entry does not exist; raise JournalCorrupt if it is too large."""
    try:
        return read_document(store, path, JournalCorrupt)
    except ObjectNotFound:
        return None


def _read_required(store: ObjectStore, path: str) -> Buffer:
    """Return the bytes of an entry that must exist; raise JournalCorrupt if it does not."""
    if (data := _read_if_exists(store, path)) is None:
        raise JournalCorrupt(f"{path}: the entry is missing, although later entries exist")
    return data


def decode_entry(data: Buffer, path: str) -> Entry:
    """Return the entry at `path`; raise JournalCorrupt if it is damaged, or if its number is not that of the path."""
    entry = unseal(Entry, data, path, JournalCorrupt)
    if entry.number != document_number(path.rpartition("/")[0], path):
        raise JournalCorrupt(f"{path}: holds entry {entry.number}")
    return entry


def _iter_entries(store: ObjectStore, key: JournalKey, after: int) -> Iterator[tuple[Entry, Digest]]:
    """Yield the entries after number `after`. A listing may be stale, so read on until a number has no entry."""
    listed = store.list(key.entries_folder, after=key.entry_path(after) if after else "")
    last = max((after, *(document_number(key.entries_folder, item.path) or 0 for item in listed)))
    # A generator, because a foreign file with a huge number in its name would otherwise cause a list of as many paths.
    paths = (key.entry_path(number) for number in range(after + 1, last + 1))
    for path, data in store.map(lambda path: (path, _read_required(store, path)), paths):
        yield decode_entry(data, path), hash_bytes(data)
    while (newer := _read_if_exists(store, path := key.entry_path(last := last + 1))) is not None:
        yield decode_entry(newer, path), hash_bytes(newer)


@contextmanager
def _superseded_if_deleted(store: ObjectStore, key: JournalKey) -> Iterator[None]:
    """Raise Superseded instead of JournalCorrupt if the experiment was deleted and only parts of its journal remain."""
    try:
        yield
    except JournalCorrupt:
        require_not_deleted(store, key)
        raise


def iter_entries(store: ObjectStore, journal: JournalKey, after: int = 0) -> Iterator[tuple[Entry, Digest]]:
    """Yield every entry after number `after` with its digest, one at a time. Raises like `load_experiment`."""
    with _superseded_if_deleted(store, journal):
        yield from _iter_entries(store, journal, after)


def read_entries(store: ObjectStore, journal: JournalKey, after: int = 0) -> Sequence[Entry]:
    """Return every entry after number `after`, for curves, timelines and audits. Raises like `load_experiment`."""
    return [entry for entry, _ in iter_entries(store, journal, after)]


def read_entry_if_exists(store: ObjectStore, journal: JournalKey, number: int) -> Entry | None:
    """Return entry `number`, or None if it does not exist; raise JournalCorrupt if it is damaged. Sends one request."""
    path = journal.entry_path(number)
    return None if (data := _read_if_exists(store, path)) is None else decode_entry(data, path)


def load_experiment(store: ObjectStore, journal: JournalKey) -> Experiment:
    """Return the experiment: the fold of the journal's entries. An empty journal gives an empty experiment.

    Read only the newest readable snapshot and later entries; if these do not continue the snapshot, read all entries.

    Raises:
        JournalCorrupt: an entry is missing or altered, or has events that cannot follow the earlier ones.
        Superseded: the experiment was deleted, and only parts of its journal remain.
        UnknownVersion: a newer prefect-tune wrote an entry.
    """
    snapshot, unusable = None, set[int]()
    while snapshot is None and (numbers := [n for n in list_snapshot_numbers(store, journal) if n not in unusable]):
        snapshot = read_snapshot(store, journal, numbers[0])
        unusable.add(numbers[0])  # skip it if it cannot be read; list again, since a newer one may exist
    if snapshot is not None:
        with suppress(JournalCorrupt):
            return _apply_newer_entries(store, snapshot)
    with _superseded_if_deleted(store, journal):
        return _apply_newer_entries(store, make_empty_experiment(journal))


def _apply_newer_entries(store: ObjectStore, experiment: Experiment) -> Experiment:
    """Apply the entries after `experiment`; if there are none, check that its last entry is unchanged."""
    number = experiment.entry_count
    for entry, digest in _iter_entries(store, experiment.key, number):
        experiment = apply_entry(experiment, entry, digest)
    if number and experiment.entry_count == number:
        path = experiment.key.entry_path(number)
        last = _read_if_exists(store, path)
        if last is None or hash_bytes(last) != experiment.digest:
            raise JournalCorrupt(f"{path}: the entry is missing, or differs from the last entry of the snapshot")
    return experiment


def load_at(store: ObjectStore, journal: JournalKey, number: int | None) -> tuple[Experiment, Sequence[Entry]]:
    """Return the experiment after entry `number` (None: the last entry), and all entries up to this number.

    Raises:
        InvalidInput: there is no such entry.
        JournalCorrupt, Superseded: see `load_experiment`.
    """
    state, entries = make_empty_experiment(journal), list[Entry]()
    with _superseded_if_deleted(store, journal):
        for entry, digest in _iter_entries(store, journal, 0):
            state = apply_entry(state, entry, digest)
            entries.append(entry)
            if number == entry.number:
                break
    wanted = state.entry_count if number is None else number
    if not wanted or state.entry_count != wanted:
        raise InvalidInput(f"{journal}: expected an entry from 1 to {state.entry_count}, found {wanted}")
    return state, entries


def append_events(store: ObjectStore, experiment: Experiment, events: Sequence[Event], stamp: WriteStamp) -> Experiment:
    """Write the next entry, and return the experiment after it. The entry is durable when this returns.

    The events are applied in the form that a reader will see (a tuple in a config becomes a list), so that this run
    and a later resume see the same values. Entries of non-owners that follow `experiment` are applied first.

    Raises:
        InvalidInput: an event holds a value that JSON cannot represent or read back; nothing was written.
        Superseded: another owner of the experiment has written the next entry, or the experiment was deleted.
        CommitUnknown: the target did not say whether it wrote; call again with the same stamp.
        JournalCorrupt: the events cannot follow the last entry; nothing was written.
        StoreUnavailable: the first entry no longer exists, or the target cannot be reached.
    """
    while True:
        try:
            return _try_append(store, experiment, events, stamp)
        except AlreadyExists as exists:
            experiment = _apply_non_owner_entry(store, experiment, exists)


def append_as_non_owner(
    store: ObjectStore,
    journal: JournalKey,
    events_for: Callable[[Experiment], Sequence[NonOwnerEvent]],
    stamp: WriteStamp,
) -> Experiment:
    """Add an entry to the journal without becoming its owner; return the experiment after the entry.

    `events_for` gets the state after the last entry, and returns the events to write, or none; its errors propagate.
    If another writer was faster, `events_for` is called again, so its events directly follow the state that it got.

    Raises:
        StoreRefused: there are events to write, but the target supports only one writer (see `has_conditional_create`).
        StoreUnavailable: other writers were faster 16 times.
        CommitUnknown: the target did not say whether it wrote. Call again: `events_for` then sees whether it did.
    """
    for _ in range(_MAX_RACES):
        experiment = load_experiment(store, journal)
        if not (events := events_for(experiment)):
            return experiment
        require_conditional_create(store, experiment.key)
        with suppress(AlreadyExists):
            return _try_append(store, experiment, events, stamp, writer="non-owner")
    raise StoreUnavailable(f"{journal}: {_MAX_RACES} other writers were faster; try again")


def _try_append(
    store: ObjectStore, experiment: Experiment, events: Sequence[Event], stamp: WriteStamp, *, writer: Writer = "owner"
) -> Experiment:
    entry = Entry(
        number=experiment.entry_count + 1,
        term=experiment.term + any(isinstance(event, OwnerChanged) for event in events),
        previous=experiment.digest,
        write_id=stamp.write_id,
        at=stamp.at,
        writer=writer,
        events=tuple(events),
    )
    path = experiment.key.entry_path(entry.number)
    data, entry = seal_and_read_back(entry)
    result = apply_entry(experiment, entry, hash_bytes(data))
    create_idempotently(store, path, data)
    confirm_creation(store, experiment.key, path)
    return result


def _apply_non_owner_entry(store: ObjectStore, experiment: Experiment, exists: AlreadyExists) -> Experiment:
    """Return the experiment after the existing entry if a non-owner wrote it; raise Superseded otherwise."""
    path = experiment.key.entry_path(experiment.entry_count + 1)
    if (data := _read_if_exists(store, path)) is None:
        require_not_deleted(store, experiment.key)
        raise StoreUnavailable(f"{path}: the entry exists, but cannot be read; try again") from exists
    entry = decode_entry(data, path)
    if entry.writer == "non-owner" and (entry.previous, entry.term) == (experiment.digest, experiment.term):
        return apply_entry(experiment, entry, hash_bytes(data))
    new_owner = next((event.owner for event in entry.events if isinstance(event, OwnerChanged)), None)
    how = f"owner {entry.term}, {new_owner}, took over" if new_owner else f"another process wrote as owner {entry.term}"
    raise Superseded(
        f"{experiment.key}: this process is owner {experiment.term}, but {how} at {entry.at}. "
        "Stop here: the experiment continues in the other process, and every committed checkpoint is kept"
    ) from exists


def confirm_creation(store: ObjectStore, key: JournalKey, created: str) -> None:
    """Require that the first entry exists; if it does not, delete `created`, which is an entry or a post, and raise.

    A deletion deletes the first entry before anything else. So if the first entry still exists, no deletion had begun
    when `created` was written; and `created` is not in the empty folder of an unmounted disk.
    """
    first = key.entry_path(1)
    try:
        if first != created and store.size(first) is not None:
            return
        require_not_deleted(store, key)
    except Superseded:
        with suppress(StoreUnavailable, StoreRefused):  # if the deletion fails, maintenance deletes the object
            store.delete([created])
        raise
    except (StoreUnavailable, StoreRefused) as error:
        what = f"{created}: written, but it is unknown whether the experiment had been deleted before"
        raise CommitUnknown(f"{what}: {error}") from error
    if first != created:
        store.delete([created])
        raise StoreUnavailable(
            f"{first}: the experiment's first entry is missing, so nothing is written. Check that the target is "
            "mounted and that the experiment still exists"
        )


def acquire_ownership(
    store: ObjectStore,
    journal: JournalKey,
    owner: Owner,
    stamp: WriteStamp,
    *,
    events_for: Callable[[Experiment], Sequence[Event]] = lambda _: (),
    loaded: Experiment | None = None,
) -> Experiment:
    """Make `owner` the owner of the experiment: write an entry that begins a new term.

    The entry also holds the events that `events_for` returns for the state before the new term. If an earlier state is
    given as `loaded`, only later entries are read; if there are none, its last entry is checked. If `loaded` is empty
    (see `make_empty_experiment`), the journal is read only if another process has written to it.

    If the present owner or another new owner writes an entry first, this function reads it and tries the next number.
    The last process to write `OwnerChanged` is the owner, and the next write of every earlier owner fails.

    Raises:
        ResumeFailed: the experiment is being deleted, and `events_for` does not continue that deletion.
        Superseded: in each of 16 tries, another owner wrote an entry first; or the experiment was deleted.
    """
    lost_race: Superseded | None = None
    for _ in range(_MAX_RACES):
        state = load_experiment(store, journal) if loaded is None else _refresh_state(store, loaded)
        if state.owner_since_entry:
            first_of_term = read_entry_if_exists(store, journal, state.owner_since_entry)
            if first_of_term is not None and first_of_term.write_id == stamp.write_id:
                return state  # an earlier try of this call succeeded, and its reply was lost
        owner_changed = OwnerChanged(
            experiment=journal.experiment, generation=journal.generation, term=state.term + 1, owner=owner, at=stamp.at
        )
        events = events_for(state)
        if state.is_being_deleted and DeletionStarted() not in events:
            raise ResumeFailed(f"{journal} is being deleted by {state.owner}: finish the deletion, or use another name")
        try:
            return append_events(store, state, [owner_changed, *events], stamp)
        except Superseded as race:
            require_not_deleted(store, journal)  # raises if this was no race, but a deletion of the experiment
            lost_race, loaded = race, None
    raise Superseded(f"{journal}: lost {_MAX_RACES} races for its ownership; try again") from lost_race


def _refresh_state(store: ObjectStore, loaded: Experiment) -> Experiment:
    """Apply the entries after `loaded`; if they do not continue it, the journal was replaced, so load all entries."""
    if not loaded.entry_count:
        return loaded  # if a first entry exists by now, the append is refused, and the journal is read then
    with suppress(JournalCorrupt):
        return _apply_newer_entries(store, loaded)
    return load_experiment(store, loaded.key)


# The owners of a journal's earlier terms.


def read_earlier_owners(store: ObjectStore, experiment: Experiment) -> Sequence[Owner]:
    """Return the owners before the present one, oldest first.

    Terms increase along the journal, so bisection finds each owner with about log2(entries) reads.

    Raises:
        JournalCorrupt: an entry is missing or altered.
        Superseded: the experiment was deleted.
    """
    key = experiment.key

    @cache
    def read_entry(number: int) -> Entry:
        path = key.entry_path(number)
        return decode_entry(_read_required(store, path), path)

    def find_owner(term: int) -> Owner | None:
        numbers = range(1, experiment.owner_since_entry)
        first_of_term = read_entry(numbers[bisect_left(numbers, term, key=lambda number: read_entry(number).term)])
        return next((event.owner for event in first_of_term.events if isinstance(event, OwnerChanged)), None)

    with _superseded_if_deleted(store, key):
        return [owner for owner in store.map(find_owner, range(1, experiment.term)) if owner is not None]


# A snapshot holds the whole experiment after an entry, and is read instead of the entries up to that entry. The first
# line of a snapshot is JSON that holds the experiment without its trials; a line for each trial follows. The interval
# between two snapshots grows with the experiment, so that writing snapshots costs about as much as writing the entries.
#
# Only the entries count: if a snapshot is lost or damaged, or belongs to other entries or another version, reading just
# takes longer. So any process may write a snapshot late, twice or never, and a failed write is ignored. Readers compare
# a snapshot's digest with that of its entry, because a snapshot can remain after its experiment was deleted by hand.

_TRIALS_ADAPTER = TypeAdapter(list[Trial])
_MIN_SNAPSHOT_INTERVAL = 200
_TRIALS_PER_ENTRY = 8


class _SnapshotHeader(Document):
    """The first line of a snapshot."""

    format: Literal["prefect-tune/snapshot"] = "prefect-tune/snapshot"
    version: Literal[2] = 2
    digest_of_trials: Digest
    """The digest of the bytes of all other lines."""
    experiment: Experiment
    """The experiment without trials."""


def compute_snapshot_interval(experiment: Experiment) -> int:
    """Return the number of entries between two snapshots: 200 for up to 1600 trials, 400 for up to 3200, and so on."""
    interval = _MIN_SNAPSHOT_INTERVAL
    while interval * _TRIALS_PER_ENTRY < len(experiment.trials):
        interval *= 2
    return interval


def is_snapshot_due(experiment: Experiment, count_before: int) -> bool:
    """Return whether a snapshot interval has ended since the journal had `count_before` entries."""
    interval = compute_snapshot_interval(experiment)
    return experiment.entry_count // interval > count_before // interval


def is_final_snapshot_due(experiment: Experiment) -> bool:
    """Return whether a resume would read 200 or more entries after the newest snapshot; False for up to 1600 trials."""
    return experiment.entry_count % compute_snapshot_interval(experiment) >= _MIN_SNAPSHOT_INTERVAL


def write_snapshot(store: ObjectStore, experiment: Experiment) -> None:
    """Write the snapshot of `experiment`, and delete earlier snapshots; errors of the target are ignored.

    It may be called late, repeatedly, in any order, in any thread, and in several processes.
    """
    key, number = experiment.key, experiment.entry_count
    if len(data := encode_snapshot(experiment)) > MAX_DOCUMENT_BYTES:
        return  # readers would reject it
    with suppress(StoreUnavailable, StoreRefused):
        store.put(key.snapshot_path(number), data)
        if earlier := [key.snapshot_path(n) for n in list_snapshot_numbers(store, key) if n < number]:
            store.delete(earlier)


def list_snapshot_numbers(store: ObjectStore, key: JournalKey) -> Sequence[int]:
    """Return the numbers of the listed snapshots, newest first; a snapshot may be stale or unusable."""
    folder = key.snapshots_folder
    numbers = (document_number(folder, listed.path, "jsonl") for listed in store.list(folder))
    return sorted((number for number in numbers if number), reverse=True)


def encode_snapshot(experiment: Experiment) -> bytes:
    """Return the bytes of the snapshot of `experiment`."""
    # Encode one trial at a time, so that no other thread waits long for the interpreter lock.
    lines = b"".join(trial.model_dump_json().encode() + b"\n" for trial in experiment.trials.values())
    bare = experiment.model_copy(update={"trials": TrialMap.from_trials()})
    return seal(_SnapshotHeader(digest_of_trials=hash_bytes(lines), experiment=bare)) + b"\n" + lines


def read_snapshot(store: ObjectStore, key: JournalKey, number: int) -> Experiment | None:
    """Return the experiment of snapshot `number`; None if the snapshot is missing, damaged or of another version."""
    try:
        return decode_snapshot(read_document(store, key.snapshot_path(number), JournalCorrupt), key, number)
    except (ObjectNotFound, JournalCorrupt, UnknownVersion):
        return None


def decode_snapshot(data: Buffer, key: JournalKey, number: int) -> Experiment:
    """Return the experiment of snapshot `number`.

    Raises:
        JournalCorrupt: the bytes differ from the snapshot that `encode_snapshot` returned.
        UnknownVersion: another version of prefect-tune wrote the snapshot.
    """
    path = key.snapshot_path(number)
    header, _, lines = bytes(data).partition(b"\n")
    body, bare = verify_document(_SnapshotHeader, header, path, JournalCorrupt)
    if hash_bytes(lines) != body.get("digest_of_trials"):
        raise JournalCorrupt(f"{path}: its trials were altered since they were written ({len(lines)} bytes)")
    experiment = parse_json(_SnapshotHeader, bare, JournalCorrupt, path).experiment
    if (experiment.key, experiment.entry_count) != (key, number):
        raise JournalCorrupt(f"{path}: holds {experiment.key} after entry {experiment.entry_count}")
    try:
        trials = _TRIALS_ADAPTER.validate_json(b"[" + lines.rstrip(b"\n").replace(b"\n", b",") + b"]")
    except ValidationError as invalid:
        raise JournalCorrupt(f"{path}: its trials cannot be read: {invalid}") from invalid
    return experiment.model_copy(update={"trials": TrialMap.from_trials(trials)})
