"""A logger that writes an MLflow run for each trial, to a tracking server or a database."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import AttemptEnded, Finished, GaveUp, Started
from prefect_tune.core.values import StepReport, flat
from prefect_tune.loggers.csv_json_loggers import require_package

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

_TRIAL = "prefect_tune.trial"
_COPY_OF = "prefect_tune.copy_of"
_MARK = "prefect_tune.mark"
_STEPS = "trained_seconds"  # reported with every step, and so the metric that has them all
_BATCH = 1000  # the most metrics that a server takes at once
_LONGEST_PARAMETER = 6000


class MLflowLogger(Callback):
    """Logs each trial as a run: its configuration as parameters, numbers as metrics by step.

    MLflow cannot delete metrics. So when steps are trained again, the trial gets a new run with the metrics of
    the steps before, and the earlier run is deleted.

    Args:
        tracking_uri: such as `"sqlite:///mlflow.db"`. Default: MLflow's own setting.
        experiment_name: in MLflow. Default: the name of the search's experiment.
        tags: of every run.

    Raises:
        InvalidInput: MLflow is not installed.
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
        self._experiment_id = found.experiment_id if found else self._client.create_experiment(name)
        self._mark = (found.tags.get(_MARK) if found else None) or uuid.uuid4().hex
        self._client.set_experiment_tag(self._experiment_id, _MARK, self._mark)

    def get_state(self) -> Mapping[str, object] | None:
        return {"experiment": self._mark}

    def set_state(self, state: Mapping[str, object]) -> bool | None:
        return state.get("experiment") == self._mark

    def on_trial_start(self, trial: Trial, started: Started) -> None:
        run = self._run(trial)
        run.keep_up_to(started.from_step)
        run.begin()

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        self._run(trial).log(report)

    def on_trial_recover(self, trial: Trial, ended: AttemptEnded) -> None:
        self._run(trial).tag("prefect_tune.last_failure", f"{ended.cause}: {ended.message}")

    def on_trial_complete(self, trial: Trial, finished: Finished) -> None:
        self._end(trial, "FINISHED", finished.reason)

    def on_trial_error(self, trial: Trial, gave_up: GaveUp) -> None:
        self._end(trial, "FAILED", gave_up.message)

    def _end(self, trial: Trial, status: str, reason: str) -> None:
        run = self._run(trial)
        run.tag("prefect_tune.reason", reason)
        run.end(status)
        del self._runs[trial.trial]

    def _run(self, trial: Trial) -> _TrialRun:
        if trial.trial not in self._runs:
            tags = {**self._tags, _TRIAL: f"{self._search.experiment}/{trial.trial}"}
            self._runs[trial.trial] = _TrialRun(self._client, self._experiment_id, tags, trial)
        return self._runs[trial.trial]


class _TrialRun:
    """The run of one trial: the one that is there, or a new one."""

    def __init__(self, client: MlflowClient, experiment_id: str, tags: Mapping[str, str], trial: Trial) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self._tags = tags
        self._name = trial.trial
        found = self._tagged(_TRIAL, tags[_TRIAL])
        self._id = found[0].info.run_id if found else self._create(trial)
        for other in found[1:]:  # a killed process made a copy and did not delete the original
            client.delete_run(other.info.run_id)
        self._last = max((each.step for each in self._history(_STEPS)), default=0) if found else 0

    def keep_up_to(self, step: int) -> None:
        """Replace the run by a copy without the metrics of later steps, if it has any."""
        if self._last <= step:
            return
        for rest in self._tagged(_COPY_OF, self._id):
            self._client.delete_run(rest.info.run_id)
        before = self._client.get_run(self._id)
        tags = {**self._tags, _COPY_OF: self._id}
        del tags[_TRIAL]
        copy = self._client.create_run(self._experiment_id, run_name=self._name, tags=tags).info.run_id
        kept = [each for name in before.data.metrics for each in self._history(name) if each.step <= step]
        self._log(copy, kept, before.data.params)
        self._client.set_tag(copy, _TRIAL, self._tags[_TRIAL])  # from here on it is the trial's run
        self._client.delete_run(self._id)
        self._id, self._last = copy, max((each.step for each in kept), default=0)

    def log(self, report: StepReport) -> None:
        from mlflow.entities import Metric

        self.keep_up_to(report.step - 1)
        now = int(time.time() * 1000)
        numbers = {name: value for name, value in flat(report.metrics).items() if isinstance(value, int | float)}
        numbers[_STEPS] = report.trained_seconds
        self._log(self._id, [Metric(name, float(value), now, report.step) for name, value in numbers.items()])
        self._last = report.step

    def begin(self) -> None:
        self._client.update_run(self._id, status="RUNNING")

    def tag(self, name: str, value: str) -> None:
        self._client.set_tag(self._id, name, value[:_LONGEST_PARAMETER])

    def end(self, status: str) -> None:
        self._client.set_terminated(self._id, status)

    def _create(self, trial: Trial) -> str:
        run = self._client.create_run(self._experiment_id, run_name=self._name, tags=dict(self._tags))
        self._log(run.info.run_id, (), flat(trial.config))
        return str(run.info.run_id)

    def _log(self, run: str, metrics: Sequence[Metric], parameters: Mapping[str, object] | None = None) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in (parameters or {}).items()]
        if params:
            self._client.log_batch(run, params=params)
        for begin in range(0, len(metrics), _BATCH):
            self._client.log_batch(run, metrics=metrics[begin : begin + _BATCH])

    def _history(self, metric: str) -> Iterable[Metric]:
        found: Iterable[Metric] = self._client.get_metric_history(self._id, metric)
        return found

    def _tagged(self, name: str, value: str) -> Sequence[Run]:
        """Newest first."""
        wanted = f"tags.`{name}` = '{value}'"
        newest = ["attributes.start_time DESC"]
        found: Sequence[Run] = self._client.search_runs([self._experiment_id], wanted, order_by=newest)
        return found
