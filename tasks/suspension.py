"""*Suspend* in the Prefect UI as a request to save and end, in place of an exception at whatever task comes next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect._flow_run_suspension import FlowRunSuspensionRequest
from prefect.context import FlowRunContext

__all__ = ["is_suspended", "undisturbed"]


def is_suspended() -> bool:
    """Whether somebody has suspended the flow run of this context. Costs nothing: Prefect has it watched."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run_suspension_request.is_requested()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run tasks in this context although the flow run is suspended.

    Otherwise the next one raises `Pause` in whatever thread submits it, which may be the one that is to save.
    """
    context = FlowRunContext.get()
    if context is None:
        yield
        return
    with context.model_copy(update={"flow_run_suspension_request": FlowRunSuspensionRequest()}):
        yield
