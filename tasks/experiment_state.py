"""The tasks that open an experiment's journal and write its next entry, each with retries and a timeout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from prefect import task
from prefect.logging import get_run_logger

from prefect_tune.blocks import StorageTarget, TargetCheck
from prefect_tune.core.checkpoints.commit import ParallelMap
from prefect_tune.core.errors import (
    JournalCorrupt,
    ObjectNotFound,
    ResumeFailed,
    StoreRefused,
    StoreUnavailable,
    Superseded,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.journal.journal import LoadedJournal, append, entries_beyond, read, take_over
from prefect_tune.core.journal.segments import write_due_segment
from prefect_tune.core.journal_events.experiment_events import Event, Owner
from prefect_tune.core.messages.live_status import last_known_steps
from prefect_tune.core.models import Stamp, digest_of
from prefect_tune.core.recovery.adopt_saves import adopt
from prefect_tune.core.storage.documents import read_document
from prefect_tune.core.storage.experiment_listing import no_experiment
from prefect_tune.core.storage.layout import JournalKey, journal_key
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.storage_retries import CHECKING, RETRYING, skip_prefect_introspection, with_retries
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.supervisor.journal_writer import EntryListener
from prefect_tune.supervisor.run_identity import new_write_id
from prefect_tune.tasks.dead_attempts import settle_dead_attempts
from prefect_tune.tasks.on_target import on_target

_TIMEOUT = timedelta(minutes=2)


@task(name="check-target", task_run_name="check {target.uri}", **CHECKING)
def check_target(target: StorageTarget) -> TargetCheck:
    """Test by writing and reading whether `target` can store checkpoints safely; an error says why not, in one line.

    Raises:
        StoreRefused: it cannot, or not with this configuration.
        StoreUnavailable: it did not answer, and all retries failed.
    """
    found = target.check(timeout=timedelta(seconds=30))
    if found.may_pass:
        raise StoreUnavailable(found.message)
    if not found.ok:
        raise StoreRefused(found.message)
    if not found.conditional_create:
        get_run_logger().warning("%s", found.message)
    return found


@task(name="restore-experiment-state", task_run_name="open {experiment}", **RETRYING)
def restore_experiment_state(
    target: StorageTarget,
    experiment: str,
    owner: Owner,
    stamp: Stamp,
    known: LoadedJournal | None = None,
) -> Experiment:
    """Open `experiment` for `owner` and return its state; from now on every earlier owner's writes fail.

    A checkpoint whose save was killed between its manifest and its journal entry is adopted, and running trials
    become waiting ones. An experiment that does not exist yet is opened as an empty one.

    Args:
        target: the storage target.
        experiment: the experiment's name on the target.
        owner: the flow run and process that open it, named in messages of superseded owners.
        stamp: write id and time of the entry that records the opening.
        known: the experiment, if the caller has just read it; saves a second read.

    Raises:
        ResumeFailed: it exists and its journal is damaged or of an unknown version. Nothing was started.
        Superseded: other processes opened it first, again and again.
        StoreRefused: the target refuses access; retried within `retrying_refusals`.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        return _opened(store, journal_key(experiment), target, Opening(owner, stamp, known=known), transfers)


@dataclass(frozen=True, slots=True)
class Opening:
    """Arguments of opening a journal: the new owner, additional events of its entry, a listener of the entries."""

    owner: Owner
    stamp: Stamp
    also: Callable[[Experiment], Sequence[Event]] = lambda _: ()
    listener: EntryListener = lambda _events, _experiment: None
    known: LoadedJournal | None = None
    """The journal, if the caller has just read it; saves a second read."""
    reached: Mapping[str, int] = field(default_factory=dict)
    """The last steps that trials are known to have trained which the journal may not have, by its earlier owner."""


class _BehindError(Exception):
    """The opener was superseded by a newer request: trying again cannot succeed."""


def _opened(
    store: ObjectStore, key: JournalKey, target: StorageTarget, opening: Opening, transfers: ParallelMap
) -> Experiment:
    said: Sequence[Event] | None = None
    before = nothing_yet(key)

    def also(found: Experiment) -> Sequence[Event]:
        nonlocal said, before
        if found.owner is not None and opening.owner.is_behind(found.owner):
            raise _BehindError(f"{key}: a newer request replaced this one, and {found.owner} executes it")
        said, before = opening.also(found), found
        return said

    try:
        opened = take_over(
            store, key, opening.owner, opening.stamp, side_by_side=transfers, also=also, known=opening.known
        )
        if said is None:  # an earlier try wrote the entry, and perhaps later ones, but the reply was lost
            _hear_again(store, opened, opening.listener, transfers)
        else:
            opening.listener([opened.opened_by(), *said], opened)
        settle_dead_attempts(before, opening.owner)
        if opened.settled_from == opened.opened_at:
            return opened
        reached = {**opening.reached, **last_known_steps(store, opened)}
        adopted = adopt(store, opened, reached=reached, side_by_side=transfers)
        after = append_entry(store, opened, adopted, _second(opening.stamp))
    except _BehindError as behind:
        raise Superseded(str(behind)) from behind
    except (JournalCorrupt, UnknownVersion) as error:
        raise ResumeFailed(f"{key} at {target.uri}: {error}. Nothing was started, and nothing is lost") from error
    opening.listener(adopted, after)
    return after


