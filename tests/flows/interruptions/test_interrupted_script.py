"""What a script prints when it is interrupted or fails: one message, how to resume, and no traceback of Prefect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.prefect_api import flow_with_server
from tests.flows.driver import until
from tests.flows.training import experiment_at
from tests.trainables.moody import train

SCRIPT = """
import sys
import prefect_tune as pt
from tests.trainables.counting import Fragile

space = {"x": pt.grid_search([1, 2]), "step_seconds": 0.1}
pt.tune(Fragile, space, target=sys.argv[1], experiment="e", metric="loss", stop={"step": 1000}, num_samples=1)
"""

SLOW_SCRIPT = """
import sys, time
import prefect_tune as pt

def train(config):
    pt.report({"loss": 1.0})
    print("trains on", flush=True)
    time.sleep(3600)

pt.tune(train, {}, target=sys.argv[1], experiment="e", metric="loss", num_samples=2, grace_period_seconds=3600)
"""


def interrupt_of(call: object) -> KeyboardInterrupt:
    assert callable(call)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        call()
    return interrupt.value


def raise_interrupt(*_args: object, **_options: object) -> object:
    raise KeyboardInterrupt


@pytest.mark.timeout(900)
def test_the_last_line_says_what_is_committed_and_how_to_resume(prefect_server: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "runs")],
        env={**os.environ, "PREFECT_API_URL": prefect_server, "PYTHONPATH": str(Path(__file__).parents[3])},
        stderr=subprocess.PIPE,
        text=True,
    )
    until(
        lambda: list(tmp_path.glob("runs/e/1/journal/0000000004.json")), seconds=150, what=lambda: f"{process.poll()}"
    )
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    last = said.splitlines()[-1]
    assert last.startswith("KeyboardInterrupt: experiment 'e': ")
    assert last.endswith("; run it again under the same experiment name, to resume")
    assert "Crash" not in said
    assert "Finished in state Interrupted(" in said


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_second_interrupt_kills_the_trials_and_ends_the_process(prefect_server: str, tmp_path: Path) -> None:
    script, said = tmp_path / "slow.py", tmp_path / "said"
    script.write_text(SLOW_SCRIPT)
    with said.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "runs")],
            env={**os.environ, "PREFECT_API_URL": prefect_server},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    until(lambda: said.read_text().count("trains on") == 2, seconds=150, what=said.read_text)
    process.send_signal(signal.SIGINT)
    until(lambda: "asked to stop" in said.read_text(), seconds=60, what=said.read_text)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == -signal.SIGINT
    text = said.read_text()
    assert text.splitlines()[-1].endswith("to resume")
    state = experiment_at(pt.LocalTarget(path=str(tmp_path / "runs")), "e")
    assert [each.status for each in state.trials.values()] == [Status.INTERRUPTED] * 2


def test_before_the_run_begins_it_is_said_that_nothing_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_with_server, "require_valid", raise_interrupt)
    interrupt = interrupt_of(lambda: pt.tune(train, {}, target=tmp_path))
    assert str(interrupt) == "tune was interrupted before it began: run it again"
    assert "raise_interrupt" not in "".join(traceback.format_exception(interrupt))


def test_during_the_import_of_the_package_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(pt), "tune", raising=False)
    monkeypatch.setattr(pt, "import_module", raise_interrupt)
    interrupt = interrupt_of(lambda: pt.tune)
    assert str(interrupt) == "interrupted while prefect_tune.tune was imported: nothing was started"
    assert "raise_interrupt" not in "".join(traceback.format_exception(interrupt))
