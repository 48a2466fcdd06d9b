"""Which failures of a task are worth another try, and how long to wait for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from prefect.cache_policies import NO_CACHE
from prefect.exceptions import MissingContextError
from prefect.logging import get_logger, get_run_logger
from prefect.tasks import exponential_backoff
from prefect.utilities.annotations import quote

from prefect_tune.core.errors import CommitUnknown, StoreUnavailable

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun

    from prefect_tune.tasks.trial_output import Log

__all__ = ["RETRYING", "is_transient", "retrying", "unseen"]

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
_RETRIES = 5
_JITTER = 0.5


def is_transient(_task: Task[..., object], _task_run: TaskRun, state: State[object]) -> bool:
    """Say whether the target failed in a way that may pass; everything else fails at once.

    A plain function on purpose: Prefect takes any other callable to mean "do not retry".
    """
    error = state.result(raise_on_failure=False)
    return isinstance(error, StoreUnavailable | CommitUnknown)


def retrying(act: Callable[[], _Result]) -> _Result:
    """Return `act()`, tried again as a task of its own would be: for what is too small to be one."""
    for seconds in exponential_backoff(backoff_factor=1)(_RETRIES):
        try:
            return act()
        except (StoreUnavailable, CommitUnknown) as error:
            pause_seconds = seconds * random.uniform(1, 1 + _JITTER)  # noqa: S311  it spreads retries, it keeps no secret
            _log().warning("tried again in %.1f s: %s", pause_seconds, error)
            time.sleep(pause_seconds)
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
    "retries": _RETRIES,
    "retry_delay_seconds": exponential_backoff(backoff_factor=1),
    "retry_jitter_factor": _JITTER,
    "retry_condition_fn": is_transient,
}
