"""Whether a restarted run may take over its experiment."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Crashed, Failed, Running, Suspended

from prefect_tune.core.errors import CrashLoop
from prefect_tune.core.experiment.experiment import make_empty_experiment
from prefect_tune.core.journal_events import Owner
from prefect_tune.ownership import make_next_owner
from tests.fakes.checkpoints import first_generation
from tests.long_cases import long_after

pytestmark = pytest.mark.usefixtures("prefect_server")


@flow(name="asks-to-own")
def own_experiment(last_run: str | None, restarts: int, scheduled: bool = False) -> Owner:
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    context.flow_run.auto_scheduled = scheduled  # as Prefect's scheduler creates it
    owner = Owner(name="the last run", host="here", pid=1, flow_run=last_run or str(flow_run.id))
    experiment = make_empty_experiment(first_generation("e")).model_copy(update={"owner": owner, "restarts": restarts})
    return make_next_owner(experiment, 5)


def _create_run(*states: State[Any], restarts: int = 0) -> FlowRun:
    """Create a flow run with this history of states."""
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(own_experiment, parameters={"last_run": None, "restarts": restarts})
        for state in states:
            client.set_flow_run_state(run.id, state, force=True)
        return client.read_flow_run(run.id)


def _restart(*states: State[Any], restarts: int) -> Owner:
    owner: Any = run_flow(own_experiment, flow_run=_create_run(*states, restarts=restarts))
    assert isinstance(owner, Owner)
    return owner


def _scheduled_state(name: str, message: str | None = None) -> State[Any]:
    return State(type=StateType.SCHEDULED, name=name, message=message)


_BY_AUTOMATION = _scheduled_state("AwaitingRetry", "State changed by Automation 3")


def test_a_run_that_nothing_came_of_is_not_started_again_by_itself() -> None:
    assert _restart(Running(), Crashed(), _BY_AUTOMATION, restarts=4).is_manual is False
    with pytest.raises(CrashLoop, match="restarted 5 times in a row"):
        _restart(Running(), Crashed(), _BY_AUTOMATION, restarts=5)


@pytest.mark.parametrize(
    "states",
    long_after(
        2,
        [
            [Crashed(), _scheduled_state("AwaitingRetry", "Retry from the UI")],
            [Crashed(), _scheduled_state("Scheduled", "Retried via CLI")],
            [Failed(), _scheduled_state("AwaitingRetry", "in the words of another release")],
            [Cancelled(), _scheduled_state("AwaitingRetry")],
            [Suspended(), _scheduled_state("Resuming")],
        ],
    ),
    ids=lambda states: f"{states[0].name}, {states[1].message or states[1].name}",
)
def test_a_person_may_start_it_again_as_often_as_they_like(states: list[State[Any]]) -> None:
    assert _restart(Running(), *states, restarts=99).is_manual is True


@pytest.mark.parametrize("states", [[Running()], [Running(), Suspended()]], ids=["running", "suspended"])
def test_a_scheduled_run_does_not_take_an_experiment_from_the_living(states: list[State[Any]]) -> None:
    last_run = str(_create_run(*states).id)
    with get_client(sync_client=True) as client:
        parameters = {"last_run": last_run, "restarts": 0, "scheduled": True}
        run = client.create_flow_run(own_experiment, parameters=parameters)
        with pytest.raises(Abort, match="has not ended"):
            run_flow(own_experiment, flow_run=run)
        state = client.read_flow_run(run.id).state
    assert state is not None
    assert (state.type, state.name) == (StateType.CANCELLED, "Skipped")
    assert own_experiment(last_run, 0).flow_run != last_run  # an unscheduled run may take over


@pytest.mark.parametrize("states", [[Running(), Crashed()], [Running(), Completed()]], ids=["crashed", "completed"])
def test_a_scheduled_run_goes_on_where_the_last_one_has_ended(states: list[State[Any]]) -> None:
    assert own_experiment(str(_create_run(*states).id), 0, scheduled=True).is_manual is False
    assert own_experiment(str(uuid4()), 0, scheduled=True).is_manual is False  # the server no longer has that run
    assert own_experiment("a forged id", 0, scheduled=True).is_manual is False
