"""The width of tables: a pipe gets every column, and a narrow terminal names the columns that it has no room for."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.cli.inspect import format_last_report
from prefect_tune.core.messages.target_messages import RunningTrial
from tests.fakes.command_line import PROGRAM, Run
from tests.fakes.searches.experiments import write_search

PARAMETERS = [f"parameter_{letter}" for letter in "abcdefgh"]
NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
BEGAN = (NOW - timedelta(seconds=90)).isoformat()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search with more parameters than a terminal has room for."""
    target = tmp_path_factory.mktemp("wide") / "runs"
    write_search(target, "wide", {"00000": 0.5, "00001": 0.25}, parameters=PARAMETERS)
    return target


def columns_of(shown: str) -> list[str]:
    return next(line for line in shown.splitlines() if line.startswith("trial  ")).split()


ALL = ["trial", "status", "step", "loss", *PARAMETERS, "rate"]


def test_a_pipe_gets_every_column_and_whole_cells(wide: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [*PROGRAM, "show", str(wide), "wide"], env=environment, capture_output=True, text=True, check=True
    )
    assert columns_of(done.stdout) == ALL
    assert "hidden" not in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("00001")]
    assert row.count(" of 00001") == len(PARAMETERS)


@pytest.mark.parametrize("columns", [60, 80, 120, 160, 200, 240])
def test_a_terminal_shows_the_columns_that_fit_and_names_the_others(columns: int, wide: Path, run: Run) -> None:
    shown = run("show", wide, "wide", columns=columns).out
    there = columns_of(shown)
    hidden = [name for name in ALL if name not in there]
    note = re.search(
        "^hidden, for lack of room: (.*); a wider terminal or a pipe has all columns$", shown, re.MULTILINE
    )
    assert (note[1].split(", ") if note else []) == hidden
    table = shown[shown.index("trial  ") :].splitlines()[:3]
    assert max(map(len, table)) <= columns
    assert "of 00001" not in shown or "…" not in shown


def test_a_real_terminal_of_80_columns_says_what_it_hides(wide: Path) -> None:
    master, slave = pty.openpty()
    os.set_inheritable(slave, True)
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    command = f"stty cols 80 rows 40 < /dev/tty; exec prefect-tune show {wide} wide"
    path = f"{Path(PROGRAM[0]).parent}:{environment['PATH']}"
    with subprocess.Popen(
        ["setsid", "-c", "bash", "-c", command],
        env={**environment, "PATH": path, "TERM": "xterm"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    ) as process:
        os.close(slave)
        shown = ""
        try:
            while data := os.read(master, 65536):
                shown += data.decode()
        except OSError:  # the program has closed it
            pass
        os.close(master)
    assert process.returncode == 0, shown
    assert "hidden, for lack of room: parameter_" in shown


def test_the_trials_of_results_are_printed_in_the_same_way(
    wide: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = pt.load_results(wide, "wide").trials
    monkeypatch.delenv("COLUMNS", raising=False)
    assert columns_of(repr(trials)) == ALL
    monkeypatch.setenv("COLUMNS", "80")
    assert "hidden, for lack of room: parameter_" in repr(trials)
    assert "hidden, for lack of room: parameter_" in trials._repr_html_()
    assert capsys.readouterr().out == ""


def test_every_table_of_a_pipe_has_its_rows_on_one_line(wide: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_tune.terminal.formatting.os.environ", {})  # `run` sets COLUMNS
    listed = run("ls", wide).out.splitlines()
    assert len(listed) == 2
    assert listed[1].split()[:2] == ["wide", "search"]
    assert len(run("checkpoints", wide, "wide").out.splitlines()) == 1


def test_the_time_of_the_last_report_or_else_of_the_start_is_shown() -> None:
    attempt = RunningTrial(trial="t", attempt=1)
    assert format_last_report(attempt, NOW) == "none known"
    begun = attempt.model_copy(update={"began_at": BEGAN})
    assert format_last_report(begun, NOW) == "none known; began 1 min 30 s ago"
    assert format_last_report(begun.model_copy(update={"reported_at": BEGAN}), NOW) == "1 min 30 s ago"
