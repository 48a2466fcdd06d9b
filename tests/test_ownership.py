"""Whether a restarted run may take over its experiment."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Crashed, Failed, Running, Suspended

from prefect_tune.core.errors import CrashLoop
from prefect_tune.core.experiment.experiment import Experiment, empty_experiment
from prefect_tune.core.journal_events import Owner
from prefect_tune.ownership import make_next_owner
from tests.fakes.checkpoints import first_generation
from tests.long_cases import long_after

pytestmark = pytest.mark.usefixtures("prefect_server")


@flow(name="asks-to-own")
def owning(before: str | None, restarts: int, scheduled: bool = False) -> Owner:
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    context.flow_run.auto_scheduled = scheduled  # as Prefect's scheduler creates it
    return make_next_owner(_known(before or str(flow_run.id), restarts), 5)


def _known(flow_run_id: str, restarts: int) -> Experiment:
    owner = Owner(name="the last run", host="here", pid=1, flow_run=flow_run_id)
    return empty_experiment(first_generation("e")).model_copy(update={"owner": owner, "restarts": restarts})


def _run_from(*states: State[Any], restarts: int) -> Owner:
    """Start a run whose state history is this."""
    with get_client(sync_client=True) as client:
        made = client.create_flow_run(owning, parameters={"before": None, "restarts": restarts})
        for state in states:
            client.set_flow_run_state(made.id, state, force=True)
        made = client.read_flow_run(made.id)
    owner: Any = run_flow(owning, flow_run=made)
    assert isinstance(owner, Owner)
    return owner


def _scheduled(name: str, message: str | None = None) -> State[Any]:
    return State(type=StateType.SCHEDULED, name=name, message=message)


_BY_AUTOMATION = _scheduled("AwaitingRetry", "State changed by Automation 3")


def test_a_run_that_nothing_came_of_is_not_started_again_by_itself() -> None:
    assert _run_from(Running(), Crashed(), _BY_AUTOMATION, restarts=4).is_manual is False
    with pytest.raises(CrashLoop, match="restarted 5 times in a row"):
        _run_from(Running(), Crashed(), _BY_AUTOMATION, restarts=5)


@pytest.mark.parametrize(
    "states",
    long_after(
        2,
        [
            [Crashed(), _scheduled("AwaitingRetry", "Retry from the UI")],
            [Crashed(), _scheduled("Scheduled", "Retried via CLI")],
            [Failed(), _scheduled("AwaitingRetry", "in the words of another release")],
            [Cancelled(), _scheduled("AwaitingRetry")],
            [Suspended(), _scheduled("Resuming")],
        ],
    ),
    ids=lambda states: f"{states[0].name}, {states[1].message or states[1].name}",
)
def test_a_person_may_start_it_again_as_often_as_they_like(states: list[State[Any]]) -> None:
    assert _run_from(Running(), *states, restarts=99).is_manual is True


def _last_run(*states: State[Any]) -> UUID:
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(owning, parameters={"before": None, "restarts": 0}).id
        for state in states:
            client.set_flow_run_state(run, state, force=True)
    return run


@pytest.mark.parametrize("states", [[Running()], [Running(), Suspended()]], ids=["running", "suspended"])
def test_a_scheduled_run_does_not_take_an_experiment_from_the_living(states: list[State[Any]]) -> None:
    last = _last_run(*states)
    with get_client(sync_client=True) as client:
        made = client.create_flow_run(owning, parameters={"before": str(last), "restarts": 0, "scheduled": True})
        with pytest.raises(Abort, match="has not ended"):
            run_flow(owning, flow_run=made)
        ended = client.read_flow_run(made.id).state
    assert ended is not None
    assert (ended.type, ended.name) == (StateType.CANCELLED, "Skipped")
    assert owning(str(last), 0).flow_run != str(last)  # a run that is not scheduled may take over


@pytest.mark.parametrize("states", [[Running(), Crashed()], [Running(), Completed()]], ids=["crashed", "completed"])
def test_a_scheduled_run_goes_on_where_the_last_one_has_ended(states: list[State[Any]]) -> None:
    assert owning(str(_last_run(*states)), 0, scheduled=True).is_manual is False
    assert owning(str(uuid4()), 0, scheduled=True).is_manual is False  # the server no longer has that run
    assert owning("a forged id", 0, scheduled=True).is_manual is False
