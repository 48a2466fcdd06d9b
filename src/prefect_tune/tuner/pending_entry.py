"""The next entry of the journal: its events change the state at once; actions wait until the entry is written.

An entry holds all events that the search and its attempts have submitted since the previous entry (group commit). While
an entry is written, attempts submit events for the next entry; so a commit waits for the writes of at most two entries.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta

from prefect_tune.attempt.search_channel import EventsSubmitted
from prefect_tune.blocks import StorageTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import CommitUnknown, IllegalTransition, TuneError
from prefect_tune.core.experiment.experiment import Experiment, apply_event
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import is_snapshot_due, write_snapshot
from prefect_tune.core.journal.outbox import delete_posts
from prefect_tune.core.journal_events import Event, TrialEvent
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.values import WriteStamp
from prefect_tune.journal_access import JournalWriter
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.storage_retries import READ_TIMEOUT, with_store
from prefect_tune.tasks.checkpoints import delete_retired_checkpoints
from prefect_tune.tuner.search_policy import SearchPolicy

_STATUS_DELAY = timedelta(seconds=2)
"""How long a trial's changed status may stay unwritten, so that the starts in all slots share one entry."""


class BackgroundWorker:
    """Writes snapshots, and deletes objects that the journal has superseded, in a thread that ends after `close`.

    Maintenance deletes what this thread fails to delete.
    """

    def __init__(self, target: StorageTarget) -> None:
        self._target = target
        self._actions: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._posts_to_delete: queue.SimpleQueue[tuple[TrialKey, int, int]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write_snapshot(self, experiment: Experiment) -> None:
        """Write the snapshot of an experiment."""
        self._enqueue_action(lambda: with_store(self._target, lambda store: write_snapshot(store, experiment)))

    def delete_post(self, key: TrialKey, outbox: int, number: int) -> None:
        """Delete a post whose events the journal holds, together with all other posts that wait for deletion."""
        self._posts_to_delete.put((key, outbox, number))
        self._enqueue_action(self._delete_queued_posts)

    def _delete_queued_posts(self) -> None:
        if self._posts_to_delete.empty():
            return
        with self._target.open(timeout=READ_TIMEOUT) as store:  # no retries: maintenance deletes the rest
            delete_posts(store, [self._posts_to_delete.get() for _ in range(self._posts_to_delete.qsize())])

    def delete_checkpoints(self, key: TrialKey, trial: Trial, retired: Sequence[CheckpointKey]) -> None:
        """Delete checkpoints that the journal has retired in `trial`."""
        self._enqueue_action(lambda: delete_retired_checkpoints.fn(self._target, key, trial, retired))

    def close(self) -> None:
        """Make the thread end after all queued work; do not wait for the end."""
        self._actions.put(None)

    def _enqueue_action(self, action: Callable[[], object]) -> None:
        self._actions.put(action)
        if self._thread is None:
            run = copy_context().run
            self._thread = threading.Thread(target=run, args=(self._run_actions,), name="janitor", daemon=True)
            self._thread.start()

    def _run_actions(self) -> None:
        while (action := self._actions.get()) is not None:
            with suppress(TuneError):
                action()


class PendingEntry:
    """The experiment's state, including unwritten events, and the actions to run when these events are written."""

    def __init__(
        self,
        journal_writer: JournalWriter,
        policy: SearchPolicy,
        observer: SearchObserver,
        sync_period: timedelta,
        background_worker: BackgroundWorker,
    ) -> None:
        self._journal_writer = journal_writer
        self._policy = policy
        self.observer = observer
        self._sync_period = sync_period
        self._background_worker = background_worker
        self.state = journal_writer.experiment
        self._unwritten: list[Event] = []
        # Event count and stamp of a write that raised an error. The write may have succeeded, so repeat it unchanged.
        self._retried_write: tuple[int, WriteStamp] | None = None
        self._forcing_actions: list[Callable[[], None]] = []
        self._delayed_actions: list[Callable[[], None]] = []
        self._submitted: list[EventsSubmitted] = []
        self._has_stop_change = False
        self._synced_at = time.monotonic()
        self._status_changed_at: float | None = None  # when the first unwritten change of a status was made

    @property
    def has_unfinished_work(self) -> bool:
        """Whether there are actions to run promptly, such as requested starts, or submitted events to write."""
        return bool(self._forcing_actions) or bool(self._submitted)

    def add_event(self, event: Event) -> None:
        """Add `event` to the next entry; pass it to the observer, the search and the scheduler now."""
        self.add_events([event])

    def add_events(self, events: Sequence[Event]) -> None:
        """Add all `events` to the next entry, or none.

        Raises:
            IllegalTransition: the events cannot follow the state.
        """
        states = [self.state]
        for event in events:
            states.append(apply_event(states[-1], event, self._journal_writer.experiment.entry_count + 1))
        for event, state in zip(events, states[1:], strict=True):
            state_before, self.state = self.state, state
            # Write the events of a stop soon, since the requester of the stop waits until they are in the journal.
            self._has_stop_change |= (
                state.stop_requests != state_before.stop_requests or state.pending_stops != state_before.pending_stops
            )
            name = str(getattr(event, "trial", ""))
            trial, trial_before = state.trials.get(name), state_before.trials.get(name)
            if trial is not None and (trial_before is None or trial_before.status is not trial.status):
                self._status_changed_at = self._status_changed_at or time.monotonic()
            self._unwritten.append(event)
            self.observer.on_event(event, state)
            if (new_count := state.policy_event_count - state_before.policy_event_count) > 0:
                for past_event in state.trial(name).policy_events[-new_count:]:
                    self._policy.record(state.trial(name), past_event)
            if trial is not None and isinstance(event, TrialEvent):
                self._policy.record_training_time(name, trial.trained_seconds)

    def add_submitted(self, submitted: EventsSubmitted) -> None:
        """Add all events of an attempt to the next entry, or none; `submitted.entry_written` gets the written state."""
        try:
            self.add_events(submitted.events)
        except IllegalTransition as impossible:
            submitted.entry_written.set_exception(impossible)
            return
        except BaseException as error:  # such as an error of a scheduler
            submitted.entry_written.set_exception(_write_error_for_attempt(error))
            raise
        self._submitted.append(submitted)

    def run_after_forced_write(self, action: Callable[[], None]) -> None:
        """Call `action` once all present events are written, and force the next `write` to write them."""
        self._forcing_actions.append(action)

    def run_after_write(self, action: Callable[[], None]) -> None:
        """Call `action` once all present events are written; the next `write` may still defer the events."""
        self._delayed_actions.append(action)

    def drop_actions(self) -> None:
        """Drop the actions that wait for a write."""
        self._forcing_actions, self._delayed_actions = [], []

    def write(self, *, may_defer: bool) -> Experiment:
        """Write the pending events as one entry, then run the waiting actions; return the written experiment.

        Args:
            may_defer: whether events may wait unless a forced write, an attempt or a stop needs them. If so, they wait
                until `sync_period` after the last write or 2 s after a trial's status changed, whichever is earlier.
        """
        is_awaited = any(submitted.is_awaited for submitted in self._submitted)
        is_needed = is_awaited or self._forcing_actions or self._has_stop_change
        now, status_changed_at = time.monotonic(), self._status_changed_at
        is_due = now - self._synced_at >= self._sync_period.total_seconds() or (
            status_changed_at is not None and now - status_changed_at >= _STATUS_DELAY.total_seconds()
        )
        if self._unwritten and (is_needed or is_due or not may_defer):
            number_before = self._journal_writer.experiment.entry_count
            try:
                while self._unwritten:
                    self._retried_write = self._retried_write or (len(self._unwritten), new_write_stamp())
                    count, write_stamp = self._retried_write
                    self._journal_writer.write(self._unwritten[:count], write_stamp)
                    self._unwritten, self._retried_write = self._unwritten[count:], None
            except BaseException as error:
                for submitted in self._submitted:
                    submitted.entry_written.set_exception(_write_error_for_attempt(error))
                self._submitted = []
                raise
            self.state = self._journal_writer.experiment
            if is_snapshot_due(self.state, number_before):
                self._background_worker.write_snapshot(self.state)
            for submitted in self._submitted:
                submitted.entry_written.set_result(self.state)
            self._submitted = []
            self._forcing_actions, self._delayed_actions = [*self._delayed_actions, *self._forcing_actions], []
            self._has_stop_change, self._status_changed_at = False, None
            self.observer.on_entry_written(self.state)
            self._synced_at = time.monotonic()
        actions, self._forcing_actions = self._forcing_actions, []
        for action in actions:
            action()
        return self._journal_writer.experiment


def _write_error_for_attempt(error: BaseException) -> Exception:
    """Return the error for attempts that wait for a write: `error`, or `CommitUnknown` if the write was interrupted."""
    if isinstance(error, Exception):
        return error
    return CommitUnknown(f"the search was interrupted while it wrote its journal ({type(error).__name__})")
