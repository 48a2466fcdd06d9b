"""Notice that no report of a search has its metric, most often a misspelt one, and end the search."""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.did_you_mean import did_you_mean
from prefect_tune.core.errors import BadMetric
from prefect_tune.core.events.experiment_events import Event, Finished, Reported, Started, events_in
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.models import StepReport, leaves, metric_in
from prefect_tune.core.search.objective import Objective
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.supervisor.process_channel import Log
from prefect_tune.supervisor.search_link import StepReported

__all__ = ["MetricCheck", "never_last"]


class MetricCheck(SearchObserver):
    """Warns if the first report lacks a metric of the search, and ends the search when it is certain that all do.

    A trainable may report a metric every n-th step only. It is certain once a trial that began in this run has
    completed, or the scheduler could not decide about one, and no report of any trial had the metric.
    """

    def __init__(self, objective: Objective | None, log: Log) -> None:
        self._metrics: Sequence[str] = objective.metrics if objective else ()
        self._log = log
        self._missing: Sequence[str] = self._metrics
        """The metrics that no report of this run had."""
        self._is_first = True
        self._begun: set[str] = set()
        self._reason = ""

    def why_end(self, experiment: Experiment, undecided: BadMetric | None = None) -> str:
        """Return why the search ends; empty while it continues.

        Args:
            undecided: the error of a scheduler that could not decide. It compares the first metric.
        """
        if undecided is not None:
            self._conclude(experiment, [each for each in self._metrics[:1] if each in self._missing])
        return self._reason

    def reported(self, step: StepReported, experiment: Experiment) -> None:
        del experiment
        self._check(step.trial, step.report)

    def happened(self, event: Event, experiment: Experiment) -> None:
        """Check also the reports of a remote trial: they arrive in `Absorbed`, with an entry of its journal."""
        for each in events_in(event):
            match each:
                case Started(trial=trial, attempt=1):
                    self._begun.add(trial)
                case Reported(trial=trial, report=report):
                    self._check(trial, report)
                case Finished(trial=trial) if trial in self._begun:
                    if experiment.trial(trial).status is Status.COMPLETED:
                        self._conclude(experiment, self._missing)
                case _:
                    pass

    def _check(self, trial: str, report: StepReport) -> None:
        if self._missing:
            self._missing = [each for each in self._missing if metric_in(report.metrics, each) is None]
        if self._is_first:
            self._is_first = False
            self._warn(trial, report)

    def _warn(self, trial: str, report: StepReport) -> None:
        found = [name for name, _ in leaves(report.metrics)]
        for name in self._metrics:
            value = metric_in(report.metrics, name)
            if isinstance(value, str):
                self._log.warning("trial %s reported the metric %r as text, not as a number: %r", trial, name, value)
            elif value is None:
                self._log.warning(
                    "trial %s reported %s, without the metric %r; the search ends if no report has it by the time a "
                    "trial completes%s",
                    *(trial, sorted(found), name, did_you_mean(name, found)),
                )

    def _conclude(self, experiment: Experiment, missing: Sequence[str]) -> None:
        if lacking := never_last(experiment, missing):
            self._reason = f"no report had the metric {', '.join(map(repr, lacking))}"


def never_last(experiment: Experiment, metrics: Sequence[str]) -> Sequence[str]:
    """Return those of the metrics that no trial's last report has."""
    trials = experiment.trials.values()
    return [name for name in metrics if all(metric_in(each.metrics, name) is None for each in trials)]
