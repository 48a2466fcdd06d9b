"""Set task runs whose process died to Crashed: Prefect leaves them Running, since only their process ends them.

Their bars in the UI last until then, since Prefect's API sets the time of a state itself; the message says when the
process was last seen.

To ask upstream: that the server ends the task runs of a flow run whose process died or was started again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
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
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventNameFilter, EventOccurredFilter, EventOrder
from prefect.exceptions import PrefectException
from prefect.states import Crashed

from prefect_tune.prefect_api.flow_runs.run_states import in_order, is_alive

_TIMEOUT_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 30.0
_LIVE = [StateType.PENDING, StateType.SCHEDULED, StateType.RUNNING]
_BY_THE_PROCESS = ["prefect.flow-run.heartbeat", "prefect.task-run.", "prefect.asset.", "prefect-tune."]
"""Names of events that the process of a flow run sends begin so; others come from the server and the worker."""


def set_crashed(
    flow_run: UUID, is_dead: Callable[[TaskRun], bool], *, successor: str, started_again: bool, has_ended: bool
) -> None:
    """Set the task runs of `flow_run` that `is_dead`, and those that they called, to Crashed, once the run is dead.

    While it may be alive, this waits: the server may not know yet that a process was killed. Ended task runs stay as
    they are. If the server does not answer or refuses, nothing is set: states only inform.

    Args:
        flow_run: the flow run.
        is_dead: whether a task run is to be set, if it has not ended.
        successor: what took over, for the message of the new states.
        started_again: whether the flow run itself runs again by now.
        has_ended: whether the process of the flow run is known to have ended; else the server is asked.
    """
    with (
        suppress(PrefectException, httpx.HTTPError, OSError, RuntimeError, ValueError),
        get_client(sync_client=True, httpx_settings={"timeout": _TIMEOUT_SECONDS}) as client,
    ):
        while not has_ended and is_alive(client.read_flow_run(flow_run), client):
            if not any(map(is_dead, _live_task_runs(client, flow_run))):
                return
            time.sleep(_LOOK_AGAIN_SECONDS)
        live = _live_task_runs(client, flow_run)
        waiting = deque(each for each in live if is_dead(each))
        seen = _last_seen(client, flow_run, started_again=started_again) if waiting else None
        while waiting:
            dead = waiting.popleft()
            crashed: State[Any] = Crashed(message=f"its process was lost{_since(dead, seen)}; {successor} took over")
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


def _last_seen(client: SyncPrefectClient, flow_run: UUID, *, started_again: bool) -> datetime | None:
    """Return the time of the last event of the lost process that runs the flow; None if there is none, or no answer."""
    signs = EventFilter(
        event=EventNameFilter(prefix=_BY_THE_PROCESS),
        any_resource=EventAnyResourceFilter(id=[f"prefect.flow-run.{flow_run}"]),
        order=EventOrder.DESC,
    )
    with suppress(PrefectException, httpx.HTTPError):
        starts = [each for each in in_order(client.read_flow_run_states(flow_run)) if each.is_running()]
        if started_again and starts:  # later events come from the new process
            signs.occurred = EventOccurredFilter(until=starts[-1].timestamp)
        return next((each.occurred for each in client.read_events(signs, limit=1).events), None)
    return None


def _since(run: TaskRun, seen: datetime | None) -> str:
    """Return when the process was last seen; empty for an event of before the task run: it tells nothing of its end."""
    if seen is None or run.start_time is None or seen < run.start_time:
        return ""
    return f" (last seen at {seen:%Y-%m-%d %H:%M:%S} UTC)"


def _callers(run: TaskRun) -> set[UUID]:
    """Return the task runs that called `run`. The key is described at `TaskRun.task_inputs`."""
    return {each.id for each in run.task_inputs.get("__parents__", ()) if isinstance(each, TaskRunResult)}
