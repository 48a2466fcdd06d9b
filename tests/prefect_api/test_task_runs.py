"""Tasks that run inline: what the server stores, what equals an ordinary call, and the events of assets."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow, tags, task
from prefect.assets import add_asset_metadata, materialize
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.runtime import task_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED, temporary_settings
from prefect.states import Cancelled, Completed, Failed

from prefect_tune.prefect_api import task_runs
from prefect_tune.prefect_api.artifacts_and_assets import (
    PrefectEvent,
    make_asset,
    make_materialization_event,
    make_reference_event,
)
from prefect_tune.prefect_api.task_runs import (
    TRIAL_TASK_NAME,
    holding_concurrency_limits,
    quieting_inner_tasks,
    run_task_inline,
    run_task_to_state,
)
from tests.fakes.servers.canned_http import CannedServer, canned_server

pytestmark = pytest.mark.usefixtures("prefect_server")
_RECORD_TIMEOUT_SECONDS = 60


@task(cache_policy=NO_CACHE, task_run_name="inner of {outer}")
def inner(outer: str) -> str:
    """Return the ids of the outer run and of this one."""
    return f"{outer} {task_run.id}"


@task(cache_policy=NO_CACHE)
def outer() -> str:
    """Run the inner task."""
    return run_task_inline(inner, outer=str(task_run.id))


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
            return run_task_inline(outer)
        case "tagged":
            with tags("gpu"):
                return run_task_inline(inner, "none")
        case _:
            return run_task_inline(fails_once, [])


def wait_for_task_run(run: str) -> tuple[TaskRun, Sequence[str]]:
    """Return a task run that has completed, and the names of its states."""
    deadline = time.monotonic() + _RECORD_TIMEOUT_SECONDS
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            states = sorted(client.read_task_run_states(UUID(run)), key=lambda state: state.timestamp)
            if states and states[-1].is_final():
                return client.read_task_run(UUID(run)), [str(state.name) for state in states]
            time.sleep(0.1)
    raise AssertionError(f"task run {run} was not recorded")


def test_a_task_run_begins_with_running_and_keeps_its_name_and_its_parent() -> None:
    parent, child = call("outer").split()
    child_run, states = wait_for_task_run(child)
    assert (child_run.name, states) == (f"inner of {parent}", ["Running", "Completed"])
    assert [str(parent_run.id) for parent_run in child_run.task_inputs["__parents__"]] == [parent]
    assert wait_for_task_run(parent)[1] == ["Running", "Completed"]


def test_with_tags_it_begins_with_pending_since_it_may_wait_for_a_slot() -> None:
    _, child = call("tagged").split()
    child_run, states = wait_for_task_run(child)
    assert (child_run.tags, states) == (["gpu"], ["Pending", "Running", "Completed"])


def test_it_is_retried_as_an_ordinary_call() -> None:
    assert wait_for_task_run(call("fails"))[1] == ["Running", "Retrying", "Completed"]


def test_it_raises_what_the_task_raises() -> None:
    @task(retries=0)
    def breaks() -> None:
        raise ValueError("as expected")

    @flow
    def call_breaks() -> None:
        run_task_inline(breaks)

    with pytest.raises(ValueError, match="as expected"):
        call_breaks()


@pytest.mark.parametrize("tag", [[], ["gpu"]])
def test_its_state_is_had_with_the_error_or_with_the_name_that_it_returned(tag: list[str]) -> None:
    @task(retries=0)
    def ends(how: str) -> State[Any]:
        if how == "raises":
            raise ValueError("as expected")
        return Cancelled(name="Interrupted", message=how)

    @flow
    def call_ends() -> tuple[State[Any], State[Any]]:
        with tags(*tag):
            return run_task_to_state(ends, "why"), run_task_to_state(ends, "raises")

    interrupted, failed = call_ends()
    assert (interrupted.name, interrupted.message) == ("Interrupted", "why")
    assert str(failed.result(raise_on_failure=False)) == "as expected"


def test_a_release_of_prefect_without_what_it_needs_runs_it_as_an_ordinary_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_runs, "_create_task_run", None)
    _, child = call("outer").split()
    assert wait_for_task_run(child)[1] == ["Pending", "Running", "Completed"]


# Prefect's log lines about the ends of tasks, and those that are dropped.


@task(name="ends")
def ends(name: str) -> State[Any]:
    return Failed(message="no") if name == "Failed" else Completed(name=name)


def find_end_lines(records: list[logging.LogRecord], name: str) -> list[str]:
    """Return Prefect's log lines about the end of the task of this name."""
    messages = [record.message for record in records if getattr(record, "task_name", "") == name]
    return [line for line in messages if "inished in state" in line or "failed with state" in line]


def test_an_inner_task_that_completes_says_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    @flow
    def quiet() -> None:
        with quieting_inner_tasks():
            ends("Quiet")
        ends("Aloud")

    quiet()
    assert find_end_lines(caplog.records, "ends") == ["Finished in state Aloud(type=COMPLETED)"]


