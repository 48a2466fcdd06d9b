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
from prefect_tune.core.values import WriteStamp, hash_bytes
from prefect_tune.prefect_api.task_runs import mark_task_runs_crashed
from prefect_tune.storage_retries import READ_TIMEOUT, with_retries, with_store


def make_process_owner(*, attempt: int = 0) -> Owner:
    """Return an `Owner` that identifies this process; the `Superseded` error of an earlier owner names it."""
    return Owner(
        name=flow_run.name or "a script",
        host=socket.gethostname(),
        pid=os.getpid(),
        flow_run=flow_run.id,
        task_run=task_run.id,
        attempt=attempt,
    )


def has_process_ended(owner: Owner) -> bool:
    """Return whether an owner was a process of this machine that has exited; False if its pid is in use again."""
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
        """Write the next entry, which is durable when this method returns; return the state after the entry.

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
    """Write an entry like `write_entry`, but without a task run, because a search writes too many entries for that.

    This function writes no snapshot, because the search writes snapshots in the background.
    """
    write_stamp = stamp or new_write_stamp()
    return with_store(target, lambda store: append_events(store, experiment, events, write_stamp))


def read_experiment_id(target: StorageTarget, experiment: JournalKey) -> str | None:
    """Return the digest of the journal's first entry; None if there is no such experiment. This takes one request.

    The digest is unique: an experiment that is created after a deletion, under the same name, has another digest.
    """

    def read_digest(store: ObjectStore) -> str | None:
        try:
            return hash_bytes(read_document(store, experiment.entry_path(1), JournalCorrupt))
        except ObjectNotFound:
            return None

    return with_store(target, read_digest)


def read_experiment(target: StorageTarget, experiment: JournalKey) -> Experiment:
    """Return the state of `experiment`, for read-only use."""
    with target.open(timeout=READ_TIMEOUT) as store:
        return load_experiment(store, experiment)


def read_experiment_by_name(target: StorageTarget, experiment: str) -> Experiment:
    """Return the state of the experiment with the name `experiment`, from its current journal."""
    with target.open(timeout=READ_TIMEOUT) as store:
        return load_experiment(store, find_current_journal(store, experiment))


def missing_experiment_message(target: StorageTarget, experiment: str) -> str:
    """Return the message that there is no `experiment` on `target`, with a similar name if the target has one."""
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
    """Read the journal like `read_experiment_to_resume`, but raise `StoreRefused` unchanged, for callers that retry it.

    Raises:
        ResumeFailed: the journal is damaged, or of an unknown version.
        StoreRefused: the target refuses access.
    """
    with raising_resume_failed(target, experiment):
        return read_experiment_by_name(target, experiment)


@contextmanager
def raising_resume_failed(target: StorageTarget, experiment: str, *others: type[TuneError]) -> Iterator[None]:
    """Raise `ResumeFailed` in place of the errors that an unreadable journal raises, and in place of `others`."""
    unreadable: tuple[type[TuneError], ...] = (JournalCorrupt, UnknownVersion, *others)
    try:
        yield
    except unreadable as error:
        raise ResumeFailed(f"experiment {experiment!r} at {target.uri}: {error}. Nothing was started") from error


# Take over a journal: become its owner, adopt the previous owner's saves, and set that owner's attempts to Crashed.


@dataclass(frozen=True, slots=True)
class OwnershipRequest:
    """The arguments of a takeover: the new owner, and a function that returns more events for the takeover's entry."""

    owner: Owner
    stamp: WriteStamp
    events_for: Callable[[Experiment], Sequence[Event]] = lambda _: ()
    loaded: Experiment | None = None
    """The state of the experiment, if the caller has just read it; the takeover then reads only newer entries."""


def acquire_and_adopt(
    store: ObjectStore, key: JournalKey, target: StorageTarget, request: OwnershipRequest
) -> Experiment:
    """Take over the journal `key` on `store` without retries; see `acquire_and_adopt_with_retries`."""
    before: Experiment | None = None

    def collect_events(state: Experiment) -> Sequence[Event]:
        nonlocal before
        before = state
        return request.events_for(state)

    try:
        owner, stamp = request.owner, request.stamp
        state_after = acquire_ownership(store, key, owner, stamp, events_for=collect_events, loaded=request.loaded)
        if before is not None:  # it is None if an earlier try wrote the entry, but its reply was lost
            mark_dead_attempts_crashed(before, owner)
        # The second entry has its own stamp, so that a retry of the task recognizes both entries.
        adoption_stamp = WriteStamp(write_id=f"{stamp.write_id}-adopted", at=stamp.at)
        return adopt_unjournaled_saves(store, state_after, adoption_stamp)
    except (JournalCorrupt, UnknownVersion) as error:
        raise ResumeFailed(f"{key} at {target.uri}: {error}. Nothing was started, and nothing is lost") from error


