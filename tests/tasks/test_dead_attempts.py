"""A takeover sets the task runs of dead attempts to Crashed, and no others."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed, Crashed, Running, Scheduled

import prefect_tune as pt
from prefect_tune.core.experiment.experiment import Experiment, apply_event, make_empty_experiment
from prefect_tune.core.journal_events import AttemptStarted, Owner, TrialAdded
from prefect_tune.journal_access import make_attempt_filter, mark_dead_attempts_crashed
from prefect_tune.prefect_api import task_runs
from prefect_tune.tasks.trials import run_attempt
from tests.fakes.checkpoints import first_generation
from tests.fakes.trial_processes import wait_until

HOST, OTHER_HOST = socket.gethostname(), "another-machine"
ATTEMPTS: Mapping[str, Any] = {"train trial · attempt 1": run_attempt, "my own name": pt.run_trial}
NEXT = Owner(name="next", host=HOST, pid=os.getpid(), flow_run=str(uuid4()))


@flow(name="dies")
def _dying_flow() -> None:
    """The flow of the dead owner."""


@task(name="prepare")
def _user_task() -> None:
    """A task of the user."""


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    assert prefect_server
    with get_client(sync_client=True) as client:
        yield client


def create_flow_run(client: SyncPrefectClient, state: State[Any]) -> UUID:
    """Create a flow run in this state, with running attempts and a running task of the user."""
    run = client.create_flow_run(_dying_flow).id
    for name, prefect_task in {**ATTEMPTS, "prepare": _user_task}.items():
        client.create_task_run(task=prefect_task, flow_run_id=run, dynamic_key=name, name=name, state=Running())
    client.set_flow_run_state(run, state, force=True)
    return run


def make_experiment(owner: Owner) -> Experiment:
    """Return the experiment of a single training whose attempt was running."""
    state = make_empty_experiment(first_generation("e")).model_copy(update={"owner": owner})
    state = apply_event(state, TrialAdded(trial="trial", config={}), 1)
    return apply_event(state, AttemptStarted(trial="trial", attempt=1, from_step=0), 2)


def read_task_runs(client: SyncPrefectClient, owner: Owner) -> Sequence[TaskRun]:
    """Return the task runs of the owner's flow run."""
    assert owner.flow_run is not None
    of_owner = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(owner.flow_run)]))
    return client.read_task_runs(flow_run_filter=of_owner, limit=200)


def read_states(client: SyncPrefectClient, owner: Owner) -> Mapping[str, str | None]:
    return {task_run.name: task_run.state_name for task_run in read_task_runs(client, owner)}


def take_over(client: SyncPrefectClient, owner: Owner, by: Owner = NEXT) -> Mapping[str, str | None]:
    mark_dead_attempts_crashed(make_experiment(owner), by)
    for thread in threading.enumerate():
        if thread.name == "settle-dead-attempts":
            thread.join(timeout=60)
    return read_states(client, owner)


def _get_ended_pid() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


@pytest.mark.parametrize(
    ("state", "host", "pid"),
    [
        (Crashed, OTHER_HOST, os.getpid),
        (Completed, HOST, os.getpid),
        (Scheduled, OTHER_HOST, os.getpid),
        (Running, HOST, _get_ended_pid),
    ],
    ids=["crashed", "completed here", "started again", "its process is gone"],
)
def test_attempts_of_a_flow_run_that_is_known_to_be_dead_are_crashed_whatever_their_names(
    client: SyncPrefectClient, state: Callable[[], State[Any]], host: str, pid: Callable[[], int]
) -> None:
    dead = Owner(name="dead", host=host, pid=pid(), flow_run=str(create_flow_run(client, state())))
    states = take_over(client, dead)
    assert states == {**dict.fromkeys(ATTEMPTS, "Crashed"), "prepare": "Running"}


@pytest.mark.parametrize(("host", "pid"), [(HOST, os.getpid), (OTHER_HOST, _get_ended_pid)], ids=["here", "elsewhere"])
def test_attempts_of_a_flow_run_keep_their_states_while_it_is_alive_and_are_crashed_once_it_is_dead(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, host: str, pid: Callable[[], int]
) -> None:
    alive = Owner(name="alive", host=host, pid=pid(), flow_run=str(flow_run := create_flow_run(client, Running())))
    looked, died = threading.Event(), threading.Event()

    def sleep_until_death(_seconds: float) -> None:
        looked.set()
        died.wait(60)

    monkeypatch.setattr(task_runs, "time", SimpleNamespace(sleep=sleep_until_death))
    mark_dead_attempts_crashed(make_experiment(alive), NEXT)
    assert looked.wait(60)
    assert set(read_states(client, alive).values()) == {"Running"}
    client.set_flow_run_state(flow_run, Crashed(), force=True)
    died.set()
    crashed = {**dict.fromkeys(ATTEMPTS, "Crashed"), "prepare": "Running"}
    wait_until(lambda: read_states(client, alive) == crashed, seconds=60, what=lambda: str(read_states(client, alive)))


def test_more_dead_attempts_than_the_server_lists_at_a_time_are_set_to_crashed(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = SyncPrefectClient.read_task_runs

    def read_one_at_a_time(client: SyncPrefectClient, **more: Any) -> list[TaskRun]:
        return listed(client, **{"limit": 1, **more})

    owner = Owner(name="dead", host=HOST, pid=_get_ended_pid(), flow_run=str(create_flow_run(client, Crashed())))
    monkeypatch.setattr(SyncPrefectClient, "read_task_runs", read_one_at_a_time)
    assert take_over(client, owner) == {**dict.fromkeys(ATTEMPTS, "Crashed"), "prepare": "Running"}


def test_an_attempt_of_an_owner_that_this_process_was_keeps_its_state(client: SyncPrefectClient) -> None:
    earlier = Owner(name="earlier", host=HOST, pid=os.getpid(), flow_run=str(create_flow_run(client, Crashed())))
    mark_dead_attempts_crashed(make_experiment(Owner(name="forged", host=OTHER_HOST, pid=1, flow_run="no id")), earlier)
    assert set(take_over(client, earlier).values()) == {"Running"}


def _make_task_run(run_count: int, key: str = run_attempt.task_key, *, has_begun: bool = True) -> TaskRun:
    start_time = datetime.now(UTC) if has_begun else None
    return TaskRun(task_key=key, dynamic_key="0", flow_run_run_count=run_count, start_time=start_time)


def test_after_a_retry_of_the_flow_run_its_present_attempts_are_left_alone() -> None:
    dead = Owner(name="dead", host=HOST, pid=1, flow_run=str(uuid4()))
    is_dead = make_attempt_filter(dead, run_count=2)
    assert is_dead(_make_task_run(1))
    assert not is_dead(_make_task_run(2))
    assert not is_dead(_make_task_run(0, has_begun=False)), "it may belong to the current run"
    assert not is_dead(_make_task_run(1, _user_task.task_key))


def test_an_owner_that_names_its_task_run_was_that_attempt_alone() -> None:
    run = _make_task_run(1)
    assert make_attempt_filter(Owner(name="o", host=HOST, pid=1, task_run=str(run.id)), None)(run)
    assert not make_attempt_filter(Owner(name="o", host=HOST, pid=1, task_run=str(uuid4())), None)(run)
