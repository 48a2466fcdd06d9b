"""Loggers that write files of rows: one row for each step that counts, after kills and retries too."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import prefect_tune as pt
from tests.loggers.telling import CONFIG, SEARCH, errored, finished, report, started

RowLogger = pt.JSONLogger | pt.CSVLogger


@pytest.fixture(params=[pt.JSONLogger, pt.CSVLogger], ids=["json", "csv"])
def logger(request: pytest.FixtureRequest, tmp_path: Path) -> RowLogger:
    """A logger that is set up."""
    made: RowLogger = request.param(tmp_path)
    made.setup(SEARCH)
    return made


def rows_of(logger: RowLogger, folder: Path, trial: str = "00000") -> Sequence[Mapping[str, object]]:
    """Return the rows as any reader of the format gets them."""
    if isinstance(logger, pt.JSONLogger):
        return [json.loads(line) for line in (folder / "e" / trial / "result.json").read_text().splitlines()]
    with (folder / "e" / trial / "progress.csv").open(newline="") as file:
        return [{name: _read(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _read(value: str) -> object:
    return json.loads(value) if value[:1].isdigit() and value != "00000" else value


def steps_of(logger: RowLogger, folder: Path) -> Sequence[object]:
    return [row["step"] for row in rows_of(logger, folder)]


def test_each_step_is_a_row_and_the_configuration_a_file(logger: RowLogger, tmp_path: Path) -> None:
    started(logger)
    report(logger, 1)
    report(logger, 2)
    finished(logger)
    assert rows_of(logger, tmp_path) == [
        {"trial": "00000", "step": 1, "trained_seconds": 0.5, "loss": 1.0},
        {"trial": "00000", "step": 2, "trained_seconds": 1.0, "loss": 0.5},
    ]
    assert json.loads((tmp_path / "e/00000/params.json").read_text()) == CONFIG


def test_steps_that_are_trained_again_take_the_place_of_what_they_were(logger: RowLogger, tmp_path: Path) -> None:
    started(logger)
    for step in (1, 2, 3):
        report(logger, step, try_=1)
    started(logger, from_step=1)
    assert steps_of(logger, tmp_path) == [1]
    report(logger, 2, try_=2)
    assert [(row["step"], row["try_"]) for row in rows_of(logger, tmp_path)] == [(1, 1), (2, 2)]


def test_a_step_that_is_told_twice_is_one_row(logger: RowLogger, tmp_path: Path) -> None:
    started(logger)
    for step in (1, 2, 2):
        report(logger, step)
    assert steps_of(logger, tmp_path) == [1, 2]


def test_a_row_that_a_crash_has_torn_counts_as_never_written(logger: RowLogger, tmp_path: Path) -> None:
    started(logger)
    report(logger, 1)
    (path,) = [each for each in (tmp_path / "e/00000").iterdir() if each.name in ("result.json", "progress.csv")]
    with path.open("a") as file:
        file.write('{"trial": "00000", "st' if path.suffix == ".json" else "00000,2,1")
    again = type(logger)(tmp_path)
    again.setup(SEARCH)
    report(again, 2)
    assert steps_of(again, tmp_path) == [1, 2]


def test_trials_that_errored_keep_their_rows(logger: RowLogger, tmp_path: Path) -> None:
    started(logger)
    report(logger, 1)
    errored(logger)
    logger.get_state()
    assert steps_of(logger, tmp_path) == [1]
    started(logger)  # tried again, from nothing
    report(logger, 1)
    report(logger, 2)
    assert steps_of(logger, tmp_path) == [1, 2]


def test_only_where_its_files_are_it_goes_on_with_them(logger: RowLogger, tmp_path: Path) -> None:
    state = logger.get_state()
    assert state is not None
    here, elsewhere = type(logger)(tmp_path), type(logger)(tmp_path / "another machine")
    for each in (here, elsewhere):
        each.setup(SEARCH)
    assert here.set_state(state)
    assert elsewhere.set_state(state) is False


def test_a_metric_that_comes_late_gets_a_column_then(tmp_path: Path) -> None:
    logger = pt.CSVLogger(tmp_path)
    logger.setup(SEARCH)
    started(logger)
    report(logger, 1)
    report(logger, 2, eval={"loss": 7}, note="two\nlines, and a comma")
    first, second = rows_of(logger, tmp_path)
    assert (first["eval/loss"], first["note"]) == ("", "")
    assert (second["eval/loss"], second["note"]) == (7, '"two\\nlines, and a comma"')


def test_a_metric_cannot_pretend_to_be_another_trials_step(logger: RowLogger, tmp_path: Path) -> None:
    started(logger)
    report(logger, 1, step=99, trial="another")
    assert [(row["step"], row["trial"]) for row in rows_of(logger, tmp_path)] == [(1, "00000")]


def test_two_loggers_in_one_directory_write_at_once(tmp_path: Path) -> None:
    loggers = [pt.JSONLogger(tmp_path), pt.CSVLogger(tmp_path)]
    names = [f"{number:05d}" for number in range(100)]
    both = threading.Barrier(2)

    def start_trials(logger: RowLogger) -> None:
        logger.setup(SEARCH)
        for name in names:
            both.wait(60)
            started(logger, name=name)
            report(logger, 1, name=name)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(start_trials, loggers))
    for name in names:
        folder = tmp_path / "e" / name
        assert json.loads((folder / "params.json").read_text()) == CONFIG
        assert sorted(file.name for file in folder.iterdir()) == ["params.json", "progress.csv", "result.json"]
