"""A key of a flow run that identifies its call, however often the run or its callers are started again."""

from __future__ import annotations

from collections import deque

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, TaskRun, TaskRunResult
from prefect.context import FlowRunContext


def call_path() -> str:
    """Return a key of this run that stays the same if it, or a run that called it, is started again by any means.

    A run that is started again keeps its id; its subflow runs may be new runs. The key therefore consists of the
    root run's id and, for each level, the flow and the number of its call. A run that calls the search every night
    has another key for each call. Journals hold these keys: another key would add samples again.

    To ask upstream: an id of a subflow call that a retry of its caller keeps.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("samples_per_run: expected to run in a flow run, found none")
    run, calls = context.flow_run, deque[str]()
    with get_client(sync_client=True) as client:
        while run.parent_task_run_id is not None:
            call = client.read_task_run(run.parent_task_run_id)
            calls.appendleft(_call(run, call))
            if call.flow_run_id is None:
                break
            run = client.read_flow_run(call.flow_run_id)
    return "/".join([str(run.id), *calls])


def _call(run: FlowRun, call: TaskRun) -> str:
    """Return the flow and the call of a subflow run: the caller's task run if a task called it, else the call's number.

    Calls from tasks have no stable number: it depends on the order in which tasks run. The key `__parents__` is
    described at `TaskRun.task_inputs`.
    """
    callers = call.task_inputs.get("__parents__", ())
    task = next((str(each.id) for each in callers if isinstance(each, TaskRunResult)), None)
    return f"{run.flow_id}-{task or call.dynamic_key}"
