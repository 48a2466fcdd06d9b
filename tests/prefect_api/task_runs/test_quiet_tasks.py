"""The log lines of Prefect about the ends of tasks, and which of them are dropped."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from prefect_tune.prefect_api.task_runs.quiet_tasks import RUN_TRIAL, quiet_inner_tasks

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
