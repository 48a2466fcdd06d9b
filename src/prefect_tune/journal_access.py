"""Open, read and write the journals of experiments on a target, with retries."""

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
from prefect_tune.clock import new_write_id
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
from prefect_tune.core.journal.journal import append, load, snapshot_is_due, take_over, write_snapshot
from prefect_tune.core.journal_events import Event, Owner
from prefect_tune.core.messages.target_messages import last_known_reports
from prefect_tune.core.restore import adopt
from prefect_tune.core.storage.documents import read_document
from prefect_tune.core.storage.generations import current_journal, no_experiment
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp, digest_of
from prefect_tune.prefect_api.task_runs import set_crashed
from prefect_tune.storage_retries import READ_TIMEOUT, on_target, with_retries


def current_owner(*, attempt: int = 0) -> Owner:
    """Return the identity of this process, for the messages of owners that it supersedes."""
    return Owner(
        name=flow_run.name or "a script",
        host=socket.gethostname(),
        pid=os.getpid(),
        flow_run=flow_run.id,
        task_run=task_run.id,
        attempt=attempt,
    )


def has_process_ended(owner: Owner) -> bool:
    """Whether an owner was a process of this machine that has ended; False if its number is in use again."""
    if owner.host != socket.gethostname():
        return False
    try:
        with suppress(PermissionError):
            os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    return False


EntryWriter: TypeAlias = Callable[[StorageTarget, Experiment, Sequence[Event], Stamp | None], Experiment]


class JournalWriter:
    """Writes journal entries and holds the state after the last one. Not thread-safe."""

    def __init__(self, target: StorageTarget, experiment: Experiment, writer: EntryWriter) -> None:
        self.target = target
        self.experiment = experiment
        self._writer = writer

    def write(self, events: Sequence[Event], stamp: Stamp | None = None) -> Experiment:
        """Write the next entry and return the state after it: durable, with this process still the owner.

        Raises:
            Superseded: another process owns the journal now.
            StoreUnavailable, CommitUnknown: all retries failed; writing the same entry again with the same stamp
                is safe.
        """
        self.experiment = self._writer(self.target, self.experiment, events, stamp)
        return self.experiment


def append_entry(store: ObjectStore, experiment: Experiment, events: Sequence[Event], stamp: Stamp) -> Experiment:
    """Write the next entry, and the snapshot after it, if one is due. Raises as `journal.append`."""
    after = append(store, experiment, events, stamp)
    if snapshot_is_due(after, experiment.number):
        write_snapshot(store, after)
    return after


def write_directly(
    target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None = None
) -> Experiment:
    """Write an entry as `write_entry` does, but without a task run: a search writes too often for one per entry.

    The search writes snapshots itself, in the background.
    """
    once = stamp or new_write_id()
    return on_target(target, lambda store: append(store, experiment, events, once))


def experiment_id(target: StorageTarget, experiment: JournalKey) -> str | None:
    """Return the digest of the journal's first entry; None if there is no such experiment. Costs one request.

    It is unique: an experiment that was deleted and created again under the same name has another one.
    """

    def look(store: ObjectStore) -> str | None:
        try:
            return digest_of(read_document(store, experiment.entry_path(1), JournalCorrupt))
        except ObjectNotFound:
            return None

    return on_target(target, look)


def read_experiment(target: StorageTarget, experiment: JournalKey) -> Experiment:
    """Return the state of `experiment` without opening it, for read-only use."""
    with target.open(timeout=READ_TIMEOUT) as store:
        return load(store, experiment)


def read_journal(target: StorageTarget, experiment: str) -> Experiment:
    """Find the journal that the name `experiment` means now, and read it, to be passed on as `known`."""
    with target.open(timeout=READ_TIMEOUT) as store:
        return load(store, current_journal(store, experiment))


def no_experiment_at(target: StorageTarget, experiment: str) -> str:
    """Return the message that there is no `experiment` on `target`, with a similar name if there is one."""
    with target.open(timeout=READ_TIMEOUT) as store:
        return no_experiment(store, experiment, target.uri)


def read_known(target: StorageTarget, experiment: str) -> Experiment:
    """Read the journal of `experiment`, before it is opened.

    Raises:
        ResumeFailed: it cannot be read, and retries do not help.
    """
    with failing_to_resume(target, experiment, StoreRefused):
        return read_journal(target, experiment)


def read_undamaged(target: StorageTarget, experiment: str) -> Experiment:
    """As `read_known`, for a caller that retries refusals.

    Raises:
        ResumeFailed: it is damaged, or of an unknown version.
        StoreRefused: the target refuses access.
    """
    with failing_to_resume(target, experiment):
        return read_journal(target, experiment)


@contextmanager
def failing_to_resume(target: StorageTarget, experiment: str, *others: type[TuneError]) -> Iterator[None]:
    """Raise `ResumeFailed` in place of the errors of a journal that cannot be read, and in place of these others."""
    unreadable: tuple[type[TuneError], ...] = (JournalCorrupt, UnknownVersion, *others)
    try:
        yield
    except unreadable as error:
        raise ResumeFailed(f"experiment {experiment!r} at {target.uri}: {error}. Nothing was started") from error


