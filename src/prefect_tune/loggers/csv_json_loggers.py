"""Loggers that write a file with one row per step for each trial, as JSON lines or CSV."""

from __future__ import annotations

import csv
import io
import json
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import Finished, GaveUp, Started
from prefect_tune.core.values import StepReport, flat
from prefect_tune.stores.local.staging import replace_file

# The base class of loggers that write files into a local folder for each trial.

DEFAULT_DIRECTORY = "~/prefect-tune-results"


class FolderLogger(Callback):
    """A logger that writes to `<directory>/<experiment>/<trial>/`.

    On a machine without these files, all events are delivered again from the first, so the files are rewritten.
    """

    def __init__(self, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> None:
        self._directory = Path(directory).expanduser()
        self._folder = self._directory
        self._mark = ""

    def setup(self, search: SearchInfo) -> None:
        self._folder = self._directory.absolute() / search.experiment  # the working directory may change later
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f".{self.name}"
        if not path.exists():
            replace_file(path, uuid.uuid4().hex.encode())
        self._mark = path.read_text()

    def get_state(self) -> Mapping[str, object] | None:
        return {"files": self._mark}

    def set_state(self, state: Mapping[str, object]) -> bool | None:
        return state.get("files") == self._mark

    def write_config(self, trial: Trial) -> None:
        """Write the configuration of a trial into `params.json`."""
        replace_file(self.folder_of(trial.trial) / "params.json", json.dumps(dict(trial.config), indent=2).encode())

    def folder_of(self, trial: str) -> Path:
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
    """Check that a package is installed, without importing it.

    Raises:
        InvalidInput: it is not installed.
    """
    if find_spec(module) is None:
        raise InvalidInput(f"{logger} needs {module}, which is not installed: pip install 'prefect-tune[{extra}]'")


class RowFile(ABC):
    """A text file with header lines and a row per step; a step replaces its earlier row and all later rows.

    A line that a crash cut off is ignored. Each row is passed to the operating system at once, and survives a
    power cut after `sync`.
    """

    header_line_count = 0

    def __init__(self, path: Path) -> None:
        """Open the file, which may have rows already."""
        self.path = path
        self.last = 0
        """The last step in the file."""
        self._is_dirty = False
        self.keep_up_to(None)

    @abstractmethod
    def add(self, trial: str, report: StepReport) -> str:
        """Write the row of a step, replacing the rows of this and all later steps; return it."""

    @abstractmethod
    def step_of(self, line: str) -> int | None:
        """Return the step of a row; None for a line that is not a row."""

    def lines(self) -> Sequence[str]:
        """Return all complete lines."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return text.split("\n")[:-1]

    def keep_up_to(self, step: int | None) -> None:
        """Remove the rows of later steps, and lines that are not rows; None keeps all rows."""
        lines = self.lines()
        header, rows = lines[: self.header_line_count], lines[self.header_line_count :]
        kept = list(self._kept(rows, step))
        if len(kept) < len(rows) or self._is_torn():
            self.rewrite([*header, *kept])
        self.last = (self.step_of(kept[-1]) or 0) if kept else 0

    def _kept(self, rows: Sequence[str], step: int | None) -> Iterator[str]:
        for line in rows:
            found = self.step_of(line)
            if found is not None and (step is None or found <= step):
                yield line

    def _is_torn(self) -> bool:
        data = self.path.read_bytes() if self.path.exists() else b""
        return bool(data) and not data.endswith(b"\n")

    def append(self, step: int, line: str) -> None:
        """Write the row of a step, replacing the rows of this and all later steps."""
        if step <= self.last:
            self.keep_up_to(step - 1)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        self.last = step
        self._is_dirty = True

    def rewrite(self, lines: Sequence[str]) -> None:
        """Replace the content by these lines."""
        replace_file(self.path, "".join(f"{line}\n" for line in lines).encode())
        self._is_dirty = True

    def sync(self) -> None:
        """Sync all rows to the disk."""
        if self._is_dirty:
            sync_to_disk(self.path)
            sync_to_disk(self.path.parent)
            self._is_dirty = False


class JSONRows(RowFile):
    """Rows that are JSON objects. A metric named like `trial`, `step` or `trained_seconds` is left out."""

    def add(self, trial: str, report: StepReport) -> str:
        said = {"trial": trial, "step": report.step, "trained_seconds": report.trained_seconds}
        row = json.dumps({**said, **{name: value for name, value in report.metrics.items() if name not in said}})
        self.append(report.step, row)
        return row

    def step_of(self, line: str) -> int | None:
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            return None
        return step if isinstance(step, int) else None


class _CSVRows(RowFile):
    """One row, one line: text of several lines is written as JSON."""

    header_line_count = 1

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        header = self.lines()[:1]
        self._columns = _cells(header[0]) if header else []

    def add(self, trial: str, report: StepReport) -> str:
        said = {"trial": trial, "step": report.step, "trained_seconds": report.trained_seconds}
        values = {**said, **flat(report.metrics), **said}
        self._have_columns(values)
        row = _line([_cell(values.get(column)) for column in self._columns])
        self.append(report.step, row)
        return row

    def step_of(self, line: str) -> int | None:
        cells = _cells(line)
        return int(cells[1]) if len(cells) > 1 and cells[1].isdecimal() else None

    def _have_columns(self, row: Mapping[str, object]) -> None:
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            rows = [f"{line}{',' * len(new)}" for line in self.lines()[1:]]
            self.rewrite([_line(self._columns), *rows])


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, str) and len(value.splitlines()) > 1 else value


class RowLogger(FolderLogger, ABC):
    """Writes a file of rows, one for each step, and `params.json` into the folder of each trial."""

    def __init__(self, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> None:
        super().__init__(directory)
        self._rows: dict[str, RowFile] = {}
        self._ended: set[str] = set()

    @abstractmethod
    def open_rows(self, folder: Path) -> RowFile:
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

    def _rows_of(self, trial: str) -> RowFile:
        if trial not in self._rows:
            self._rows[trial] = self.open_rows(self.folder_of(trial))
        return self._rows[trial]


class JSONLogger(RowLogger):
    """Writes `result.json`, a line for each step, and `params.json`, the configuration, into each trial's folder.

    Killed and resumed, each file has one line for each step that counts.

    Args:
        directory: where the folder `<experiment>/<trial>` is.
    """

    def open_rows(self, folder: Path) -> RowFile:
        return JSONRows(folder / "result.json")


class CSVLogger(RowLogger):
    """Writes `progress.csv`, a row for each step, and `params.json`, the configuration, into each trial's folder.

    Nested metrics are columns such as `eval/loss`; a metric that is reported later than others gets a column
    then. Killed and resumed, each file has one row for each step that counts.

    Args:
        directory: where the folder `<experiment>/<trial>` is.
    """

    def open_rows(self, folder: Path) -> RowFile:
        return _CSVRows(folder / "progress.csv")
