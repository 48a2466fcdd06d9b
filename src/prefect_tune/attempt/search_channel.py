"""The connection of an attempt to its search, by which the attempt sends events and requests, and gets decisions.

    search in this process      SubmittingJournal ──► the driver's next entry; `write` waits until it is written
    search in another process   OutboxJournal     ──► numbered posts on the target, which the owner journals later
    the user's own flow         WritingJournal    ──► the journal of the experiment, which the flow run owns

An event is durable when `write` returns. Only then is a save acknowledged to the trial, or a checkpoint deleted.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

from prefect_tune.attempt.processes.process_channel import TrialChannel
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import SaveOvertaken, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial, apply_trial_event
from prefect_tune.core.journal.outbox import Post, read_post, write_post
from prefect_tune.core.journal_events import AttemptEvent, Owner, StepReported
from prefect_tune.core.messages.process_messages import ContinueTraining, Start, StopTrial
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport, WriteStamp
from prefect_tune.journal_access import JournalWriter
from prefect_tune.storage_retries import READ_TIMEOUT, with_store

Answer: TypeAlias = ContinueTraining | StopTrial
_MAX_UNREAD_POSTS = 1000


class TrialJournal(ABC):
    """Journals the events of one attempt in order. A second thread may call `add_report` during other calls."""

    deletes_retired = True
    """Whether the attempt deletes retired checkpoints. If not, the owner does so after it has journaled the events."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        """The state of the trial after its last durable events."""

    @abstractmethod
    def add_report(self, event: StepReported) -> None:
        """Journal a report soon, at the latest in the next `write` that includes its step. Never blocks."""

    @abstractmethod
    def list_unjournaled_reports(self, step: int) -> Sequence[StepReport]:
        """Return the reports up to `step` that may not be durable yet."""

    @abstractmethod
    def write(self, events: Sequence[AttemptEvent], *, up_to: int | None = None) -> None:
        """Journal the reports up to step `up_to` (None: all), then `events`; return when all are durable.

        Raises:
            Superseded: another process owns the experiment, or trains the trial.
            SaveOvertaken: another task of the same flow changed the trial's checkpoints; nothing was written.
            StoreUnavailable, StoreRefused, CommitUnknown: all retries failed; another call is safe.
        """

    @abstractmethod
    def flush(self) -> None:
        """Journal the queued reports. Raises the same errors as `write`."""

    def get_flush_interval(self, sync: SyncConfig) -> timedelta:
        """Return the time until the next call of `flush`."""
        return sync.sync_period


@dataclass(frozen=True, slots=True)
class EventsSubmitted:
    """Events of an attempt for the driver's next entry."""

    trial: str
    events: tuple[AttemptEvent, ...]
    is_awaited: bool
    """Whether the attempt waits for the entry. If not, the events can wait until the driver writes other events."""
    entry_written: Future[Experiment] = field(default_factory=Future)
    """Completes with the state of the experiment after the entry, or with the error of the write."""


class SubmittingJournal(TrialJournal):
    """Submits the events of an attempt to the driver of its search."""

    def __init__(self, trial: Trial, submit: Callable[[EventsSubmitted], None]) -> None:
        super().__init__(trial)
        self._submit = submit
        self._reports: deque[tuple[StepReport, Future[Experiment]]] = deque()  # another thread reads copies of it

    def add_report(self, event: StepReported) -> None:
        submitted = EventsSubmitted(event.trial, (event,), is_awaited=False)
        while self._reports and _is_durable(self._reports[0][1]):  # reports become durable in the order of the calls
            self._reports.popleft()
        self._reports.append((event.report, submitted.entry_written))
        self._submit(submitted)

    def list_unjournaled_reports(self, step: int) -> Sequence[StepReport]:
        return [report for report, written in self._reports.copy() if report.step <= step and not _is_durable(written)]

    def flush(self) -> None:
        """Do nothing, because `add_report` has already submitted each report."""

    def write(self, events: Sequence[AttemptEvent], *, up_to: int | None = None) -> None:
        del up_to  # all reports are already submitted
        submitted = EventsSubmitted(self.trial.id, tuple(events), is_awaited=True)
        self._submit(submitted)
        self.trial = submitted.entry_written.result().trial(self.trial.id)


