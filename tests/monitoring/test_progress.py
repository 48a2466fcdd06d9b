"""What the terminal shows while a search runs, and what the log shows without a terminal."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event

import pytest

import prefect_tune as pt
from prefect_tune.attempt.search_link import StepReported
from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.journal_events import Cause, GaveUp, Started, TrialAdded
from prefect_tune.core.messages.live_status import RunningAttempts
from prefect_tune.core.values import StepReport
from prefect_tune.monitoring.progress import Progress, progress
from prefect_tune.monitoring.search_observer import AttemptRecorder
from prefect_tune.terminal.time_left import SearchEstimate
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import after
from tests.fakes.searches.tracked_progress import TrackedProgress
from tests.trainables.moody import train

LOG = logging.getLogger("a flow run")


@pytest.fixture(autouse=True)
def _says_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOG.name)


def recorded(experiment: Experiment) -> RunningAttempts:
    return AttemptRecorder(experiment).attempts


def running() -> tuple[Progress, Callable[[int], None]]:
    """The progress of a search of one trial, and a function that reports a step."""
    state = after(
        nothing_yet(first_generation("e")),
        [TrialAdded(trial="0", config={}), Started(trial="0", attempt=1, from_step=0)],
    )
    seen = Progress(TrackedProgress(state, SearchEstimate("e"), 0.0, datetime.now(UTC)), LOG, log_period=timedelta(0))
    return seen, lambda step: seen.reported(StepReported("0", StepReport(step=step, metrics={}), asks=False), state)


def test_where_nobody_sees_it_the_log_has_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    seen, report = running()
    report(1)
    assert caplog.messages[0].startswith("e: 1 running after ")
    seen.is_shown = True
    report(2)
    assert len(caplog.messages) == 1


def test_a_single_training_without_a_display_logs_its_metrics_now_and_then_and_no_second_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = after(
        nothing_yet(first_generation("e")),
        [TrialAdded(trial="0", config={}), Started(trial="0", attempt=1, from_step=0)],
    )
    outlook = SearchEstimate("e", None, 1, 80, is_training=True)
    tracker = TrackedProgress(state, outlook, 0.0, datetime.now(UTC))
    seen, report = Progress(tracker, LOG, log_period=timedelta(0)), StepReport(step=7, metrics={"loss": 0.5})
    tracker.reported("0", report, 1.0)
    seen.reported(StepReported("0", report, asks=False), state)
    (message,) = caplog.messages
    assert message.startswith("e: step 7 of 80, loss 0.5 after ")
    seen.conclude()
    assert caplog.messages == [message]
    seen.is_shown = True
    seen.conclude()
    assert len(caplog.messages) == 2


def test_no_line_comes_before_its_time(caplog: pytest.LogCaptureFixture) -> None:
    state = nothing_yet(first_generation("e"))
    seen = Progress(TrackedProgress(state, SearchEstimate("e"), 0.0, datetime.now(UTC)), LOG)
    for step in range(1, 100):
        seen.reported(StepReported("0", StepReport(step=step, metrics={}), asks=False), state)
    assert caplog.messages == []


def test_a_table_that_breaks_is_told_once_and_the_lines_begin(caplog: pytest.LogCaptureFixture) -> None:
    seen, report = running()
    seen.is_shown = True
    seen.fall_back(OSError("hung up"))
    report(1)
    assert caplog.messages[0] == "the live table ends, and the search continues: OSError: hung up"
    assert len(caplog.messages) == 2


def test_in_the_end_there_is_one_line_unless_the_search_broke(caplog: pytest.LogCaptureFixture) -> None:
    with progress(
        recorded(nothing_yet(first_generation("e"))), SearchEstimate("e", trial_count=3), LOG, Event(), in_terminal=True
    ):
        pass
    assert caplog.messages == ["e: none of 3 after 0 s"]
    shown = progress(recorded(nothing_yet(first_generation("e"))), SearchEstimate("e"), LOG, Event(), in_terminal=True)
    with pytest.raises(ZeroDivisionError), shown:
        raise ZeroDivisionError
    assert len(caplog.messages) == 1


def test_the_last_line_warns_of_trials_that_errored_and_says_where_to_look(caplog: pytest.LogCaptureFixture) -> None:
    errored = GaveUp(trial="0", cause=Cause.USER, message="no")
    state = after(nothing_yet(first_generation("e")), [TrialAdded(trial="0", config={}), errored])
    with progress(recorded(state), SearchEstimate("e", trial_count=1), LOG, Event(), in_terminal=True):
        pass
    (last,) = caplog.records
    assert last.levelname == "WARNING"
    assert last.message == "e: 1 errored of 1 after 0 s; why: results.errors, or prefect-tune show TARGET e"


def test_a_search_that_is_not_in_a_terminal_prints_nothing(
    prefect_server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert prefect_server
    pt.tune(train, {"x": 1}, target=str(tmp_path), experiment="e", metric="loss", num_samples=1)
    assert capfd.readouterr().out == ""


_SEARCH = """
import sys, prefect_tune as pt
from tests.trainables.digits_table import DigitsTable
print("begun", flush=True)
results = pt.tune(
    DigitsTable, {"row": pt.grid_search([1, 2, 3]), "step_seconds": 0.4}, target=sys.argv[1], experiment="digits",
    metric="error", num_samples=1, stop={"step": 9}, scheduler=pt.ASHA(max_t=9), max_concurrent_trials=2,
)
print("best", results.best.trial, flush=True)
"""


def searching(server: str, folder: Path, code: str = _SEARCH) -> tuple[subprocess.Popen[bytes], int]:
    """A process that searches in a pseudo terminal, and the terminal's other end."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "PREFECT_API_URL": server, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    os.close(slave)
    return process, master


