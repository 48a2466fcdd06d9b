"""A drill on a real target, with real processes and kills."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from inspect import unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast
from unittest.mock import Mock

import numpy as np
import psutil  # type: ignore[import-untyped]  # the package has no types
import pytest
from prefect import flow, unmapped
from prefect.logging import disable_run_logger
from rich.console import Console

import prefect_tune as pt
from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.drills import probe
from prefect_tune.drills import run_drill as run_drill_module
from prefect_tune.drills.evidence import METRICS, Difference, DrillRun, ProbeRecord, read_records
from prefect_tune.drills.plan import DrillPlan, make_drill_plan, plan_kills
from prefect_tune.drills.probe import RunPlan, collect_states
from prefect_tune.drills.run_drill import (
    Drill,
    RunProgress,
    read_output_tail,
    render_cells,
    require_drillable,
    run_drill,
    run_drill_in_terminal,
)
from prefect_tune.drills.values import FileDifference
from tests.drills.test_findings import MANIFEST
from tests.fakes.trial_processes import wait_until
from tests.trainables.numpy_mlp import NumpyMlp

MODEL = "prefect_tune.demo.model:Digits"


@pytest.mark.deep  # the README's own test runs a drill: it kills a trial, and a search in an upload
@pytest.mark.timeout(900)
def test_a_run_killed_in_its_trial_its_search_and_an_upload_ends_as_the_undisturbed_one(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    console, target = Console(record=True, width=140, force_terminal=False), tmp_path / "target"
    plan = DrillPlan(MODEL, {"width": 64}, 6, 2, kills=((2, "upload"), (3, "trial"), (5, "search")))
    report = run_drill_in_terminal(plan, str(target), console, keep=False)
    output = console.export_text()
    assert report.is_exact, output
    assert [(kill.victim, kill.step, kill.resumed_from) for kill in report.kills] == [
        ("upload", 2, 0), ("trial", 3, 2), ("search", 5, 4),
    ]  # fmt: skip
    assert (report.compared_metric_count, report.compared_file_count) == (6, 3 * 5)
    assert "✓ exact: the run that was killed 3 times equals the undisturbed run; " in output
    assert "2 killed" in output
    assert _list_files(target) == [], "without keep nothing stays"


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_what_was_forgotten_is_named_and_the_flow_fails(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    with pytest.raises(pt.NotExact) as caught:
        pt.drill("tests.trainables.numpy_mlp:Forgetful", target=str(tmp_path), steps=6, at=[3])
    report = caught.value.report
    assert isinstance(report, pt.DrillReport)
    assert "not exact: first difference at step " in str(caught.value)
    assert json.loads(json.dumps(report.fields()))["unrestored"][0]["kind"] == "rng"


@pytest.mark.long
@pytest.mark.parametrize("keep", [False, True])
def test_without_a_target_the_runs_are_in_a_temporary_folder(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[pt.LocalTarget] = []

    def run(_plan: object, target: pt.LocalTarget, *_: object, **__: object) -> SimpleNamespace:
        assert Path(target.path).is_dir()
        targets.append(target)
        return SimpleNamespace(is_exact=True, lines=list)

    monkeypatch.setitem(unwrap(pt.drill.fn).__globals__, "run_in_processes", run)
    with disable_run_logger():
        pt.drill.fn(MODEL, keep=keep)
    assert Path(targets[0].path).is_dir() is keep
    shutil.rmtree(targets[0].path, ignore_errors=True)


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_a_flow_of_ones_own_drills_several_trainings_as_tasks(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    trainables = [f"tests.trainables.numpy_mlp:{name}" for name in ("NumpyMlp", "Forgetful")]

    @flow
    def check() -> list[Any]:
        futures = pt.run_drill.map(trainables, target=str(tmp_path), steps=4, at=unmapped([2]))
        return [future.result(raise_on_failure=False) for future in futures]

    exact, forgetful = check()
    assert isinstance(exact, pt.DrillReport)
    assert exact.is_exact
    assert isinstance(forgetful, pt.NotExact)


def test_a_run_that_fails_is_reported_with_its_last_output(prefect_server: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PREFECT_API_URL": prefect_server, "PYTHONHOME": str(tmp_path / "nowhere")}
    activities: list[str] = []
    target = pt.LocalTarget(path=str(tmp_path / "target"))
    with pytest.raises(TuneError, match=r"run 'undisturbed' of the drill ended with exit code 1; .*(\n.*)*encodings"):
        run_drill(DrillPlan(MODEL), target, environment, on_activity=activities.append)
    assert activities == ["run 1, undisturbed: 12 steps, usually 5 to 30 s besides the training"]


def test_the_last_output_is_that_of_the_first_error_if_it_is_long(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_text("KeyError: 'cause'\n\x1b[31m11:06 | ERROR   | wandb\x1b[0m\n")
    assert read_output_tail(log) == "KeyError: 'cause'\n11:06 | ERROR   | wandb"
    log.write_text("x" * 3000 + "\nlast\n\x1b[31m11:06 | ERROR   | attempt 1 failed\x1b[0m\nTraceback\n")
    assert read_output_tail(log) == "11:06 | ERROR   | attempt 1 failed\nTraceback"
    log.write_text("x" * 3000 + "\nsee the log\n")
    assert read_output_tail(log) == "…" + "x" * 1988 + "\nsee the log"


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        (
            "broken:Nett",
            "def train(config): ...",
            r"^trainable 'broken:Nett': module 'broken' \(.*\) has no 'Nett'; it has train$",
        ),
        ("broken:train", "print('prints')\nimport nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("broken:train", "import os; os._exit(3)", "trainable 'broken:train': its import exited with code 3; "),
        (
            "broken:Net",
            "class Net(Trainable):\n  def step(self): return {}\n  def save_checkpoint(self, d): ...",
            "'broken:Net': it has no load_checkpoint",
        ),
    ],
)
def test_a_trainable_that_cannot_be_imported_is_refused_at_once(
    name: str, code: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(f"from prefect_tune import Trainable\n{code}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TuneError, match=message) as caught:
        require_drillable(name)
    assert "prints" not in str(caught.value)


def test_what_a_module_starts_at_its_import_ends_with_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "starts.py").write_text(
        "import atexit, os, subprocess, sys, threading, time\n"
        "assert sys.stdin.read() == ''\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "subprocess.Popen(['sleep', '604'], stdout=subprocess.DEVNULL)\n"
        "atexit.register(os._exit, 7)\n"
        "def train(config): ...\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    require_drillable("starts:train")
    wait_until(lambda: not _find_processes("sleep 604"), seconds=60, what=lambda: "the end of what it started")


def test_a_module_that_drills_at_its_import_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "import prefect_tune as pt\npt.run_drill.fn('drills:train')\ndef train(config): ..."
    (tmp_path / "drills.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TuneError, match="drill: the import of module 'drills' calls it"):
        require_drillable("drills:train")


MISSED = Difference(1, FileDifference(METRICS, "", "the step was not reported"))
SECONDS, WEIGHT, BIAS = (
    Difference(step, FileDifference(file, key, "2, expected 1"))
    for step, file, key in ((1, METRICS, "seconds"), (2, "m.npz", "w"), (3, "m.npz", "b"))
)


@pytest.mark.parametrize(
    ("differ", "again", "unstable"),
    [
        ([], None, []),
        ([SECONDS], None, [SECONDS]),
        ([WEIGHT, BIAS], None, [WEIGHT]),
        ([SECONDS, BIAS], [BIAS], [SECONDS, BIAS]),
        ([BIAS], [], []),
        ([MISSED], [], []),
    ],
    ids=["equal", "by itself", "training differs by itself", "in a third run", "after a kill", "a lost report"],
)
def test_a_third_run_is_made_only_if_the_steps_before_the_first_kill_do_not_explain_what_differs(
    differ: list[Any], again: list[Any] | None, unstable: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The killed run resumed from step 2."""
    undisturbed, third = (DrillRun({step: {}}, {2: MANIFEST}, [], [], []) for step in (1, 2))
    killed = replace(undisturbed, records=[ProbeRecord(2, 2, True, 1.0, 0.5, 0.0, {})])
    differences = {id(killed): differ, id(third): again}
    monkeypatch.setattr(run_drill_module, "compare_runs", lambda _store, _one, other: differences[id(other)])
    train_run = Mock(return_value=third)
    monkeypatch.setattr(Drill, "train_run", train_run)
    target = pt.LocalTarget(path=str(tmp_path / "target"))
    with target.open(timeout=timedelta(seconds=60)) as store:
        runs = Drill(DrillPlan(MODEL), target, store, tmp_path, os.environ).compare(undisturbed, killed)
    assert train_run.call_count == (again is not None)
    assert (list(runs.differences), list(runs.unstable)) == (differ, unstable)


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    target = pt.LocalTarget(path=str(tmp_path / "target"))
    with target.open(timeout=timedelta(seconds=60)) as store:
        drill = Drill(DrillPlan(MODEL), target, store, tmp_path, os.environ, run_timeout_seconds=0.5)
        with pytest.raises(TuneError, match=r"drill-.*-killed did not end within 0 s, at least 10 times"):
            drill.train_run("killed")


