"""Track which events of an experiment a recipient has received, so that each is delivered exactly once.

For journaled events the position is a number: that of the experiment's entry, and that of each trial's own entry.
An event delivered before it is journaled (a report, the events of the next entry) is recorded in a mark, until the
journal holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import Field

from prefect_tune.core.events.experiment_events import (
    Absorbed,
    Adopted,
    Answered,
    Described,
    Event,
    Extended,
    Finished,
    ForkBegun,
    Forked,
    GaveUp,
    Learned,
    OneTrialsEvent,
    Opened,
    Questioned,
    Rebased,
    RemovalBegun,
    RemovalGivenUp,
    Reported,
    Started,
    StopAsked,
    TrialAdded,
)
from prefect_tune.core.experiment.experiment import Entry
from prefect_tune.core.models import StepReport, Value

__all__ = ["DeliveryPosition", "DeliveryTracker", "TrialPosition"]


class TrialPosition(Value):
    """The events of a trial that were delivered beyond the delivered entries."""

    absorbed: int = 0
    """The last entry of the trial's own journal that was delivered."""
    step: int = 0
    """The last step of the present attempt that was delivered."""
    journaled: int = 0
    """The last delivered step that is in the journal."""
    ended: bool = False


class DeliveryPosition(Value):
    """A recipient's delivery position."""

    number: int = 0
    """The last entry of the experiment's journal that was delivered completely."""
    marks: Mapping[str, TrialPosition] = Field(default_factory=dict)
    """The events delivered beyond that entry, by trial."""


class DeliveryTracker:
    """Filters events to those that were not delivered before, and records what it returns as delivered."""

    def __init__(self, heard: DeliveryPosition | None = None) -> None:
        self._number = heard.number if heard else 0
        self._marks = dict(heard.marks) if heard else {}
        self._beyond = set(self._marks)  # trials with delivered events that no written entry holds yet

    @property
    def number(self) -> int:
        """The last entry that was delivered completely."""
        return self._number

    @property
    def heard(self) -> DeliveryPosition:
        """The present delivery position."""
        marks = {
            trial: mark for trial, mark in self._marks.items() if trial in self._beyond or mark.step > mark.journaled
        }
        return DeliveryPosition(number=self._number, marks=marks)

    def replay(self, entry: Entry) -> Iterator[OneTrialsEvent]:
        """Yield the undelivered events of a journal entry; entries must come in order."""
        if entry.number > self._number:
            for event in entry.events:
                yield from self.news(event)
            self.written(entry.number)

    def written(self, number: int) -> None:
        """Record that all delivered events except reports are in the entries up to `number`."""
        self._number = number
        self._beyond.clear()
        self._marks = {trial: mark for trial, mark in self._marks.items() if not mark.ended}

    def news(self, event: Event) -> Iterator[OneTrialsEvent]:
        """Yield the event, or the events that it absorbs, where they were not delivered before."""
        match event:
            case Opened() | Adopted() | Described() | Extended() | StopAsked() | TrialAdded():
                return
            case ForkBegun() | Forked() | Learned() | Answered() | Questioned():
                return
            case RemovalBegun() | RemovalGivenUp():
                return
            case Rebased(trial=trial, absorbed=absorbed):
                self._set(trial, absorbed=absorbed)
            case Absorbed(trial=trial, number=number, events=events):
                if number > self._mark(trial).absorbed:
                    for each in events:
                        yield from self.news(each)
                    self._set(trial, absorbed=number)
            case _:
                yield from self._own_news(event)

    def report(self, trial: str, report: StepReport) -> bool:
        """Return whether a report that is not journaled yet was not delivered before."""
        if report.step <= self._mark(trial).step:
            return False
        self._set(trial, step=report.step)
        return True

    def _own_news(self, event: OneTrialsEvent) -> Iterator[OneTrialsEvent]:
        mark = self._mark(event.trial)
        match event:
            case Started(from_step=start):
                self._set(event.trial, step=start, journaled=start, ended=False)
                yield event
            case Reported(report=report):
                self._set(event.trial, step=max(mark.step, report.step), journaled=report.step)
                if report.step > mark.step:
                    yield event
            case Finished() | GaveUp():
                self._set(event.trial, ended=True)
                if not mark.ended:
                    yield event
            case _:
                self._set(event.trial)
                yield event

    def _mark(self, trial: str) -> TrialPosition:
        return self._marks.get(trial) or TrialPosition()

    def _set(self, trial: str, **changes: int | bool) -> None:
        self._marks[trial] = self._mark(trial).model_copy(update=changes)
        self._beyond.add(trial)
