"""*Cancel* of a flow run, noticed by the run itself: its worker may have been killed, and a script has none.

A worker that lives sends SIGTERM within seconds. Either way the trials save, and the run ends as Cancelled.

To ask upstream: that a run observes its own cancellation, as it observes its suspension.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from datetime import timedelta
from typing import NoReturn
from uuid import UUID

import httpx
from prefect._internal import control_listener
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, TerminationSignal

_ENGINE_SETS_STATE = "PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS"
_CANCELLED = {"type": {"any_": ["CANCELLING", "CANCELLED"]}}


@contextmanager
def watching_cancellation(period: timedelta) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the flow run of this context, or one that called it, was cancelled.

    It makes no request: a thread asks the server once per `period`, and again while the server does not answer.
    """
    closed, is_cancelled = threading.Event(), threading.Event()

    def watch() -> None:
        runs: Sequence[UUID] = ()
        while not closed.wait(period.total_seconds()):
            try:
                with get_client(sync_client=True) as client:
                    runs = runs or _runs_of_process(client)
                    only = FlowRunFilter.model_validate({"id": {"any_": runs}, "state": _CANCELLED})
                    if client.read_flow_runs(flow_run_filter=only, limit=1):
                        is_cancelled.set()
                        return
            except (httpx.HTTPError, ObjectNotFound):
                continue

    if FlowRunContext.get() is not None:
        threading.Thread(target=copy_context().run, args=(watch,), name="cancellation", daemon=True).start()
    try:
        yield is_cancelled.is_set
    finally:
        closed.set()


def _runs_of_process(client: SyncPrefectClient) -> Sequence[UUID]:
    """Return the flow run of this context and those that called it, up to the one that the process was started for."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    runs: list[UUID] = []
    while run is not None:
        runs.append(run.id)
        if run.parent_task_run_id is None or run.deployment_id is not None:
            break
        caller = client.read_task_run(run.parent_task_run_id).flow_run_id
        run = client.read_flow_run(caller) if caller is not None else None
    return runs


def raise_cancellation() -> NoReturn:
    """Raise what a worker's *Cancel* raises; the flow runs of this process then end as Cancelled.

    Raises:
        TerminationSignal: always.
    """
    if control_listener.get_intent() is None:
        control_listener._set_intent("cancel")  # noqa: SLF001 - as the listener does when the worker asks
        os.environ[_ENGINE_SETS_STATE] = "true"  # the worker that would set it did not ask: it may be gone
    raise TerminationSignal(signal.SIGTERM)


def end_cancellation() -> bool:
    """Return whether the present `TerminationSignal` is a *Cancel*, which is then over for the rest of the process."""
    is_cancelled = control_listener.get_intent() == "cancel"
    if is_cancelled:
        control_listener.clear_intent()
    return is_cancelled
