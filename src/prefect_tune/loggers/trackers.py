"""Loggers for experiment trackers: MLflow, TensorBoard, and Weights & Biases."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import last_report
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import AttemptEnded, AttemptStarted, TrialErrored, TrialFinished
from prefect_tune.core.values import StepReport, flatten
from prefect_tune.loggers.file_logger import DEFAULT_DIRECTORY, FolderLogger, RowLogger, StepRows, require_package

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from wandb import Run as WandbRun


def _select_numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in flatten(metrics).items() if isinstance(value, int | float)}


# MLflow: a run for each trial, on a tracking server or in a database.

_TRIAL_TAG = "prefect_tune.trial"
_MARK_TAG = "prefect_tune.mark"
_STEP_METRIC = "trained_seconds"  # every step has this metric, so its history has all steps
_MAX_BATCH_METRICS = 1000  # the most metrics that a server accepts in one request
_MAX_VALUE_LENGTH = 6000
_MAX_NAME_LENGTH = 250
_INVALID_CHARACTERS = re.compile(r"[^\w\-. :/]")  # MLflow refuses a batch if a name in it has such a character


class MLflowLogger(Callback):
    """Logs each trial as a run: the configuration as parameters, and the numbers of each step as metrics.

    A resumed trial keeps its run and the run's ID. MLflow cannot delete metrics. If a step is trained again and yields
    another value, the run keeps both values, and MLflow shows the newer value. If a trial ends before its run's last
    step, the trial's last metrics are also logged at the run's last step, because MLflow compares runs by that step.
    Characters that MLflow refuses in names become `_`. If a run was deleted, a new one is created. See `FileLogger`.

    Args:
        tracking_uri: for example `"sqlite:///mlflow.db"`. Default: MLflow's own setting.
        experiment_name: the experiment's name in MLflow. Default: the name of the search's experiment.
        tags: tags for every run.

    Raises:
        InvalidInput: MLflow is not installed; or, at the start of a search, the MLflow experiment was deleted.
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
        self._runs: dict[str, _MLflowRun] = {}
        self._experiment_mark = ""

    def setup(self, search: SearchInfo) -> None:
        from mlflow import MlflowClient

        self._search = search
        self._client = MlflowClient(tracking_uri=self._tracking_uri)
        name = self._experiment_name or search.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment and experiment.lifecycle_stage != "active":
            raise InvalidInput(
                f"MLflowLogger: the experiment {name!r} was deleted in MLflow; restore it there "
                f"(mlflow experiments restore -x {experiment.experiment_id}), or pass another experiment_name"
            )
        self._experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._experiment_mark = (experiment.tags.get(_MARK_TAG) if experiment else None) or uuid.uuid4().hex
        self._client.set_experiment_tag(self._experiment_id, _MARK_TAG, self._experiment_mark)

    def get_state(self) -> Mapping[str, object] | None:
        return {"experiment": self._experiment_mark}

    def set_state(self, state: Mapping[str, object]) -> bool | None:
        return state.get("experiment") == self._experiment_mark

    def on_trial_start(self, trial: Trial, started: AttemptStarted) -> None:
        del started
        with self._using_run(trial) as run:
            run.mark_running()

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        with self._using_run(trial) as run:
            run.log_step(report)

    def on_trial_recover(self, trial: Trial, ended: AttemptEnded) -> None:
        with self._using_run(trial) as run:
            run.set_tag("prefect_tune.last_failure", f"{ended.cause}: {ended.reason}")

    def on_trial_complete(self, trial: Trial, finished: TrialFinished) -> None:
        self._end_run(trial, "FINISHED", str(finished.reason))

    def on_trial_error(self, trial: Trial, gave_up: TrialErrored) -> None:
        self._end_run(trial, "FAILED", str(gave_up.reason))

    def _end_run(self, trial: Trial, status: str, reason: str) -> None:
        with self._using_run(trial) as run:
            run.log_last_metrics(last_report(trial))
            run.set_tag("prefect_tune.reason", reason)
            run.terminate(status)
        del self._runs[trial.id]

    @contextmanager
    def _using_run(self, trial: Trial) -> Iterator[_MLflowRun]:
        """Yield the trial's run; after an error, the next call searches for the run again: it may have been deleted."""
        if trial.id not in self._runs:
            tags = {**self._tags, _TRIAL_TAG: f"{self._search.experiment}/{self._search.generation}/{trial.id}"}
            self._runs[trial.id] = _MLflowRun(self._client, self._experiment_id, tags, trial)
        try:
            yield self._runs[trial.id]
        except Exception:
            del self._runs[trial.id]
            raise