# Open a journal: become its owner, adopt what the owner before it has saved, and show its attempts as dead.


@dataclass(frozen=True, slots=True)
class Opening:
    """Arguments of opening a journal: the new owner, and additional events of its entry."""

    owner: Owner
    stamp: Stamp
    also: Callable[[Experiment], Sequence[Event]] = lambda _: ()
    known: Experiment | None = None
    """The journal, if the caller has just read it; saves a second read."""


def opened_journal(store: ObjectStore, key: JournalKey, target: StorageTarget, opening: Opening) -> Experiment:
    """Open the journal `key` on `store`, once; see `open_journal`."""
    before: Experiment | None = None

    def also(found: Experiment) -> Sequence[Event]:
        nonlocal before
        before = found
        return opening.also(found)

    try:
        opened = take_over(store, key, opening.owner, opening.stamp, also=also, known=opening.known)
        if before is not None:  # else an earlier try has written the entry, and its reply was lost
            settle_dead_attempts(before, opening.owner)
        # The stamp of the second entry: a retry of the task recognizes both.
        second = Stamp(write_id=f"{opening.stamp.write_id}-adopted", at=opening.stamp.at)
        return adopt_unjournaled(store, opened, second)
    except (JournalCorrupt, UnknownVersion) as error:
        raise ResumeFailed(f"{key} at {target.uri}: {error}. Nothing was started, and nothing is lost") from error


def adopt_unjournaled(store: ObjectStore, opened: Experiment, stamp: Stamp) -> Experiment:
    """Journal what the owner before has saved and not journaled, unless that has been done."""
    if opened.adopted_in == opened.term:
        return opened
    adopted = adopt(store, opened, last=last_known_reports(store, opened))
    return append_entry(store, opened, adopted, stamp)


def open_journal(target: StorageTarget, key: JournalKey, opening: Opening) -> Experiment:
    """Open a journal as the task `open_experiment` does, within the calling task. Raises as that task."""
    tries = iter([opening])

    def open_it() -> Experiment:
        # `known` holds for the first try only: that try may have written an entry and lost the reply.
        this_time = next(tries, replace(opening, known=None))
        with target.open(timeout=READ_TIMEOUT) as store:
            return opened_journal(store, key, target, this_time)

    return with_retries(open_it)


_KEYS_OF_ATTEMPTS = ("run_attempt-", "run_trial-")
"""Begin Prefect's keys of the tasks that run attempts, of a search and of a flow of one's own: their names in code."""
_opened_here: set[Owner] = set()
"""The owners with which this process has opened journals: their attempts end by themselves."""


def settle_dead_attempts(before: Experiment, owner: Owner) -> None:
    """Set the task runs of attempts that were running when `owner` took the journal over to Crashed, in a thread.

    An attempt whose flow run is alive keeps its state: it ends by itself as soon as it finds that it was superseded. If
    the flow run is found dead later, while this process lives, the attempt is set to Crashed then. The thread does not
    delay the end of the process; errors of the Prefect server change nothing.

    Args:
        before: the experiment before the takeover.
        owner: the new owner.
    """
    dead, is_own = before.owner, before.owner in _opened_here
    _opened_here.add(owner)
    running_there = [each for each in before.trials.values() if each.status is Status.RUNNING and each.outbox is None]
    if is_own or dead is None or not running_there:
        return
    is_same_run = dead.flow_run == owner.flow_run
    _set_crashed(dead, owner, (owner.attempt or flow_run.run_count) if is_same_run else None)


def set_attempt_crashed(supervisor: Owner, owner: Owner) -> None:
    """Do the same for one attempt on another machine, which `owner` has fenced off."""
    if supervisor.task_run is not None:
        _set_crashed(supervisor, owner, None)


def _set_crashed(dead: Owner, owner: Owner, run_count: int | None) -> None:
    if dead.flow_run is None:
        return
    is_same_run = dead.flow_run == owner.flow_run  # Prefect starts a run again once it has ended
    successor = "the trial's next attempt" if run_count is None else f"run {run_count} of this flow run"
    if not is_same_run:
        successor = f"flow run {owner.name!r}" if owner.flow_run else str(owner)
    threading.Thread(
        target=copy_context().run,
        args=(set_crashed, dead.flow_run, attempts_of(dead, run_count)),
        kwargs={
            "successor": successor,
            "has_ended": is_same_run or has_process_ended(dead),
        },
        name="settle-dead-attempts",
        daemon=True,
    ).start()


def attempts_of(owner: Owner, run_count: int | None) -> Callable[[TaskRun], bool]:
    """Return whether a task run of its flow run is an attempt of `owner`.

    Args:
        owner: the owner of the journal, or the supervisor of one attempt, which names its task run.
        run_count: how often the flow run was started, if it is running again: its present attempts are not those of
            `owner`. None if it is not.
    """

    def is_attempt(run: TaskRun) -> bool:
        if owner.task_run is not None:
            return str(run.id) == owner.task_run
        is_earlier = run_count is None or (run.start_time is not None and run.flow_run_run_count < run_count)
        return is_earlier and run.task_key.startswith(_KEYS_OF_ATTEMPTS)

    return is_attempt
