"""Which failures of a task are worth another try, and how long to wait for it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

from prefect.cache_policies import NO_CACHE
from prefect.exceptions import MissingContextError
from prefect.logging import get_logger, get_run_logger
from prefect.utilities.annotations import quote

from prefect_tune.core.errors import CommitUnknown, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun

    from prefect_tune.tasks.trial_output import Log

__all__ = [
    "CHECKING",
    "RETRYING",
    "is_away",
    "is_transient",
    "is_unavailable",
    "may_pass",
    "retrying",
    "retrying_refusals",
    "retrying_until",
    "unseen",
]

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)
"""Between the tries: a minute and a half together, for what replaces expired credentials needs about one."""
_UNSERVED_TRIES = 5
"""How often what fails is tried again where the target has not served the run: half a minute, as somebody waits."""
_JITTER = 0.5
_retries_refusals: ContextVar[bool] = ContextVar("prefect_tune_retries_refusals", default=False)


_abandoned: ContextVar[threading.Event | None] = ContextVar("prefect_tune_abandoned", default=None)


@contextmanager
def retrying_until(abandoned: threading.Event) -> Iterator[None]:
    """Retry nothing within this context once `abandoned` is set: the process is to end, and waits for its threads."""
    token = _abandoned.set(abandoned)
    try:
        yield
    finally:
        _abandoned.reset(token)


def _is_abandoned() -> bool:
    event = _abandoned.get()
    return event is not None and event.is_set()


def _pause(seconds: float) -> None:
    """Wait, and no longer than until the work of this context is abandoned."""
    event = _abandoned.get()
    if event is None:
        time.sleep(seconds)
    else:
        event.wait(seconds)


@contextmanager
def retrying_refusals() -> Iterator[None]:
    """Retry what the target refuses too, within this context: for a run whose target has passed `check_target`.

    A target that has served a run refuses it later for what has changed meanwhile: credentials that expired, a policy,
    a file system that was mounted again. Such a refusal passes, and the trial is not to blame for it.
    """
    token = _retries_refusals.set(True)
    try:
        yield
    finally:
        _retries_refusals.reset(token)


def may_pass(error: object) -> bool:
    """Return whether `error` says that the target failed in a way that may pass, and somebody still waits for that."""
    if _is_abandoned():
        return False
    refused = isinstance(error, StoreRefused) and _retries_refusals.get()
    return refused or isinstance(error, StoreUnavailable | CommitUnknown)


def is_transient(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """Say whether the target failed in a way that may pass; everything else fails at once.

    A plain function on purpose: Prefect takes any other callable to mean "do not retry".
    """
    return may_pass(state.result(raise_on_failure=False))


def is_unavailable(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """As `is_transient`, for the task that a run begins with: a target that refuses it has never served the run."""
    return isinstance(state.result(raise_on_failure=False), StoreUnavailable) and not _is_abandoned()


def is_away(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """As `is_transient`, for what is done later just as well: who may not do it now is not to be waited for."""
    error = state.result(raise_on_failure=False)
    return may_pass(error) and not isinstance(error, StoreRefused)


def retrying(act: Callable[[], _Result]) -> _Result:
    """Return `act()`, tried again as a task of its own would be: for what is too small to be one."""
    for seconds in _PAUSES_SECONDS if _retries_refusals.get() else _PAUSES_SECONDS[:_UNSERVED_TRIES]:
        try:
            return act()
        except (StoreUnavailable, StoreRefused, CommitUnknown) as error:
            if not may_pass(error):
                raise
            pause_seconds = seconds * random.uniform(1, 1 + _JITTER)  # noqa: S311  it spreads retries, it keeps no secret
            _log().warning("tried again in %.1f s: %s", pause_seconds, error)
            _pause(pause_seconds)
    return act()


def _log() -> Log:
    """Where it is looked for: in the log of the run whose doing it is."""
    try:
        return get_run_logger()
    except MissingContextError:
        return get_logger("prefect_tune")


def unseen(argument: _Argument) -> _Argument:
    """Pass `argument` to a task without Prefect walking through all of it in search of futures."""
    return cast("_Argument", quote(argument))


# What every task that talks to a target is made with. What is read is never cached: the store is the truth.
RETRYING: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "refresh_cache": True,  # or Prefect asks its result storage all the same, a request for each run on a remote one
    "retries": len(_PAUSES_SECONDS),
    "retry_delay_seconds": list(_PAUSES_SECONDS),
    "retry_jitter_factor": _JITTER,
    "retry_condition_fn": is_transient,
}

# For the task that a run begins with.
CHECKING: dict[str, Any] = {
    **RETRYING,
    "retries": _UNSERVED_TRIES,
    "retry_delay_seconds": list(_PAUSES_SECONDS[:_UNSERVED_TRIES]),
    "retry_condition_fn": is_unavailable,
}
