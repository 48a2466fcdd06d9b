"""Read and append the numbered entries of a journal; creating each only if absent fences off older owners.

The idea: an experiment is the fold of the entries 1, 2, 3 … Each entry is one object, created only if its number is
free, and holds the digest of the entry before it. So the target itself decides which of two writers is first, for any
number of processes that do not know of each other, without locks, leases or clocks.

    owner 1    1 Opened(1) ─ 2 ─ 3 ─ 4            5 refused: exists, of owner 2 → Superseded, it stops
    owner 2                       └─▶ 5 Opened(2) ─ 6 ─ 7 …
    a guest                                          └─▶ 8 (events that guests may add)

- **Owner.** The last `Opened` names it. `take_over` is an append of `Opened`; there is no other way to become the
  owner, and none to remain it: an owner learns that it was replaced when its next entry is refused.
- **Guests** (quarantine and pruning by another process) append through `append_as_guest`, and only
  `GuestEvent`; the entry says its writer. The owner finds such an entry in its place, applies it, and appends after it.
- **Write id.** A refused creation may be one's own, whose reply was lost: an entry with one's own write id is success.
- **Deletion.** An entry counts once the experiment's first entry was seen after its creation: see `generations`.
- **Order.** An entry is durable before its effect: a trial is answered, and bytes are deleted, only after `append`.

Never: an entry replaced or deleted (but with its whole experiment); an entry after one that is gone, since an unmounted
disk would accept it; an unknown outcome taken for success or for a refusal.

A snapshot is a cache of this fold. Whatever does not follow from the entries is thrown away.
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
from prefect_tune.core.experiment.experiment import Experiment, TrialMap, apply, nothing_yet
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import (
    Deletion,
    Entry,
    Event,
    GuestEvent,
    Opened,
    Owner,
    Writer,
)
from prefect_tune.core.storage.documents import (
    DOCUMENT_BYTES,
    Document,
    read_document,
    seal,
    seal_and_read_back,
    unseal,
    verified,
)
from prefect_tune.core.storage.generations import require_not_deleted
from prefect_tune.core.storage.layout import JournalKey, number_in
from prefect_tune.core.storage.object_store import Buffer, ObjectStore, create_or_recognize, require_conditional_create
from prefect_tune.core.values import Digest, Stamp, digest_of, parse

_RACES = 16


# Read the entries of a journal by their numbers, verify each one, and fold them.


def read_if_there(store: ObjectStore, path: str) -> Buffer | None:
    """Return an entry's bytes; None where there is no object; raise JournalCorrupt where it is too large for one."""
    try:
        return read_document(store, path, JournalCorrupt)
    except ObjectNotFound:
        return None


def read_listed(store: ObjectStore, path: str) -> Buffer:
    """Return the bytes of an entry that must exist; raise JournalCorrupt where it does not."""
    if (data := read_if_there(store, path)) is None:
        raise JournalCorrupt(f"{path}: entries after it exist, and it is missing")
    return data


def decode_entry(data: Buffer, path: str) -> Entry:
    """Return the entry of that path; raise JournalCorrupt where it is damaged, or has another number."""
    entry = unseal(Entry, data, path, JournalCorrupt)
    if entry.number != number_in(path.rpartition("/")[0], path):
        raise JournalCorrupt(f"{path}: holds entry {entry.number}")
    return entry


def _entries(store: ObjectStore, key: JournalKey, after: int) -> Iterator[tuple[Entry, Digest]]:
    """Yield the entries after `after`, read by number up to the first absent one: a stale listing hides none."""
    listed = store.list(key.entries, after=key.entry_path(after) if after else "")
    last = max((after, *(number_in(key.entries, each.path) or 0 for each in listed)))
    # Lazily: a foreign file named like the ten-billionth entry must not make a list of ten billion paths.
    paths = (key.entry_path(number) for number in range(after + 1, last + 1))
    for path, data in store.map(lambda path: (path, read_listed(store, path)), paths):
        yield decode_entry(data, path), digest_of(data)
    while (late := read_if_there(store, path := key.entry_path(last := last + 1))) is not None:
        yield decode_entry(late, path), digest_of(late)


