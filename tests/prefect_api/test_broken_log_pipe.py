"""A run goes on when the reader of its log is gone, as after a kill of the worker that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import Status
from tests.flows.training import experiment_at

SCRIPT = """
import sys
import prefect_tune as pt
from tests.trainables.counting import Fragile

pt.tune(
    Fragile, {"x": pt.grid_search([1, 2]), "gate": sys.argv[2]}, target=sys.argv[1], experiment="e", metric="loss",
    stop={"step": 9}, num_samples=1, checkpoint=pt.Cadence(every_steps=1),
)
print("the end", flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_search_whose_log_nobody_reads_any_more_trains_to_its_end(prefect_server: str, tmp_path: Path) -> None:
    script, gate = tmp_path / "script.py", tmp_path / "gate"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "runs"), str(gate)],
        env={**os.environ, "PREFECT_API_URL": prefect_server, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    until = time.monotonic() + 240
    while not list(tmp_path.glob("runs/e/1/trials/*/checkpoints/0000000001-*")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    assert process.stdout is not None
    process.stdout.close()
    gate.touch()
    assert process.wait(240) == 0
    trials = experiment_at(LocalTarget(path=str(tmp_path / "runs")), "e").trials.values()
    assert [(each.status, each.attempt, each.step) for each in trials] == [(Status.COMPLETED, 1, 9)] * 2
