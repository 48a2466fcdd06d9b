"""Suspend and Resume in the UI: every trial saves, the form asks how to continue, and the same run continues so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from uuid import UUID

import prefect
import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import Status
from tests.flows.training import experiment_at, trial_at, undisturbed
from tests.flows.ui import Ui, eventually
from tests.trainables.witness import acts_of

_MLP = "tests.trainables.numpy_mlp:NumpyMlp"
_TABLE = "tests.trainables.digits_table:DigitsTable"
_resumes_at_once = pytest.mark.xfail(
    prefect.__version__.startswith("3.8."),
    reason="its process worker may lose a run that starts again while its process still ends: docs/troubleshooting.md",
    strict=False,
)


class _Story:
    """One flow run on a target of its own."""

    def __init__(self, ui: Ui, folder: Path, name: str, deployment: str, **parameters: Any) -> None:
        self.ui = ui
        self.name = name
        self.target = LocalTarget(path=str(folder / name))
        self.witness = folder / f"{name}.witness"
        key = "config" if deployment == "durable-trainable" else "space"
        parameters[key] = {**parameters.get(key, {}), "witness": str(self.witness)}
        where = {"target": self.target.uri, "experiment": name, "checkpoint": {"every_steps": 5}}
        self.run: UUID = ui.start(deployment, **parameters, **where)

    def trained(self) -> int:
        return sum(each.act == "trained" for each in acts_of(self.witness))

    def until_trained(self, steps: int) -> None:
        eventually(f"{steps} steps of {self.name}\n{self.ui.log(self.run)}", lambda: self.trained() >= steps)

    def processes(self) -> int:
        return len({each.pid for each in acts_of(self.witness)})


@pytest.mark.deep
@pytest.mark.timeout(500)
@_resumes_at_once
def test_runs_that_are_suspended_save_and_go_on_as_they_are_answered(ui: Ui, tmp_path: Path) -> None:
    training = _Story(
        ui,
        tmp_path,
        "training",
        "durable-trainable",
        trainable=_MLP,
        config={"step_seconds": 0.4},
        stop={"step": 30},
    )
    search = _Story(
        ui,
        tmp_path,
        "search",
        "tune",
        trainable=_TABLE,
        space={"row": {"randint": [0, 160]}, "step_seconds": 0.5},
        metric="error",
        num_samples=2,
        stop={"step": 15},
        max_concurrent_trials=2,
    )
    waiting = [training, search]

    def suspended() -> bool:
        for each in [each for each in waiting if each.trained() >= 7]:
            ui.suspend(each.run)
            waiting.remove(each)
        return not waiting

    eventually("both train", suspended)
    schema, page = ui.form(training.run)
    at = training.trained()
    assert list(schema["properties"]) == ["way", "steps", "hours", "checkpoint"]
    assert re.search(rf"checkpoints, newest first: {at}, ([0-9]+, )*5\n- code: unchanged", page), page
    trial = trial_at(training.target, "training")
    assert (trial.status, trial.checkpoints[-1].step) == (Status.INTERRUPTED, at)  # not one step is lost

    schema, page = ui.form(search.run)
    assert schema["properties"]["samples"]["default"] == 2
    assert "trials: 2 (2 interrupted)" in page
    assert "best: trial 0000" in page
    ui.resume(search.run, way="extend", samples=1)
    ui.resume(training.run, way="other checkpoint", checkpoint=5)

    _, again = ui.form(search.run, but=page)
    assert "less than before: samples 1 (it has 2)" in again
    ui.resume(search.run, way="extend", samples=3, steps=16)
    assert ui.until_final(training.run).is_completed(), ui.log(training.run)
    assert ui.until_final(search.run).is_completed(), ui.log(search.run)

    assert [each.step for each in acts_of(training.witness) if each.act == "loaded"] == [5]
    trial = trial_at(training.target, "training")
    assert (trial.step, trial.metrics["state"]) == (30, undisturbed(30).state[30])
    found = experiment_at(search.target, "search")
    assert [(each.status, each.step) for each in found.trials.values()] == [(Status.COMPLETED, 16)] * 3
    assert (found.settings["num_samples"], found.term) == (3, 2)
