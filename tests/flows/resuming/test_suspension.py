"""Suspend and Resume: the answer to a form is found again, and carried out once; by clicks: `tests/browser`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.input import RunInput
from prefect.states import AwaitingRetry

from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import FormAnswered, Owner
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.journal_access import write_entry_directly
from prefect_tune.suspension import (
    TRAINING_QUESTION,
    LastForm,
    NewAnswer,
    ResumeChoice,
    RunSegment,
    apply_answers,
    make_answer_events,
    read_last_form,
    suspend_with_form,
)
from prefect_tune.tasks.experiments import acquire_experiment
from tests.flows.interruptions.trouble import Trouble
from tests.flows.training import experiment_at, flip_bit, own_blobs


class WaitingRun:
    """A flow run whose code runs in this process."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client = client
        deployment = client.create_deployment(client.create_flow(flow(name="asks")(_do_nothing)), name="asks")
        self.id: UUID = client.create_flow_run_from_deployment(deployment).id

    def call_in_run(self, act: Callable[[], object]) -> Any:
        return run_flow(flow(name="asks")(act), flow_run=self._client.read_flow_run(self.id))

    def ask(self, form: type[RunInput]) -> None:
        with pytest.raises(Pause):
            self.call_in_run(lambda: suspend_with_form(form))

    def resume(self, answer: Mapping[str, object] | None = None) -> None:
        self._client.resume_flow_run(self.id, run_input=None if answer is None else dict(answer))

    def retry(self) -> None:
        self._client.set_flow_run_state(self.id, AwaitingRetry(), force=True)

    def read_form(self) -> LastForm | None:
        forms: list[LastForm | None] = []
        self.call_in_run(lambda: forms.append(read_last_form()))
        return forms[0]

    def read_form_text(self) -> str:
        """Return the text above the form that the run waits with."""
        state = self._client.read_flow_run(self.id).state
        keyset = state.state_details.run_input_keyset if state else None
        assert keyset is not None
        return self._client.read_flow_run_input(self.id, keyset["description"])

    def write_earlier_forms(self, forms: int) -> None:
        """Write the stored inputs of so many earlier forms."""
        for number in range(forms):
            for kind in ("schema", "description", "response"):
                key = f"suspended-prefect-tune-{number:012}-{kind}"
                self._client.create_flow_run_input(self.id, key, '{"go_on": true}')


def _do_nothing() -> None:
    """A flow that no worker starts."""


@pytest.fixture
def waiting_run(prefect_server: str) -> Iterator[WaitingRun]:
    """A run of a deployment that waits for forms."""
    assert prefect_server
    with get_client(sync_client=True) as client:
        yield WaitingRun(client)


# The answer to the last form of a run, however many forms there were before.


_MAX_INPUTS = 200  # of one page of Prefect's list, the oldest first


class _GoOn(RunInput):
    go_on: bool = True
    reason: str = ""


def test_the_answer_to_one_of_many_forms_is_the_answer_that_was_given(waiting_run: WaitingRun) -> None:
    waiting_run.write_earlier_forms(_MAX_INPUTS // 3)
    waiting_run.ask(_GoOn.with_initial_data(description="Does it continue?"))
    waiting_run.resume({"go_on": False, "reason": "it costs too much"})
    form = waiting_run.read_form()
    assert form is not None
    assert form.answer == {"go_on": False, "reason": "it costs too much"}
    waiting_run.retry()
    assert waiting_run.read_form() == form


# *other checkpoint*: a training goes back once to an intact checkpoint, or asks again.


_TRIAL = TrialKey(experiment="troubled", generation=1, trial="trial")
_BACK = {"action": "other checkpoint", "checkpoint": 5}


@pytest.fixture
def training(trouble: Trouble) -> Trouble:
    """A training of 15 steps, with checkpoints of steps 5, 10 and 15."""
    trouble.options["isolation"] = "thread"
    trouble.run(steps=15)
    return trouble


def _acquire_experiment(training: Trouble) -> Experiment:
    owner = Owner(name="a start of the run", host="here", pid=1, flow_run="run")
    return acquire_experiment(training.target, _TRIAL.journal_key, owner, new_write_stamp())


def test_of_two_starts_of_a_run_that_were_told_to_go_back_only_the_first_one_does(training: Trouble) -> None:
    plan = TrialSpec(target=training.target, trial=_TRIAL, trainable="", stopper="", needs_history=False)
    answer = FormAnswered(key="form", answer=_BACK, flow_run="run")
    choice = ResumeChoice(action="other checkpoint", checkpoint=5)
    iteration = RunSegment(training.make_plan(None), answer=NewAnswer(choice, answer))
    experiment = _acquire_experiment(training)
    trial = write_entry_directly(training.target, experiment, make_answer_events(plan, experiment, iteration)).trial(
        "trial"
    )
    assert (trial.status, trial.checkpoints[-1].step) == (Status.PENDING, 5)
    training.run(steps=20)
    second = _acquire_experiment(training)
    assert make_answer_events(plan, second, iteration) == ()
    assert [checkpoint.step for checkpoint in second.trial("trial").checkpoints] == [5, 10, 15, 5, 10, 15, 20]
    assert second.trial("trial").status is Status.COMPLETED
    assert list(experiment_at(training.target, "troubled").answers) == [answer]


_DAMAGE: dict[str, Callable[[LocalTarget], None]] = {
    "its bytes are altered": lambda target: flip_bit(own_blobs(target, "troubled", 5)[0]),
    "its manifest is gone": lambda target: next(Path(target.path).rglob("0000000005-*/manifest.json")).unlink(),
}


@pytest.mark.long
@pytest.mark.parametrize("damage", _DAMAGE)
def test_whoever_chooses_a_damaged_checkpoint_is_asked_again(
    training: Trouble, waiting_run: WaitingRun, damage: str
) -> None:
    before = experiment_at(training.target, "troubled")
    waiting_run.ask(TRAINING_QUESTION.make_form(training.make_plan(None), before, ""))
    waiting_run.resume(_BACK)
    _DAMAGE[damage](training.target)
    iterations: list[RunSegment] = []

    def start() -> None:
        iterations.append(apply_answers(RunSegment(training.make_plan(None)), TRAINING_QUESTION, read_last_form()))

    with pytest.raises(Pause):
        waiting_run.call_in_run(start)
    assert "Please answer again**: checkpoint: step 5 cannot be used: " in waiting_run.read_form_text()
    assert experiment_at(training.target, "troubled") == before
    waiting_run.resume({**_BACK, "checkpoint": 10})
    waiting_run.call_in_run(start)
    (answer,) = [iteration.answer for iteration in iterations]
    assert answer is not None
    assert answer.choice == ResumeChoice(action="other checkpoint", checkpoint=10)