@contextmanager
def _unless_deleted(store: ObjectStore, key: JournalKey) -> Iterator[None]:
    """Raise Superseded in place of JournalCorrupt if the experiment was deleted, and parts of its journal are left."""
    try:
        yield
    except JournalCorrupt:
        require_not_deleted(store, key)
        raise


def each_entry(store: ObjectStore, journal: JournalKey, after: int = 0) -> Iterator[tuple[Entry, Digest]]:
    """Yield every entry after number `after`, with the digest of its bytes, and keep none. Raises as `load`."""
    with _unless_deleted(store, journal):
        yield from _entries(store, journal, after)


def history(store: ObjectStore, journal: JournalKey, after: int = 0) -> Sequence[Entry]:
    """Return every entry after number `after`, for curves, timelines and audits. Raises as `load`."""
    return [entry for entry, _ in each_entry(store, journal, after)]


def next_entry(store: ObjectStore, journal: JournalKey, number: int) -> Entry | None:
    """Return the entry after `number`, or None while it does not exist. Sends one request: for polling a journal.

    Raises:
        JournalCorrupt: the entry is damaged.
    """
    path = journal.entry_path(number + 1)
    return None if (data := read_if_there(store, path)) is None else decode_entry(data, path)


def load(store: ObjectStore, journal: JournalKey) -> Experiment:
    """Return the experiment that the journal's entries fold to; an empty journal gives the empty experiment.

    Reads the newest snapshot that can be read, and the entries after it. Where they do not follow from it, reads all
    entries.

    Raises:
        JournalCorrupt: an entry is missing or altered, or its events are impossible after the ones before.
        Superseded: the experiment was deleted, and parts of its journal are left.
        UnknownVersion: a newer prefect-tune wrote an entry.
    """
    snapshot, unusable = None, set[int]()
    while snapshot is None and (numbers := [n for n in list_snapshots(store, journal) if n not in unusable]):
        snapshot = read_snapshot(store, journal, numbers[0])
        unusable.add(numbers[0])  # damaged, or deleted since it has a successor: list again
    if snapshot is not None:
        with suppress(JournalCorrupt):
            return _follow(store, snapshot)
    with _unless_deleted(store, journal):
        return _follow(store, nothing_yet(journal))


def _follow(store: ObjectStore, experiment: Experiment) -> Experiment:
    """Apply the entries that come after `experiment`; where there is none, check the last one."""
    number = experiment.number
    for entry, digest in _entries(store, experiment.key, number):
        experiment = apply(experiment, entry, digest)
    if number and experiment.number == number:
        path = experiment.key.entry_path(number)
        last = read_if_there(store, path)
        if last is None or digest_of(last) != experiment.digest:
            raise JournalCorrupt(f"{path}: missing, or not the entry that the snapshot was made of")
    return experiment


def as_of(store: ObjectStore, journal: JournalKey, number: int | None) -> tuple[Experiment, Sequence[Entry]]:
    """Return the experiment after entry `number` (None: after the last one), and every entry up to it.

    Raises:
        InvalidInput: there is no such entry.
        JournalCorrupt, Superseded: as `load`.
    """
    state, entries = nothing_yet(journal), list[Entry]()
    with _unless_deleted(store, journal):
        for entry, digest in _entries(store, journal, 0):
            state = apply(state, entry, digest)
            entries.append(entry)
            if number == entry.number:
                break
    wanted = state.number if number is None else number
    if not wanted or state.number != wanted:
        raise InvalidInput(f"{journal}: expected an entry from 1 to {state.number}, found {wanted}")
    return state, entries


