"""Trainables that cannot be imported: refused before anything is written, or failed by their first attempts."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import InvalidInput, TrialFailed
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import AttemptEnded, Cause
from tests.fakes.searches.far_attempts import FarAttempt
from tests.fakes.searches.far_searches import FarSearch
from tests.flows.resuming.test_resume import read_objects, run_search
from tests.long_cases import long_after

_MODELS = """
import os
import pathlib
import prefect_tune as pt

with pathlib.Path({witness!r}).open("a") as witness:
    print(os.getpid(), file=witness)

class Net(pt.Trainable):
    def step(self):
        return {{"loss": 1.0, "done": True}}

    def save_checkpoint(self, checkpoint_dir):
        pass

class Plain:
    pass

class tune:  # as that of Ray
    class Trainable:
        pass

class OfRay(tune.Trainable):
    def step(self):
        return {{"loss": 1.0, "done": True}}

def _made():
    return lambda config: {{"loss": config["x"]}}

globals()["Dynamic"] = _made()
size = 3
"""


_LEAVES = """import sys
sys.exit('no data set')

class Net:
    pass

def train(config): pass
"""


@pytest.fixture
def importers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_prefect_server: None) -> Callable[[], set[int]]:
    """Make `models_here`, `needs_more` and `leaves` importable; return the processes that imported the first."""
    del no_prefect_server
    witness, project = tmp_path / "witness", tmp_path / "project"
    project.mkdir()
    (project / "models_here.py").write_text(_MODELS.format(witness=str(witness)))
    (project / "needs_more.py").write_text(f"import not_there\n{_MODELS.format(witness=str(witness))}")
    (project / "leaves.py").write_text(_LEAVES)
    monkeypatch.syspath_prepend(str(project))
    return lambda: {int(line) for line in witness.read_text().split()} if witness.exists() else set()


_NO_TRAINABLES = [
    ("models_here:Nett", r"module 'models_here' \(.*models_here.py\) has no 'Nett'; did you mean 'Net'\?"),
    ("models_here:Net.Deep", r"has no 'Deep'"),
    ("models_here:Xyz", r"has no 'Xyz'; it has Dynamic, Net, OfRay, Plain"),
    ("models_here:size", r"trainable 'models_here:size': expected a function of the configuration, .* found int"),
    ("models_here:Plain", r"trainable Plain: expected a subclass of pt.Trainable .* write class Plain\(pt.Train"),
    ("models_here:OfRay", r"trainable OfRay: expected a subclass of pt.Trainable"),
    (
        "leaves:Net",
        r"module 'leaves' .*: SystemExit: no data set \(raised in .*leaves.py, line 2\)\. Run .* `if __name__ == ",
    ),
    ("needs_more:Nett", r"module 'needs_more' cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
    ("model_here:Net", r"there is no module 'model_here'; is its project installed here"),
]


@pytest.mark.parametrize(("trainable", "message"), long_after(4, _NO_TRAINABLES))
@pytest.mark.parametrize("flow", long_after(1, [pt.tune, pt.durable_trainable]), ids=["search", "training"])
def test_what_is_no_trainable_is_refused_before_anything_is_written(
    importers: Callable[[], set[int]], tmp_path: Path, flow: Callable[..., object], trainable: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        flow(trainable, {}, target=str(tmp_path / "target"), experiment="e")
    assert not list(tmp_path.glob("target/**/*.json"))
    assert os.getpid() not in importers(), "the flow's process has imported it"


def test_a_trainable_that_its_source_defines_is_imported_by_its_trial_alone(
    importers: Callable[[], set[int]], tmp_path: Path
) -> None:
    pt.tune("models_here:Net", {}, target=str(tmp_path / "t"), experiment="e", num_samples=1)
    assert len(importers()) == 1


def test_with_threads_it_is_imported_here(importers: Callable[[], set[int]], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="did you mean 'Net'"):
        pt.tune("models_here:Nett", {}, target=str(tmp_path / "target"), experiment="e", isolation="thread")
    assert importers() == {os.getpid()}
    assert not list(tmp_path.glob("target/**/*.json"))


@pytest.mark.long
@pytest.mark.usefixtures("importers")
@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ("needs_more:Net", r"ModuleNotFoundError: No module named 'not_there' \(raised in .*needs_more.py, line 1\)"),
        ("leaves:train", r"SystemExit: no data set \(raised in .*leaves.py, line 2\)"),
    ],
)
def test_an_import_that_fails_in_the_first_attempts_ends_the_search_which_the_same_name_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trainable: str, message: str
) -> None:
    target = str(tmp_path / "target")
    with pytest.raises(TrialFailed, match=f"nothing was trained.*cannot be imported: {message}"):
        pt.tune(trainable, {"x": pt.uniform(0, 1)}, target=target, experiment="e", num_samples=9)
    before = pt.load_results(target, "e").trials
    assert {trial.status for trial in before.values()} == {Status.INTERRUPTED}
    assert len(before) <= (os.cpu_count() or 1), "only the first attempts were begun"

    module, _, _ = trainable.partition(":")
    file = tmp_path / "project" / f"{module}.py"
    source = file.read_text().replace("import not_there\n", "").replace("sys.exit('no data set')\n", "")
    mended = source.replace("def train(config): pass", "def train(config): return {'loss': config['x']}")
    file.write_text(f"{mended}# a file of the same second and size would count as compiled\n")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again = pt.tune(trainable, {"x": pt.uniform(0, 1)}, target=target, experiment="e", num_samples=9)
    assert [trial.status for trial in again.trials.values()] == [Status.COMPLETED] * 9
    assert "space" not in caplog.text


def test_an_import_that_fails_elsewhere_ends_the_search_and_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    target = pt.LocalTarget(path=str(tmp_path))
    search = FarSearch(target, samples=9)
    attempts: list[FarAttempt] = []

    def fail_import() -> None:
        attempts.append(attempt := FarAttempt(target))
        attempt.start()
        event = AttemptEnded(trial="00000", cause=Cause.IMPORT, reason="No module named 'torch'\nTraceback")
        attempt.post(event)
        search.machines.end("00000")
        search.machines.end("00001")

    with pytest.raises(TrialFailed, match=r"nothing was trained: .*trial 00000: No module named 'torch'$"):
        search.simulate(lambda: None, fail_import, *[lambda: None] * 50)

    later = FarSearch(target, samples=9)
    state = later.simulate(lambda: None, lambda: None)
    assert ("00000", 2, None) in later.machines.started
    assert {trial.status for trial in state.trials.values()} <= {Status.PENDING, Status.INTERRUPTED, Status.RUNNING}


def test_an_import_that_fails_after_a_step_was_trained_costs_its_trial_only(tmp_path: Path) -> None:
    target = pt.LocalTarget(path=str(tmp_path))
    search = FarSearch(target, samples=2)

    def train_one_step() -> None:
        first = FarAttempt(target, "00000")
        first.start()
        first.report(1)

    def fail_import() -> None:
        second = FarAttempt(target, "00001")
        second.start()
        second.post(AttemptEnded(trial="00001", cause=Cause.IMPORT, reason="No module named 'lion'"))
        search.machines.end("00001")

    state = search.simulate(lambda: None, train_one_step, *[lambda: None] * 5, fail_import, *[lambda: None] * 20)
    assert state.trial("00001").status is Status.ERRORED


@pytest.mark.usefixtures("prefect_server")
def test_a_resume_where_its_module_cannot_be_imported_is_one_error_without_a_traceback(
    local_target: LocalTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere_nets").mkdir()
    (tmp_path / "elsewhere_nets" / "train.py").write_text("def train(config):\n    return {'error': 1.0}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    function = importlib.import_module("elsewhere_nets.train").train
    run_search(local_target, num_samples=1, trainable=function, stop=None)
    before = read_objects(local_target)
    for module in ("elsewhere_nets", "elsewhere_nets.train"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    expected = "trainable 'elsewhere_nets.train:train': there is no module 'elsewhere_nets'; is its project installed"
    with pytest.raises(pt.InvalidInput, match=expected) as raised:
        pt.resume("old", target=local_target)
    assert raised.value.__cause__ is None
    assert not [entry for entry in raised.traceback if "/prefect/" in str(entry.path)]
    assert [record.levelname for record in caplog.records if "Encountered exception" in record.message] == ["ERROR"]
    assert read_objects(local_target) == before