class _MLflowRun:
    """The MLflow run of one trial, found by its tag or created."""

    def __init__(self, client: MlflowClient, experiment_id: str, tags: Mapping[str, str], trial: Trial) -> None:
        self._client = client
        query = f"tags.`{_TRIAL_TAG}` = '{tags[_TRIAL_TAG]}'"
        runs: Sequence[Run] = client.search_runs([experiment_id], query, order_by=["attributes.start_time ASC"])
        run = runs[0] if runs else client.create_run(experiment_id, run_name=trial.id, tags=dict(tags))
        self._id = str(run.info.run_id)
        if not run.data.params and (config := flatten(trial.config)):
            from mlflow.entities import Param

            params = [Param(_clean_name(name), str(value)[:_MAX_VALUE_LENGTH]) for name, value in config.items()]
            client.log_batch(self._id, params=params)
        self._values: dict[str, dict[int, float]] = {}
        """For each metric that was fetched: the run's newest value at each step."""
        self._last_step = max(self._fetch_values(_STEP_METRIC), default=0) if runs else 0

    def log_step(self, report: StepReport) -> None:
        """Log the numbers of a step, except values that the run already has at this step."""
        metrics = _make_metrics(report)
        if report.step <= self._last_step:
            logged = {name: self._fetch_values(name).get(report.step) for name in metrics}
            metrics = {name: value for name, value in metrics.items() if not _is_already_logged(value, logged[name])}
        self._log_metrics(metrics, report.step)
        self._last_step = max(self._last_step, report.step)

    def log_last_metrics(self, report: StepReport) -> None:
        """If the run has steps after `report`, log the report's metrics also at the last step, which MLflow shows."""
        if report.step < self._last_step:
            self._log_metrics(_make_metrics(report), self._last_step)

    def mark_running(self) -> None:
        self._client.update_run(self._id, status="RUNNING")

    def set_tag(self, name: str, value: str) -> None:
        self._client.set_tag(self._id, name, value[:_MAX_VALUE_LENGTH])

    def terminate(self, status: str) -> None:
        self._client.set_terminated(self._id, status)

    def _log_metrics(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        for begin in range(0, len(metrics), _MAX_BATCH_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MAX_BATCH_METRICS])
        for name in self._values.keys() & numbers.keys():
            self._values[name][step] = numbers[name]

    def _fetch_values(self, metric: str) -> Mapping[int, float]:
        if metric not in self._values:
            history = sorted(self._client.get_metric_history(self._id, metric), key=attrgetter("timestamp"))
            self._values[metric] = {point.step: point.value for point in history}
        return self._values[metric]


def _make_metrics(report: StepReport) -> dict[str, float]:
    numbers = {_clean_name(name): float(value) for name, value in _select_numbers(report.metrics).items()}
    return {**numbers, _STEP_METRIC: float(report.trained_seconds)}


def _is_already_logged(value: float, logged: float | None) -> bool:
    return value == logged or (logged is not None and isnan(value) and isnan(logged))


def _clean_name(name: str) -> str:
    return _INVALID_CHARACTERS.sub("_", name)[:_MAX_NAME_LENGTH]


# TensorBoard: event files, written with tensorboardX, which needs neither torch nor TensorFlow.

_MAX_EVENT_FILES = 64


