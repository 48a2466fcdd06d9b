"""Detect *Suspend* of the flow run, so that it saves and ends before Prefect interrupts its next task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect._flow_run_suspension import FlowRunSuspensionRequest
from prefect.context import FlowRunContext

__all__ = ["is_suspended", "undisturbed"]


def is_suspended() -> bool:
    """Whether the flow run of this context was suspended. It makes no request: Prefect watches the run's state."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run_suspension_request.is_requested()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let tasks in this context run although the flow run is suspended.

    Otherwise Prefect raises `Pause` in the thread that submits the next task, which may be the one that saves.
    """
    context = FlowRunContext.get()
    if context is None:
        yield
        return
    with context.model_copy(update={"flow_run_suspension_request": FlowRunSuspensionRequest()}):
        yield
