"""The output about an experiment that a user's own flow wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prefect_tune as pt
from tests.fakes.checkpoints import files_in, write
from tests.fakes.command_line import Run
from tests.fakes.servers.processes import free_port


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
    assert "1, 2, 6 B in all" in run("show", target, "own", "--trial", "a").out
    assert run("verify", target, "own").code == 0
    assert run("gc", target, "own").code == 0
    restored = pt.restore_checkpoint.fn(trial="b", step=1, **place)
    assert restored is not None
    assert (restored.directory / "w").read_bytes() == b"b 1"


def test_a_training_time_that_was_not_measured_is_left_out_and_never_0(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "runs"
    for experiment, seconds in (("unmeasured", 0.0), ("measured", 12.5)):
        directory = write(tmp_path / experiment, {"w": b"1"})
        pt.save_checkpoint.fn(directory, target=target, experiment=experiment, step=1, trained_seconds=seconds)

    shown = json.loads(run("show", target, "unmeasured", "--json").out)
    facts = json.loads(run("report", target, "unmeasured", "--json").out)
    assert shown["trained_seconds"] is facts["trials"][0]["trained_seconds"] is facts["cost"]["trained_seconds"] is None
    assert "trained_seconds" not in run("show", target, "unmeasured").out
    page = run("report", target, "unmeasured").out
    assert "| **step** | 1, in 1 attempt |" in page
    assert "1 attempt; time not measured" in page
    results = pt.load_results(target, "unmeasured")
    assert results.to_arrow()["trained_seconds"].to_pylist() == [None]
    assert ">1 step<" in results.trials["trial"]._repr_html_()

    assert json.loads(run("show", target, "measured", "--json").out)["trained_seconds"] == 12.5
    page = run("report", target, "measured").out
    assert "1, after 12 s of training in 1 attempt" in page
    assert "12 s in 1 attempt" in page


def test_a_resume_by_name_says_at_once_that_the_flow_itself_continues_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "runs"
    pt.save_checkpoint.fn(write(tmp_path / "a", {"w": b"1"}), target=target, experiment="own", step=1)
    before = files_in(target)
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    done = run("resume", target, "own")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(
        f"prefect-tune: experiment 'own' at {target.as_uri()} belongs to a flow of your own, not to a search: "
        "run that flow again with the same target and experiment, or, if it is of a deployment, Retry its last "
        "run, script "
    )
    assert files_in(target) == before
