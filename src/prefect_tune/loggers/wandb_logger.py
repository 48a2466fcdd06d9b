"""A logger that writes an offline Weights & Biases run for each trial, to upload later with `wandb sync`."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_tune.callbacks import SearchInfo
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import Finished, GaveUp, Started
from prefect_tune.core.values import StepReport
from prefect_tune.loggers.file_logger import DEFAULT_DIRECTORY, RowLogger, StepRows, require_package

if TYPE_CHECKING:
    from wandb import Run

_MOST_OPEN = 16


class WandbLogger(RowLogger):
    """Writes an offline run for each trial: `wandb sync <directory>/<experiment>/wandb/offline-run-*`.

    An offline run can be neither corrected nor resumed. So when a trial resumes, its run is written again from
    `wandb.json` in its folder, and the earlier run is removed. At the end of the search there is one run for each
    trial, with one row for each step that counts. Upload them then.

    Args:
        project: in W&B. Default: the name of the experiment.
        directory: where the folder `<experiment>` is.

    Raises:
        InvalidInput: wandb is not installed.
    """

    def __init__(self, project: str | None = None, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> None:
        require_package("wandb", "wandb", "WandbLogger")
        super().__init__(directory, "wandb.json", StepRows)
        self._project = project
        self._experiment = ""
        self._runs: OrderedDict[str, Run] = OrderedDict()  # least recently used first

    def setup(self, search: SearchInfo) -> None:
        super().setup(search)
        self._experiment = search.experiment

    def on_trial_start(self, trial: Trial, started: Started) -> None:
        self.rows_of(trial.trial).keep_up_to(started.from_step)
        self._close(trial.trial, 0)
        self._open(trial)

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        rows = self.rows_of(trial.trial)
        if report.step <= rows.last:
            rows.keep_up_to(report.step - 1)
            self._close(trial.trial, 0)
        run = self._runs.get(trial.trial) or self._open(trial)
        self._runs.move_to_end(trial.trial)
        _log(run, rows.add(trial.trial, report))

    def on_trial_complete(self, trial: Trial, finished: Finished) -> None:
        del finished
        self._end(trial, 0)

    def on_trial_error(self, trial: Trial, gave_up: GaveUp) -> None:
        del gave_up
        self._end(trial, 1)

    def on_experiment_end(self, trials: Mapping[str, Trial]) -> None:
        del trials
        for trial in list(self._runs):
            self._close(trial, 0)

    def _end(self, trial: Trial, exit_code: int) -> None:
        if trial.trial not in self._runs:
            self._open(trial)
        self._close(trial.trial, exit_code)
        self.close_rows(trial.trial)

    def _open(self, trial: Trial) -> Run:
        """Open a new run with the rows so far, and remove the trial's earlier runs."""
        import wandb

        while len(self._runs) >= _MOST_OPEN:
            self._close(next(iter(self._runs)), 0)
        name = f"{self._experiment}-{trial.trial}"
        run = wandb.init(
            mode="offline",
            reinit="create_new",  # other runs, also the user's own, stay active
            id=name,
            name=trial.trial,
            group=self._experiment,
            project=self._project or self._experiment,
            dir=str(self._folder),
            config=dict(trial.config),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )
        self._runs[trial.trial] = run
        for row in self.rows_of(trial.trial).lines():
            _log(run, row)
        for other in (self._folder / "wandb").glob(f"offline-run-*/run-{name}.wandb"):
            if other.parent != Path(run.dir).parent:
                shutil.rmtree(other.parent)
        return run

    def _close(self, trial: str, exit_code: int) -> None:
        if (run := self._runs.pop(trial, None)) is not None:
            run.finish(exit_code=exit_code)


def _log(run: Run, row: str) -> None:
    said = json.loads(row)
    run.log({name: value for name, value in said.items() if name not in {"trial", "step"}}, step=said["step"])
