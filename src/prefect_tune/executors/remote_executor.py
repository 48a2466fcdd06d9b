"""Executor of attempts on other machines: reads their journals, and answers them through the target."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeAlias

from prefect_tune.attempt.search_link import EntryWritten, LatestReport, StepReported
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.core.journal.journal import next_entry
from prefect_tune.core.journal_events import Entry, Opened, Reported, Started
from prefect_tune.core.messages.live_status import LiveStatus, RunningTrial, newest_live_status
from prefect_tune.core.messages.process_messages import Leave, Proceed, StopAndSave
from prefect_tune.core.messages.target_messages import UNASKED, answer, take_back
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.executors.remote_link import PoolSharing, StoreLink
from prefect_tune.executors.trial_executor import AttemptExited, Message, RemoteAttemptStarted
from prefect_tune.journal_access import experiment_id
from prefect_tune.storage_retries import on_target
from prefect_tune.stores.local.staging import transfer_pool

# Read the newest reports of attempts on other machines in the background: a slow target does not delay the search.

_STATUS_REQUEST = timedelta(seconds=20)


class LiveStatusReader:
    """Reads live statuses side by side, in a thread for each look; one look at a time. Best effort."""

    def __init__(self, target: StorageTarget) -> None:
        self._target = target
        self._found: queue.SimpleQueue[RunningTrial] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the last look is still under way."""
        return self._thread is not None and self._thread.is_alive()

    def look(self, journals: Sequence[JournalKey]) -> None:
        """Begin to read the live statuses of these journals, and return; those that cannot be read are left out."""
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._read, journals), name="live-status-reader", daemon=True
        )
        self._thread.start()

    def found(self) -> Sequence[RunningTrial]:
        """Return the attempts that were read since the last call."""
        found: list[RunningTrial] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._found.get_nowait())
        return found

    def _read(self, journals: Sequence[JournalKey]) -> None:
        with (
            suppress(StoreUnavailable, StoreRefused),
            self._target.open(timeout=_STATUS_REQUEST) as store,
            transfer_pool() as transfers,
        ):
            for live in transfers(lambda key: _live_status(store, key), journals):
                for each in live.trials if live is not None else ():
                    self._found.put(each)


def _live_status(store: ObjectStore, key: JournalKey) -> LiveStatus | None:
    with suppress(StoreUnavailable, StoreRefused):
        return newest_live_status(store, key)
    return None


_REQUEST = timedelta(seconds=60)
_UNREAD = timedelta(minutes=10)
"""How long reads of the target may fail before the search ends with their error."""


_Reply: TypeAlias = tuple[TrialKey, int, int, Proceed | Leave | StopAndSave]
"""To a trial, to its attempt, at its step."""


class AttemptLauncher(Protocol):
    """Launches attempts on other machines; a second launch with the same attempt number finds the first one."""

    @property
    def survives_search(self) -> bool:
        """Whether an attempt continues after the search that started it has ended."""
        ...

    def __call__(self, spec: TrialSpec, request: AttemptRequest, link: StoreLink, attempt: int) -> Callable[[], object]:
        """Launch; return a function that waits for the attempt's end, and raises its error if that is known."""
        ...

    def withdraw(self) -> None:
        """Cancel attempts that have not begun, where the launcher can; return without waiting."""
        ...


@dataclass
class _RemoteAttempt:
    spec: TrialSpec
    number: int
    milestone: int | None
    read: int
    """Number of the last entry that was read from its journal."""
    search_term: int = 0
    """The experiment's term of the search that reads it."""
    is_taken_over: bool = False
    """Whether a newer search has started the trial again: this one must not answer it any more."""
    looked_at: float = 0.0
    """When its live status was read last, in seconds of the monotonic clock."""
    unread_since: float | None = None
    """Since when reads of its journal fail, in seconds of the monotonic clock; None if the last one succeeded."""

    def is_to_look_at(self, now: float) -> bool:
        """Whether its live status is to be read again."""
        period = self.spec.sync.live_period
        return period is not None and now - self.looked_at >= period.total_seconds()

    def is_unread(self, now: float) -> bool:
        """Whether its journal may have entries that were not read; False after 10 minutes of errors."""
        return self.unread_since is not None and now - self.unread_since <= _UNREAD.total_seconds()

    def reply(self, step: int, said: Proceed | Leave | StopAndSave) -> _Reply:
        """Return the reply to this attempt at `step`."""
        return self.spec.trial, self.number, step, said

    def is_due(self, step: int) -> bool:
        """Whether the scheduler decides about the trial at `step`."""
        return self.milestone is not None and step >= self.milestone


