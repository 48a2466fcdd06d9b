"""The log lines of Prefect about the ends of tasks, and which of them are dropped."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from prefect_tune.prefect_api import task_runs
from prefect_tune.prefect_api.task_runs import RUN_TRIAL, quiet_inner_tasks

pytestmark = pytest.mark.usefixtures("prefect_server")


@task(name="inner")
def inner(name: str) -> State[Any]:
    return Failed(message="no") if name == "Failed" else Completed(name=name)


def ends_of(records: list[logging.LogRecord], name: str) -> list[str]:
    """Return Prefect's log lines about the end of the task of this name."""
    ours = [each for each in records if getattr(each, "task_name", "") == name]
    return [each.message for each in ours if "inished in state" in each.message or "failed with state" in each.message]


def test_an_inner_task_that_completes_says_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    @flow
    def quiet() -> None:
        with quiet_inner_tasks():
            inner("Quiet")
        inner("Aloud")

    quiet()
    assert ends_of(caplog.records, "inner") == ["Finished in state Aloud(type=COMPLETED)"]


def test_an_inner_task_that_fails_is_still_reported(caplog: pytest.LogCaptureFixture) -> None:
    @flow
    def quiet() -> str:
        with quiet_inner_tasks():
            inner("Failed")
        return "done"

    quiet()
    assert "Finished in state Failed('no')" in ends_of(caplog.records, "inner")


def test_the_log_of_the_search_alone_says_how_an_attempt_ended(caplog: pytest.LogCaptureFixture) -> None:
    attempt = inner.with_options(name=RUN_TRIAL)

    @flow
    def quiet() -> str:
        with quiet_inner_tasks():
            pass
        attempt("Failed")
        return "done"

    quiet()
    assert ends_of(caplog.records, RUN_TRIAL) == []


def test_at_the_level_debug_nothing_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    @flow
    def quiet() -> None:
        with quiet_inner_tasks():
            inner("Quiet")

    with caplog.at_level(logging.DEBUG, logger="prefect.task_runs"):
        quiet()
    assert ends_of(caplog.records, "inner") == ["Finished in state Quiet(type=COMPLETED)"]


def test_events_that_a_server_does_not_take_are_one_line_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, times = logging.getLogger("prefect._internal.concurrency"), iter((1000.0, 1059.0, 1061.0))
    monkeypatch.setattr(task_runs, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setitem(task_runs._last_logged, "seconds", 0.0)  # another test of this process may have logged one
    with quiet_inner_tasks(), caplog.at_level(logging.ERROR, logger=service.name):
        for _ in range(3):
            service.error("Service %r failed to process item %r", "EventsWorker", "Event(\n" * 14)
        service.error("another %s", "error")
    line = "Prefect's EventsWorker could not send an item: its server may be down. Training continues."
    assert [each.getMessage() for each in caplog.records] == [line, line, "another error"]