def _is_durable(written: Future[Experiment]) -> bool:
    return written.done() and written.exception() is None


class _BufferedJournal(TrialJournal):
    """Queues reports until `write` or `flush`. If a write raises, but may have succeeded, the next call repeats it."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self._queued_reports: list[StepReported] = []
        self._pending_entry: tuple[tuple[AttemptEvent, ...], WriteStamp] | None = None

    def add_report(self, event: StepReported) -> None:
        self._queued_reports.append(event)

    def list_unjournaled_reports(self, step: int) -> Sequence[StepReport]:
        pending = self._pending_entry[0] if self._pending_entry is not None else ()
        reports = (event.report for event in (*pending, *self._queued_reports) if isinstance(event, StepReported))
        return [report for report in reports if report.step <= step]

    def write(self, events: Sequence[AttemptEvent], *, up_to: int | None = None) -> None:
        self._write_pending_entry()
        reports = [event for event in self._queued_reports if up_to is None or event.report.step <= up_to]
        del self._queued_reports[: len(reports)]  # the other thread appends only at the end
        if all_events := (*reports, *events):
            self._pending_entry = all_events, new_write_stamp()
            self._write_pending_entry()

    def flush(self) -> None:
        if self._queued_reports or self._pending_entry:
            self.write(())

    def _write_pending_entry(self) -> None:
        if self._pending_entry is not None:
            events = self._pending_entry[0]
            try:
                self.trial = self._write_events(*self._pending_entry)
            except SaveOvertaken:  # nothing was written, so queue the reports again
                self._queued_reports[:0] = [event for event in events if isinstance(event, StepReported)]
                self._pending_entry = None
                raise
            self._pending_entry = None

    @abstractmethod
    def _write_events(self, events: Sequence[AttemptEvent], stamp: WriteStamp) -> Trial:
        """Write the events unless they are already written; return the trial after them."""


class OutboxJournal(_BufferedJournal):
    """Posts the events of an attempt to the outbox of its trial (`core/journal/outbox`)."""

    deletes_retired = False

    def __init__(self, target: StorageTarget, key: TrialKey, trial: Trial) -> None:
        super().__init__(trial)
        if trial.outbox is None:
            raise ValueError(f"trial {trial.id!r} has no outbox")
        self._target, self._key, self._outbox = target, key, trial.outbox
        self._post_count = 0
        self._has_unread_posts = False
        """Whether the post `_MAX_UNREAD_POSTS` before the newest still exists, so no search has read and deleted it."""

    def get_flush_interval(self, sync: SyncConfig) -> timedelta:
        """Return the time between posts: short while a search reads posts to show the newest step, otherwise longer."""
        live, sync_period = sync.live_period, sync.sync_period
        if live is None or (self._has_unread_posts and sync_period < _MAX_UNREAD_POSTS / 2 * live):
            return sync_period  # no search waits for newer posts
        return min(sync_period, live)

    def check_closed(self, store: ObjectStore) -> bool:
        """Return whether an owner has ended this attempt, and so rejects its next post. Sends one request."""
        post = read_post(store, self._key, self._outbox, self._post_count + 1)
        return post is not None and bool(post.closed_by)

    def _write_events(self, events: Sequence[AttemptEvent], stamp: WriteStamp) -> Trial:
        trial = self.trial
        for event in events:
            trial = apply_trial_event(trial, event)
        post = Post(write_id=stamp.write_id, at=stamp.at, events=tuple(events))
        with_store(self._target, lambda store: write_post(store, self._key, self._outbox, self._post_count + 1, post))
        self._post_count += 1
        earlier = self._post_count - _MAX_UNREAD_POSTS
        if earlier > 1 and (self._has_unread_posts or not self._post_count % _MAX_UNREAD_POSTS):  # post 1 always exists
            # Ignore errors, because the new post is already durable.
            with suppress(TuneError, OSError), self._target.open(timeout=READ_TIMEOUT) as store:
                self._has_unread_posts = store.size(self._key.post_path(self._outbox, earlier)) is not None
        return trial


class WritingJournal(_BufferedJournal):
    """Writes the events of an attempt as entries of its experiment's journal."""

    def __init__(self, trial: str, journal_writer: JournalWriter) -> None:
        super().__init__(journal_writer.experiment.trial(trial))
        self._journal_writer = journal_writer

    def _write_events(self, events: Sequence[AttemptEvent], stamp: WriteStamp) -> Trial:
        return self._journal_writer.write(events, stamp).trial(self.trial.id)


