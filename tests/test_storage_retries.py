"""Which failures of a target are retried, and after which delay."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest
from prefect.states import Failed

from prefect_tune.core.errors import CommitUnknown, InvalidInput, StoreRefused, StoreUnavailable, Superseded
from prefect_tune.storage_retries import retrying_refusals, should_retry, should_retry_if_unavailable, with_retries
from prefect_tune.tasks.checkpoints import delete_retired_checkpoints, publish_checkpoint
from prefect_tune.tasks.experiments import check_target

TRANSIENT = [StoreUnavailable("503"), CommitUnknown("no reply")]
FATAL = [InvalidInput("no"), Superseded("another"), ValueError("no")]
REFUSED = StoreRefused("the credentials have expired")


def is_retryable(error: Exception, condition: Any = should_retry) -> bool:
    return bool(condition(None, None, Failed(data=error)))


class Target:
    """Raises the errors in order, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self._errors: Iterator[Exception] = iter(errors)
        self.tries = 0

    def __call__(self) -> str:
        self.tries += 1
        for error in self._errors:
            raise error
        return "answered"


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_tune.storage_retries.time.sleep", lambda _seconds: None)


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_what_may_pass_is_tried_again_anywhere(error: Exception) -> None:
    assert is_retryable(error)
    assert with_retries(Target(error, error)) == "answered"


@pytest.mark.parametrize("error", FATAL, ids=repr)
def test_what_never_passes_is_not_tried_again(error: Exception) -> None:
    with retrying_refusals():
        assert not is_retryable(error)
        target = Target(error)
        with pytest.raises(type(error)):
            with_retries(target)
    assert target.tries == 1


def test_a_refusal_is_final_until_the_target_has_served_the_run() -> None:
    assert not is_retryable(REFUSED)
    target = Target(REFUSED)
    with pytest.raises(StoreRefused):
        with_retries(target)
    assert target.tries == 1


def test_a_refusal_after_that_passes_and_is_raised_as_itself_where_it_does_not() -> None:
    with retrying_refusals():
        assert is_retryable(REFUSED)
        assert with_retries(Target(*[REFUSED] * 7)) == "answered"
        with pytest.raises(StoreRefused, match="expired"):
            with_retries(Target(*[REFUSED] * 8))
    assert not is_retryable(REFUSED)


def test_a_thread_of_the_runs_own_retries_them_too() -> None:
    results: list[bool] = []
    with retrying_refusals():
        thread = threading.Thread(target=copy_context().run, args=(lambda: results.append(is_retryable(REFUSED)),))
    thread.start()
    thread.join()
    assert results == [True]


def test_the_check_that_a_run_begins_with_takes_a_refusal_for_an_answer() -> None:
    assert check_target.retry_condition_fn is should_retry_if_unavailable
    with retrying_refusals():
        assert not is_retryable(REFUSED, should_retry_if_unavailable)
        assert is_retryable(StoreUnavailable("503"), should_retry_if_unavailable)


def test_a_refused_deletion_holds_up_no_commit_of_a_trial_that_runs() -> None:
    condition = delete_retired_checkpoints.retry_condition_fn
    with retrying_refusals():
        assert is_retryable(REFUSED)
        assert not is_retryable(REFUSED, condition), "each commit that retires one would wait for two minutes"
        assert all(is_retryable(error, condition) for error in TRANSIENT)


def test_the_tries_of_a_task_last_longer_than_it_takes_to_replace_credentials() -> None:
    pauses = publish_checkpoint.retry_delay_seconds
    assert len(pauses) == publish_checkpoint.retries
    assert sum(pauses) > 60


def test_who_waits_for_a_first_answer_waits_half_a_minute_and_not_two(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("prefect_tune.storage_retries.time.sleep", pauses.append)
    with pytest.raises(StoreUnavailable):
        with_retries(Target(*[StoreUnavailable("no such host")] * 9))
    assert sum(pauses) < 50, "the address may be wrong"
    assert len(check_target.retry_delay_seconds) == check_target.retries
    assert sum(check_target.retry_delay_seconds) == 31
