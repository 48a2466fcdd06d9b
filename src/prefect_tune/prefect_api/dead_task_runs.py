"""Set task runs whose process died to Crashed: Prefect leaves them Running, since only their process ends them.

To ask upstream: that the server ends the task runs of a flow run whose process died or was started again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType, TaskRun, TaskRunResult
from prefect.client.schemas.sorting import TaskRunSort
from prefect.exceptions import PrefectException
from prefect.states import Crashed

from prefect_tune.prefect_api.run_states import is_alive

__all__ = ["set_crashed"]

_TIMEOUT_SECONDS = 10.0
_LIVE = [StateType.PENDING, StateType.SCHEDULED, StateType.RUNNING]


def set_crashed(flow_run: UUID, is_dead: Callable[[TaskRun], bool], *, message: str, has_ended: bool) -> None:
    """Set the task runs of `flow_run` that `is_dead`, and those that they called, to Crashed, unless the run is alive.

    Ended task runs stay as they are. If the server does not answer or refuses, nothing is set: states only inform.

    Args:
        flow_run: the flow run.
        is_dead: whether a task run is to be set, if it has not ended.
        message: of the new states.
        has_ended: whether the process of the flow run is known to have ended; else the server is asked.
    """
    with (
        suppress(PrefectException, httpx.HTTPError, OSError, RuntimeError, ValueError),
        get_client(sync_client=True, httpx_settings={"timeout": _TIMEOUT_SECONDS}) as client,
    ):
        if not has_ended and is_alive(client.read_flow_run(flow_run), client):
            return
        live = _live_task_runs(client, flow_run)
        waiting = deque(each for each in live if is_dead(each))
        while waiting:
            dead = waiting.popleft()
            crashed: State[Any] = Crashed(message=message)
            client.set_task_run_state(dead.id, crashed, force=True)
            waiting.extend(each for each in live if dead.id in _callers(each))


def _live_task_runs(client: SyncPrefectClient, flow_run: UUID) -> list[TaskRun]:
    """Return all task runs that have not ended; the server returns no more than its limit at a time, 200 by default."""
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    live = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_LIVE)))
    runs: list[TaskRun] = []
    while page := client.read_task_runs(
        flow_run_filter=of_run, task_run_filter=live, sort=TaskRunSort.ID_DESC, offset=len(runs)
    ):
        runs += page
    return runs


def _callers(run: TaskRun) -> set[UUID]:
    """Return the task runs that called `run`. The key is described at `TaskRun.task_inputs`."""
    return {each.id for each in run.task_inputs.get("__parents__", ()) if isinstance(each, TaskRunResult)}
