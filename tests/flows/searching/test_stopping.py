"""Early ends of a search: by a request from outside, or by its own stoppers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.stoppers import MaxFailures, MaxSteps, TrialBudget
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal.journal import append_events
from prefect_tune.core.journal_events import FinishKind, StopRequested
from prefect_tune.core.messages.target_messages import StopRequest, read_stop_request, write_stop_request
from prefect_tune.core.reasons import AnyReason, Reason
from prefect_tune.core.values import WriteStamp
from prefect_tune.tuner.stop_requests import StopOutcome, stop
from tests.fakes.checkpoints import first_generation
from tests.fakes.trial_processes import wait_until
from tests.flows.training import experiment_at, statuses
from tests.long_cases import long_after
from tests.trainables.moody import Moody
from tests.trainables.witness import acts_of

pytestmark = pytest.mark.usefixtures("no_prefect_server")

TABLE = "tests.trainables.digits_table:DigitsTable"
MOODY = "tests.trainables.moody:Moody"


@pytest.fixture
def target(tmp_path: Path) -> pt.LocalTarget:
    return pt.LocalTarget(path=str(tmp_path / "target"))


class SlowSearch:
    """A search of two slow trials, and the steps that they trained."""

    def __init__(self, target: pt.LocalTarget, folder: Path) -> None:
        self.target = target
        self.witness = folder / "witness"

    def run(self, *, step_seconds: float = 0.2, **options: Any) -> pt.Results:
        common: dict[str, Any] = {
            "space": {"row": pt.grid_search([3, 5]), "witness": str(self.witness), "step_seconds": step_seconds},
            "target": self.target,
            "experiment": "e",
            "metric": "error",
            "num_samples": 1,
            "stop": {"step": 20},
            "max_concurrent_trials": 2,
            "sync": pt.SyncConfig(sync_period_seconds=0.2),
        }
        return pt.tune(TABLE, **{**common, **options})

    def count_steps(self) -> int:
        return sum(act.act == "trained" for act in acts_of(self.witness))

    def run_while(self, request_stop: Callable[[], StopOutcome]) -> tuple[pt.Results, StopOutcome]:
        """Search, and call a function as soon as both trials train."""
        outcomes: list[StopOutcome] = []

        def ask_when_training() -> None:
            wait_until(
                lambda: len({act.pid for act in acts_of(self.witness)}) == 2, seconds=120, what=lambda: "two trials"
            )
            outcomes.append(request_stop())

        thread = threading.Thread(target=ask_when_training)
        thread.start()
        results = self.run()
        thread.join(120)
        return results, outcomes[0]


@pytest.fixture
def search(target: pt.LocalTarget, tmp_path: Path) -> SlowSearch:
    return SlowSearch(target, tmp_path)


def require_stop_request(reason: AnyReason, text: str) -> None:
    assert isinstance(reason, Reason)
    assert (reason.code, reason.arguments["text"]) == ("stop-request", text)


def step_of_checkpoint(results: pt.Results, trial: str) -> int:
    return results.trials[trial].checkpoints[-1].step


@pytest.mark.long
def test_a_trial_that_is_stopped_from_outside_saves_and_is_interrupted_and_no_other_notices(search: SlowSearch) -> None:
    results, outcome = search.run_while(lambda: stop("e", target=search.target, trial="00000", reason="bad curve"))
    stopped, other = results.trials.values()
    assert (outcome.status, stopped.status, stopped.attempt, stopped.finish_kind) == (
        "stopped",
        Status.INTERRUPTED,
        1,
        FinishKind.STOPPED,
    )
    require_stop_request(stopped.end_reason, "bad curve")
    assert 0 < stopped.step == step_of_checkpoint(results, "00000") < 20
    assert (other.status, other.step) == (Status.COMPLETED, 20)
    again = search.run(step_seconds=0, stop={"step": 22})
    assert [(trial.step, trial.attempt) for trial in again.trials.values()] == [(stopped.step, 1), (22, 2)]
    with search.target.open(timeout=timedelta(seconds=9)) as store:
        assert read_stop_request(store, first_generation("e"), 1) is None  # it was collected


def test_an_experiment_that_is_stopped_from_outside_saves_and_is_resumed_without_loss(search: SlowSearch) -> None:
    results, outcome = search.run_while(lambda: stop("e", target=search.target, reason="the machine is needed"))
    assert outcome.status == "stopped"
    assert outcome.message == "experiment 'e' has ended; 2 of its 2 trials can be resumed"
    require_stop_request(results.experiment.stop_reason, "the machine is needed")
    assert {trial.status for trial in results.trials.values()} == {Status.INTERRUPTED}
    assert all(0 < trial.step == step_of_checkpoint(results, name) < 20 for name, trial in results.trials.items())
    resumed = search.run(step_seconds=0)
    assert [(trial.status, trial.step, trial.recomputed_steps) for trial in resumed.trials.values()] == [
        (Status.COMPLETED, 20, 0)
    ] * 2
    assert (search.count_steps(), resumed.experiment.stop_reason) == (40, "")


@pytest.mark.long
def test_where_nobody_runs_it_a_trial_is_stopped_at_the_next_opening_and_an_experiment_is_not(
    search: SlowSearch,
) -> None:
    search.run(step_seconds=0, stop={"step": 2})
    trial = stop("e", target=search.target, trial="00000", wait_seconds=0)
    assert (trial.status, "is completed at step 2" in trial.message) == ("had-ended", True)
    search.run(step_seconds=0, stop={"step": 27}, time_budget_seconds=0.001)
    one = stop("e", target=search.target, trial="00000", wait_seconds=0)
    whole = stop("e", target=search.target, wait_seconds=0.3)
    assert (one.status, whole.status) == ("unanswered", "unanswered")
    assert "a run that begins later is not stopped by this" in whole.message
    results = search.run(step_seconds=0, stop={"step": 27})
    stopped, other = results.trials.values()
    assert (stopped.status, stopped.finish_kind) == (Status.INTERRUPTED, FinishKind.STOPPED)
    assert stopped.step < 27  # the smallest budget may allow it a step
    assert (other.status, other.finish_kind, other.step) == (Status.COMPLETED, FinishKind.CRITERION, 27)
    assert (len(results.experiment.stop_requests), results.experiment.stop_reason) == (2, "")


@pytest.mark.long
def test_what_an_owner_that_died_had_journaled_is_done_by_the_next_one(search: SlowSearch) -> None:
    search.run(step_seconds=0, stop={"step": 2})
    before = search.run(step_seconds=0, stop={"step": 27}, time_budget_seconds=0.001).experiment
    _append_event(search.target, before, StopRequested(trial="00001", reason="enough", request="w"))
    results = search.run(step_seconds=0, stop={"step": 27})
    assert results.trials["00001"].reason == "enough"
    assert results.trials["00001"].step < 27


def _append_event(target: pt.LocalTarget, experiment: Experiment, event: StopRequested) -> None:
    with target.open(timeout=timedelta(seconds=9)) as store:
        append_events(store, experiment, [event], WriteStamp(write_id="by-hand", at="now"))


@pytest.mark.long
def test_a_request_that_the_owner_cannot_read_is_told_and_holds_up_nothing(search: SlowSearch) -> None:
    search.run(step_seconds=0, stop={"step": 1})
    with search.target.open(timeout=timedelta(seconds=9)) as store:
        store.create("e/1/requests/0000000001.json", b"junk")
        state = experiment_at(search.target, "e")
        request = StopRequest(write_id="w", at="now", reason="stop", term=state.term + 1, trial="unknown")
        assert write_stop_request(store, state, request) == 2
    results = search.run(step_seconds=0, stop={"step": 2})
    assert [trial.step for trial in results.trials.values()] == [2, 2]
    assert results.experiment.stop_requests == ("unreadable-1", "w")


def test_the_training_of_one_trial_is_no_search_to_be_stopped(target: pt.LocalTarget) -> None:
    pt.durable_trainable(Moody, {}, target=target, experiment="one", stop={"step": 1})
    with pytest.raises(pt.InvalidInput, match="is not a search: cancel its flow run"):
        stop("one", target=target)
    with pytest.raises(pt.InvalidInput, match="is for a search of many trials"):
        pt.durable_trainable(Moody, {}, target=target, experiment="two", stop=MaxSteps(1) | MaxFailures(1))


# ------------------------------------------------------------------------------------------ its own stoppers


def run_moody_search(target: pt.LocalTarget, **options: Any) -> pt.Results:
    common: dict[str, Any] = {"target": target, "experiment": "e", "metric": "loss", "max_concurrent_trials": 1}
    common |= {"isolation": "thread"}
    return pt.tune(MOODY, **{**common, **options})


def test_a_trial_budget_is_spent_once_however_often_it_is_resumed(target: pt.LocalTarget) -> None:
    budget: dict[str, Any] = {"step": 1, "TrialBudget": {"trials": 3}}
    first = run_moody_search(target, space={"x": pt.uniform(0, 1)}, num_samples=9, stop=budget)
    assert statuses(first) == statuses(pt.resume("e", target=target)) == ["completed"] * 3
    more = pt.resume("e", target=target, stop=[MaxSteps(1), TrialBudget(5)])
    assert [(str(trial.status), trial.attempt) for trial in more.trials.values()] == [("completed", 1)] * 5


@pytest.mark.parametrize(
    ("stopper", "message"),
    long_after(
        2,
        [
            ({"MaxFailure": {"failures": 3}}, "stop: unknown name 'MaxFailure'; .* did you mean 'MaxFailures'"),
            ({"MaxFailures": {"trials": 3}}, "stop: MaxFailures .*trials"),
            ({"TimeBudget": {"time_seconds": "long"}}, "expected a positive timedelta or number of seconds"),
            ({"TrialBudget": {"trials": 0}}, "expected at least 1 trial"),
            ([{"ExperimentPlateau": {}}], "ExperimentPlateau: expected a metric"),
        ],
    ),
)
def test_a_stopper_that_is_none_is_said_before_anything_is_written(
    stopper: Any, message: str, target: pt.LocalTarget
) -> None:
    with pytest.raises(pt.InvalidInput, match=message):
        run_moody_search(target, stop=stopper, metric=None)
    assert not Path(target.path).exists()
