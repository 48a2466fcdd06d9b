"""Slots of Prefect's concurrency limits for attempts: wait for them without losing the attempt, until it is to stop.

Prefect's own wait ends with an error if a limit is 0 at the moment (HTTP 422), and nothing else ends it.

To ask upstream: a wait that a caller can end; that a limit of 0 is answered as one without free slots, by HTTP 423.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any

import httpx
from prefect import task_engine
from prefect.concurrency._sync import concurrency
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.context import FlowRunContext

from prefect_tune.prefect_api.api_client import is_temporary
from prefect_tune.prefect_api.flow_with_server import FlowWithServer
from prefect_tune.storage_retries import run_log

_TRY, _PAUSE = timedelta(seconds=5), timedelta(seconds=2)
_LEASE = timedelta(seconds=60)  # the slot of a killed process is free after this time
_NONE_FREE, _BELOW_REQUEST = 423, 422
_stop: ContextVar[threading.Event | None] = ContextVar("prefect_tune_stop_of_waits", default=None)


def holding_concurrency_limits(limits: Sequence[str], stop: threading.Event) -> AbstractContextManager[None]:
    """Return a block that waits for a slot in all `limits` and holds it; it begins without one once `stop` is set.

    While the API is unreachable, or a limit is 0, it waits. If a lease cannot be renewed later, the block continues; if
    it cannot be released at the end, the slot is free a minute later.
    """
    lease_seconds = _LEASE.total_seconds()
    options: dict[str, Any] = {"lease_duration": lease_seconds, "raise_on_lease_renewal_failure": False}
    return _holding(list(limits), stop, partial(concurrency, list(limits), **options))


@contextmanager
def ending_waits(stop: threading.Event) -> Iterator[None]:
    """Have tasks that are called in this block wait for slots of their tags as above: `stop` ends the wait."""
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


@contextmanager
def _holding(
    names: Sequence[str], stop: threading.Event, slots_of: Callable[..., AbstractContextManager[None]]
) -> Iterator[None]:
    is_logged = False
    with ExitStack() as held:
        while names and not stop.is_set():
            # Prefect asks for one caller after another: each asks once, and not longer while the API fails.
            slots = slots_of(max_retries=0, timeout_seconds=_TRY.total_seconds())
            try:
                slots.__enter__()
                held.callback(_release, slots)
                break
            except TimeoutError:
                continue
            except ConcurrencySlotAcquisitionError as error:
                cause = error.__cause__
                status = cause.response.status_code if isinstance(cause, httpx.HTTPStatusError) else None
                if status not in (_NONE_FREE, _BELOW_REQUEST) and not is_temporary(cause):
                    raise
                if status == _BELOW_REQUEST and not is_logged:
                    run_log().warning("a concurrency limit among %s is 0: the trial waits", ", ".join(names))
                    is_logged = True
                stop.wait(_PAUSE.total_seconds())
        yield


def _release(slots: AbstractContextManager[None]) -> None:
    with suppress(httpx.HTTPError):  # an error here must not fail an attempt that has ended
        slots.__exit__(None, None, None)


def _concurrency(names: list[str], **options: Any) -> AbstractContextManager[None]:
    """Wait for the slots of a task's tags: in a flow of ours as above, in others as Prefect does."""
    context, stop = FlowRunContext.get(), _stop.get()
    if stop is None and (context is None or not isinstance(context.flow, FlowWithServer)):
        return concurrency(names, **options)
    return _holding(names, stop or threading.Event(), partial(concurrency, names, **options))


# Prefect's engine finds its wait for the slots of a task's tags under this name; it has no public hook.
if "_concurrency" in vars(task_engine):
    vars(task_engine)["_concurrency"] = _concurrency