def append(store: ObjectStore, experiment: Experiment, events: Sequence[Event], stamp: Stamp) -> Experiment:
    """Write the next entry, and return the experiment after it. The entry is durable when this returns.

    The events are applied as they will be read back (a tuple in a config becomes a list), so that this run
    and a later resume see the same values. Entries that guests added meanwhile come before it.

    Raises:
        InvalidInput: an event holds a value that JSON cannot represent or read back; nothing was written.
        Superseded: another owner has written the next entry, and owns the experiment now; or it was deleted.
        CommitUnknown: the target did not say whether it wrote; call again with the same stamp.
        JournalCorrupt: the events cannot follow the last entry; nothing was written.
        StoreUnavailable: the first entry no longer exists, or the target cannot be reached.
    """
    while True:
        try:
            return _append_next(store, experiment, events, stamp)
        except AlreadyExists as exists:
            experiment = _after_guest(store, experiment, exists)


def append_as_guest(
    store: ObjectStore, journal: JournalKey, events_for: Callable[[Experiment], Sequence[GuestEvent]], stamp: Stamp
) -> Experiment:
    """Add an entry to a journal of another owner, which stays the owner; return the experiment after the entry.

    `events_for` returns the events to write after the state that it is given, or none. It is called again when another
    writer is faster, so that no entry comes between that state and the events. Its exception ends the call.

    Raises:
        StoreRefused: there are events to write, and the target supports one writer only: see `conditional_create`.
        StoreUnavailable: other writers were faster 16 times.
        CommitUnknown: the target did not say whether it wrote; call again, `events_for` may find its events written.
    """
    for _ in range(_RACES):
        found = load(store, journal)
        if not (events := events_for(found)):
            return found
        require_conditional_create(store, found.key)
        with suppress(AlreadyExists):
            return _append_next(store, found, events, stamp, writer="guest")
    raise StoreUnavailable(f"{journal}: {_RACES} other writers were faster; try again")


def _append_next(
    store: ObjectStore, experiment: Experiment, events: Sequence[Event], stamp: Stamp, *, writer: Writer = "owner"
) -> Experiment:
    entry = Entry(
        number=experiment.number + 1,
        term=experiment.term + any(isinstance(event, Opened) for event in events),
        previous=experiment.digest,
        write_id=stamp.write_id,
        at=stamp.at,
        writer=writer,
        events=tuple(events),
    )
    path = experiment.key.entry_path(entry.number)
    data, entry = seal_and_read_back(entry)
    result = apply(experiment, entry, digest_of(data))
    create_or_recognize(store, path, data)
    require_first_entry(store, experiment.key, path)
    return result


def _after_guest(store: ObjectStore, experiment: Experiment, exists: AlreadyExists) -> Experiment:
    """Return the experiment after the existing entry if a guest wrote it; raise Superseded otherwise."""
    path = experiment.key.entry_path(experiment.number + 1)
    if (data := read_if_there(store, path)) is None:
        require_not_deleted(store, experiment.key)
        raise StoreUnavailable(f"{path}: it exists, and cannot be read; try again") from exists
    entry = decode_entry(data, path)
    if entry.writer == "guest" and (entry.previous, entry.term) == (experiment.digest, experiment.term):
        return apply(experiment, entry, digest_of(data))
    opened = next((event.owner for event in entry.events if isinstance(event, Opened)), None)
    how = f"owner {entry.term}, {opened}, took over" if opened else f"another process wrote as owner {entry.term}"
    raise Superseded(
        f"{experiment.key}: this process is owner {experiment.term}, and {how} at {entry.at}. "
        "Stop here: it continues there, and every committed checkpoint is kept"
    ) from exists


def require_first_entry(store: ObjectStore, key: JournalKey, created: str) -> None:
    """Check after the creation of an entry that the experiment was not deleted before; remove the entry if it was.

    A deletion deletes the experiment's first entry before anything else. So if that is there, no entry was missing when
    this one was created; and the disk is the one on which the experiment is, not an empty folder where it was mounted.
    """
    first = key.entry_path(1)
    try:
        if first != created and store.size(first) is not None:
            return
        require_not_deleted(store, key)
    except Superseded:
        with suppress(StoreUnavailable, StoreRefused):  # else maintenance finds it
            store.delete([created])
        raise
    except StoreUnavailable as error:
        what = f"{created}: written, but it is not known whether the experiment was deleted before"
        raise CommitUnknown(f"{what}: {error}") from error
    if first != created:
        store.delete([created])
        raise StoreUnavailable(
            f"{first}: the experiment's first entry is gone, so nothing is written after it. Is the target still "
            "mounted, and does the experiment still exist?"
        )