class RemoteExecutor:
    """A `TrialExecutor` for attempts that share only the target with this process."""

    def __init__(self, target: StorageTarget, elsewhere: AttemptLauncher, look_every: timedelta) -> None:
        self._target = target
        self._elsewhere = elsewhere
        self._live = LiveStatusReader(target)
        self._look_every = look_every
        self._ends: queue.SimpleQueue[AttemptExited] = queue.SimpleQueue()
        self._attempts: dict[str, _RemoteAttempt] = {}
        self._experiment_id: str | None = None
        self._stopped = False
        self._unread_since: float | None = None
        self._over: list[AttemptExited] = []
        self._unsent: list[_Reply] = []

    @property
    def survives_search(self) -> bool:
        return self._elsewhere.survives_search

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, trial: str) -> bool:
        return trial in self._attempts

    def start(self, spec: TrialSpec, request: AttemptRequest, attempt: int, absorbed: int) -> None:
        """Start an attempt; read the entries of its journal after entry `absorbed`."""
        trial = spec.trial.trial
        on_target(self._target, lambda store: take_back(store, spec.trial, attempt), _REQUEST)
        sharing = PoolSharing(request.search_term, spec.reuse)
        link = StoreLink(self._target, spec.trial, attempt, spec.sync.live_period, sharing)
        wait = self._elsewhere(spec, replace(request, experiment_id=self._id_of(spec)), link, attempt)
        self._attempts[trial] = _RemoteAttempt(spec, attempt, request.milestone, absorbed, request.search_term)
        threading.Thread(target=copy_context().run, args=(self._await, trial, wait), daemon=True).start()

    def answer(self, trial: str, said: Proceed | Leave, step: int | None = None) -> None:
        """Write an answer for the trial to the target, with the next `poll`; do nothing if its attempt has ended."""
        attempt = self._attempts.get(trial)
        if attempt is None:
            return
        if isinstance(said, Proceed):
            attempt.milestone = said.milestone
        self._unsent.append(attempt.reply(UNASKED if step is None else step, said))

    def stop(self) -> None:
        """Have every trial save and end. After an error of the target, the next call writes to all of them again."""
        if not self._stopped:
            self._elsewhere.withdraw()
            self._send_queued()
            self._send([attempt.reply(UNASKED, StopAndSave()) for attempt in self._attempts.values()])
            self._stopped = True

    def poll(self, patience: timedelta) -> list[Message]:
        """Send the answers; return the new messages, and wait up to `patience` for the first.

        The end of an attempt is returned after all entries of its journal; while that cannot be read, later.
        """
        self._send_queued()
        end = time.monotonic() + patience.total_seconds()
        while True:
            self._wait_for_ends(min(self._look_every, timedelta(seconds=max(0.0, end - time.monotonic()))))
            messages = [*self._read_journals(), *self._latest()]
            over = [each for each in self._over if not self._attempts[each.trial].is_unread(time.monotonic())]
            self._over = [each for each in self._over if each not in over]
            if messages or over or time.monotonic() >= end:
                return [*messages, *over]

    def forget(self, trial: str) -> None:
        """Remove an attempt that has ended."""
        del self._attempts[trial]

    def _id_of(self, spec: TrialSpec) -> str:
        """Return the experiment's id; an attempt that starts after its experiment was deleted detects this by it."""
        if self._experiment_id is None:
            self._experiment_id = experiment_id(self._target, spec.trial.of_experiment)
        return self._experiment_id or ""

    def _await(self, trial: str, wait: Callable[[], object]) -> None:
        try:
            wait()
        except BaseException as error:  # noqa: BLE001  the driver handles any error of an attempt
            self._ends.put(AttemptExited(trial, error))
        else:
            self._ends.put(AttemptExited(trial))

    def _wait_for_ends(self, patience: timedelta) -> None:
        """Take over the attempts that have ended; wait up to `patience` for the first."""
        with suppress(queue.Empty):
            self._over.append(self._ends.get(timeout=patience.total_seconds()))
            while True:
                self._over.append(self._ends.get_nowait())

    def _read_journals(self) -> list[Message]:
        """Return the messages of new entries in all journals. If the target fails, a later call reads the rest."""
        read: list[tuple[_RemoteAttempt, Sequence[Entry]]] = []
        failed: list[StoreUnavailable | StoreRefused] = []
        attempts, now = [*self._attempts.values()], time.monotonic()
        for each in attempts:
            each.unread_since = each.unread_since or now  # until it is read
        with _noted(failed), self._target.open(timeout=_REQUEST) as store, transfer_pool() as transfers:
            read += zip(attempts, transfers(partial(_new_entries, store, failed), attempts), strict=True)
        target_works = len(failed) < len(read)  # at least one read succeeded
        self._note_unread(() if target_works else failed)
        return [message for attempt, entries in read for entry in entries for message in self._said_in(entry, attempt)]

    def _note_unread(self, failed: Sequence[StoreUnavailable | StoreRefused]) -> None:
        """Take note of the errors of the reads just made. Raises the first one after reads failed for `_UNREAD`."""
        if not failed:
            self._unread_since = None
            return
        if self._unread_since is None:
            logging.getLogger("prefect_tune").warning("the journals of remote trials are read later: %s", failed[0])
            self._unread_since = time.monotonic()
        if time.monotonic() - self._unread_since > _UNREAD.total_seconds():
            raise failed[0]

    def _latest(self) -> Iterator[LatestReport]:
        """Yield the newest reports that were read since the last call; the journals of the attempts have them later.

        Each attempt's is read once every `live_period`, in the background.
        """
        now = time.monotonic()
        if not self._live.is_busy and (due := [each for each in self._attempts.values() if each.is_to_look_at(now)]):
            for each in due:
                each.looked_at = now
            self._live.look([each.spec.journal for each in due])
        for found in self._live.found():
            attempt = self._attempts.get(found.trial)
            if attempt is not None and attempt.number == found.attempt and found.report and found.reported_at:
                yield LatestReport(found.trial, found.report, found.reported_at)

    def _said_in(self, entry: Entry, attempt: _RemoteAttempt) -> list[Message]:
        trial = attempt.spec.trial.trial
        messages: list[Message] = [EntryWritten(trial, entry.number, entry.events, entry.at)]
        for event in entry.events:
            match event:
                case Opened(owner=owner):
                    attempt.is_taken_over = owner.search_term > attempt.search_term
                case _ if attempt.is_taken_over:
                    pass
                case Started():
                    messages += self._begun(attempt, event)
                case Reported(report=report, asks=asks):
                    is_due = attempt.is_due(report.step)
                    if asks and not is_due:  # its request predates the latest decision
                        self._unsent.append(attempt.reply(report.step, Proceed(milestone=attempt.milestone)))
                    messages.append(StepReported(trial, report, asks and is_due))
                case _:
                    pass
        return messages

    def _begun(self, attempt: _RemoteAttempt, started: Started) -> list[Message]:
        """Note the attempt's number: it is new if a task runner reran a dead worker's task, with the old request."""
        is_another = started.attempt != attempt.number
        attempt.number = started.attempt
        if is_another and self._stopped:
            self._unsent.append(attempt.reply(UNASKED, StopAndSave()))
        return [RemoteAttemptStarted(started.trial)] if is_another or attempt.is_due(started.from_step) else []

    def _send_queued(self) -> None:
        self._send(self._unsent)
        self._unsent = []

    def _send(self, replies: Sequence[_Reply]) -> None:
        """Write replies side by side, since each takes a round trip on an object store; of two for a step the first."""
        first = {reply[:3]: reply for reply in reversed(replies)}

        def send(store: ObjectStore) -> None:
            with transfer_pool() as transfers:
                for _ in transfers(lambda reply: answer(store, *reply), first.values()):
                    pass

        if replies:
            on_target(self._target, send, _REQUEST)


@contextmanager
def _noted(failed: list[StoreUnavailable | StoreRefused]) -> Iterator[None]:
    """Add an error of the target to `failed` instead of raising it."""
    try:
        yield
    except (StoreUnavailable, StoreRefused) as error:
        failed.append(error)


def _new_entries(
    store: ObjectStore, failed: list[StoreUnavailable | StoreRefused], attempt: _RemoteAttempt
) -> Sequence[Entry]:
    """Read the entries of an attempt's journal that were not read yet, up to the first error of the target."""
    entries: list[Entry] = []
    with _noted(failed):
        while (entry := next_entry(store, attempt.spec.journal, attempt.read)) is not None:
            attempt.read = entry.number
            entries.append(entry)
        attempt.unread_since = None
    return entries
