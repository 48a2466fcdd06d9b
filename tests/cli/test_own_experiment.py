"""What the command line shows of an experiment that a flow of one's own has written."""

from __future__ import annotations

import json
from pathlib import Path

import prefect_tune as pt
from tests.fakes.checkpoints import write
from tests.fakes.command_line import Run


def test_an_experiment_of_ones_own_is_listed_shown_verified_and_kept(run: Run, tmp_path: Path) -> None:
    target = str(tmp_path / "runs")
    place = {"target": target, "experiment": "own"}
    for trial in ("a", "b"):
        for step in (1, 2):
            directory = write(tmp_path / f"{trial}-{step}", {"w": f"{trial} {step}".encode()})
            pt.save_checkpoint.fn(directory, trial=trial, step=step, metrics={"loss": 1 / step}, **place)
    pt.sync_experiment_state.fn(trial="a", status="completed", reason="enough", **place)

    listed = json.loads(run("ls", target, "--json").out)
    assert [(each["experiment"], each["kind"], each["trials"]) for each in listed] == [
        ("own", "training", {"running": 1, "completed": 1})
    ]
    shown = json.loads(run("show", target, "own", "--trial", "a", "--json").out)
    assert (shown["status"], shown["reason"], shown["checkpoints"]) == ("completed", "enough", [1, 2])
    assert run("show", target, "own").code == 0
    assert run("verify", target, "own").code == 0
    assert run("gc", target, "own").code == 0
    restored = pt.restore_checkpoint.fn(trial="b", step=1, **place)
    assert restored is not None
    assert (restored.directory / "w").read_bytes() == b"b 1"
