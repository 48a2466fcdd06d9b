"""How far somebody has been told of an experiment, so that nothing is told twice and nothing is left out.

What is in the journal is told by its numbers: of the experiment's entries, and of the entries of each
trial's own journal. What is told before it is in the journal (a report, what the next entry will hold)
leaves a mark, until the journal has come so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import Field

from prefect_tune.core.events import (
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
from prefect_tune.core.experiment import Entry
from prefect_tune.core.values import StepReport, Value

__all__ = ["Heard", "Mark", "Telling"]


class Mark(Value):
    """What was told of a trial beyond the entries that count as told."""

    absorbed: int = 0
    """The last entry of its own journal that was told."""
    step: int = 0
    """The last step of the present attempt that was told."""
    journaled: int = 0
    """The last step of it that was told as the journal has it."""
    ended: bool = False


class Heard(Value):
    """How far somebody has been told."""

    number: int = 0
    """The last entry of the experiment's journal of which everything was told."""
    marks: Mapping[str, Mark] = Field(default_factory=dict)
    """What was told beyond it, by trial."""


class Telling:
    """Says of what happens what is news. It takes note as it says so."""

    def __init__(self, heard: Heard | None = None) -> None:
        self._number = heard.number if heard else 0
        self._marks = dict(heard.marks) if heard else {}
        self._beyond = set(self._marks)  # of whom something was told that no written entry holds yet

    @property
    def number(self) -> int:
        """The last entry of which everything was told."""
        return self._number

    @property
    def heard(self) -> Heard:
        """How far it has come."""
        marks = {
            trial: mark for trial, mark in self._marks.items() if trial in self._beyond or mark.step > mark.journaled
        }
        return Heard(number=self._number, marks=marks)

    def replay(self, entry: Entry) -> Iterator[OneTrialsEvent]:
        """Return what is news in an entry of the journal; entries come in their order."""
        if entry.number > self._number:
            for event in entry.events:
                yield from self.news(event)
            self.written(entry.number)

    def written(self, number: int) -> None:
        """Take note that all that was told, but for reports, is in the entries up to `number`."""
        self._number = number
        self._beyond.clear()
        self._marks = {trial: mark for trial, mark in self._marks.items() if not mark.ended}

    def news(self, event: Event) -> Iterator[OneTrialsEvent]:
        """Return what is news in an event, and in those that it absorbs."""
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
        """Return whether a report that the journal does not have yet is news."""
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

    def _mark(self, trial: str) -> Mark:
        return self._marks.get(trial) or Mark()

    def _set(self, trial: str, **changes: int | bool) -> None:
        self._marks[trial] = self._mark(trial).model_copy(update=changes)
        self._beyond.add(trial)
