"""Loggers that write files of rows: one row for each step that counts, after kills and retries too."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeAlias

import pytest

import prefect_tune as pt
from tests.loggers.telling import CONFIG, SEARCH, errored, finished, report, started

FileFormat: TypeAlias = Literal["csv", "json"]


@pytest.fixture(params=["json", "csv"])
def file_format(request: pytest.FixtureRequest) -> FileFormat:
    return request.param


@pytest.fixture
def logger(tmp_path: Path, file_format: FileFormat) -> pt.FileLogger:
    return set_up(tmp_path, file_format)


def set_up(folder: Path, file_format: FileFormat) -> pt.FileLogger:
    logger = pt.FileLogger(folder, file_format)
    logger.setup(SEARCH)
    return logger


def read_rows(folder: Path, trial: str = "00000") -> Sequence[Mapping[str, object]]:
    """Return the rows as any reader of the format gets them."""
    path = folder / "e" / trial / "result.json"
    if path.exists():
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.with_name("progress.csv").open(newline="") as file:
        return [{name: _read(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _read(value: str) -> object:
    return json.loads(value) if value[:1].isdigit() and value != "00000" else value


def read_steps(folder: Path) -> Sequence[object]:
    return [row["step"] for row in read_rows(folder)]


def test_each_step_is_a_row_and_the_configuration_a_file(logger: pt.FileLogger, tmp_path: Path) -> None:
    started(logger)
    report(logger, 1)
    report(logger, 2)
    finished(logger)
    assert read_rows(tmp_path) == [
        {"trial": "00000", "step": 1, "trained_seconds": 0.5, "loss": 1.0},
        {"trial": "00000", "step": 2, "trained_seconds": 1.0, "loss": 0.5},
    ]
    assert json.loads((tmp_path / "e/00000/params.json").read_text()) == CONFIG


def test_steps_that_are_trained_again_take_the_place_of_what_they_were(logger: pt.FileLogger, tmp_path: Path) -> None:
    started(logger)
    for step in (1, 2, 3):
        report(logger, step, try_=1)
    started(logger, from_step=1)
    assert read_steps(tmp_path) == [1]
    report(logger, 2, try_=2)
    assert [(row["step"], row["try_"]) for row in read_rows(tmp_path)] == [(1, 1), (2, 2)]


def test_a_step_that_is_told_twice_is_one_row(logger: pt.FileLogger, tmp_path: Path) -> None:
    started(logger)
    for step in (1, 2, 2):
        report(logger, step)
    assert read_steps(tmp_path) == [1, 2]


def test_a_row_that_a_crash_has_torn_counts_as_never_written(
    logger: pt.FileLogger, tmp_path: Path, file_format: FileFormat
) -> None:
    started(logger)
    report(logger, 1)
    (path,) = [each for each in (tmp_path / "e/00000").iterdir() if each.name in ("result.json", "progress.csv")]
    with path.open("a") as file:
        file.write('{"trial": "00000", "st' if path.suffix == ".json" else "00000,2,1")
    again = set_up(tmp_path, file_format)
    report(again, 1)
    report(again, 2)
    assert read_steps(tmp_path) == [1, 2]


def test_trials_that_errored_keep_their_rows(logger: pt.FileLogger, tmp_path: Path) -> None:
    started(logger)
    report(logger, 1)
    errored(logger)
    logger.get_state()
    assert read_steps(tmp_path) == [1]
    started(logger)  # tried again, from nothing
    report(logger, 1)
    report(logger, 2)
    assert read_steps(tmp_path) == [1, 2]


def test_the_state_is_stored_after_the_rows_are_on_the_disk(
    logger: pt.FileLogger, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("prefect_tune.loggers.file_logger.sync_to_disk", synced.append)
    for name in ("running", "ended"):
        started(logger, name=name)
        report(logger, 1, name=name)
    finished(logger, name="ended")
    logger.get_state()
    assert {path.parent.name for path in synced if path.suffix} == {"running", "ended"}


def test_only_where_its_files_are_it_goes_on_with_them(
    logger: pt.FileLogger, tmp_path: Path, file_format: FileFormat
) -> None:
    state = logger.get_state()
    assert state is not None
    assert set_up(tmp_path, file_format).set_state(state)
    assert set_up(tmp_path / "another machine", file_format).set_state(state) is False
    other_format = pt.FileLogger(tmp_path, "csv" if file_format == "json" else "json")
    assert other_format.name != logger.name, "its stored state is another one"


def test_a_metric_that_comes_late_gets_a_column_then(tmp_path: Path) -> None:
    logger = set_up(tmp_path, "csv")
    started(logger)
    report(logger, 1)
    report(logger, 2, eval={"loss": 7}, note="two\nlines, and a comma")
    first, second = read_rows(tmp_path)
    assert (first["eval/loss"], first["note"]) == ("", "")
    assert (second["eval/loss"], second["note"]) == (7, '"two\\nlines, and a comma"')


def test_a_metric_cannot_pretend_to_be_another_trials_step(logger: pt.FileLogger, tmp_path: Path) -> None:
    started(logger)
    report(logger, 1, step=99, trial="another")
    assert [(row["step"], row["trial"]) for row in read_rows(tmp_path)] == [(1, "00000")]


def test_two_loggers_in_one_directory_write_at_once(tmp_path: Path) -> None:
    loggers = [pt.FileLogger(tmp_path, "json"), pt.FileLogger(tmp_path)]
    names = [f"{number:05d}" for number in range(100)]
    both = threading.Barrier(2)

    def start_trials(logger: pt.FileLogger) -> None:
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


def test_an_unknown_format_and_the_names_of_earlier_classes_are_refused() -> None:
    with pytest.raises(pt.InvalidInput, match="expected the format 'csv' or 'json', found 'tsv'"):
        pt.FileLogger("logs", "tsv")
    with pytest.raises(AttributeError, match=r"use pt\.FileLogger"):
        _ = pt.JSONLogger