def take_over(
    store: ObjectStore,
    journal: JournalKey,
    owner: Owner,
    stamp: Stamp,
    *,
    also: Callable[[Experiment], Sequence[Event]] = lambda _: (),
    known: Experiment | None = None,
) -> Experiment:
    """Open the experiment for `owner`: begin a new term. The same entry holds the events that `also` returns.

    `also` gets the experiment before it is opened. With `known`, only the last known entry is checked, and the
    entries after it are read; a journal known to be empty is read only if another writer has opened it since.

    In a race with an owner that still writes, or with another opener, this reads the new entries and tries the
    next number: the last to open is the owner, and the next write of every other one fails.

    Raises:
        ResumeFailed: the experiment is being deleted, and `also` does not continue that deletion.
        Superseded: other runs opened it first, 16 times.
    """
    lost: Superseded | None = None
    for _ in range(_RACES):
        found = _catch_up(store, known) if known else load(store, journal)
        if found.opened_at:
            opening = next_entry(store, journal, found.opened_at - 1)
            if opening is not None and opening.write_id == stamp.write_id:
                return found  # an earlier attempt of this same call succeeded, and its reply was lost
        opened = Opened(
            experiment=journal.experiment,
            generation=journal.generation,
            term=found.term + 1,
            owner=owner,
            at=stamp.at,
        )
        events = also(found)
        if found.is_removed and Deletion() not in events:
            raise ResumeFailed(f"{journal} is being deleted by {found.owner}: finish the deletion, or use another name")
        try:
            return append(store, found, [opened, *events], stamp)
        except Superseded as race:
            require_not_deleted(store, journal)  # that is no race
            lost, known = race, None
    raise Superseded(f"{journal}: lost {_RACES} races to open it") from lost


def _catch_up(store: ObjectStore, known: Experiment) -> Experiment:
    """Read what follows `known`; where the journal does not continue it, load the journal anew: it was replaced."""
    if not known.number:
        return known  # if a first entry exists by now, writing ours fails, and the journal is read then
    with suppress(JournalCorrupt):
        return _follow(store, known)
    return load(store, known.key)


# The owners of a journal's earlier terms.


def earlier_owners(store: ObjectStore, experiment: Experiment) -> Sequence[Owner]:
    """Return the owners before the present one, oldest first.

    Terms increase along the journal, so each is found by bisection: some log(entries) reads for each earlier term.

    Raises:
        JournalCorrupt: an entry is missing or altered.
        Superseded: the experiment was deleted.
    """
    key = experiment.key

    @cache
    def entry(number: int) -> Entry:
        path = key.entry_path(number)
        return decode_entry(read_listed(store, path), path)

    def owner_of(term: int) -> Owner | None:
        before = range(1, experiment.opened_at)
        opening = entry(before[bisect_left(before, term, key=lambda number: entry(number).term)])
        return next((event.owner for event in opening.events if isinstance(event, Opened)), None)

    with _unless_deleted(store, key):
        return [owner for owner in store.map(owner_of, range(1, experiment.term)) if owner is not None]


# A snapshot: the whole experiment after an entry, read in place of the entries up to that one.
#
# The first line is JSON that holds the experiment without its trials; then comes one line for each trial.
#
# The entries are the truth: a snapshot that is lost, damaged, or of another history or version costs time, and nothing
# else. So it is written after its entry, by any process, late, twice or not at all, and its failures are ignored. What
# a reader must check is the history: a snapshot counts only if its digest is that of its entry. A deleted experiment
# whose name is used again may have left a snapshot of other entries behind.
#
# The interval between two snapshots grows with the experiment, so that writing them costs about as much as the entries.

_TRIALS = TypeAdapter(list[Trial])
_INTERVAL = 200
_TRIALS_PER_ENTRY = 8


