"""How tasks retry: which errors of a target are retried, how often, and after which pauses."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from prefect.cache_policies import NO_CACHE
from prefect.exceptions import MissingContextError
from prefect.logging import get_logger, get_run_logger

from prefect_tune.core.errors import CommitUnknown, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun

    from prefect_tune.attempt.processes.process_output import Log
    from prefect_tune.blocks import StorageTarget
    from prefect_tune.core.storage.object_store import ObjectStore

READ_TIMEOUT = timedelta(minutes=2)
"""The timeout of a read or a small write on a target, for all of its requests together; transfers may take longer."""
_Argument = TypeVar("_Argument")
_Out = TypeVar("_Out")
_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)
"""Pauses between tries: 91 s in total, because replacing expired credentials takes about a minute."""
_MAX_FIRST_RETRIES = 5  # applies until the target has served the run once: 31 s in total, because a user may be waiting
_JITTER = 0.5
_retries_refusals: ContextVar[bool] = ContextVar("prefect_tune_retries_refusals", default=False)
_abandoned_event: ContextVar[threading.Event | None] = ContextVar("prefect_tune_abandoned", default=None)


@contextmanager
def setting_context_variable(variable: ContextVar[_Argument], value: _Argument) -> Iterator[None]:
    """Set a context variable during the `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def stopping_retries_on(abandoned: threading.Event) -> AbstractContextManager[None]:
    """Stop all retries in this context once `abandoned` is set, because retrying threads would delay the exit."""
    return setting_context_variable(_abandoned_event, abandoned)


def is_work_abandoned() -> bool:
    """Return whether the process is exiting and no longer needs the work of this context."""
    event = _abandoned_event.get()
    return event is not None and event.is_set()


def _pause(seconds: float) -> None:
    """Sleep; return early if the work of this context is abandoned."""
    event = _abandoned_event.get()
    if event is None:
        time.sleep(seconds)
    else:
        event.wait(seconds)


def retrying_refusals() -> AbstractContextManager[None]:
    """In this context, retry `StoreRefused` too; used in a flow run whose target has passed `check_target`.

    If a target refuses a run that it served before, credentials may have expired, a policy may have changed, or a file
    system may have been remounted. Such a refusal is often temporary, and the trial did not cause it.
    """
    return setting_context_variable(_retries_refusals, True)  # noqa: FBT003 - the value of the variable


def is_retryable(error: object) -> bool:
    """Return whether `error` may be temporary and the work of this context is not abandoned."""
    if is_work_abandoned():
        return False
    refused = isinstance(error, StoreRefused) and _retries_refusals.get()
    return refused or isinstance(error, StoreUnavailable | CommitUnknown)


def should_retry(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """Retry condition of a Prefect task: retry temporary errors of the target, and fail at once on all other errors.

    It must be a plain function, because Prefect does not retry with any other callable.
    """
    return is_retryable(state.result(raise_on_failure=False))


def should_retry_with_refusals(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """Like `should_retry`, but retry `StoreRefused` too; for the tasks that store the training of a user's own flow.

    Such a task does not know whether the target has served its flow run before (see `retrying_refusals`). If the task
    failed at once when credentials expired, the flow would lose the steps since its last checkpoint.
    """
    error = state.result(raise_on_failure=False)
    return is_retryable(error) or (isinstance(error, StoreRefused) and not is_work_abandoned())


def should_retry_if_unavailable(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """Retry condition that retries only `StoreUnavailable`; for a flow run's first task, which tests the target."""
    return isinstance(state.result(raise_on_failure=False), StoreUnavailable) and not is_work_abandoned()


def should_retry_unless_refused(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """Like `should_retry`, but never retry `StoreRefused`; for work that a later attempt can do instead."""
    error = state.result(raise_on_failure=False)
    return is_retryable(error) and not isinstance(error, StoreRefused)


def with_retries(
    act: Callable[[], _Out],
    is_retried: Callable[[Exception], bool] = is_retryable,
    pauses_seconds: Sequence[float] | None = None,
    work: str = "",
) -> _Out:
    """Return `act()`; retry it as a task would, for work too small for a task run. Log lines begin with `work`."""
    default_pauses = _PAUSES_SECONDS if _retries_refusals.get() else _PAUSES_SECONDS[:_MAX_FIRST_RETRIES]
    for pause_seconds in default_pauses if pauses_seconds is None else pauses_seconds:
        try:
            return act()
        except Exception as error:
            if is_retried(error) and not is_work_abandoned():
                seconds = pause_seconds * random.uniform(1, 1 + _JITTER)  # noqa: S311  it spreads retries, it keeps no secret
                get_run_log().warning("%sretrying in %.1f s: %s", work, seconds, str(error) or type(error).__name__)
                _pause(seconds)
                continue
            raise
    return act()


def with_store(target: StorageTarget, act: Callable[[ObjectStore], _Out], timeout: timedelta = READ_TIMEOUT) -> _Out:
    """Return `act(store)`; retry it as a task would. Each try opens the target again, and can take `timeout`."""

    def act_on_store() -> _Out:
        with target.open(timeout=timeout) as store:
            return act(store)

    return with_retries(act_on_store)


def get_run_log() -> Log:
    """Return the logger of the current Prefect run; the package's logger if there is no run."""
    try:
        return get_run_logger()
    except MissingContextError:
        return get_logger("prefect_tune")


# Options of every task that uses a target. Results are never cached, since only the target is authoritative.
TASK_RETRY_OPTIONS: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "refresh_cache": True,  # else each task run would ask Prefect's result storage, which can be remote
    "retries": len(_PAUSES_SECONDS),
    "retry_delay_seconds": list(_PAUSES_SECONDS),
    "retry_jitter_factor": _JITTER,
    "retry_condition_fn": should_retry,
}

# Options of the tasks that store the training of a user's own flow.
REFUSAL_RETRY_OPTIONS: dict[str, Any] = {**TASK_RETRY_OPTIONS, "retry_condition_fn": should_retry_with_refusals}

# Options of a flow run's first task.
FIRST_TASK_RETRY_OPTIONS: dict[str, Any] = {
    **TASK_RETRY_OPTIONS,
    "retries": _MAX_FIRST_RETRIES,
    "retry_delay_seconds": list(_PAUSES_SECONDS[:_MAX_FIRST_RETRIES]),
    "retry_condition_fn": should_retry_if_unavailable,
}