def test_an_inner_task_that_fails_is_still_reported(caplog: pytest.LogCaptureFixture) -> None:
    @flow
    def quiet() -> str:
        with quieting_inner_tasks():
            ends("Failed")
        return "done"

    quiet()
    assert "Finished in state Failed('no')" in find_end_lines(caplog.records, "ends")


def test_the_log_of_the_search_alone_says_how_an_attempt_ended(caplog: pytest.LogCaptureFixture) -> None:
    attempt = ends.with_options(name=TRIAL_TASK_NAME)

    @flow
    def quiet() -> str:
        with quieting_inner_tasks():
            pass
        attempt("Failed")
        return "done"

    quiet()
    assert find_end_lines(caplog.records, TRIAL_TASK_NAME) == []


def test_events_that_a_server_does_not_take_are_one_line_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, times = logging.getLogger("prefect._internal.concurrency"), iter((1000.0, 1059.0, 1061.0))
    monkeypatch.setattr(task_runs, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setitem(task_runs._last_log_time, "seconds", 0.0)  # another test of this process may have logged one
    with quieting_inner_tasks(), caplog.at_level(logging.ERROR, logger=service.name):
        for _ in range(3):
            service.error("Service %r failed to process item %r", "EventsWorker", "Event(\n" * 14)
        service.error("another %s", "error")
    line = "Prefect's EventsWorker could not send an item: its server may be down. Training continues."
    assert [record.getMessage() for record in caplog.records] == [line, line, "another error"]


# The events of assets equal those that Prefect emits itself.


_METADATA = {"step": 3}


def test_they_are_those_of_a_materializing_task(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[PrefectEvent] = []

    def emit(event: str, resource: Any, related: Any = (), payload: Any = None) -> None:
        emitted.append(PrefectEvent(event, resource, list(related), payload or {}))

    monkeypatch.setattr("prefect.events.emit_event", emit)
    source = make_asset("s3://bucket/runs/first/best")
    model = make_asset("s3://bucket/runs/second/best", "second: best model", "The best model.")
    assert source
    assert model

    @materialize(model, asset_deps=[source], by="prefect-tune")
    def train() -> None:
        add_asset_metadata(model, _METADATA)

    flow(name="trains")(train)()
    expected = (make_reference_event(source), make_materialization_event(model, [source], _METADATA))
    asset_events = [event for event in emitted if event.event.startswith("prefect.asset.")]
    assert asset_events == [
        PrefectEvent(event.event, event.resource, list(event.related), event.payload) for event in expected
    ]


# Slots of Prefect's concurrency limits while the API fails: an attempt waits, and does not fail.


GRANTED = f'{{"lease_id": "{uuid4()}", "limits": [{{"id": "{uuid4()}", "name": "gpu", "limit": 1}}]}}'.encode()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedServer]:
    """An API that fails, until the test changes its answer."""
    monkeypatch.setattr(task_runs, "_RETRY_INTERVAL", timedelta(seconds=0.05))
    monkeypatch.setattr(task_runs, "_ACQUIRE_TIMEOUT", timedelta(seconds=1))
    with (
        canned_server(500) as canned,
        temporary_settings({PREFECT_API_URL: f"{canned.url}/api", PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}),
    ):
        yield canned


def make_limit_names() -> list[str]:
    """Return a name that no other test uses: Prefect caches a client for each."""
    return [f"gpu-{uuid4().hex}"]


class _HealingStop(threading.Event):
    """Heals the API in the first pause between two tries."""

    def __init__(self, api: CannedServer) -> None:
        super().__init__()
        self._api = api

    def wait(self, timeout: float | None = None) -> bool:
        self._api.status, self._api.body = 200, GRANTED
        return super().wait(timeout)


def test_an_api_that_fails_is_asked_again_and_cannot_fail_an_attempt_that_has_ended(api: CannedServer) -> None:
    with holding_concurrency_limits(make_limit_names(), _HealingStop(api)):
        assert api.status == 200, "the slot was granted"
        api.status = 500


def test_an_api_that_cannot_be_reached_is_waited_for_until_the_trial_is_stopped() -> None:
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    settings = {PREFECT_API_URL: "http://127.0.0.1:9/api"}
    with temporary_settings(settings), holding_concurrency_limits(make_limit_names(), stop):
        assert stop.is_set()


@pytest.mark.parametrize("status", [422, 423])
def test_an_answer_that_no_slot_is_free_now_is_waited_for(api: CannedServer, status: int) -> None:
    api.status = status  # 422: the limit is 0
    with holding_concurrency_limits(make_limit_names(), _HealingStop(api)):
        assert api.status == 200, "the slot was granted"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_request_that_prefect_refuses_is_an_error(api: CannedServer, status: int) -> None:
    api.status = status
    with (
        pytest.raises(ConcurrencySlotAcquisitionError, match=str(status)),
        holding_concurrency_limits(make_limit_names(), _HealingStop(api)),
    ):
        pass
