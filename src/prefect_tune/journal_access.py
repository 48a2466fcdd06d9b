"""Read, write and take over the journals of experiments on a target, with retries."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TypeAlias

from prefect.client.schemas.objects import TaskRun
from prefect.runtime import flow_run, task_run

from prefect_tune.blocks import StorageTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import (
    JournalCorrupt,
    ObjectNotFound,
    ResumeFailed,
    StoreRefused,
    TuneError,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal.journal import (
    acquire_ownership,
    append_events,
    is_snapshot_due,
    load_experiment,
    write_snapshot,
)
from prefect_tune.core.journal_events import Event, Owner
from prefect_tune.core.messages.target_messages import read_last_reports
from prefect_tune.core.restore import make_adoption_events
from prefect_tune.core.storage.documents import read_document
from prefect_tune.core.storage.generations import find_current_journal, no_experiment_message
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import WriteStamp, digest_of
from prefect_tune.prefect_api.task_runs import mark_task_runs_crashed
from prefect_tune.storage_retries import READ_TIMEOUT, with_retries, with_store


def current_owner(*, attempt: int = 0) -> Owner:
    """Return the identity of this process, which its superseded predecessors name in messages."""
    return Owner(
        name=flow_run.name or "a script",
        host=socket.gethostname(),
        pid=os.getpid(),
        flow_run=flow_run.id,
        task_run=task_run.id,
        attempt=attempt,
    )


def has_process_ended(owner: Owner) -> bool:
    """Return whether an owner was a process of this machine that has ended; False if its pid is in use again."""
    if owner.host != socket.gethostname():
        return False
    try:
        with suppress(PermissionError):
            os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    return False


EntryWriter: TypeAlias = Callable[[StorageTarget, Experiment, Sequence[Event], WriteStamp | None], Experiment]


class JournalWriter:
    """Writes journal entries and holds the state after the last entry. Not thread-safe."""

    def __init__(self, target: StorageTarget, experiment: Experiment, writer: EntryWriter) -> None:
        self.target = target
        self.experiment = experiment
        self._writer = writer

    def write(self, events: Sequence[Event], stamp: WriteStamp | None = None) -> Experiment:
        """Write the next entry, durably, while this process is the owner; return the state after it.

        Raises:
            Superseded: another process owns the journal now.
            StoreUnavailable, CommitUnknown: all retries failed; writing the same entry again with the same stamp
                is safe.
        """
        self.experiment = self._writer(self.target, self.experiment, events, stamp)
        return self.experiment


def append_entry(store: ObjectStore, experiment: Experiment, events: Sequence[Event], stamp: WriteStamp) -> Experiment:
    """Write the next entry, and a snapshot after it if one is due. Raises like `journal.append_events`."""
    after = append_events(store, experiment, events, stamp)
    if is_snapshot_due(after, experiment.entry_count):
        write_snapshot(store, after)
    return after


def write_entry_directly(
    target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: WriteStamp | None = None
) -> Experiment:
    """Write an entry like `write_entry`, but without a task run: a search writes too often for a task run per entry.

    The search itself writes snapshots, in the background.
    """
    write_stamp = stamp or new_write_stamp()
    return with_store(target, lambda store: append_events(store, experiment, events, write_stamp))


def experiment_id(target: StorageTarget, experiment: JournalKey) -> str | None:
    """Return the digest of the journal's first entry; None if there is no such experiment. Sends one request.

    The digest is unique: it changes if an experiment is deleted and created again under the same name.
    """

    def read_digest(store: ObjectStore) -> str | None:
        try:
            return digest_of(read_document(store, experiment.entry_path(1), JournalCorrupt))
        except ObjectNotFound:
            return None

    return with_store(target, read_digest)


def read_experiment(target: StorageTarget, experiment: JournalKey) -> Experiment:
    """Return the state of `experiment`, for read-only use."""
    with target.open(timeout=READ_TIMEOUT) as store:
        return load_experiment(store, experiment)


def read_experiment_by_name(target: StorageTarget, experiment: str) -> Experiment:
    """Find the current journal of the name `experiment`, and return its state."""
    with target.open(timeout=READ_TIMEOUT) as store:
        return load_experiment(store, find_current_journal(store, experiment))


def missing_experiment_message(target: StorageTarget, experiment: str) -> str:
    """Return the message that there is no `experiment` on `target`, with a similar name if there is one."""
    with target.open(timeout=READ_TIMEOUT) as store:
        return no_experiment_message(store, experiment, target.uri)


def read_experiment_to_resume(target: StorageTarget, experiment: str) -> Experiment:
    """Read the journal of `experiment` before a takeover.

    Raises:
        ResumeFailed: the journal cannot be read, and retries do not help.
    """
    with raising_resume_failed(target, experiment, StoreRefused):
        return read_experiment_by_name(target, experiment)


def read_experiment_raising_refusals(target: StorageTarget, experiment: str) -> Experiment:
    """Read the journal like `read_experiment_to_resume`, for a caller that retries refusals.

    Raises:
        ResumeFailed: the journal is damaged, or of an unknown version.
        StoreRefused: the target refuses access.
    """
    with raising_resume_failed(target, experiment):
        return read_experiment_by_name(target, experiment)


@contextmanager
def raising_resume_failed(target: StorageTarget, experiment: str, *others: type[TuneError]) -> Iterator[None]:
    """Raise `ResumeFailed` in place of the errors of an unreadable journal, and in place of `others`."""
    unreadable: tuple[type[TuneError], ...] = (JournalCorrupt, UnknownVersion, *others)
    try:
        yield
    except unreadable as error:
        raise ResumeFailed(f"experiment {experiment!r} at {target.uri}: {error}. Nothing was started") from error


# Take over a journal: become its owner, adopt the previous owner's saves, and set its attempts to Crashed.


@dataclass(frozen=True, slots=True)
class OwnershipRequest:
    """Arguments of a takeover: the new owner, and additional events of its entry."""

    owner: Owner
    stamp: WriteStamp
    events_for: Callable[[Experiment], Sequence[Event]] = lambda _: ()
    loaded: Experiment | None = None
    """The state, if the caller has just read the journal; saves a second read."""


def acquire_and_adopt(
    store: ObjectStore, key: JournalKey, target: StorageTarget, opening: OwnershipRequest
) -> Experiment:
    """Take over the journal `key` on `store` without retries; see `acquire_and_adopt_with_retries`."""
    before: Experiment | None = None

    def collect_events(state: Experiment) -> Sequence[Event]:
        nonlocal before
        before = state
        return opening.events_for(state)

    try:
        state_after = acquire_ownership(
            store, key, opening.owner, opening.stamp, events_for=collect_events, loaded=opening.loaded
        )
        if before is not None:  # None: an earlier try wrote the entry, and the reply was lost
            set_dead_attempts_crashed(before, opening.owner)
        # The second entry has its own stamp, so that a retry of the task recognizes both entries.
        adoption_stamp = WriteStamp(write_id=f"{opening.stamp.write_id}-adopted", at=opening.stamp.at)
        return adopt_unjournaled_saves(store, state_after, adoption_stamp)
    except (JournalCorrupt, UnknownVersion) as error:
        raise ResumeFailed(f"{key} at {target.uri}: {error}. Nothing was started, and nothing is lost") from error


def adopt_unjournaled_saves(store: ObjectStore, opened: Experiment, stamp: WriteStamp) -> Experiment:
    """Journal the saves that the previous owner has not journaled, unless this term has done so already."""
    if opened.last_adopting_term == opened.term:
        return opened
    adopted = make_adoption_events(store, opened, last=read_last_reports(store, opened))
    return append_entry(store, opened, adopted, stamp)


def acquire_and_adopt_with_retries(target: StorageTarget, key: JournalKey, opening: OwnershipRequest) -> Experiment:
    """Take over a journal like the task `acquire_experiment`, but within the calling task. Raises like that task."""
    tries = iter([opening])

    def try_to_open() -> Experiment:
        # `loaded` is valid only for the first try, which may have written an entry and lost the reply.
        this_time = next(tries, replace(opening, loaded=None))
        with target.open(timeout=READ_TIMEOUT) as store:
            return acquire_and_adopt(store, key, target, this_time)

    return with_retries(try_to_open)


_ATTEMPT_TASK_KEY_PREFIXES = ("run_attempt-", "run_trial-")
"""Prefect's keys of the tasks that run attempts, of a search and of a user's own flow, begin with these names."""
_owners_of_this_process: set[Owner] = set()
"""The owners with which this process has taken over journals; their attempts end by themselves."""


def set_dead_attempts_crashed(before: Experiment, owner: Owner) -> None:
    """Set the task runs of attempts that were running when `owner` took over the journal to Crashed, in a thread.

    An attempt whose flow run is alive keeps its state: it ends by itself as soon as it detects that it was superseded.
    If the flow run turns out to be dead while this process lives, the attempt is set to Crashed then. The thread does
    not delay the end of the process; errors of the Prefect server change nothing.

    Args:
        before: the experiment before the takeover.
        owner: the new owner.
    """
    owner_before, is_own = before.owner, before.owner in _owners_of_this_process
    _owners_of_this_process.add(owner)
    running = [trial for trial in before.trials.values() if trial.status is Status.RUNNING and trial.outbox is None]
    if is_own or owner_before is None or not running:
        return
    is_same_run = owner_before.flow_run == owner.flow_run
    _set_attempts_crashed(owner_before, owner, (owner.attempt or flow_run.run_count) if is_same_run else None)


def set_attempt_crashed(supervisor: Owner, owner: Owner) -> None:
    """Set the task run of one attempt on another machine, which `owner` has fenced, to Crashed."""
    if supervisor.task_run is not None:
        _set_attempts_crashed(supervisor, owner, None)


def _set_attempts_crashed(dead_owner: Owner, owner: Owner, run_count: int | None) -> None:
    if dead_owner.flow_run is None:
        return
    is_same_run = dead_owner.flow_run == owner.flow_run  # Prefect restarts a run only after it has ended
    successor = "the trial's next attempt" if run_count is None else f"run {run_count} of this flow run"
    if not is_same_run:
        successor = f"flow run {owner.name!r}" if owner.flow_run else str(owner)
    threading.Thread(
        target=copy_context().run,
        args=(mark_task_runs_crashed, dead_owner.flow_run, make_attempt_filter(dead_owner, run_count)),
        kwargs={
            "successor": successor,
            "has_owner_exited": is_same_run or has_process_ended(dead_owner),
        },
        name="settle-dead-attempts",
        daemon=True,
    ).start()


def make_attempt_filter(owner: Owner, run_count: int | None) -> Callable[[TaskRun], bool]:
    """Return a predicate: whether a task run of the owner's flow run is an attempt of `owner`.

    Args:
        owner: the owner of the journal, or the supervisor of one attempt, which names its task run.
        run_count: the run count of the flow run if it is running again: then its present attempts are not attempts of
            `owner`. None if it is not running again.
    """

    def is_attempt(run: TaskRun) -> bool:
        if owner.task_run is not None:
            return str(run.id) == owner.task_run
        is_earlier = run_count is None or (run.start_time is not None and run.flow_run_run_count < run_count)
        return is_earlier and run.task_key.startswith(_ATTEMPT_TASK_KEY_PREFIXES)

    return is_attempt
