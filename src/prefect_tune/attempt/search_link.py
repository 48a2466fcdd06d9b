"""The link between an attempt and its search: sends reports and journal entries up, and answers down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from prefect_tune.attempt.processes.process_channel import TrialChannel
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events import Event
from prefect_tune.core.messages.process_messages import Leave, Proceed, Start
from prefect_tune.core.values import StepReport
from prefect_tune.journal_access import utc_now

Answer: TypeAlias = Proceed | Leave


class SearchLink(Protocol):
    """The attempt's end of the link."""

    @property
    def stop(self) -> threading.Event:
        """Set to make the trial save and end."""
        ...

    @property
    def reads_journal(self) -> bool:
        """Whether the search reads reports from the attempt's journal only."""
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

    def reported(self, report: StepReport, *, asks: bool) -> None:
        """Send a step's report; if it `asks`, the trial waits for an answer. Never blocks."""
        ...

    def wrote(self, events: Sequence[Event], experiment: Experiment) -> None:
        """Send the events just written to the attempt's journal, and the state after them. Never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class StepReported:
    """A step was trained; if it `asks`, the trial waits for an answer."""

    trial: str
    report: StepReport
    asks: bool


@dataclass(frozen=True, slots=True)
class EntryWritten:
    """An entry that the attempt has written to its journal: the trial's own one, or that of a single training."""

    trial: str
    number: int
    events: tuple[Event, ...]
    at: str | None = None
    """When it was written, as an ISO timestamp."""
    journal: Experiment | None = None
    """The state of the journal after it; None if the entry was read from the target."""


@dataclass(frozen=True, slots=True)
class LatestReport:
    """The newest report of an attempt on another machine: its journal has it later, with those before it."""

    trial: str
    report: StepReport
    at: str
    """When the attempt reported it, as an ISO timestamp."""


TrialMessage: TypeAlias = StepReported | EntryWritten


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
        self.reads_journal = False
        self._pool = pool
        self.stop = threading.Event()
        self._receive = receive

    def process(self, start: Start, log: Log, environment: Mapping[str, str]) -> AbstractContextManager[TrialChannel]:
        return self._pool.process(start, log, environment, self.stop)

    def reported(self, report: StepReport, *, asks: bool) -> None:
        self._receive(StepReported(self.trial, report, asks))

    def wrote(self, events: Sequence[Event], experiment: Experiment) -> None:
        self._receive(EntryWritten(self.trial, experiment.number, tuple(events), utc_now(), experiment))

    def close(self) -> None:
        """Nothing to let go of."""
