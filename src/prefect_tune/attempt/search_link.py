"""The link between an attempt and its search: journal events and questions go up, answers come down.

    search, same process    SubmittedEvents ──► the driver's next entry, of which `write` waits for the end
    search, elsewhere       Outbox          ──► numbered posts on the target, which the owner journals later
    flow of one's own       WrittenEntries  ──► the journal of the experiment, which the flow run owns

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
from prefect_tune.clock import new_write_id
from prefect_tune.core.errors import SaveOvertaken, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial, after
from prefect_tune.core.journal.outbox import Post, read_post, write_post
from prefect_tune.core.journal_events import AttemptEvent, Owner, Reported
from prefect_tune.core.messages.process_messages import Leave, Proceed, Start
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp, StepReport
from prefect_tune.journal_access import JournalWriter
from prefect_tune.storage_retries import READ_TIMEOUT, on_target

Answer: TypeAlias = Proceed | Leave
_UNREAD_POSTS = 1000


class TrialJournal(ABC):
    """Journals the events of one attempt, in order. `report` may be called beside the other methods, by one thread."""

    deletes_retired = True
    """Whether the attempt deletes what it retires; else the owner does, after it has journaled that."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        """The trial after the last events that are durable."""

    @abstractmethod
    def report(self, event: Reported) -> None:
        """Journal a report with the next events, or soon. Never blocks."""

    @abstractmethod
    def unjournaled(self, step: int) -> Sequence[StepReport]:
        """Return the reports up to `step` that are not known to be durable."""

    @abstractmethod
    def write(self, events: Sequence[AttemptEvent], *, up_to: int | None = None) -> None:
        """Journal the reports up to step `up_to` (None: all), then `events`; return when all of them are durable.

        Raises:
            Superseded: another process owns the experiment, or trains the trial.
            SaveOvertaken: another task of one's own flow has changed the trial's checkpoints; nothing was written.
            StoreUnavailable, StoreRefused, CommitUnknown: all retries failed; calling it again is safe.
        """

    @abstractmethod
    def flush(self) -> None:
        """Journal the reports that wait. Raises as `write`."""

    def flush_period(self, sync: SyncConfig) -> timedelta:
        """Return after which time to call `flush` again."""
        return sync.sync_period


@dataclass(frozen=True, slots=True)
class EventsSubmitted:
    """Events of an attempt, for the driver's next entry; `written` gets the experiment after it, or its error."""

    trial: str
    events: tuple[AttemptEvent, ...]
    is_awaited: bool
    """Whether the attempt waits for the entry; reports may wait for one that has another cause."""
    written: Future[Experiment] = field(default_factory=Future)


class SubmittedEvents(TrialJournal):
    """Submits the events of an attempt to the driver of its search."""

    def __init__(self, trial: Trial, submit: Callable[[EventsSubmitted], None]) -> None:
        super().__init__(trial)
        self._submit = submit
        self._reports: deque[tuple[StepReport, Future[Experiment]]] = deque()  # another thread reads a copy

    def report(self, event: Reported) -> None:
        submitted = EventsSubmitted(event.trial, (event,), is_awaited=False)
        while self._reports and _is_durable(self._reports[0][1]):  # entries are written in the order of the reports
            self._reports.popleft()
        self._reports.append((event.report, submitted.written))
        self._submit(submitted)

    def unjournaled(self, step: int) -> Sequence[StepReport]:
        return [report for report, written in self._reports.copy() if report.step <= step and not _is_durable(written)]

    def flush(self) -> None:
        """Do nothing: no report waits here."""

    def write(self, events: Sequence[AttemptEvent], *, up_to: int | None = None) -> None:
        del up_to  # the reports were submitted before
        submitted = EventsSubmitted(self.trial.trial, tuple(events), is_awaited=True)
        self._submit(submitted)
        self.trial = submitted.written.result().trial(self.trial.trial)


def _is_durable(written: Future[Experiment]) -> bool:
    return written.done() and written.exception() is None