def test_a_search_in_a_terminal_is_a_table_that_is_gone_in_the_end(prefect_server: str, tmp_path: Path) -> None:
    process, master = searching(prefect_server, tmp_path)
    shown = _all_of(master)
    assert process.wait(120) == 0
    assert "digits" in shown
    assert "2 running" in shown
    assert "at step 1" in shown
    assert shown.rstrip().endswith(f"best {pt.load_results(tmp_path, 'digits', metric='error').best.trial}")


_TRAINING = """
import sys, prefect_tune as pt
from tests.trainables.digits_table import DigitsTable
config = {"row": 1, "step_seconds": 0.4}
print(pt.durable_trainable(DigitsTable, config, target=sys.argv[1], experiment="digits", stop={"step": 9}).step)
"""


def test_a_single_training_in_a_terminal_has_a_live_display_too(prefect_server: str, tmp_path: Path) -> None:
    process, master = searching(prefect_server, tmp_path, _TRAINING)
    shown = _all_of(master)
    assert process.wait(120) == 0
    assert " of 9" in shown
    assert "error 0." in shown
    assert shown.rstrip().endswith("9")


@pytest.mark.deep  # tests/terminal/test_live_display.py shows the same without a search
@pytest.mark.parametrize("how", ["hangs up", "takes nothing"])
def test_whatever_becomes_of_the_terminal_the_search_ends_as_it_would(
    prefect_server: str, tmp_path: Path, how: str
) -> None:
    code = _SEARCH.replace('print("best"', 'sys.stdout = open(sys.argv[1] + "/best", "w"); print("best"')
    process, master = searching(prefect_server, tmp_path, code)
    assert _line_of(master) == "begun"  # read the whole line: a hangup within it would make this print fail
    if how == "hangs up":
        os.close(master)
    try:
        process.wait(120)
    finally:
        if how == "takes nothing":
            os.close(master)
    assert (tmp_path / "best").read_text().startswith("best 0000")


def _line_of(master: int) -> str:
    said = b""
    while not said.endswith(b"\r\n"):
        said += os.read(master, 1)
    return said.decode().strip()


def _all_of(master: int) -> str:
    shown = bytearray()
    try:
        while data := os.read(master, 65536):
            shown += data
    except OSError:  # the last process closed the terminal
        pass
    os.close(master)
    return shown.decode()
