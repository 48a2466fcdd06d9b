"""The journal's next entry: events apply to the state at once, actions run after the entry is written.

One entry holds the events of the search and of all attempts that have submitted some since the entry before (group
commit). While it is written, others submit events for the next one; so a commit waits for two entries at most.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta

from prefect_tune.attempt.search_link import EventsSubmitted
from prefect_tune.blocks import StorageTarget
from prefect_tune.clock import new_write_id
from prefect_tune.core.errors import CommitUnknown, IllegalTransition, TuneError
from prefect_tune.core.experiment.experiment import Experiment, after_event
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import snapshot_is_due, write_snapshot
from prefect_tune.core.journal.outbox import delete_posts
from prefect_tune.core.journal_events import Event, TrialEvent
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.values import Stamp
from prefect_tune.journal_access import JournalWriter
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.storage_retries import READ_TIMEOUT, on_target
from prefect_tune.tasks.checkpoints import delete_retired_checkpoints
from prefect_tune.tuner.search_policy import SearchPolicy

_STATUS_DELAY = timedelta(seconds=2)
"""How long a changed status of a trial waits at most: long enough for the starts of all slots to share an entry."""


class Janitor:
    """Writes snapshots, and deletes what the journal has made superfluous, in a thread that ends after `close`.

    What it fails to delete, maintenance deletes.
    """

    def __init__(self, target: StorageTarget) -> None:
        self._target = target
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._posts: queue.SimpleQueue[tuple[TrialKey, int, int]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write_snapshot(self, experiment: Experiment) -> None:
        """Write the snapshot of an experiment."""
        self._start(lambda: on_target(self._target, lambda store: write_snapshot(store, experiment)))

    def delete_post(self, key: TrialKey, outbox: int, number: int) -> None:
        """Delete a post whose events the journal holds, and with it all others that wait for their deletion."""
        self._posts.put((key, outbox, number))
        self._start(self._delete_posts)

    def _delete_posts(self) -> None:
        if self._posts.empty():
            return
        with self._target.open(timeout=READ_TIMEOUT) as store:  # without retries: maintenance finds what is left
            posts: list[tuple[TrialKey, int, int]] = []
            while not self._posts.empty():
                posts.append(self._posts.get())
            delete_posts(store, posts)

    def delete_checkpoints(self, key: TrialKey, trial: Trial, retired: Sequence[CheckpointKey]) -> None:
        """Delete checkpoints that the journal has retired in `trial`."""
        self._start(lambda: delete_retired_checkpoints.fn(self._target, key, trial, retired))

    def close(self) -> None:
        """Take no more work, and end once the present work is done; does not wait."""
        self._work.put(None)

    def _start(self, act: Callable[[], object]) -> None:
        self._work.put(act)
        if self._thread is None:
            run = copy_context().run
            self._thread = threading.Thread(target=run, args=(self._run,), name="janitor", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (act := self._work.get()) is not None:
            with suppress(TuneError):
                act()


class PendingEntry:
    """The state of the experiment with its unwritten events, and the actions that wait for their write."""

    def __init__(
        self,
        journal_writer: JournalWriter,
        policy: SearchPolicy,
        listener: SearchObserver,
        sync_period: timedelta,
        janitor: Janitor,
    ) -> None:
        self._journal_writer = journal_writer
        self._policy = policy
        self.listener = listener
        self._sync_period = sync_period
        self._janitor = janitor
        self.state = journal_writer.experiment
        self._unwritten: list[Event] = []
        self._tried: tuple[int, Stamp] | None = None  # a failed write, which may have arrived: it is repeated as it was
        self._then: list[Callable[[], None]] = []
        self._after_entry: list[Callable[[], None]] = []
        self._submitted: list[EventsSubmitted] = []
        self._is_asked_after = False
        self._synced_at = time.monotonic()
        self._status_changed_at: float | None = None  # the first change that is not written yet

    @property
    def is_awaited(self) -> bool:
        """Whether an action or an attempt waits for the next write."""
        return bool(self._then) or bool(self._submitted)

    def put(self, event: Event) -> None:
        """Add `event` to the next entry; pass it to the listener, the search and the scheduler now."""
        self.put_all([event])

    def put_all(self, events: Sequence[Event]) -> None:
        """Add events to the next entry, all or none.

        Raises:
            IllegalTransition: they cannot follow the state.
        """
        states = [self.state]
        for event in events:
            states.append(after_event(states[-1], event, self._journal_writer.experiment.number + 1))
        for event, state in zip(events, states[1:], strict=True):
            self._put(event, state)

    def submit(self, submitted: EventsSubmitted) -> None:
        """Add the events of an attempt to the next entry, all or none; `submitted.written` gets the state after it."""
        try:
            self.put_all(submitted.events)
        except IllegalTransition as impossible:
            submitted.written.set_exception(impossible)
            return
        except BaseException as error:  # such as one of a scheduler
            submitted.written.set_exception(_error_for_attempt(error))
            raise
        self._submitted.append(submitted)

    def refuse(self, error: BaseException) -> None:
        """Let the attempts whose events wait know that these are not written."""
        for submitted in self._submitted:
            submitted.written.set_exception(_error_for_attempt(error))
        self._submitted = []

    def _put(self, event: Event, state: Experiment) -> None:
        earlier, self.state = self.state, state
        # The sender of a stop request looks in the journal for the answer, and then for the end.
        self._is_asked_after |= state.stop_requests != earlier.stop_requests or state.stops != earlier.stops
        name = str(getattr(event, "trial", ""))
        trial, trial_before = state.trials.get(name), earlier.trials.get(name)
        if trial is not None and (trial_before is None or trial_before.status is not trial.status):
            self._status_changed_at = self._status_changed_at or time.monotonic()
        self._unwritten.append(event)
        self.listener.applied(event, state)
        if state.past_count > earlier.past_count:
            for past_event in state.trial(name).past[earlier.past_count - state.past_count :]:
                self._policy.record(state.trial(name), past_event)
        if trial is not None and isinstance(event, TrialEvent):
            self._policy.note_training(name, trial.trained_seconds)

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` once every event so far is written."""
        self._then.append(act)

    def after_entry(self, act: Callable[[], None]) -> None:
        """Call `act` once every event so far is written, without asking for an entry."""
        self._after_entry.append(act)

    def drop_actions(self) -> None:
        """Call none of the actions that wait for an entry."""
        self._then, self._after_entry = [], []

    def write(self, *, may_wait: bool) -> Experiment:
        """Write the pending events as one entry, then run the waiting actions; return the experiment as written.

        Args:
            may_wait: whether events that no action, no attempt and no stop request waits for may stay unwritten until
                `sync_period` has passed since the last write, or 2 s since a trial's status changed.
        """
        is_awaited = self._then or self._is_asked_after or any(each.is_awaited for each in self._submitted)
        now, changed_at = time.monotonic(), self._status_changed_at
        is_due = now - self._synced_at >= self._sync_period.total_seconds() or (
            changed_at is not None and now - changed_at >= _STATUS_DELAY.total_seconds()
        )
        if self._unwritten and (is_awaited or is_due or not may_wait):
            before = self._journal_writer.experiment.number
            try:
                while self._unwritten:
                    self._tried = self._tried or (len(self._unwritten), new_write_id())
                    count, stamp = self._tried
                    self._journal_writer.write(self._unwritten[:count], stamp)
                    self._unwritten, self._tried = self._unwritten[count:], None
            except BaseException as error:
                self.refuse(error)
                raise
            self.state = self._journal_writer.experiment
            if snapshot_is_due(self.state, before):
                self._janitor.write_snapshot(self.state)
            for submitted in self._submitted:
                submitted.written.set_result(self.state)
            self._submitted = []
            self._then, self._after_entry = [*self._after_entry, *self._then], []
            self._is_asked_after = False
            self._status_changed_at = None
            self.listener.wrote(self.state)
            self._synced_at = time.monotonic()
        acts, self._then = self._then, []
        for act in acts:
            act()
        return self._journal_writer.experiment


def _error_for_attempt(error: BaseException) -> Exception:
    """Return the error of a write for the attempts that wait for it: an interruption leaves its outcome unknown."""
    if isinstance(error, Exception):
        return error
    return CommitUnknown(f"the search was interrupted while it wrote its journal ({type(error).__name__})")
