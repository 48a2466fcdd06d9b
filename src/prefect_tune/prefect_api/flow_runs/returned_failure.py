"""End a flow run in Failed with an error of our own, without a traceback of this package in its log."""

from __future__ import annotations

from typing import TypeVar, cast

from prefect.context import FlowRunContext
from prefect.states import Failed

_R = TypeVar("_R")


def failed_by(error: Exception, returns: type[_R]) -> _R:
    """Return a value for a flow to return, in place of one of type `returns`: the flow run then fails by `error`.

    Prefect raises `error` where the flow was called, or returns the state where one was asked for. Its message is
    that of the state. If the flow raised the error, Prefect would log where.

    A flow with retries raises the error: Prefect 3.8 runs a flow again after an error only, and would leave a run that
    returns its failure scheduled.
    """
    del returns
    context = FlowRunContext.get()
    if context is not None and context.flow is not None and context.flow.retries:
        raise error
    return cast("_R", Failed(message=str(error), data=error))
