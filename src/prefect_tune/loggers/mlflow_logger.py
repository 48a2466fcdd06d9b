"""A logger that writes an MLflow run for each trial, to a tracking server or a database."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from operator import attrgetter
from typing import TYPE_CHECKING

from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import AttemptEnded, Finished, GaveUp, Started
from prefect_tune.core.values import StepReport, flat
from prefect_tune.loggers.file_logger import require_package

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_TRIAL = "prefect_tune.trial"
_MARK = "prefect_tune.mark"
_STEPS = "trained_seconds"  # reported with every step, and so the metric that has them all
_BATCH = 1000  # the most metrics that a server takes at once
_LONGEST_PARAMETER = 6000
_LONGEST_NAME = 250
_REFUSED = re.compile(r"[^\w\-. :/]")  # in the name of a metric or parameter; one such name would cost its whole batch


class MLflowLogger(Callback):
    """Logs each trial as a run: its configuration as parameters, numbers as metrics by step.

    A trial keeps its run, and so the run's ID, when it resumes. MLflow cannot delete metrics: where a step that is
    trained again has another value, it has both, and MLflow shows the newer one as the last. If a trial ends before a
    step that it had reported earlier, its last metrics are logged at that step too, so that runs compare by them.
    Characters that MLflow refuses in names, such as `@`, become `_`. A run that a person deletes is replaced.

    Args:
        tracking_uri: such as `"sqlite:///mlflow.db"`. Default: MLflow's own setting.
        experiment_name: in MLflow. Default: the name of the search's experiment.
        tags: of every run.

    Raises:
        InvalidInput: MLflow is not installed; at the start of a search: its experiment in MLflow was deleted.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        require_package("mlflow", "mlflow", "MLflowLogger")
        self._tracking_uri = tracking_uri
        self._experiment_name = experiment_name
        self._tags = dict(tags or {})
        self._runs: dict[str, _TrialRun] = {}
        self._mark = ""

    def setup(self, search: SearchInfo) -> None:
        from mlflow import MlflowClient

        self._search = search
        self._client = MlflowClient(tracking_uri=self._tracking_uri)
        name = self._experiment_name or search.experiment
        found = self._client.get_experiment_by_name(name)
        if found and found.lifecycle_stage != "active":
            raise InvalidInput(
                f"MLflowLogger: the experiment {name!r} was deleted in MLflow; restore it there "
                f"(mlflow experiments restore -x {found.experiment_id}), or pass another experiment_name"
            )
        self._experiment_id = found.experiment_id if found else self._client.create_experiment(name)
        self._mark = (found.tags.get(_MARK) if found else None) or uuid.uuid4().hex
        self._client.set_experiment_tag(self._experiment_id, _MARK, self._mark)

    def get_state(self) -> Mapping[str, object] | None:
        return {"experiment": self._mark}

    def set_state(self, state: Mapping[str, object]) -> bool | None:
        return state.get("experiment") == self._mark

    def on_trial_start(self, trial: Trial, started: Started) -> None:
        del started
        with self._run(trial) as run:
            run.begin()

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        with self._run(trial) as run:
            run.log(report)

    def on_trial_recover(self, trial: Trial, ended: AttemptEnded) -> None:
        with self._run(trial) as run:
            run.tag("prefect_tune.last_failure", f"{ended.cause}: {ended.reason}")

    def on_trial_complete(self, trial: Trial, finished: Finished) -> None:
        self._end(trial, "FINISHED", str(finished.reason))

    def on_trial_error(self, trial: Trial, gave_up: GaveUp) -> None:
        self._end(trial, "FAILED", str(gave_up.reason))

    def _end(self, trial: Trial, status: str, reason: str) -> None:
        with self._run(trial) as run:
            run.log_last(StepReport(step=trial.step, metrics=trial.metrics, trained_seconds=trial.trained_seconds))
            run.tag("prefect_tune.reason", reason)
            run.end(status)
        del self._runs[trial.trial]

    @contextmanager
    def _run(self, trial: Trial) -> Iterator[_TrialRun]:
        """Yield the trial's run; after an error it is looked for again, since a person may have deleted it."""
        if trial.trial not in self._runs:
            name = f"{self._search.experiment}/{self._search.generation}/{trial.trial}"
            tags = {**self._tags, _TRIAL: name}
            self._runs[trial.trial] = _TrialRun(self._client, self._experiment_id, tags, trial)
        try:
            yield self._runs[trial.trial]
        except Exception:
            del self._runs[trial.trial]
            raise


