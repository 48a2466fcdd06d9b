"""A flow run apart from its caller: its own log and tags, and a key of the call that each repetition of it has, too.

Names of experiments, seeds and added samples are derived from the key where a call names none.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, TaskRun, TaskRunResult
from prefect.context import FlowRunContext, TagsContext, TaskRunContext
from prefect.utilities.hashing import hash_objects

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.values import digest_of

# The context of a run of ours, apart from that of its caller.
#
# To ask upstream: that a flow run leaves the context of the task that called it, and that a task can refuse tags.

_Value = TypeVar("_Value")
_task_variable: ContextVar[TaskRunContext | None] = cast("Any", TaskRunContext.__var__)
_calling_task: ContextVar[TaskRunContext | None] = ContextVar("prefect_tune_calling_task", default=None)
_callers_tags: ContextVar[frozenset[str]] = ContextVar("prefect_tune_callers_tags", default=frozenset())


@contextmanager
def own_context() -> Iterator[None]:
    """Run this block as the run of this context only: without the task that called it, and without its caller's tags.

    In a flow that a task has called, Prefect logs to that task, and takes it for the one that runs. Each task inherits
    the tags of its caller, and the limit of a tag holds for each: an upload would wait for the slot of its own trial.
    """
    flow, task = FlowRunContext.get(), TaskRunContext.get()
    tags, held = TagsContext.get().current_tags, task.task_run.tags if task is not None else ()
    with ExitStack() as resets:
        _set(resets, _callers_tags, frozenset(tags).difference(held))
        if flow and flow.flow_run and task and task.task_run.flow_run_id != flow.flow_run.id:
            _set(resets, _calling_task, task)
            _set(resets, _task_variable, None)
        resets.enter_context(TagsContext(current_tags=set()))
        yield


def _set(resets: ExitStack, variable: ContextVar[_Value], value: _Value) -> None:
    resets.callback(variable.reset, variable.set(value))


def callers_tags() -> frozenset[str]:
    """Return the tags that a call gives to its trials, without those for which the calling task holds the slots."""
    return _callers_tags.get()


# The key of a call.

_numbers: defaultdict[str, list[UUID]] = defaultdict(list)
"""By caller, the runs that it has called in this process, in order."""
_keys_in_use: dict[str, UUID] = {}
"""The flow runs of this process that have asked for an order, by key."""
_guard = threading.Lock()


def call_path() -> str:
    """Return a key of this run that stays the same if it, or a run that called it, is started again by any means.

    A run that is started again keeps its id; its subflow runs and its task runs may be new runs. The key therefore
    consists of the root run's id and, for each level, the flow and which call of it. A run that calls the search every
    night has another key for each call. Journals and names of experiments hold these keys: with another key, a run
    would add samples again, or train from step 0.

    A flow tells its calls apart by their order. A task is told apart from others by its name and its arguments, and
    only then by its order: tasks run side by side. Without a flow run, the root is the task run.

    To ask upstream: an id of a call that a retry of its caller keeps.
    """
    run, calls = _this_run(), deque[tuple[FlowRun, TaskRun]]()
    if run.parent_task_run_id is None:
        return _key_below(run, (), None)
    with get_client(sync_client=True) as client:
        while run.parent_task_run_id is not None:
            call = client.read_task_run(run.parent_task_run_id)
            calls.appendleft((run, call))
            if call.flow_run_id is None:
                break
            run = client.read_flow_run(call.flow_run_id)
        return _key_below(run, calls, client)


def _this_run() -> FlowRun:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("a default that depends on the flow run: expected to run in one, found none")
    return context.flow_run


def _key_below(root: FlowRun, calls: Iterable[tuple[FlowRun, TaskRun]], client: SyncPrefectClient | None) -> str:
    """Return the key of the last of `calls`, each a flow run with the task run that represents its call."""
    key, execution, task = str(root.id), f"{root.id}@{root.run_count}", _calling_context()
    if task is not None and task.task_run.flow_run_id is None:
        key = f"{task.task_run.id}/{_call_in_task(root, task.task_run, task.parameters, execution='')}"
    for run, call in calls:
        # The key `__parents__` is described at `TaskRun.task_inputs`.
        callers = call.task_inputs.get("__parents__", ())
        caller = next((each.id for each in callers if isinstance(each, TaskRunResult)), None)
        if caller is None:
            key = f"{key}/{run.flow_id}:{call.dynamic_key}"
        elif task is not None and task.task_run.id == caller:
            key = f"{key}/{_call_in_task(run, task.task_run, task.parameters, execution)}"
        elif client is not None:  # only the server knows it: by the arguments of the flow run that it called
            key = f"{key}/{_call_in_task(run, client.read_task_run(caller), run.parameters, execution)}"
        execution = f"{execution}/{run.id}@{run.run_count}"
    return key


def _calling_context() -> TaskRunContext | None:
    return TaskRunContext.get() or _calling_task.get()


def _call_in_task(run: FlowRun, task: TaskRun, arguments: dict[str, Any], execution: str) -> str:
    """Return which call of a flow a run is, of all calls of it by tasks in this `execution` of the tasks' flow run."""
    name = task.task_key.rpartition("-")[0]  # without the digest of its code
    alike = f"{run.flow_id}-{digest_of(f'{name} {hash_objects(arguments)}'.encode())[:16]}"
    of_tasks = _number(task.id, f"{execution}/{alike}")
    return f"{alike}:{of_tasks}:{_number(run.id, f'{task.id}@{task.run_count}/{run.flow_id}')}"


def _number(called: UUID, by: str) -> int:
    with _guard:
        calls = _numbers[by]
        if called not in calls:
            calls.append(called)
        return calls.index(called)


def require_order(key: str) -> None:
    """Refuse this run's key if another call runs now, and only their order tells the two apart: a retry may swap them.

    Raises:
        InvalidInput: as said; the other call continues.
    """
    with _guard:
        others = [(other, run) for other, run in _keys_in_use.items() if _differs_by_order(key, other)]
        _keys_in_use[key] = _this_run().id
    if not others:
        return
    with get_client(sync_client=True) as client:
        for _, run in others:
            state = client.read_flow_run(run).state
            if state is not None and not state.is_final():
                raise InvalidInput(
                    f"experiment: another call without a name runs now (flow run {run}), and a retry could not tell "
                    "the two apart, since only their order differs. Pass experiment='...' in both; or call from tasks "
                    "with different arguments, or one after the other"
                )


def _differs_by_order(key: str, other: str) -> bool:
    """Whether two keys differ first in the number of a call of the same flow by the same caller."""
    levels = zip(key.split("/"), other.split("/"), strict=False)
    one, two = next(((one, two) for one, two in levels if one != two), ("", ":"))
    return one.partition(":")[0] == two.partition(":")[0]
