"""Deliver each event of an experiment to a callback once, and store the delivery position with the callback's state.

For journaled events the position is a number: that of the experiment's entry, and that of each trial's own entry.
An event delivered before it is journaled (a report, the events of the next entry) is recorded in a mark, until the
journal holds it.

Position and state are numbered documents: the highest number counts, and its writer deletes the one before it. A
document is created only if absent, so that of two searches that both believe they own the experiment one stops writing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from prefect_tune.core.errors import JournalCorrupt
from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Committed,
    Entry,
    Event,
    Finished,
    Forked,
    GaveUp,
    Reported,
    Started,
)
from prefect_tune.core.storage.documents import Document, read_newest, seal
from prefect_tune.core.storage.layout import JournalKey, numbered
from prefect_tune.core.storage.object_store import ObjectStore, create_or_recognize
from prefect_tune.core.values import StepReport, Value, valid_name

Delivered = Started | Reported | Committed | AttemptEnded | Finished | GaveUp
"""The events for which callbacks have hooks."""


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
    """A callback's delivery position."""

    number: int = 0
    """The last entry of the experiment's journal that was delivered completely."""
    marks: Mapping[str, TrialPosition] = Field(default_factory=dict)
    """The events delivered beyond that entry, by trial."""


class CallbackState(Document):
    """The stored state of one callback of an experiment."""

    format: Literal["prefect-tune/callback"] = "prefect-tune/callback"
    version: Literal[1] = 1
    number: int
    write_id: str
    position: DeliveryPosition
    state: Mapping[str, object] | None = None
    """The value that its `get_state` returned."""


class DeliveryTracker:
    """Filters events to those that were not delivered before, and records what it returns as delivered."""

    def __init__(self, position: DeliveryPosition | None = None) -> None:
        self.number = position.number if position else 0
        """The last entry that was delivered completely."""
        self._marks = dict(position.marks) if position else {}
        self._beyond = set(self._marks)  # trials with delivered events that no written entry holds yet

    @property
    def position(self) -> DeliveryPosition:
        """The present delivery position."""
        marks = {name: mark for name, mark in self._marks.items() if name in self._beyond or mark.step > mark.journaled}
        return DeliveryPosition(number=self.number, marks=marks)

    def replay(self, entry: Entry) -> Iterator[Delivered]:
        """Yield the undelivered events of a journal entry; entries must come in order."""
        if entry.number > self.number:
            for event in entry.events:
                yield from self.news(event)
            self.written(entry.number)

    def written(self, number: int) -> None:
        """Record that all delivered events except reports are in the entries up to `number`."""
        self.number = number
        self._beyond.clear()
        self._marks = {trial: mark for trial, mark in self._marks.items() if not mark.ended}

    def report(self, trial: str, report: StepReport) -> bool:
        """Return whether a report that is not journaled yet was not delivered before."""
        if report.step <= self._mark(trial).step:
            return False
        self._set(trial, step=report.step)
        return True

    def news(self, event: Event) -> Iterator[Delivered]:
        """Yield the event, or the events that it absorbs, if it has a hook and was not delivered before."""
        if isinstance(event, Forked):
            for trial, forked in (event.trials or {}).items():
                self._set(trial, absorbed=forked.absorbed)
        elif isinstance(event, Absorbed):
            if event.number > self._mark(event.trial).absorbed:
                for each in event.events:
                    yield from self.news(each)
                self._set(event.trial, absorbed=event.number)
        elif isinstance(event, Delivered) and self._is_new(event):
            yield event

    def _is_new(self, event: Delivered) -> bool:
        mark = self._mark(event.trial)
        match event:
            case Started(from_step=step):
                self._set(event.trial, step=step, journaled=step, ended=False)
            case Reported(report=report):
                self._set(event.trial, step=max(mark.step, report.step), journaled=report.step)
                return report.step > mark.step
            case Finished() | GaveUp():
                self._set(event.trial, ended=True)
                return not mark.ended
            case Committed() | AttemptEnded():
                pass
        return True

    def _mark(self, trial: str) -> TrialPosition:
        return self._marks.get(trial) or TrialPosition()

    def _set(self, trial: str, **changes: int | bool) -> None:
        self._marks[trial] = self._mark(trial).model_copy(update=changes)
        self._beyond.add(trial)


def newest_state(store: ObjectStore, experiment: JournalKey, name: str) -> CallbackState | None:
    """Return the newest state; None where none was written.

    Raises:
        JournalCorrupt: the state is torn or altered.
    """
    return read_newest(store, CallbackState, _folder(experiment, name), JournalCorrupt)


def keep_state(store: ObjectStore, experiment: JournalKey, name: str, state: CallbackState) -> None:
    """Write `state` as the newest one, and delete the one before it.

    Raises:
        InvalidInput: it holds a value that JSON cannot represent.
        AlreadyExists: another process has written this number: it keeps the state of this callback now.
        CommitUnknown: the target did not say whether it wrote.
    """
    folder = _folder(experiment, name)
    create_or_recognize(store, numbered(folder, state.number), seal(state))
    if state.number > 1:
        store.delete([numbered(folder, state.number - 1)])


def _folder(experiment: JournalKey, name: str) -> str:
    return f"{experiment.folder}/callbacks/{valid_name(name)}"
