"""The base class of loggers that write a file with one row per step for each trial."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events.experiment_events import Finished, GaveUp, Started
from prefect_tune.core.models import StepReport
from prefect_tune.loggers.folder_logger import DEFAULT_DIRECTORY, FolderLogger


class Rows(Protocol):
    """The rows of one trial."""

    def keep_up_to(self, step: int) -> None:
        """Remove the rows of later steps."""
        ...

    def add(self, trial: str, report: StepReport) -> object:
        """Write the row of a step, replacing the rows of this and all later steps."""
        ...

    def sync(self) -> None:
        """Sync all rows to the disk."""
        ...


class RowLogger(FolderLogger, ABC):
    """Writes a file of rows, one for each step, and `params.json` into the folder of each trial."""

    def __init__(self, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> None:
        super().__init__(directory)
        self._rows: dict[str, Rows] = {}
        self._ended: set[str] = set()

    @abstractmethod
    def open_rows(self, folder: Path) -> Rows:
        """Open the rows in the folder of a trial, including existing ones."""

    def on_trial_start(self, trial: Trial, started: Started) -> None:
        self.write_config(trial)
        self._ended.discard(trial.trial)
        self._rows_of(trial.trial).keep_up_to(started.from_step)

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        self._rows_of(trial.trial).add(trial.trial, report)

    def on_trial_complete(self, trial: Trial, finished: Finished) -> None:
        del finished
        self._ended.add(trial.trial)

    def on_trial_error(self, trial: Trial, gave_up: GaveUp) -> None:
        del gave_up
        self._ended.add(trial.trial)

    def get_state(self) -> Mapping[str, object] | None:
        for rows in self._rows.values():
            rows.sync()
        for trial in self._ended:
            self._rows.pop(trial, None)
        self._ended.clear()
        return super().get_state()

    def _rows_of(self, trial: str) -> Rows:
        if trial not in self._rows:
            self._rows[trial] = self.open_rows(self.folder_of(trial))
        return self._rows[trial]
