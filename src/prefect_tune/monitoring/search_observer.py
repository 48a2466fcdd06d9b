"""Observers of a search, such as progress and callbacks, which decide nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import Losses
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import Entry, Event
from prefect_tune.core.search_view import SearchSnapshot, SearchView


class SearchObserver:
    """An observer of a search, which overrides the methods that it needs: these do nothing.

    The driver calls it in the driver's thread, in order; methods must return at once.
    """

    def applied(self, event: Event, experiment: Experiment) -> None:
        """Receive an event that the next entry of the journal will hold, and the state after it."""

    def lost(self, trial: Trial, why: str) -> None:
        """Receive that an attempt ended without journaling its end, and is tried again; the journal gets it later."""

    def wrote(self, experiment: Experiment) -> None:
        """Receive the state up to which the journal is written."""


class ObserverGroup(SearchObserver):
    """Passes each call to several listeners, or to none."""

    def __init__(self, listeners: Sequence[SearchObserver] = ()) -> None:
        self._listeners = tuple(listeners)

    def applied(self, event: Event, experiment: Experiment) -> None:
        self._call(lambda each: each.applied(event, experiment))

    def lost(self, trial: Trial, why: str) -> None:
        self._call(lambda each: each.lost(trial, why))

    def wrote(self, experiment: Experiment) -> None:
        self._call(lambda each: each.wrote(experiment))

    def _call(self, call: Callable[[SearchObserver], None]) -> None:
        for each in self._listeners:
            call(each)


class DisplayGroup(ObserverGroup):
    """Passes each call to observers that only show the search: one that raises is logged, and called no more.

    The search continues: nothing that it decides or stores depends on them.
    """

    def __init__(self, listeners: Sequence[SearchObserver], log: Log) -> None:
        super().__init__(listeners)
        self._log = log

    def _call(self, call: Callable[[SearchObserver], None]) -> None:
        for each in self._listeners:
            try:
                call(each)
            except Exception:  # noqa: BLE001 - the edge of what only shows: hours of training must not end for it
                name = type(each).__name__
                self._log.exception("%s failed, and shows nothing from now on; the search continues", name)
                self._listeners = tuple(other for other in self._listeners if other is not each)


class SearchRecorder(SearchObserver):
    """Applies what happens to the one `SearchView` of a run; `read` may be called from any thread.

    It comes first: the other observers read it.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._guard = threading.Lock()
        self._first, self._began = experiment, datetime.now(UTC)
        self._view = SearchView(experiment)
        self._view.begin_run(self._began)
        self._changes: list[Callable[[SearchView], None]] | None = None
        """Those of this run, until what came before it is known; None if nobody wants to know."""

    def applied(self, event: Event, experiment: Experiment) -> None:
        at = datetime.now(UTC)
        self._change(lambda view: view.apply(event, at, experiment))

    def wrote(self, experiment: Experiment) -> None:
        self._change(lambda view: view.set_experiment(experiment))

    def read(self, drawn: Collection[str] = ()) -> SearchSnapshot:
        """Return what is known now, with the curves of these trials."""
        with self._guard:
            return self._view.read(drawn)

    @property
    def best(self) -> tuple[str, Losses] | None:
        """The trial with the best last report until now, and its losses."""
        with self._guard:
            return self._view.best

    def await_earlier_entries(self) -> None:
        """Keep all changes from now on, until `prepend` has the entries of earlier runs."""
        self._changes = []

    def prepend(self, entries: Iterable[Entry] | None) -> None:
        """Apply the entries of earlier runs, and then the changes of this run again; None: they cannot be read."""
        view = self._view
        if entries is not None:
            view = SearchView(self._first)
            for entry in entries:
                view.apply_entry(entry)
            view.begin_run(self._began)
        with self._guard:
            for change in (self._changes or ()) if view is not self._view else ():
                change(view)
            self._view, self._changes = view, None

    def _change(self, change: Callable[[SearchView], None]) -> None:
        with self._guard:
            change(self._view)
            if self._changes is not None:
                self._changes.append(change)