class _Buffered(TrialJournal):
    """Reports wait for the next events, or for `flush`. After an unknown outcome the same write is made again."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self._waiting: list[Reported] = []
        self._unsettled: tuple[tuple[AttemptEvent, ...], Stamp] | None = None

    def report(self, event: Reported) -> None:
        self._waiting.append(event)

    def unjournaled(self, step: int) -> Sequence[StepReport]:
        unsettled = self._unsettled[0] if self._unsettled is not None else ()
        reports = (event.report for event in (*unsettled, *self._waiting) if isinstance(event, Reported))
        return [report for report in reports if report.step <= step]

    def write(self, events: Sequence[AttemptEvent], *, up_to: int | None = None) -> None:
        self._settle()
        reports = [event for event in self._waiting if up_to is None or event.report.step <= up_to]
        del self._waiting[: len(reports)]  # the attempt's thread only appends
        if together := (*reports, *events):
            self._unsettled = together, new_write_id()
            self._settle()

    def flush(self) -> None:
        if self._waiting or self._unsettled:
            self.write(())

    def _settle(self) -> None:
        if self._unsettled is not None:
            events, stamp = self._unsettled
            try:
                self.trial = self._write(events, stamp)
            except SaveOvertaken:  # nothing was written: the reports wait again
                self._waiting[:0] = [event for event in events if isinstance(event, Reported)]
                self._unsettled = None
                raise
            self._unsettled = None

    @abstractmethod
    def _write(self, events: Sequence[AttemptEvent], stamp: Stamp) -> Trial:
        """Write the events, and return the trial after them; the same again where they are written already."""


class Outbox(_Buffered):
    """Posts the events of an attempt to the outbox of its trial; see `core/journal/outbox`."""

    deletes_retired = False

    def __init__(self, target: StorageTarget, key: TrialKey, trial: Trial) -> None:
        super().__init__(trial)
        if trial.outbox is None:
            raise ValueError(f"trial {trial.trial!r} has no outbox")
        self._target, self._key, self._outbox = target, key, trial.outbox
        self._posted = 0
        self._is_unread = False
        """Whether no search has received, and so deleted, the post that was made `_UNREAD_POSTS` posts ago."""

    def flush_period(self, sync: SyncConfig) -> timedelta:
        """Return how often the search, which reads the posts, is to see the newest step; seldom while none reads."""
        live, longest = sync.live_period, sync.sync_period
        if live is None or (self._is_unread and longest < _UNREAD_POSTS / 2 * live):  # a search receives them within it
            return longest
        return min(longest, live)

    def is_closed(self, store: ObjectStore) -> bool:
        """Whether an owner of the experiment has ended this attempt: its next post will be refused. One request."""
        post = read_post(store, self._key, self._outbox, self._posted + 1)
        return post is not None and bool(post.closed_by)

    def _write(self, events: Sequence[AttemptEvent], stamp: Stamp) -> Trial:
        trial = self.trial
        for event in events:
            trial = after(trial, event)
        post = Post(write_id=stamp.write_id, at=stamp.at, events=tuple(events))
        on_target(self._target, lambda store: write_post(store, self._key, self._outbox, self._posted + 1, post))
        self._posted += 1
        earlier = self._posted - _UNREAD_POSTS
        if earlier > 1 and (self._is_unread or not self._posted % _UNREAD_POSTS):  # the first post is never deleted
            # An error here changes nothing: the post itself is durable.
            with suppress(TuneError, OSError), self._target.open(timeout=READ_TIMEOUT) as store:
                self._is_unread = store.size(self._key.outbox_path(self._outbox, earlier)) is not None
        return trial


class WrittenEntries(_Buffered):
    """Writes the events of an attempt as entries of its experiment's journal."""

    def __init__(self, trial: str, journal_writer: JournalWriter) -> None:
        super().__init__(journal_writer.experiment.trial(trial))
        self._journal_writer = journal_writer

    def _write(self, events: Sequence[AttemptEvent], stamp: Stamp) -> Trial:
        return self._journal_writer.write(events, stamp).trial(self.trial.trial)


@dataclass(frozen=True, slots=True)
class AnswerAwaited:
    """A trial waits for an answer to the report of a step."""

    trial: str
    report: StepReport


TrialMessage: TypeAlias = AnswerAwaited | EventsSubmitted


class SearchLink(ABC):
    """The attempt's end of the link. Answers that arrive before it is connected are kept until then."""

    asks_by_report = False
    """Whether the search sees that the trial asks by the report in the attempt's journal only."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        """Set to make the trial save and end."""
        self._guard = threading.Lock()
        self._early: list[Answer] = []
        self._on_answer: Callable[[Answer], None] | None = None

    @property
    def supervisor(self) -> Owner | None:
        """This process, if it is not one of the search."""
        return None

    @abstractmethod
    def open_journal(self, spec: TrialSpec, request: AttemptRequest) -> TrialJournal:
        """Return where the attempt journals its events. Raises Superseded if its experiment was deleted."""

    @abstractmethod
    def process(self, start: Start, log: Log, environment: Mapping[str, str]) -> AbstractContextManager[TrialChannel]:
        """Open a process for the attempt to train in."""

    @abstractmethod
    def ask(self, report: StepReport) -> None:
        """Say that the trial waits for an answer to the report of this step. Never blocks."""

    def watch(self) -> None:  # noqa: B027 - within one process the request sets `stop`
        """Begin to look for a request to stop, before the attempt trains."""

    def connect(self, on_answer: Callable[[Answer], None]) -> None:
        """Deliver answers with `on_answer`, including those that arrived before."""
        with self._guard:
            self._on_answer = on_answer
            for answer in self._early:
                on_answer(answer)

    def answer(self, answer: Answer) -> None:
        """Deliver an answer to the trial, now or when it is connected."""
        with self._guard:
            if self._on_answer is None:
                self._early.append(answer)
            else:
                self._on_answer(answer)

    def close(self) -> None:  # noqa: B027 - within one process there is nothing to release
        """Release the link: the attempt is over."""


class InProcessLink(SearchLink):
    """A link within one process: it calls `receive` with each message, in the sender's thread."""

    def __init__(self, trial: str, receive: Callable[[TrialMessage], None], pool: TrialProcessPool) -> None:
        super().__init__()
        self.trial = trial
        self._journal: SubmittedEvents | None = None
        self._pool = pool
        self._receive = receive

    def process(self, start: Start, log: Log, environment: Mapping[str, str]) -> AbstractContextManager[TrialChannel]:
        return self._pool.process(start, log, environment, self.stop)

    def open_journal(self, spec: TrialSpec, request: AttemptRequest) -> TrialJournal:
        """Return the journal of the trial; the same again where a task runs the attempt again."""
        del spec
        if self._journal is None:
            self._journal = SubmittedEvents(request.trial, self._receive)
        return self._journal

    def ask(self, report: StepReport) -> None:
        self._receive(AnswerAwaited(self.trial, report))
