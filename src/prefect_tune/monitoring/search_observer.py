"""Observe a search without making decisions, and publish the live status of its running attempts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from typing import Self

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.blocks import StorageTarget
from prefect_tune.clock import run_clock_now, utc_now
from prefect_tune.core.errors import Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import LearningCurves, Losses
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import Entry, Event
from prefect_tune.core.messages.target_messages import LiveStatus, RunningAttempt, delete_live_status, write_live_status
from prefect_tune.core.search_view import AttemptPeriod, SearchSnapshot, SearchView


class SearchObserver:
    """Base class of the observers of a search. The methods do nothing here; a subclass overrides the ones it needs.

    The driver's thread calls the methods, in the order of the events. The search waits for them, so they must be fast.
    """

    def on_event(self, event: Event, experiment: Experiment) -> None:
        """Handle an event that the next journal entry will contain; `experiment` is the state after the event."""

    def on_attempt_lost(self, trial: Trial, reason: str) -> None:
        """Learn that an attempt was lost, and that its trial will be retried; the attempt's end is journaled later."""

    def on_entry_written(self, experiment: Experiment) -> None:
        """Learn that a journal entry was written; `experiment` is the state after the entry."""


class ObserverGroup(SearchObserver):
    """Passes each call to several observers, in order. An observer that raised an error is not called again.

    The error is logged, and the search continues, because no decision and no journal entry depends on an observer.
    """

    def __init__(self, observers: Sequence[SearchObserver], log: Log) -> None:
        self._observers = tuple(observers)
        self._log = log

    def on_event(self, event: Event, experiment: Experiment) -> None:
        self._call_observers(lambda observer: observer.on_event(event, experiment))

    def on_attempt_lost(self, trial: Trial, reason: str) -> None:
        self._call_observers(lambda observer: observer.on_attempt_lost(trial, reason))

    def on_entry_written(self, experiment: Experiment) -> None:
        self._call_observers(lambda observer: observer.on_entry_written(experiment))

    def _call_observers(self, method: Callable[[SearchObserver], None]) -> None:
        for observer in self._observers:
            try:
                method(observer)
            except Exception:  # noqa: BLE001 - the edge of all observers: their errors must not end the search
                name = type(observer).__name__
                self._log.exception("%s failed and is not called again; the search continues", name)
                self._observers = tuple(other for other in self._observers if other is not observer)


class SearchRecorder(SearchObserver):
    """Applies each event to the `SearchView` of a run; any thread can call `read_search_snapshot`.

    The recorder must be the first observer, so that the other observers read a view that already includes the event.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._guard = threading.Lock()
        self._initial_experiment, self._run_began = experiment, datetime.now(UTC)
        self._view = SearchView(experiment)
        self._view.begin_run(self._run_began)
        self._changes: list[Callable[[SearchView], None]] | None = None
        """The changes since `expect_earlier_entries` was called; None before that call, and after `prepend_entries`."""

    def on_event(self, event: Event, experiment: Experiment) -> None:
        at = datetime.now(UTC)
        self._apply_change(lambda view: view.apply_event(event, at, experiment))

    def on_entry_written(self, experiment: Experiment) -> None:
        self._apply_change(lambda view: view.set_experiment(experiment))

    def read_search_snapshot(self, drawn: Collection[str] = ()) -> SearchSnapshot:
        """Return a snapshot of the view, with the learning curves of the trials in `drawn`."""
        with self._guard:
            return self._view.take_snapshot(drawn)

    @property
    def running(self) -> Mapping[str, AttemptPeriod]:
        """The attempts that are running, by trial."""
        with self._guard:
            return self._view.running

    @property
    def best(self) -> tuple[str, Losses] | None:
        """The trial whose last report is the best so far, and the losses of that report."""
        with self._guard:
            return self._view.best

    def expect_earlier_entries(self) -> None:
        """Keep all changes from now on, so that `prepend_entries` can apply them after the entries of earlier runs."""
        self._changes = []

    def prepend_entries(self, entries: Iterable[Entry] | None) -> None:
        """Rebuild the view from earlier runs' `entries` and this run's changes; keep the view if `entries` is None."""
        view = self._view
        if entries is not None:
            view = SearchView(self._initial_experiment)
            for entry in entries:
                view.apply_entry(entry)
            view.begin_run(self._run_began)
        with self._guard:
            for change in (self._changes or ()) if view is not self._view else ():
                change(view)
            self._view, self._changes = view, None

    def _apply_change(self, change: Callable[[SearchView], None]) -> None:
        with self._guard:
            change(self._view)
            if self._changes is not None:
                self._changes.append(change)


_MAX_CURVE_REPORTS = 300_000


class CurveCollector(SearchObserver):
    """Collects the learning curves of a new experiment while it runs, to publish them without reading the journal."""

    def __init__(self, experiment: Experiment) -> None:
        self.curves: LearningCurves | None = None if experiment.trials else LearningCurves()

    def on_event(self, event: Event, experiment: Experiment) -> None:
        del experiment
        curves, self.curves = self.curves, None  # an error leaves None, and then `publish_results` reads the journal
        if curves is not None:
            curves.add_event(event)
            if curves.report_count <= _MAX_CURVE_REPORTS:  # bounds the memory
                self.curves = curves


# Write the live status, which lists the running attempts, to the target every few seconds.

_REQUEST_TIMEOUT = timedelta(seconds=30)
_FIRST_DELAY = timedelta(seconds=1)
_END_TIMEOUT = timedelta(seconds=1)
_PAUSE_FACTOR = 20
"""The pause after a write is at least this multiple of the write's duration, so a slow target gets fewer writes."""