def _hear_again(store: ObjectStore, opened: Experiment, listener: EntryListener, transfers: ParallelMap) -> None:
    """Pass the stored entries to the listener: this process does not know all events that the earlier try wrote."""
    for entry in entries_beyond(store, opened.key, opened.opened_at - 1, side_by_side=transfers):
        listener(entry.events, opened.model_copy(update={"number": entry.number}))


def open_journal(target: StorageTarget, key: JournalKey, opening: Opening) -> Experiment:
    """Open a trial's own journal as `restore_experiment_state` opens the experiment's, within the calling task.

    Raises as `restore_experiment_state`; `Superseded`, without writing anything, also if the journal was opened
    for a newer request than that of `opening.owner`.
    """
    tries = iter([opening])

    def open_it() -> Experiment:
        # `known` holds for the first try only: that try may have written an entry and lost the reply.
        this_time = next(tries, replace(opening, known=None))
        with target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
            return _opened(store, key, target, this_time, transfers)

    return with_retries(open_it)


def _second(stamp: Stamp) -> Stamp:
    """The stamp of the entry after the first: a retry of the task recognizes both."""
    return Stamp(write_id=f"{stamp.write_id}-adopted", at=stamp.at)


@task(name="sync-experiment-state", task_run_name="journal {experiment.name}", **RETRYING)
def sync_experiment_state(
    target: StorageTarget,
    experiment: Experiment,
    events: Sequence[Event],
    stamp: Stamp,
) -> Experiment:
    """Write `events` as the next journal entry of `experiment` and return the state after it.

    On return the entry is durable, and this process was still the owner when it was written.

    Args:
        target: the storage target.
        experiment: the state after the previous entry.
        events: the events of the entry, in order.
        stamp: write id and time of the entry. A try with the same write id is the same entry.

    Raises:
        Superseded: another process owns the experiment now.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with target.open(timeout=_TIMEOUT) as store:
        return append_entry(store, experiment, events, stamp)


def append_entry(store: ObjectStore, experiment: Experiment, events: Sequence[Event], stamp: Stamp) -> Experiment:
    """Write the next entry, and the segment that ends with it, if one does. Raises as `journal.append`."""
    after = append(store, experiment, events, stamp)
    write_due_segment(store, after)
    return after


def write_entry(
    target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None = None
) -> Experiment:
    """Run `sync_experiment_state`, with a new stamp unless one is given. Raises as that task does."""
    return sync_experiment_state(
        target, skip_prefect_introspection(experiment), skip_prefect_introspection(events), stamp or new_write_id()
    )


def write_directly(
    target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None = None
) -> Experiment:
    """Write an entry as `write_entry` does, but without a task run: a search writes too often for one per entry."""
    once = stamp or new_write_id()
    return on_target(target, lambda store: append_entry(store, experiment, events, once))


def experiment_id(target: StorageTarget, experiment: str) -> str | None:
    """Return the digest of the journal's first entry; None if there is no such experiment. Costs one request.

    It is unique: an experiment that was deleted and created again under the same name has another one.
    """

    def look(store: ObjectStore) -> str | None:
        try:
            return digest_of(read_document(store, journal_key(experiment).entry_path(1), JournalCorrupt))
        except ObjectNotFound:
            return None

    return on_target(target, look)


def read_experiment(target: StorageTarget, experiment: str) -> Experiment:
    """Return the state of `experiment` without opening it, for read-only use."""
    return read_journal(target, experiment).experiment


def read_journal(target: StorageTarget, experiment: str) -> LoadedJournal:
    """Read the journal of `experiment`, to be passed as `known` to `restore_experiment_state` without a second read."""
    with target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        return read(store, experiment, side_by_side=transfers)


def no_experiment_at(target: StorageTarget, experiment: str) -> str:
    """Return the message that there is no `experiment` on `target`, with a similar name if there is one."""
    with target.open(timeout=_TIMEOUT) as store:
        return no_experiment(store, experiment, target.uri)
