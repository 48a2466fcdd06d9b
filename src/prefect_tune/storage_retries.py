"""The retry policy of the tasks: which errors of a target are retried, how often and after which pauses."""

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
"""How long a read of a target, or a small write, may take with all of its requests; transfers take longer."""
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)
"""Pauses between tries: 91 s in total, since replacing expired credentials takes about a minute."""
_UNSERVED_TRIES = 5  # of a target that has not served the run yet: 31 s in total, since a user may wait for the answer
_JITTER = 0.5
_retries_refusals: ContextVar[bool] = ContextVar("prefect_tune_retries_refusals", default=False)
_abandoned: ContextVar[threading.Event | None] = ContextVar("prefect_tune_abandoned", default=None)


@contextmanager
def set_to(variable: ContextVar[_Argument], value: _Argument) -> Iterator[None]:
    """Set a context variable for the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def retrying_until(abandoned: threading.Event) -> AbstractContextManager[None]:
    """Retry nothing in this context once `abandoned` is set: the process is ending, and waits for its threads."""
    return set_to(_abandoned, abandoned)


def is_abandoned() -> bool:
    """Return whether the process ends and waits no longer for the work of this context."""
    event = _abandoned.get()
    return event is not None and event.is_set()


def _pause(seconds: float) -> None:
    """Sleep; return at once when the work of this context is abandoned."""
    event = _abandoned.get()
    if event is None:
        time.sleep(seconds)
    else:
        event.wait(seconds)


def retrying_refusals() -> AbstractContextManager[None]:
    """Retry `StoreRefused` too in this context: for a run whose target has passed `check_target`.

    A target that has served a run refuses it later because something changed: credentials expired, a policy changed,
    a file system was remounted. Such a refusal is often temporary, and the trial did not cause it.
    """
    return set_to(_retries_refusals, True)  # noqa: FBT003 - the value of the variable


def may_pass(error: object) -> bool:
    """Return whether to retry after `error`: it may be temporary, and the work of this context is not abandoned."""
    if is_abandoned():
        return False
    refused = isinstance(error, StoreRefused) and _retries_refusals.get()
    return refused or isinstance(error, StoreUnavailable | CommitUnknown)


def is_transient(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """Retry condition of a Prefect task: retry temporary errors of the target, fail at once on all others.

    It must be a plain function: for any other callable Prefect does not retry.
    """
    return may_pass(state.result(raise_on_failure=False))


def is_targets_failure(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """As `is_transient`, and retry `StoreRefused` too: for a task that stores what a flow of one's own has trained.

    Such a task does not know whether the target has served its flow run before, as `retrying_refusals` requires; a
    flow that fails at once when credentials expire would lose the steps since its last checkpoint.
    """
    error = state.result(raise_on_failure=False)
    return may_pass(error) or (isinstance(error, StoreRefused) and not is_abandoned())


def is_unavailable(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """As `is_transient`, for the first task of a run, without `StoreRefused`: that target has never served the run."""
    return isinstance(state.result(raise_on_failure=False), StoreUnavailable) and not is_abandoned()


def is_away(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """As `is_transient`, without `StoreRefused`, for work that a later attempt can do: it does not wait for access."""
    error = state.result(raise_on_failure=False)
    return may_pass(error) and not isinstance(error, StoreRefused)


def with_retries(
    act: Callable[[], _Result],
    is_retried: Callable[[Exception], bool] = may_pass,
    pauses_seconds: Sequence[float] | None = None,
    work: str = "",
) -> _Result:
    """Return `act()`, retried as a task would be; for work too small for a task run. Log lines begin with `work`."""
    served = _PAUSES_SECONDS if _retries_refusals.get() else _PAUSES_SECONDS[:_UNSERVED_TRIES]
    for seconds in served if pauses_seconds is None else pauses_seconds:
        try:
            return act()
        except Exception as error:
            if is_retried(error) and not is_abandoned():
                pause_seconds = seconds * random.uniform(1, 1 + _JITTER)  # noqa: S311  it spreads retries, it keeps no secret
                run_log().warning("%sretrying in %.1f s: %s", work, pause_seconds, str(error) or type(error).__name__)
                _pause(pause_seconds)
                continue
            raise
    return act()


def on_target(
    target: StorageTarget, act: Callable[[ObjectStore], _Result], timeout: timedelta = READ_TIMEOUT
) -> _Result:
    """Return `act(store)`; each try opens the target anew, and may last `timeout`. Retried as `with_retries` does."""

    def acted() -> _Result:
        with target.open(timeout=timeout) as store:
            return act(store)

    return with_retries(acted)


def run_log() -> Log:
    """Return the logger of the current run, or the package's if there is none."""
    try:
        return get_run_logger()
    except MissingContextError:
        return get_logger("prefect_tune")


# Options of every task that uses a target. Results are never cached: only the store is authoritative.
RETRYING: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "refresh_cache": True,  # else Prefect still asks its result storage, one request per run if that is remote
    "retries": len(_PAUSES_SECONDS),
    "retry_delay_seconds": list(_PAUSES_SECONDS),
    "retry_jitter_factor": _JITTER,
    "retry_condition_fn": is_transient,
}

# Options of the tasks of a flow of one's own that follow its training.
RETRYING_REFUSALS: dict[str, Any] = {**RETRYING, "retry_condition_fn": is_targets_failure}

# Options of the first task of a run.
CHECKING: dict[str, Any] = {
    **RETRYING,
    "retries": _UNSERVED_TRIES,
    "retry_delay_seconds": list(_PAUSES_SECONDS[:_UNSERVED_TRIES]),
    "retry_condition_fn": is_unavailable,
}
