"""The progress of a search, from events and reports that a test applies."""

from __future__ import annotations

from datetime import datetime

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events import Event
from prefect_tune.core.search_view import SearchView
from prefect_tune.core.values import StepReport
from prefect_tune.terminal.progress_view import ProgressReader, SearchExtent


class TrackedProgress(ProgressReader):
    """Reads a view, to which it applies each event and report at the same time of day."""

    def __init__(self, experiment: Experiment, extent: SearchExtent, now: float, at: datetime) -> None:
        self.view = SearchView(experiment)
        self.view.begin_run(at)
        self._at = at
        super().__init__(self.view.take_snapshot, extent, (), now)

    def apply_event(self, event: Event, experiment: Experiment) -> None:
        self.view.apply_event(event, self._at, experiment)

    def apply_report(self, trial: str, report: StepReport) -> None:
        self.view.apply_report(trial, report, self._at)