def adopt_unjournaled_saves(store: ObjectStore, experiment: Experiment, stamp: WriteStamp) -> Experiment:
    """Journal the saves that the previous owner has not journaled, unless the present owner has already done so."""
    if experiment.last_adopting_term == experiment.term:
        return experiment
    events = make_adoption_events(store, experiment, last=read_last_reports(store, experiment))
    return append_entry(store, experiment, events, stamp)


def acquire_and_adopt_with_retries(target: StorageTarget, key: JournalKey, request: OwnershipRequest) -> Experiment:
    """Take over a journal like the task `acquire_experiment`, but within the calling task. Raises like that task."""
    requests = iter([request])

    def try_to_acquire() -> Experiment:
        # After the first try, `loaded` may be stale, since that try may have written an entry whose reply was lost.
        next_request = next(requests, replace(request, loaded=None))
        with target.open(timeout=READ_TIMEOUT) as store:
            return acquire_and_adopt(store, key, target, next_request)

    return with_retries(try_to_acquire)


_ATTEMPT_TASK_KEY_PREFIXES = ("run_attempt-", "run_trial-")
"""The tasks that run attempts have `task_key`s with these prefixes, in a search and in a user's own flow."""
_owners_of_this_process: set[Owner] = set()
"""The `Owner` values with which this process took over journals. Task runs of their attempts stay Running."""


def mark_dead_attempts_crashed(before: Experiment, owner: Owner) -> None:
    """Set to Crashed the task runs of those attempts that were running in `before`, the state before the takeover.

    A daemon thread does this, so the process can exit at once; errors of the Prefect server are ignored. An attempt
    whose flow run is alive keeps its state, and ends by itself as soon as it detects that it was superseded. If the
    thread finds later that the flow run has ended, the thread sets the attempt's task run to Crashed.
    """
    owner_before, is_own = before.owner, before.owner in _owners_of_this_process
    _owners_of_this_process.add(owner)
    running = [trial for trial in before.trials.values() if trial.status is Status.RUNNING and trial.outbox is None]
    if is_own or owner_before is None or not running:
        return
    is_same_run = owner_before.flow_run == owner.flow_run
    _mark_attempts_crashed(owner_before, owner, (owner.attempt or flow_run.run_count) if is_same_run else None)


def mark_attempt_crashed(supervisor: Owner, owner: Owner) -> None:
    """Set the task run of an attempt on another machine to Crashed, after `owner` has closed the attempt's outbox."""
    if supervisor.task_run is not None:
        _mark_attempts_crashed(supervisor, owner, None)


def _mark_attempts_crashed(dead_owner: Owner, owner: Owner, run_count: int | None) -> None:
    if dead_owner.flow_run is None:
        return
    is_same_run = dead_owner.flow_run == owner.flow_run  # then the flow run was restarted after the dead owner's end
    successor = "the trial's next attempt" if run_count is None else f"run {run_count} of this flow run"
    if not is_same_run:
        successor = f"flow run {owner.name!r}" if owner.flow_run else str(owner)
    threading.Thread(
        target=copy_context().run,
        args=(mark_task_runs_crashed, dead_owner.flow_run, make_attempt_filter(dead_owner, run_count)),
        kwargs={"successor": successor, "has_owner_exited": is_same_run or has_process_ended(dead_owner)},
        name="settle-dead-attempts",
        daemon=True,
    ).start()


def make_attempt_filter(owner: Owner, run_count: int | None) -> Callable[[TaskRun], bool]:
    """Return a function that tells whether a task run of the owner's flow run is an attempt of `owner`.

    Args:
        owner: the owner of the journal, or the supervisor of one attempt, with the id of its task run.
        run_count: if the flow run was restarted, its present run count, because task runs with this count belong to a
            later owner. None if the flow run was not restarted.
    """

    def is_attempt(run: TaskRun) -> bool:
        if owner.task_run is not None:
            return str(run.id) == owner.task_run
        is_earlier = run_count is None or (run.start_time is not None and run.flow_run_run_count < run_count)
        return is_earlier and run.task_key.startswith(_ATTEMPT_TASK_KEY_PREFIXES)

    return is_attempt
