"""Who listens to a search without having a say in it: progress, callbacks. None of them can hold it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prefect_tune.core.events import Event
from prefect_tune.core.experiment import Experiment, after_event
from prefect_tune.tasks.line import Told

__all__ = ["Listener", "Listeners", "SoloListener"]


class Listener(Protocol):
    """What the driver tells, in its thread and in the order in which it happens. Takes note, and returns at once."""

    def happened(self, event: Event, experiment: Experiment) -> None:
        """Hear of what the next entry of the journal will hold, and of the state after it."""
        ...

    def told(self, told: Told, experiment: Experiment) -> None:
        """Hear of a step as soon as it is trained; the journal is told of it later, in an `Absorbed`."""
        ...

    def wrote(self, experiment: Experiment) -> None:
        """Hear that everything up to this state is written."""
        ...


class Listeners:
    """Several listeners as one; none is one too."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self._listeners = tuple(listeners)

    def happened(self, event: Event, experiment: Experiment) -> None:
        for each in self._listeners:
            each.happened(event, experiment)

    def told(self, told: Told, experiment: Experiment) -> None:
        for each in self._listeners:
            each.told(told, experiment)

    def wrote(self, experiment: Experiment) -> None:
        for each in self._listeners:
            each.wrote(experiment)


class SoloListener:
    """Has a listener hear what the only trial of an experiment tells, and the flow around it."""

    def __init__(self, listener: Listener, experiment: Experiment) -> None:
        self._listener = listener
        self._experiment = experiment

    def told(self, told: Told) -> None:
        self._listener.told(told, self._experiment)

    def wrote(self, events: Sequence[Event], experiment: Experiment) -> None:
        for each in events[:-1]:
            self._experiment = after_event(self._experiment, each, experiment.number)
            self._listener.happened(each, self._experiment)
        self._experiment = experiment  # and what guests have written meanwhile
        for each in events[-1:]:
            self._listener.happened(each, experiment)
        self._listener.wrote(experiment)
