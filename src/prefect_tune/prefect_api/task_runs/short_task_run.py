"""Run a task without the state Pending, which costs a Prefect server as much as each of its other two states.

For each state of a task run Prefect's client sends an event, and its server stores the state in a transaction of its
own. A task that is called, and waits for nothing, is Pending for less than a millisecond.

To ask upstream: that such a task run begins with Running; or that the server stores states in batches by default, as
`PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE` allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

from prefect import task_engine
from prefect.utilities.callables import get_call_parameters

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State

_P = ParamSpec("_P")
_R = TypeVar("_R")
# None in a release of Prefect without it. The public `Task.create_local_run` is asynchronous, and opens a client.
_create = getattr(task_engine, "_create_task_run_locally", None)


def run_here(task: Task[_P, _R], *args: _P.args, **options: _P.kwargs) -> _R:
    """Run a synchronous task as `task(...)` does, in this thread; its task run begins with the state Running.

    With tags it begins with Pending: it may wait for a slot of their concurrency limits. Raises what the task raises.
    """
    return cast("_R", _run(task, "result", args, options))


def run_to_state(task: Task[_P, Any], *args: _P.args, **options: _P.kwargs) -> State[Any]:
    """Run a task as `run_here` does, and return the final state of its run; an error of the task is in the state."""
    return cast("State[Any]", _run(task, "state", args, options))


def _run(
    task: Task[Any, Any],
    returned: Literal["result", "state"],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> object:
    parameters = get_call_parameters(task.fn, args, options)
    task_run = _create(task, parameters=parameters) if _create else None
    if task_run is None or task_run.tags:
        return task(*args, **options, return_state=returned == "state")
    return task_engine.run_task(task, task_run=task_run, parameters=parameters, return_type=returned)