def test_a_run_ends_with_the_drill_that_started_it(tmp_path: Path) -> None:
    plan = RunPlan(MODEL, str(tmp_path))
    environment = {**os.environ, **plan.to_environment(), "PREFECT_API_URL": "http://127.0.0.1:9"}
    options = {"target": str(tmp_path), "config": {}, "experiment": "e", "steps": 4, "save_every": 2}
    command = [sys.executable, "-m", "prefect_tune.drills.training", json.dumps(options)]
    process = subprocess.run(command, env=environment, input=b"", capture_output=True, timeout=60, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (1, b"", b"")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_interrupted_drill_ends_with_130_and_leaves_no_process_and_nothing_on_the_target(
    prefect_server: str, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    arguments = ["drill", "tests.trainables.numpy_mlp:NumpyMlp", "--steps", "5000", "--save-every", "1", "--at", "4000"]
    with subprocess.Popen(
        [Path(sys.executable).with_name("prefect-tune"), *arguments, "--target", str(target)],
        env={**os.environ, "PREFECT_API_URL": prefect_server},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as drill:
        wait_until(lambda: list(target.rglob("manifest.json")), seconds=300, what=lambda: "a checkpoint")
        drill.send_signal(signal.SIGINT)
        output = drill.communicate(timeout=120)[0].decode()
    assert drill.returncode == 130, output
    assert "Traceback" not in output
    wait_until(lambda: not _find_processes(str(target)), seconds=120, what=lambda: "the end of its runs")
    assert _list_files(target) == []


def _list_files(target: Path) -> list[Path]:
    return [path for path in target.rglob("*") if path.is_file() and ".tmp" not in path.parts]


def _find_processes(text: str) -> list[Any]:
    return [process for process in psutil.process_iter(["cmdline"]) if text in " ".join(process.info["cmdline"] or ())]


# ---------------------------------------------------------------------------------------------------------- the plan


def test_kills_are_drawn_by_the_seed_and_each_victim_has_its_turn() -> None:
    assert plan_kills(12, 3, (), 0) == plan_kills(12, 3, (), 0)
    assert len({plan_kills(12, 3, (), seed) for seed in range(20)}) > 10
    for seed in range(20):
        drawn = plan_kills(12, 6, (), seed)
        assert [step for step, _ in drawn] == sorted({step for step, _ in drawn})
        assert all(0 < step < 12 for step, _ in drawn)
        assert sorted(victim for _, victim in drawn) == ["search", "search", "trial", "trial", "upload", "upload"]
        assert "rank" in dict(map(reversed, plan_kills(12, 1, (), seed, processes=2)))
    assert [step for step, _ in plan_kills(12, 3, (7, 3), 0)] == [3, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainable": "Net"}, "trainable 'Net': expected 'package.module:Name'"),
        ({"steps": 1}, "steps: expected at least 2"),
        ({"kills": 0}, "kills: expected a number from 1 to 11, one less than steps, found 0"),
        ({"kills": 12}, "kills: expected a number from 1 to 11, one less than steps, found 12"),
        ({"at": (3, 12)}, "at: expected steps from 1 to 11, one less than steps, found 12"),
        ({"save_every": 13}, "save_every: expected a number of steps from 1 to 12, found 13"),
        ({"processes": 0}, "processes_per_trial: expected a number from 1 to 1024, found 0"),
        ({"config": {"f": object()}}, "config"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"trainable": MODEL, "config": {}, "steps": 12, "save_every": None, **options}
    with pytest.raises(InvalidInput, match=re.escape(message)):
        make_drill_plan(**arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_a_kill_is_due_once_in_its_turn_and_for_its_victims_only(tmp_path: Path) -> None:
    plan = RunPlan(MODEL, str(tmp_path), ((2, "upload"), (5, "trial")))
    assert plan.next_due_kill(1, "upload") is None
    assert plan.next_due_kill(9, "trial", "search") is None, "the upload's turn comes first"
    assert plan.next_due_kill(2, "upload") == 0
    (tmp_path / "kill-0").write_text("12.5")
    assert (plan.next_due_kill(4, "trial"), plan.next_due_kill(6, "trial")) == (None, 1)
    assert list(plan.read_kills()) == [("upload", 12.5)]


def test_the_plan_travels_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RunPlan(MODEL, "/folder", ((2, "upload"),), 17)
    for name, value in plan.to_environment().items():
        monkeypatch.setenv(name, value)
    assert RunPlan.from_environment() == plan


# ----------------------------------------------------------------------------------------------------- the trainable


def test_a_trainable_that_pickles_itself_does_so_in_a_drill_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in RunPlan("tests.trainables.numpy_mlp:NumpyMlp", str(tmp_path)).to_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(probe, "get_trial", lambda: SimpleNamespace(step=0, attempt=1, rank=0))
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(vars(probe), "Probed", kind := cast(type[Any], probe.__getattr__("Probed")))
    probed, plain = kind(), NumpyMlp()
    for trainable in (probed, plain):
        trainable.setup({})
        trainable.step()
    assert vars(probed).keys() == vars(plain).keys()
    assert type(pickle.loads(pickle.dumps(probed))) is kind
    assert [record.step for record in read_records(Path(tmp_path, "records.jsonl"))] == [1]


# -------------------------------------------------------------------------------------------------------- the states


def test_the_state_of_a_generator_is_a_digest_that_changes_with_each_draw() -> None:
    own, numpys = random.Random(1), np.random.default_rng(2)
    first = dict(collect_states({"own": own, "numpys": numpys}))
    own.random()
    numpys.random()
    second = dict(collect_states({"own": own, "numpys": numpys}))
    assert first["rng own"] != second["rng own"]
    assert first["rng numpys"] != second["rng numpys"]
    own.setstate(random.Random(1).getstate())
    assert dict(collect_states({"own": own}))["rng own"] == first["rng own"]


def test_values_are_shown_and_arrays_are_digests_by_their_paths() -> None:
    variables = {"steps": 5, "rate": 0.1, "on": True, "parts": {"w": np.zeros(3), "n": [1]}, "np": np, "f": len}
    states = dict(collect_states(variables))
    shown = {"counter steps": "5", "value rate": "0.1", "value on": "True", "counter parts.n.0": "1"}
    assert shown.items() <= states.items()
    assert len(states["state parts.w"]) == 16
    assert not {name for name in states if name.endswith((" np", " f"))}, "neither modules nor functions"


def test_what_has_no_digest_is_shown_by_its_type() -> None:
    assert dict(collect_states({"batches": iter([1])}))["state batches"].startswith(("<", *"0123456789abcdef"))
    assert dict(collect_states({"batches": (number for number in [1])}))["state batches"] == "<generator>"


class Quantized:
    """A tensor of a class that NumPy cannot hold."""

    is_floating_point = False

    def detach(self) -> Self:
        return self

    def cpu(self) -> Self:
        return self

    def numpy(self) -> object:
        raise RuntimeError(".numpy() is not supported for tensor subclasses.")


def test_a_tensor_that_cannot_be_read_does_not_end_the_training() -> None:
    assert set(dict(collect_states({"odd": Quantized(), "steps": 5}))) >= {"counter steps"}
    assert "counter parts.n" in dict(collect_states({"parts": {"odd": Quantized(), "n": 1}}))


class DataLoader:
    """Names and attributes of PyTorch's iterator over batches."""

    class _BaseDataLoaderIter:
        def __init__(self) -> None:
            self._num_yielded, self._sampler = 3, iter([1])


def test_the_state_of_an_iterator_over_batches_is_how_many_it_has_yielded() -> None:
    assert dict(collect_states({"batches": DataLoader._BaseDataLoaderIter()}))["data batches"] == "3"


# ------------------------------------------------------------------------------------------------------- the picture


@pytest.mark.parametrize(
    ("track", "picture"),
    [
        (RunProgress("not yet", 12), "············"),
        (RunProgress("begun", 12, step=5, committed={3}), "━━●━━·······"),
        (RunProgress("scaled", 24, step=24, committed={6, 12, 18, 24}), "━━●━━●━━●━━●"),
        (RunProgress("killed", 12, step=9, committed={3, 6}, kills=[8], resumes=[6]), "━━●━━↻━✗━···"),
        (RunProgress("killed after a commit", 6, step=4, committed={2, 4}, kills=[2, 3], resumes=[2]), "━━━↻✗━✗●····"),
        (RunProgress("one step per many cells", 4, step=2, committed={1}), "━━●━━━······"),
    ],
)
def test_a_track_shows_each_step_in_its_place(track: RunProgress, picture: str) -> None:
    assert render_cells(track, 12).plain == picture


# Each attempt of a drill has its own working directory, with the files from before the drill.


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "home" / "project"
    (project / "package").mkdir(parents=True)
    (project / ".git").mkdir()
    (tmp_path / "home" / "data").mkdir()
    (tmp_path / "drill").mkdir()
    (project / "weights.json").write_text("old")
    (project / "package" / "part.txt").write_text("part")
    (tmp_path / "home" / "data" / "table.csv").write_text("1,2")
    (project / "link").symlink_to("../data")
    monkeypatch.setenv("PWD", str(project))
    monkeypatch.chdir(project)
    return project


def test_what_an_attempt_leaves_in_its_directory_is_not_there_for_the_next_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in (1, 2):
        monkeypatch.chdir(project)
        probe.copy_and_enter_directory(tmp_path / "drill" / f"directory-{attempt}")
        assert not Path("made").exists()
        assert Path("weights.json").read_text() == "old"
        assert Path("package/part.txt").read_text() == "part"
        assert Path("../data/table.csv").read_text() == Path("link/table.csv").read_text() == "1,2"
        Path("made").mkdir()
        Path("weights.json").write_text("new")
        Path("package/more.txt").write_text("more")
    assert sorted(path.name for path in project.iterdir()) == [".git", "link", "package", "weights.json"]
    assert (project / "weights.json").read_text() == "old"


def test_the_ranks_of_an_attempt_share_their_directory(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        monkeypatch.chdir(project)
        probe.copy_and_enter_directory(tmp_path / "drill" / "directory-1")
        assert Path("of-rank-0").exists() == (rank == 1)
        Path("of-rank-0").touch()


def test_what_is_too_much_to_copy_is_a_link(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_MAX_COPIED_BYTES", 3)
    probe.copy_and_enter_directory(tmp_path / "drill" / "directory-1")
    assert [Path(name).is_symlink() for name in ("weights.json", "package", "package/part.txt", ".git")] == [
        False, False, True, True,
    ]  # fmt: skip
    assert Path("package/part.txt").resolve() == project / "package" / "part.txt"


def test_a_drill_whose_folder_is_in_the_working_directory_does_not_copy_itself(project: Path) -> None:
    (project / "drills").mkdir()
    probe.copy_and_enter_directory(project / "drills" / "directory-1")
    assert Path("drills").is_symlink()