class _TrialRun:
    """The run of one trial: the one that is there, or a new one."""

    def __init__(self, client: MlflowClient, experiment_id: str, tags: Mapping[str, str], trial: Trial) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self._tags = tags
        self._name = trial.trial
        runs = self._tagged(_TRIAL, tags[_TRIAL])
        self._id = str(runs[0].info.run_id) if runs else self._create()
        if not (runs and runs[0].data.params):
            self._log_parameters(trial)
        self._values: dict[str, dict[int, float]] = {}
        """By metric and step, the newest value in the run; of metrics that were needed."""
        self._last = max(self._values_of(_STEPS), default=0) if runs else 0

    def log(self, report: StepReport) -> None:
        """Log the numbers of a step, except those that the run has at this step already."""
        metrics = _numbers_of(report)
        if report.step <= self._last:
            known = {name: self._values_of(name).get(report.step) for name in metrics}
            metrics = {name: value for name, value in metrics.items() if not _is_same(value, known[name])}
        self._log_metrics(metrics, report.step)
        self._last = max(self._last, report.step)

    def log_last(self, report: StepReport) -> None:
        """Make the last metrics of a trial those that MLflow shows, if the run has later steps that were lost."""
        if report.step < self._last:
            self._log_metrics(_numbers_of(report), self._last)

    def begin(self) -> None:
        self._client.update_run(self._id, status="RUNNING")

    def tag(self, name: str, value: str) -> None:
        self._client.set_tag(self._id, name, value[:_LONGEST_PARAMETER])

    def end(self, status: str) -> None:
        self._client.set_terminated(self._id, status)

    def _create(self) -> str:
        run = self._client.create_run(self._experiment_id, run_name=self._name, tags=dict(self._tags))
        return str(run.info.run_id)

    def _log_parameters(self, trial: Trial) -> None:
        from mlflow.entities import Param

        config = flat(trial.config).items()
        params = [Param(_accepted(name), str(value)[:_LONGEST_PARAMETER]) for name, value in config]
        if params:
            self._client.log_batch(self._id, params=params)

    def _log_metrics(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        for begin in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _BATCH])
        for name in self._values.keys() & numbers.keys():
            self._values[name][step] = numbers[name]

    def _values_of(self, metric: str) -> Mapping[int, float]:
        if metric not in self._values:
            history = sorted(self._client.get_metric_history(self._id, metric), key=attrgetter("timestamp"))
            self._values[metric] = {point.step: point.value for point in history}
        return self._values[metric]

    def _tagged(self, name: str, value: str) -> Sequence[Run]:
        """Oldest first."""
        wanted = f"tags.`{name}` = '{value}'"
        oldest = ["attributes.start_time ASC"]
        found: Sequence[Run] = self._client.search_runs([self._experiment_id], wanted, order_by=oldest)
        return found


def _numbers_of(report: StepReport) -> dict[str, float]:
    metrics = flat(report.metrics).items()
    numbers = {_accepted(name): float(value) for name, value in metrics if isinstance(value, int | float)}
    return {**numbers, _STEPS: float(report.trained_seconds)}


def _accepted(name: str) -> str:
    return _REFUSED.sub("_", name)[:_LONGEST_NAME]


def _is_same(value: float, known: float | None) -> bool:
    return value == known or (known is not None and isnan(value) and isnan(known))
