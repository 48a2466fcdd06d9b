"""Notice that no report of a search has its metric, most often a misspelt one, and end the search."""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.did_you_mean import did_you_mean, nearest
from prefect_tune.core.errors import BadMetric
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events.experiment_events import Event, Finished, Reported, Started, events_in
from prefect_tune.core.models import StepReport, leaves, metric_in
from prefect_tune.core.search.objective import Objective
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.supervisor.search_link import StepReported

_CERTAIN = 2
"""The number of trials without a metric that are no exception any more."""


class MetricCheck(SearchObserver):
    """Warns if the first report lacks a metric of the search, and ends the search when it is certain that all do.

    A trainable may report a metric every n-th step only. So a trial shows that a metric is missing only when it has
    completed, if it began in this run, or when the scheduler could not decide about it, and no report of any trial had
    the metric. It is certain with the first such trial if a metric of a similar name was reported; else with the
    second: one trial alone may be an exception, such as a configuration that cannot be trained.
    """

    def __init__(self, objective: Objective | None, log: Log) -> None:
        self._metrics: Sequence[str] = objective.metrics if objective else ()
        self._log = log
        self._missing: Sequence[str] = self._metrics
        """The metrics that no report of this run had."""
        self._reported: set[str] = set()
        """The names in the reports of this run, while one is missing."""
        self._is_first = True
        self._begun: set[str] = set()
        self._lacking: set[str] = set()
        """The trials that have completed without a metric, and the errors of those that could not be decided."""
        self._reason = ""

    def why_end(self, experiment: Experiment, undecided: BadMetric | None = None) -> str:
        """Return why the search ends; empty while it continues.

        Args:
            undecided: the error of a scheduler that could not decide. It compares the first metric.
        """
        if undecided is not None:
            self._conclude(str(undecided), experiment, [each for each in self._metrics[:1] if each in self._missing])
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
                        self._conclude(trial, experiment, self._missing)
                case _:
                    pass

    def _check(self, trial: str, report: StepReport) -> None:
        if self._missing:
            self._missing = [each for each in self._missing if metric_in(report.metrics, each) is None]
            self._reported.update(name for name, _ in leaves(report.metrics))
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
                hint = did_you_mean(name, found)
                self._log.warning(
                    "trial %s reported %s, without the metric %r; the search ends if no report has it by the time %s%s",
                    *(trial, sorted(found), name, "a trial completes" if hint else "two trials have completed", hint),
                )

    def _conclude(self, by: str, experiment: Experiment, missing: Sequence[str]) -> None:
        if not (lacking := never_last(experiment, missing)):
            return
        self._lacking.add(by)
        if len(self._lacking) >= _CERTAIN or all(nearest(each, self._reported) for each in lacking):
            self._reason = f"no report had the metric {', '.join(map(repr, lacking))}"


def never_last(experiment: Experiment, metrics: Sequence[str]) -> Sequence[str]:
    """Return those of the metrics that no trial's last report has."""
    trials = experiment.trials.values()
    return [name for name in metrics if all(metric_in(each.metrics, name) is None for each in trials)]
