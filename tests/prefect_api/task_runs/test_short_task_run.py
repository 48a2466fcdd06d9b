"""A task that runs at once: what the server stores of it, and what equals an ordinary call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import task_run
from prefect.states import Cancelled

from prefect_tune.prefect_api import task_runs
from prefect_tune.prefect_api.task_runs import run_here, run_to_state

pytestmark = pytest.mark.usefixtures("prefect_server")
_RECORDED_WITHIN_SECONDS = 60


@task(cache_policy=NO_CACHE, task_run_name="inner of {outer}")
def inner(outer: str) -> str:
    """Return the ids of the outer run and of this one."""
    return f"{outer} {task_run.id}"


@task(cache_policy=NO_CACHE)
def outer() -> str:
    """Run the inner task."""
    return run_here(inner, outer=str(task_run.id))


@task(cache_policy=NO_CACHE, retries=1)
def fails_once(tries: list[int]) -> str:
    """Raise the first time."""
    tries.append(1)
    if len(tries) == 1:
        raise ValueError("once")
    return str(task_run.id)


@flow
def call(what: str) -> str:
    """Run one of the tasks, in a flow."""
    match what:
        case "outer":
            return run_here(outer)
        case "tagged":
            with tags("gpu"):
                return run_here(inner, "none")
        case _:
            return run_here(fails_once, [])


def recorded(run: str) -> tuple[TaskRun, Sequence[str]]:
    """Return a task run that has completed, and the names of its states."""
    until = time.monotonic() + _RECORDED_WITHIN_SECONDS
    with get_client(sync_client=True) as client:
        while time.monotonic() < until:
            states = sorted(client.read_task_run_states(UUID(run)), key=lambda each: each.timestamp)
            if states and states[-1].is_final():
                return client.read_task_run(UUID(run)), [str(each.name) for each in states]
            time.sleep(0.1)
    raise AssertionError(f"task run {run} was not recorded")


def test_a_task_run_begins_with_running_and_keeps_its_name_and_its_parent() -> None:
    parent, child = call("outer").split()
    found, states = recorded(child)
    assert (found.name, states) == (f"inner of {parent}", ["Running", "Completed"])
    assert [str(each.id) for each in found.task_inputs["__parents__"]] == [parent]
    assert recorded(parent)[1] == ["Running", "Completed"]


def test_with_tags_it_begins_with_pending_since_it_may_wait_for_a_slot() -> None:
    _, child = call("tagged").split()
    found, states = recorded(child)
    assert (found.tags, states) == (["gpu"], ["Pending", "Running", "Completed"])


def test_it_is_retried_as_an_ordinary_call() -> None:
    assert recorded(call("fails"))[1] == ["Running", "Retrying", "Completed"]


def test_it_raises_what_the_task_raises() -> None:
    @task(retries=0)
    def breaks() -> None:
        raise ValueError("as expected")

    @flow
    def broken() -> None:
        run_here(breaks)

    with pytest.raises(ValueError, match="as expected"):
        broken()


@pytest.mark.parametrize("tag", [[], ["gpu"]])
def test_its_state_is_had_with_the_error_or_with_the_name_that_it_returned(tag: list[str]) -> None:
    @task(retries=0)
    def ends(how: str) -> State[Any]:
        if how == "raises":
            raise ValueError("as expected")
        return Cancelled(name="Interrupted", message=how)

    @flow
    def ended() -> tuple[State[Any], State[Any]]:
        with tags(*tag):
            return run_to_state(ends, "why"), run_to_state(ends, "raises")

    interrupted, failed = ended()
    assert (interrupted.name, interrupted.message) == ("Interrupted", "why")
    assert str(failed.result(raise_on_failure=False)) == "as expected"


def test_a_release_of_prefect_without_what_it_needs_runs_it_as_an_ordinary_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_runs, "_create", None)
    _, child = call("outer").split()
    assert recorded(child)[1] == ["Pending", "Running", "Completed"]
