"""A bounded queue of events for a callback, on which the producer never blocks."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from prefect_tune.core.events.experiment_events import Event
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.models import StepReport

__all__ = ["BoundedQueue", "DroppedItems", "EndItem", "EntryItem", "EventItem", "QueueItem", "ReportItem"]

_MOST = 20_000


@dataclass(frozen=True, slots=True)
class EventItem:
    """The next entry of the journal will hold this event."""

    event: Event
    experiment: Experiment


@dataclass(frozen=True, slots=True)
class ReportItem:
    """A trial reported a step."""

    trial: str
    report: StepReport
    experiment: Experiment


@dataclass(frozen=True, slots=True)
class EntryItem:
    """All events before this item are in the journal."""

    experiment: Experiment


@dataclass(frozen=True, slots=True)
class DroppedItems:
    """The queue was full, and the events before this item were dropped: read them from the journal."""


@dataclass(frozen=True, slots=True)
class EndItem:
    """The last item."""

    experiment: Experiment


QueueItem: TypeAlias = EventItem | ReportItem | EntryItem | DroppedItems | EndItem


class BoundedQueue:
    """A queue for one producer and one consumer thread. When it is full, `DroppedItems` replaces all its items."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._items: deque[QueueItem] = deque()
        self._changed = threading.Condition()

    def put(self, item: QueueItem) -> None:
        """Add an item at the end."""
        with self._changed:
            if len(self._items) >= self._most:
                self._items.clear()
                self._items.append(DroppedItems())
            self._items.append(item)
            self._changed.notify()

    def take(self, patience: timedelta) -> QueueItem | None:
        """Return the first item; None if there is none within `patience`."""
        with self._changed:
            self._changed.wait_for(lambda: self._items, timeout=max(0.0, patience.total_seconds()))
            return self._items.popleft() if self._items else None
