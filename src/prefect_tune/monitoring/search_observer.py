"""Observers of a search, such as progress and callbacks, which decide nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.search_link import LatestReport, StepReported
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import Event
from prefect_tune.core.messages.live_status import RunningAttempts
from prefect_tune.core.values import StepReport
from prefect_tune.journal_access import utc_now


class SearchObserver:
    """An observer of a search, which overrides the methods that it needs: these do nothing.

    The driver calls it in the driver's thread, in order; methods must return at once.
    """

    def applied(self, event: Event, experiment: Experiment) -> None:
        """Receive an event that the next entry of the journal will hold, and the state after it."""

    def reported(self, step: StepReported, experiment: Experiment) -> None:
        """Receive the report of a step as soon as it is trained; the journal gets it later, in an `Absorbed`."""

    def latest(self, newest: LatestReport) -> None:
        """Receive the newest report of an attempt on another machine; `reported` gets it later, in its order."""

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

    def reported(self, step: StepReported, experiment: Experiment) -> None:
        self._call(lambda each: each.reported(step, experiment))

    def latest(self, newest: LatestReport) -> None:
        self._call(lambda each: each.latest(newest))

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


class AttemptRecorder(SearchObserver):
    """Records what the attempts of a search report; what shows the search reads `attempts`, so this one comes first."""

    def __init__(self, experiment: Experiment) -> None:
        self.attempts = RunningAttempts(experiment, utc_now())

    def applied(self, event: Event, experiment: Experiment) -> None:
        self.attempts.applied(event, experiment, utc_now())

    def reported(self, step: StepReported, experiment: Experiment) -> None:
        del experiment
        self.record(step.trial, step.report)

    def record(self, trial: str, report: StepReport) -> None:
        """Record the report of a step that is trained now."""
        self.attempts.reported(trial, report, utc_now())

    def latest(self, newest: LatestReport) -> None:
        self.attempts.latest(newest.trial, newest.report, newest.at)

    def wrote(self, experiment: Experiment) -> None:
        self.attempts.wrote(experiment)
