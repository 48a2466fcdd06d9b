"""The command line, called as a user calls it, and the experiments that it reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
from prefect.logging.configuration import setup_logging

import prefect_tune as pt
from prefect_tune import cli
from prefect_tune.testing import without_server
from tests.fakes.command_line import CommandResult, Run
from tests.fakes.searches.experiments import write_experiment
from tests.trainables.moody import Moody


@pytest.fixture(scope="session")
def _logging() -> None:
    """Have Prefect's log go where it does not mix with what a test captures, and is not closed after the test."""
    setup_logging()


@pytest.fixture(scope="session")
def _commands() -> Iterator[None]:
    """Have typer read the signatures of the commands once: each time it takes 50 ms of CPU time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], _logging: None, _commands: None) -> Run:
    """Call the command line in this process."""

    def run_command(*arguments: object, columns: int = 200) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["prefect-tune", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return CommandResult(exit_info.value.code or 0, captured.out, captured.err)

    return run_command


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target with the experiment `digits`: checkpoints of steps 2, 4 and 6."""
    write_experiment(tmp_path / "target", "digits", [2, 4, 6])
    return tmp_path / "target"


@pytest.fixture(scope="session")
def moods(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with the search `moods`, for tests that only read.

    00000 and 00002 errored at step 2; 00003 is better than 00001, and of both the last two of three checkpoints stay.
    """
    target = tmp_path_factory.mktemp("moods") / "target"
    with without_server():
        pt.tune(
            Moody,
            {"fails": pt.grid_search(["raise", "not"]), "x": pt.grid_search([0.5, 0.25]), "always": "[bold]"},
            target=str(target),
            experiment="moods",
            metric="loss",
            num_samples=1,
            stop={"step": 3},
            checkpoint=pt.Cadence(every_steps=1),
            retention=pt.Retention(last=2),
            max_concurrent_trials=1,
            isolation="thread",
        )
    return target
