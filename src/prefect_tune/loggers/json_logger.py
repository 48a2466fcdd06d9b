"""A logger that writes a file of JSON lines for each trial."""

from __future__ import annotations

import json
from pathlib import Path

from prefect_tune.core.models import StepReport
from prefect_tune.loggers.row_file import RowFile
from prefect_tune.loggers.row_logger import RowLogger, Rows


class JSONLogger(RowLogger):
    """Writes `result.json`, a line for each step, and `params.json`, the configuration, into each trial's folder.

    Killed and resumed, each file has one line for each step that counts.

    Args:
        directory: where the folder `<experiment>/<trial>` is.
    """

    def open_rows(self, folder: Path) -> Rows:
        return JSONRows(folder / "result.json")


class JSONRows(RowFile):
    """Rows that are JSON objects. A metric named like `trial`, `step` or `trained_seconds` is left out."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _step_of)

    def add(self, trial: str, report: StepReport) -> str:
        """Write the row of a step, replacing the rows of this and all later steps; return it."""
        said = {"trial": trial, "step": report.step, "trained_seconds": report.trained_seconds}
        row = json.dumps({**said, **{name: value for name, value in report.metrics.items() if name not in said}})
        self.append(report.step, row)
        return row


def _step_of(line: str) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