@dataclass(frozen=True, slots=True)
class DecisionAwaited:
    """A trial waits for a decision about the report of a step."""

    trial: str
    report: StepReport


TrialMessage: TypeAlias = DecisionAwaited | EventsSubmitted


class SearchChannel(ABC):
    """The attempt's side of the connection to its search. Keeps answers that arrive before `subscribe`."""

    requests_decisions_by_report = False
    """Whether a journaled report itself requests the decision, because the search runs in another process."""

    def __init__(self) -> None:
        self.run_stop = threading.Event()
        """Set when the whole run stops; the trial then saves and ends within its grace period."""
        self._guard = threading.Lock()
        self._early_answers: list[Answer] = []
        self._on_answer: Callable[[Answer], None] | None = None

    @property
    def supervisor(self) -> Owner | None:
        """This process, which the journal names as the attempt's supervisor; None if it runs the search, too."""
        return None

    @abstractmethod
    def make_journal(self, spec: TrialSpec, request: AttemptRequest) -> TrialJournal:
        """Return the journal for the attempt's events. Raises Superseded if the experiment was deleted."""

    @abstractmethod
    def open_process(
        self, start: Start, log: Log, environment: Mapping[str, str]
    ) -> AbstractContextManager[TrialChannel]:
        """Open a process in which the attempt trains."""

    @abstractmethod
    def expect_decision(self, report: StepReport) -> None:
        """Expect a decision about this report; if this process runs the search, request the decision. Never blocks."""

    def start_polling(self) -> None:  # noqa: B027 - within one process, the driver sets `run_stop`
        """Start to poll for answers of the search, before the attempt trains."""

    def subscribe(self, on_answer: Callable[[Answer], None]) -> None:
        """Call `on_answer` with each answer, including earlier answers."""
        with self._guard:
            self._on_answer = on_answer
            for answer in self._early_answers:
                on_answer(answer)

    def send_answer(self, answer: Answer) -> None:
        """Deliver an answer to the trial, immediately or at `subscribe`."""
        with self._guard:
            if self._on_answer is None:
                self._early_answers.append(answer)
            else:
                self._on_answer(answer)

    def close(self) -> None:  # noqa: B027 - within one process, no resources to release
        """Release the resources of the channel when the attempt is over."""


class InProcessChannel(SearchChannel):
    """Connects an attempt to a search in this process: calls `receive` with each message, in the sender's thread."""

    def __init__(self, trial: str, receive: Callable[[TrialMessage], None], pool: TrialProcessPool) -> None:
        super().__init__()
        self.trial, self._receive, self._pool = trial, receive, pool
        self._journal: SubmittingJournal | None = None

    def open_process(
        self, start: Start, log: Log, environment: Mapping[str, str]
    ) -> AbstractContextManager[TrialChannel]:
        return self._pool.open_process(start, log, environment, self.run_stop)

    def make_journal(self, spec: TrialSpec, request: AttemptRequest) -> TrialJournal:
        """Return the journal of the trial; a retry of the task gets the same journal."""
        del spec
        if self._journal is None:
            self._journal = SubmittingJournal(request.trial, self._receive)
        return self._journal

    def expect_decision(self, report: StepReport) -> None:
        self._receive(DecisionAwaited(self.trial, report))