class TensorBoardLogger(FolderLogger):
    """Writes an event file to each trial's folder, for `tensorboard --logdir <directory>/<experiment>`.

    Numbers become scalars by step. Nested numbers get names like `eval/loss`; other values are left out. When a trial
    finishes, its configuration and last metrics appear under HPARAMS. When steps are trained again, a new event file
    replaces their values in earlier files. See `FileLogger`.

    Args:
        directory: the parent of the folders `<experiment>/<trial>`.

    Raises:
        InvalidInput: tensorboardX is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> None:
        require_package("tensorboardX", "tensorboard", "TensorBoardLogger")
        super().__init__(directory)
        self._files: OrderedDict[str, _EventFile] = OrderedDict()  # least recently used first

    def on_trial_start(self, trial: Trial, started: AttemptStarted) -> None:
        self._close_event_file(trial.id)
        self._open_event_file(trial.id, started.from_step + 1)

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        file = self._files.get(trial.id) or self._open_event_file(trial.id, report.step)
        self._files.move_to_end(trial.id)
        numbers = _select_numbers(report.metrics).items()
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in numbers]
        file.write(step=report.step, summary=Summary(value=scalars))

    def on_trial_complete(self, trial: Trial, finished: TrialFinished) -> None:
        from tensorboardX.summary import hparams

        del finished
        file = self._files.get(trial.id) or self._open_event_file(trial.id, trial.step + 1)
        config = flatten(trial.config)
        plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in config.items()}
        for summary in hparams(plain, _select_numbers(trial.metrics)):
            file.write(summary=summary)
        self._close_event_file(trial.id)

    def on_trial_error(self, trial: Trial, gave_up: TrialErrored) -> None:
        del gave_up
        self._close_event_file(trial.id)

    def on_experiment_end(self, trials: Mapping[str, Trial]) -> None:
        del trials
        for trial in list(self._files):
            self._close_event_file(trial)

    def get_state(self) -> Mapping[str, object] | None:
        for file in self._files.values():
            file.flush()
        return super().get_state()

    def _open_event_file(self, trial: str, step: int) -> _EventFile:
        """Open an event file that replaces the values of earlier files from `step` on."""
        while len(self._files) >= _MAX_EVENT_FILES:
            self._close_event_file(next(iter(self._files)))
        self._files[trial] = _EventFile(self.make_trial_folder(trial), step)
        return self._files[trial]

    def _close_event_file(self, trial: str) -> None:
        if (file := self._files.pop(trial, None)) is not None:
            file.close()


class _EventFile:
    """An event file that is written in the calling thread."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        # TensorBoard reads files in the order of their names. A number orders files that begin in the same second.
        suffix = f".{sum(1 for _ in folder.glob('events.out.tfevents.*')):06d}"
        self._writer = EventsWriter(str(folder / "events"), suffix)
        self.write(step=step, session_log=SessionLog(status=SessionLog.START))

    def write(self, **fields: object) -> None:
        """Write an event with the current time."""
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), **fields))

    def flush(self) -> None:
        """Pass all events to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


# Weights & Biases: an offline run for each trial, to upload later with `wandb sync`.

_MAX_OFFLINE_RUNS = 16


class WandbLogger(RowLogger):
    """Writes an offline run for each trial; upload with `wandb sync <directory>/<experiment>/wandb/offline-run-*`.

    An offline run can be neither changed nor resumed. So when a trial resumes, its run is rewritten from `wandb.json`
    in the trial's folder, and the earlier run is removed. At the end of the search, there is one run for each trial,
    with exactly one row for each step. Upload the runs only then. See `FileLogger`.

    Args:
        project: the W&B project. Default: the name of the experiment.
        directory: the parent of the folder `<experiment>`.

    Raises:
        InvalidInput: wandb is not installed.
    """

    def __init__(self, project: str | None = None, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> None:
        require_package("wandb", "wandb", "WandbLogger")
        super().__init__(directory, "wandb.json", StepRows)
        self._project = project
        self._runs: OrderedDict[str, WandbRun] = OrderedDict()  # least recently used first

    def on_trial_start(self, trial: Trial, started: AttemptStarted) -> None:
        self.get_rows(trial.id).remove_rows_after(started.from_step)
        self._close_run(trial.id, 0)
        self._open_run(trial)

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        rows = self.get_rows(trial.id)
        if report.step <= rows.last_step:
            rows.remove_rows_after(report.step - 1)
            self._close_run(trial.id, 0)
        run = self._runs.get(trial.id) or self._open_run(trial)
        self._runs.move_to_end(trial.id)
        _log_row(run, rows.write_row(trial.id, report))

    def on_trial_complete(self, trial: Trial, finished: TrialFinished) -> None:
        del finished
        self._end_run(trial, 0)

    def on_trial_error(self, trial: Trial, gave_up: TrialErrored) -> None:
        del gave_up
        self._end_run(trial, 1)

    def on_experiment_end(self, trials: Mapping[str, Trial]) -> None:
        del trials
        for trial in list(self._runs):
            self._close_run(trial, 0)

    def _end_run(self, trial: Trial, exit_code: int) -> None:
        if trial.id not in self._runs:
            self._open_run(trial)
        self._close_run(trial.id, exit_code)
        self.close_rows(trial)

    def _open_run(self, trial: Trial) -> WandbRun:
        """Open a new run with the existing rows, and remove the trial's earlier runs."""
        import wandb

        while len(self._runs) >= _MAX_OFFLINE_RUNS:
            self._close_run(next(iter(self._runs)), 0)
        name = f"{self._folder.name}-{trial.id}"
        run = wandb.init(
            mode="offline",
            reinit="create_new",  # other runs, also the user's own, stay active
            id=name,
            name=trial.id,
            group=self._folder.name,
            project=self._project or self._folder.name,
            dir=str(self._folder),
            config=dict(trial.config),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )
        self._runs[trial.id] = run
        for row in self.get_rows(trial.id).read_lines():
            _log_row(run, row)
        for other in (self._folder / "wandb").glob(f"offline-run-*/run-{name}.wandb"):
            if other.parent != Path(run.dir).parent:
                shutil.rmtree(other.parent)
        return run

    def _close_run(self, trial: str, exit_code: int) -> None:
        if (run := self._runs.pop(trial, None)) is not None:
            run.finish(exit_code=exit_code)


def _log_row(run: WandbRun, row: str) -> None:
    values = json.loads(row)
    run.log({name: value for name, value in values.items() if name not in {"trial", "step"}}, step=values["step"])
