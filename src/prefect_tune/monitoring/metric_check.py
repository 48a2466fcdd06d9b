"""Warn when the first report of a search lacks the metric that trials are compared by."""

from __future__ import annotations

from prefect_tune.core.events.experiment_events import Absorbed, Event, Reported
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.models import StepReport, metric_in
from prefect_tune.core.search.objective import Objective
from prefect_tune.supervisor.process_channel import Log
from prefect_tune.supervisor.search_link import StepReported

__all__ = ["MetricLookout"]


class MetricLookout:
    """A listener that checks the first report of each run of a search, and no later one."""

    def __init__(self, objective: Objective, log: Log) -> None:
        self._objective = objective
        self._log = log
        self._has_looked = False

    def happened(self, event: Event, experiment: Experiment) -> None:
        """Check the reports of a remote trial: they arrive in `Absorbed`, with an entry of its journal."""
        del experiment
        if self._has_looked or not isinstance(event, Absorbed):
            return
        for each in event.events:
            if isinstance(each, Reported):
                self._look(each.trial, each.report)

    def told(self, told: StepReported, experiment: Experiment) -> None:
        del experiment
        if not self._has_looked:
            self._look(told.trial, told.report)

    def wrote(self, experiment: Experiment) -> None:
        del experiment

    def _look(self, trial: str, report: StepReport) -> None:
        if self._has_looked:
            return
        self._has_looked = True
        for name in self._objective.metrics:
            value = metric_in(report.metrics, name)
            if isinstance(value, str):
                self._log.warning("trial %s reported the metric %r as text, not as a number: %r", trial, name, value)
            elif value is None:
                self._log.warning("trial %s reported %s, without the metric %r", trial, sorted(report.metrics), name)