class LiveStatusPublisher:
    """Writes the running attempts to the target during a `with` block, first after 1 s, and then every `period`.

    The publisher also writes while no trial is running, because `delete` treats an experiment with a recent live status
    as running. Errors of the target are not raised; only the first of several consecutive errors is logged.
    """

    def __init__(
        self,
        target: StorageTarget,
        read: Callable[[], SearchSnapshot],
        period: timedelta | None,
        is_own_trial: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Prepare to write.

        Args:
            read: returns a snapshot of the experiment that this process owns.
            period: the time between two writes; None to write nothing.
            is_own_trial: takes a trial's id; returns whether this owner runs the trial. Other trials are not published.
        """
        self._target = target
        self._read = read
        self._period = period
        self._is_own_trial = is_own_trial
        self._written_count = 0
        self._is_failing = False
        self._is_superseded = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._period is not None:
            loop = self._run_publisher, self._period
            self._thread = threading.Thread(target=copy_context().run, args=loop, name="live-status", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop writing, and delete the live status if no trial is running. Waits at most 1 s for the target.

        After `Superseded`, the live status of this process is always deleted, since another process publishes now.
        """
        self._is_superseded = kind is not None and issubclass(kind, Superseded)
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_END_TIMEOUT.total_seconds())

    def _run_publisher(self, period: timedelta) -> None:
        pause, next_pause = _FIRST_DELAY, period
        while not self._closed.wait(pause.total_seconds()):
            began = time.monotonic()
            self._write_status(next_pause)
            pause, next_pause = next_pause, max(period, timedelta(seconds=time.monotonic() - began) * _PAUSE_FACTOR)
        experiment, running = self._read_running_trials()
        may_be_left = self._written_count > 0 or experiment.term > 1  # an earlier owner may have left a status
        if may_be_left and (self._is_superseded or not running):
            with suppress(TuneError), self._target.open(timeout=_REQUEST_TIMEOUT) as store:
                delete_live_status(store, experiment.key, experiment.term)

    def _write_status(self, next_pause: timedelta) -> None:
        experiment, running = self._read_running_trials()
        status = LiveStatus(
            term=experiment.term,
            owner=experiment.owner,
            number=self._written_count + 1,
            at=utc_now(),
            run_at=run_clock_now(),
            period_seconds=next_pause.total_seconds(),
            trials=running,
        )
        try:
            with self._target.open(timeout=_REQUEST_TIMEOUT) as store:
                write_live_status(store, experiment.key, status)
        except TuneError as error:
            if not self._is_failing:
                log = logging.getLogger("prefect_tune")
                log.warning("the newest steps of running trials cannot be published; retried later: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False
        self._written_count += 1  # counts failed writes too, because the target may have stored the status

    def _read_running_trials(self) -> tuple[Experiment, tuple[RunningAttempt, ...]]:
        """Return the experiment and its running attempts. Attempts of earlier owners have no `began_at` or `host`."""
        snapshot = self._read()
        running = [
            RunningAttempt(
                trial=name,
                attempt=attempt.attempt,
                began_at=None if attempt.is_earlier else attempt.began_at.isoformat(timespec="milliseconds"),
                host=attempt.owner.host if attempt.owner and not attempt.is_earlier else None,
                report=attempt.report,
                reported_at=attempt.reported_at.isoformat(timespec="milliseconds") if attempt.reported_at else None,
            )
            for name, attempt in snapshot.running.items()
            if self._is_own_trial(name)
        ]
        return snapshot.experiment, tuple(running)
