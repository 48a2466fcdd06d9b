"""Suspend and Resume: every trial saves, a form asks how to continue, and the answer is carried out once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import prefect
import pytest
from prefect.exceptions import Pause
from prefect.input import RunInput

from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import Answered, Owner
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.journal_access import new_write_id, write_directly
from prefect_tune.suspension import (
    TRAINING_QUESTION,
    NewAnswer,
    ResumeChoice,
    ResumeLimits,
    Turn,
    first_turn,
    follow_up,
    form_of_training,
    last_form,
)
from prefect_tune.tasks.experiments import open_experiment
from tests.flows.interruptions.trouble import Trouble
from tests.flows.resuming.left_run import LeftRun
from tests.flows.training import experiment_at, flip, own_blobs, trial_at, undisturbed
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


# The answer to the last form of a run, however many forms there were before.


_MOST_INPUTS = 200
"""So many Prefect lists at once, the oldest first."""


class _GoOn(RunInput):
    go_on: bool = True
    why: str = ""


def test_the_answer_to_one_of_many_forms_is_the_answer_that_was_given(left_run: LeftRun) -> None:
    left_run.has_answered(_MOST_INPUTS // 3)
    left_run.ask(_GoOn.with_initial_data(description="Does it continue?"))
    left_run.resume({"go_on": False, "why": "it costs too much"})
    found = left_run.last_form()
    assert found is not None
    assert found.answer == {"go_on": False, "why": "it costs too much"}
    left_run.retry()
    assert left_run.last_form() == found


# *other checkpoint*: a training goes back once to an intact checkpoint, or asks again.


_TRIAL = TrialKey(experiment="troubled", generation=1, trial="trial")
_BACK = {"way": "other checkpoint", "checkpoint": 5}


@pytest.fixture
def trained(trouble: Trouble) -> Trouble:
    """A training of 15 steps, with checkpoints of steps 5, 10 and 15."""
    trouble.run(steps=15)
    return trouble


def _opened(trained: Trouble) -> Experiment:
    owner = Owner(name="a start of the run", host="here", pid=1, flow_run="run")
    return open_experiment(trained.target, _TRIAL.of_experiment, owner, new_write_id())


def test_of_two_starts_of_a_run_that_were_told_to_go_back_only_the_first_one_does(trained: Trouble) -> None:
    plan = TrialSpec(target=trained.target, trial=_TRIAL, trainable="", stopper="", needs_curve=False)
    answered = Answered(key="form", answer=_BACK, flow_run="run")
    choice = ResumeChoice(way="other checkpoint", checkpoint=5)
    turn = Turn(trained.plan(None), answer=NewAnswer(choice, answered))
    opened = _opened(trained)
    back = write_directly(trained.target, opened, follow_up(plan, opened, turn)).trial("trial")
    assert (back.status, back.checkpoints[-1].step) == (Status.PENDING, 5)
    trained.run(steps=20)
    second = _opened(trained)
    assert follow_up(plan, second, turn) == ()
    assert [each.step for each in second.trial("trial").checkpoints] == [5, 10, 15, 5, 10, 15, 20]
    assert second.trial("trial").status is Status.COMPLETED
    assert list(experiment_at(trained.target, "troubled").answers) == [answered]


_DAMAGE: dict[str, Callable[[LocalTarget], None]] = {
    "its bytes are altered": lambda target: flip(own_blobs(target, "troubled", 5)[0]),
    "its manifest is gone": lambda target: next(Path(target.path).rglob("0000000005-*/manifest.json")).unlink(),
}


@pytest.mark.long
@pytest.mark.parametrize("damage", _DAMAGE)
def test_whoever_chooses_a_damaged_checkpoint_is_asked_again(trained: Trouble, left_run: LeftRun, damage: str) -> None:
    left_run.ask(form_of_training(ResumeLimits(checkpoints=(5, 10, 15)), "How?"))
    left_run.resume(_BACK)
    _DAMAGE[damage](trained.target)
    before = experiment_at(trained.target, "troubled")
    turns: list[Turn] = []

    def start() -> None:
        turns.append(first_turn(Turn(trained.plan(None)), TRAINING_QUESTION, last_form()))

    with pytest.raises(Pause):
        left_run.within(start)
    assert "Please answer again**: checkpoint: step 5 cannot be used: " in left_run.page()
    assert experiment_at(trained.target, "troubled") == before
    left_run.resume({**_BACK, "checkpoint": 10})
    left_run.within(start)
    (answer,) = [turn.answer for turn in turns]
    assert answer is not None
    assert answer.choice == ResumeChoice(way="other checkpoint", checkpoint=10)