class _Head(Document):
    """The first line of a snapshot."""

    format: Literal["prefect-tune/snapshot"] = "prefect-tune/snapshot"
    version: Literal[1] = 1
    digest_of_trials: Digest
    """The digest of the bytes of all other lines."""
    experiment: Experiment
    """The experiment without trials."""


def interval_of(experiment: Experiment) -> int:
    """Return how many entries apart snapshots are: 200, 400, 800 … for up to 1600, 3200, 6400 … trials."""
    interval = _INTERVAL
    while interval * _TRIALS_PER_ENTRY < len(experiment.trials):
        interval *= 2
    return interval


def snapshot_is_due(experiment: Experiment, before: int) -> bool:
    """Return whether an interval has ended after entry `before`: a guest may have written the entry that ended it."""
    interval = interval_of(experiment)
    return experiment.number // interval > before // interval


def lacks_snapshot(experiment: Experiment) -> bool:
    """Return whether the end of a run should write a snapshot: 200 entries or more came after the last snapshot."""
    return experiment.number % interval_of(experiment) >= _INTERVAL


def write_snapshot(store: ObjectStore, experiment: Experiment) -> None:
    """Write the snapshot of `experiment`, and delete earlier ones; a failing target is ignored.

    It may run later, in another thread, twice, in several processes, in any order.
    """
    key, number = experiment.key, experiment.number
    if len(data := encode_snapshot(experiment)) > DOCUMENT_BYTES:
        return  # no reader would read it
    with suppress(StoreUnavailable, StoreRefused):
        store.put(key.snapshot_path(number), data)
        if earlier := [key.snapshot_path(each) for each in list_snapshots(store, key) if each < number]:
            store.delete(earlier)


def list_snapshots(store: ObjectStore, key: JournalKey) -> Sequence[int]:
    """Return the numbers of the snapshots that are listed, the last one first; they may be stale or unusable."""
    numbers = (number_in(key.snapshots, listed.path, "jsonl") for listed in store.list(key.snapshots))
    return sorted((number for number in numbers if number), reverse=True)


def encode_snapshot(experiment: Experiment) -> bytes:
    """Return the bytes of the snapshot of `experiment`."""
    # One trial at a time, so that no other thread waits long for the interpreter lock.
    lines = b"".join(trial.model_dump_json().encode() + b"\n" for trial in experiment.trials.values())
    bare = experiment.model_copy(update={"trials": TrialMap.of()})
    return seal(_Head(digest_of_trials=digest_of(lines), experiment=bare)) + b"\n" + lines


def read_snapshot(store: ObjectStore, key: JournalKey, number: int) -> Experiment | None:
    """Return the experiment in snapshot `number`; None if it does not exist, is damaged or has another version."""
    try:
        return decode_snapshot(read_document(store, key.snapshot_path(number), JournalCorrupt), key, number)
    except (ObjectNotFound, JournalCorrupt, UnknownVersion):
        return None


def decode_snapshot(data: Buffer, key: JournalKey, number: int) -> Experiment:
    """Return the experiment in snapshot `number`.

    Raises:
        JournalCorrupt: it is not what `encode_snapshot` returned for this number.
        UnknownVersion: another version of prefect-tune wrote it.
    """
    path = key.snapshot_path(number)
    first, _, lines = bytes(data).partition(b"\n")
    body, bare = verified(_Head, first, path, JournalCorrupt)
    if digest_of(lines) != body.get("digest_of_trials"):
        raise JournalCorrupt(f"{path}: its trials were altered since they were written ({len(lines)} bytes)")
    experiment = parse(_Head, bare, JournalCorrupt, path).experiment
    if (experiment.key, experiment.number) != (key, number):
        raise JournalCorrupt(f"{path}: holds {experiment.key} after entry {experiment.number}")
    try:
        trials = _TRIALS.validate_json(b"[" + lines.rstrip(b"\n").replace(b"\n", b",") + b"]")
    except ValidationError as invalid:
        raise JournalCorrupt(f"{path}: its trials cannot be read: {invalid}") from invalid
    return experiment.model_copy(update={"trials": TrialMap.of(trials)})
