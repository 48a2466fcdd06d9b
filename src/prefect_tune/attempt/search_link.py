"""The link between an attempt and its search: sends questions and journal events up, and answers down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from prefect_tune.attempt.processes.process_channel import TrialChannel
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_journal import EventsSubmitted, SubmittedEvents, TrialJournal
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.messages.process_messages import Leave, Proceed, Start
from prefect_tune.core.values import StepReport

Answer: TypeAlias = Proceed | Leave


class SearchLink(Protocol):
    """The attempt's end of the link."""

    @property
    def stop(self) -> threading.Event:
        """Set to make the trial save and end."""
        ...

    @property
    def supervisor(self) -> Owner | None:
        """This process, if it is not one of the search."""
        ...

    @property
    def asks_by_report(self) -> bool:
        """Whether the search sees that the trial asks by the report in the attempt's journal only."""
        ...

    def open_journal(self, spec: TrialSpec, request: AttemptRequest) -> TrialJournal:
        """Return where the attempt journals its events. Raises Superseded if its experiment was deleted."""
        ...

    def process(self, start: Start, log: Log, environment: Mapping[str, str]) -> AbstractContextManager[TrialChannel]:
        """Open a process for the attempt to train in."""
        ...

    def watch(self) -> None:
        """Begin to look for a request to stop, before there is a process."""
        ...

    def connect(self, tell: Callable[[Answer], None]) -> None:
        """Deliver answers with `tell`, including those that arrived before."""
        ...

    def close(self) -> None:
        """Release the link: the attempt is over."""
        ...

    def ask(self, report: StepReport) -> None:
        """Say that the trial waits for an answer to the report of this step. Never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerAwaited:
    """A trial waits for an answer to the report of a step."""

    trial: str
    report: StepReport


TrialMessage: TypeAlias = AnswerAwaited | EventsSubmitted


class AnsweringLink:
    """Delivers answers to a trial; those that arrive before it is connected are kept until then."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._early: list[Answer] = []
        self._tell: Callable[[Answer], None] | None = None

    def watch(self) -> None:
        """Do nothing: within one process a request to stop sets the event."""

    def connect(self, tell: Callable[[Answer], None]) -> None:
        with self._guard:
            self._tell = tell
            for answer in self._early:
                tell(answer)

    def answer(self, answer: Answer) -> None:
        """Deliver an answer to the trial, now or when it is connected."""
        with self._guard:
            if self._tell is None:
                self._early.append(answer)
            else:
                self._tell(answer)


class InProcessLink(AnsweringLink):
    """A link within one process: it calls `receive` with each message, in the sender's thread."""

    def __init__(self, trial: str, receive: Callable[[TrialMessage], None], pool: TrialProcessPool) -> None:
        super().__init__()
        self.trial = trial
        self.asks_by_report = False
        self.supervisor = None
        self._journal: SubmittedEvents | None = None
        self._pool = pool
        self.stop = threading.Event()
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

    def close(self) -> None:
        """Nothing to let go of."""
