"""A tracker of progress with the record of attempts that it reads, fed as by a driver."""

from __future__ import annotations

from datetime import datetime

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events import Event
from prefect_tune.core.messages.live_status import RunningAttempts
from prefect_tune.core.values import StepReport
from prefect_tune.terminal.progress_view import ProgressTracker, SearchEstimate


class TrackedProgress(ProgressTracker):
    """Takes each event and report, and passes it to both."""

    def __init__(self, experiment: Experiment, outlook: SearchEstimate, now: float, at: datetime) -> None:
        self.attempts = RunningAttempts(experiment, at.isoformat())
        self._at = at
        super().__init__(self.attempts, outlook, now)

    def happens(self, event: Event, experiment: Experiment) -> None:
        self.attempts.applied(event, experiment, self._at.isoformat())
        self.applied(event, experiment, self._at)

    def reported(self, trial: str, report: StepReport) -> None:
        self.attempts.reported(trial, report, self._at.isoformat())

    def latest(self, trial: str, report: StepReport) -> None:
        self.attempts.latest(trial, report, self._at.isoformat())
