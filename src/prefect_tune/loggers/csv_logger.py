"""A logger that writes a CSV file for each trial."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect_tune.core.models import StepReport, flat
from prefect_tune.loggers.row_file import RowFile
from prefect_tune.loggers.row_logger import RowLogger, Rows


class CSVLogger(RowLogger):
    """Writes `progress.csv`, a row for each step, and `params.json`, the configuration, into each trial's folder.

    Nested metrics are columns such as `eval/loss`; a metric that is reported later than others gets a column
    then. Killed and resumed, each file has one row for each step that counts.

    Args:
        directory: where the folder `<experiment>/<trial>` is.
    """

    def open_rows(self, folder: Path) -> Rows:
        return _CSVRows(folder / "progress.csv")


class _CSVRows(RowFile):
    """One row, one line: text of several lines is written as JSON."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _step_of, head=1)
        head = self.lines()[:1]
        self._columns = _cells(head[0]) if head else []

    def add(self, trial: str, report: StepReport) -> None:
        said = {"trial": trial, "step": report.step, "trained_seconds": report.trained_seconds}
        row = {**said, **flat(report.metrics), **said}
        self._have_columns(row)
        self.append(report.step, _line([_cell(row.get(column)) for column in self._columns]))

    def _have_columns(self, row: Mapping[str, object]) -> None:
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            rows = [f"{line}{',' * len(new)}" for line in self.lines()[1:]]
            self.rewrite([_line(self._columns), *rows])


def _step_of(line: str) -> int | None:
    cells = _cells(line)
    return int(cells[1]) if len(cells) > 1 and cells[1].isdecimal() else None


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, str) and len(value.splitlines()) > 1 else value
