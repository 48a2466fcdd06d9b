"""Loggers that write a file for each trial, with one row per step, as JSON lines or CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import AttemptStarted, TrialErrored, TrialFinished
from prefect_tune.core.values import StepReport, flatten
from prefect_tune.stores.local.staging import replace_file

DEFAULT_DIRECTORY = "~/prefect-tune-results"


class FolderLogger(Callback):
    """A logger that writes to `<directory>/<experiment>/<trial>/`.

    On a machine without the logger's files, all events are delivered again, so that the files are written again.
    """

    def __init__(self, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> None:
        self._directory = Path(directory).expanduser()
        self._folder = self._directory
        self._files_id = ""

    def setup(self, search: SearchInfo) -> None:
        self._folder = self._directory.absolute() / search.experiment  # the working directory may change later
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f".{self.name}"
        if not path.exists():
            replace_file(path, uuid.uuid4().hex.encode())
        self._files_id = path.read_text()

    def get_state(self) -> Mapping[str, object] | None:
        return {"files": self._files_id}

    def set_state(self, state: Mapping[str, object]) -> bool | None:
        return state.get("files") == self._files_id

    def make_trial_folder(self, trial: str) -> Path:
        """Return the folder of a trial, creating it if it is missing."""
        folder = self._folder / trial
        folder.mkdir(exist_ok=True)
        return folder


def sync_to_disk(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_package(module: str, extra: str, logger: str) -> None:
    """Raise InvalidInput if a package is not installed. The package is not imported."""
    if find_spec(module) is None:
        raise InvalidInput(f"{logger} needs {module}, which is not installed: pip install 'prefect-tune[{extra}]'")


class StepRows:
    """A text file with one row (a JSON object) per step. A new row replaces the rows of its step and of later steps.

    A line that a crash truncated is ignored. Each row is passed to the operating system at once; after `sync`, it also
    survives a power failure. A metric named `trial`, `step` or `trained_seconds` is left out.
    """

    header_line_count = 0

    def __init__(self, path: Path) -> None:
        """Open the file; it may already have rows."""
        self._path = path
        self._is_dirty = False
        self.last_step = 0
        """The last step in the file; 0 if the file has no rows."""
        self.remove_rows_after(math.inf)

    def write_row(self, trial: str, report: StepReport) -> str:
        """Write the row of a step in place of the rows of this step and all later steps; return the row."""
        row = self._make_row({"trial": trial, "step": report.step, "trained_seconds": report.trained_seconds}, report)
        if report.step <= self.last_step:
            self.remove_rows_after(report.step - 1)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{row}\n")
        self.last_step = report.step
        self._is_dirty = True
        return row

    def read_lines(self) -> Sequence[str]:
        """Return all complete lines."""
        return self._read_text().split("\n")[:-1]

    def remove_rows_after(self, step: float) -> None:
        """Remove the rows of all steps after `step`, and lines that are not rows."""
        text, lines = self._read_text(), self.read_lines()
        header, rows = lines[: self.header_line_count], lines[self.header_line_count :]
        kept = [row for row in rows if 0 < self._parse_step(row) <= step]
        if (kept_text := _join_lines([*header, *kept])) != text:
            self._rewrite(kept_text)
        self.last_step = self._parse_step(kept[-1]) if kept else 0

    def sync(self) -> None:
        """Sync all rows to the disk."""
        if self._is_dirty:
            for path in (self._path, self._path.parent):
                sync_to_disk(path)
            self._is_dirty = False

    def _make_row(self, fields: Mapping[str, object], report: StepReport) -> str:
        return json.dumps({**fields, **{name: value for name, value in report.metrics.items() if name not in fields}})

    def _parse_step(self, row: str) -> int:
        """Return the step of a row; 0 for a line that is not a row."""
        try:
            return int(json.loads(row)["step"])
        except (ValueError, KeyError, TypeError):
            return 0

    def _read_text(self) -> str:
        return self._path.read_text(encoding="utf-8") if self._path.exists() else ""

    def _rewrite(self, text: str) -> None:
        replace_file(self._path, text.encode())
        self._is_dirty = True


class CSVRows(StepRows):
    """A CSV file in which each row is a single line, because text of several lines is written as JSON."""

    header_line_count = 1

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns = next(csv.reader(self.read_lines()[:1]), [])

    def _make_row(self, fields: Mapping[str, object], report: StepReport) -> str:
        values = {**fields, **flatten(report.metrics), **fields}
        if new := [name for name in values if name not in self._columns]:
            self._columns += new
            rows = [f"{row}{',' * len(new)}" for row in self.read_lines()[1:]]
            self._rewrite(_join_lines([_format_csv_line(self._columns), *rows]))
        return _format_csv_line([_encode_multiline(values.get(column)) for column in self._columns])

    def _parse_step(self, row: str) -> int:
        cells = next(csv.reader([row]), [])
        return int(cells[1]) if len(cells) > 1 and cells[1].isdecimal() else 0


def _join_lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _format_csv_line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _encode_multiline(value: object) -> object:
    return json.dumps(value) if isinstance(value, str) and len(value.splitlines()) > 1 else value


class RowLogger(FolderLogger):
    """A logger that writes a file with a row for each step to the folder of each trial."""

    def __init__(self, directory: str | os.PathLike[str], file_name: str, rows: type[StepRows]) -> None:
        super().__init__(directory)
        self._file_name = file_name
        self._row_type = rows
        self._rows: dict[str, StepRows] = {}

    def get_rows(self, trial: str) -> StepRows:
        """Return the rows of a trial, including rows of an existing file."""
        if trial not in self._rows:
            self._rows[trial] = self._row_type(self.make_trial_folder(trial) / self._file_name)
        return self._rows[trial]

    def on_trial_complete(self, trial: Trial, finished: TrialFinished) -> None:
        del finished
        self.close_rows(trial)

    def on_trial_error(self, trial: Trial, gave_up: TrialErrored) -> None:
        del gave_up
        self.close_rows(trial)

    def close_rows(self, trial: Trial) -> None:
        """Sync the rows of an ended trial to the disk."""
        self.get_rows(trial.id).sync()
        del self._rows[trial.id]

    def get_state(self) -> Mapping[str, object] | None:
        for rows in self._rows.values():
            rows.sync()
        return super().get_state()


_FORMATS = {"csv": ("progress.csv", CSVRows), "json": ("result.json", StepRows)}


class FileLogger(RowLogger):
    """Writes a file with a row for each step, and the configuration as `params.json`, to each trial's folder.

    Even after kills and resumes, each file has exactly one row for each step.

    ```python
    callbacks = [pt.FileLogger("logs", "json"), pt.TensorBoardLogger("logs"), pt.WandbLogger("digits")]
    callbacks += [pt.MLflowLogger("sqlite:///mlflow.db")]
    ```

    Args:
        directory: the parent of the folders `<experiment>/<trial>`.
        file_format: `csv` writes `progress.csv`. Nested metrics become columns such as `eval/loss`, and a metric gets a
            column at its first report. `json` writes `result.json`, with a JSON object in each line.

    Raises:
        InvalidInput: the format is unknown.
    """

    def __init__(
        self, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY, file_format: Literal["csv", "json"] = "csv"
    ) -> None:
        if file_format not in _FORMATS:
            raise InvalidInput(f"FileLogger: expected the format 'csv' or 'json', found {file_format!r}")
        super().__init__(directory, *_FORMATS[file_format])
        self._format = file_format

    @property
    def name(self) -> str:
        return f"{super().name}-{self._format}"

    def on_trial_start(self, trial: Trial, started: AttemptStarted) -> None:
        config = json.dumps(dict(trial.config), indent=2)
        replace_file(self.make_trial_folder(trial.id) / "params.json", config.encode())
        self.get_rows(trial.id).remove_rows_after(started.from_step)

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        self.get_rows(trial.id).write_row(trial.id, report)
