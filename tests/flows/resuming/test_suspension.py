"""Suspend and Resume: the answer to a form is found again, and carried out once; by clicks: `tests/browser`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
from tests.flows.training import experiment_at, flip, own_blobs

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
