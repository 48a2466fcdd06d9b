"""A flow run apart from its caller: its own log and tags, and a key of the call that each repetition of it has, too.

Names of experiments, seeds and added samples are derived from the key where a call names none.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, TaskRun, TaskRunResult
from prefect.context import FlowRunContext, TagsContext, TaskRunContext
from prefect.utilities.hashing import hash_objects

from prefect_tune.core.errors import InvalidInput
from prefect_tune.runtime.load_named import stable_digest

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
_arguments: dict[UUID, str] = {}
"""By task run, the digest of its arguments when it first called: a retry of the task may find them changed."""
_guard = threading.Lock()


class CallPath(NamedTuple):
    """Which call of a flow run this run is."""

    key: str
    """The same if this run, or a run that called it, is started again by any means."""
    place: str
    """What the key begins with: the caller, and what it calls; empty for a run without a caller."""
    caller: tuple[str, UUID | None, int]
    """The execution of the calling flow, the id of the calling task run, and its try."""


def call_path(what: object = "") -> CallPath:
    """Return which call of which run this run is, by its root run's id and, for each level, the flow and its call.

    A run that is started again keeps its id; its subflow runs and its task runs may be new runs. A run that calls the
    search every night has another key for each call. Journals and names of experiments hold these keys: with another
    key, a run would add samples again, or train from step 0.

    A call is told apart from others of the same caller by `what` it does and by the parameters of the subflows that
    lead to it, and only then by its order. A task is told apart by its name and its arguments, and only then by its
    order: tasks run side by side. Subflows are by their order. Without a flow run, the root is the task run.

    To ask upstream: an id of a call that a retry of its caller keeps.
    """
    run, calls = _this_run(), deque[tuple[FlowRun, TaskRun]]()
    if run.parent_task_run_id is None:
        return _path_below(run, (), what, None)
    with get_client(sync_client=True) as client:
        while run.parent_task_run_id is not None:
            call = client.read_task_run(run.parent_task_run_id)
            calls.appendleft((run, call))
            if call.flow_run_id is None:
                break
            run = client.read_flow_run(call.flow_run_id)
        return _path_below(run, calls, what, client)


def _this_run() -> FlowRun:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("a default that depends on the flow run: expected to run in one, found none")
    return context.flow_run


def _path_below(
    root: FlowRun, calls: Collection[tuple[FlowRun, TaskRun]], what: object, client: SyncPrefectClient | None
) -> CallPath:
    """Return the path of the last of `calls`, each a flow run with the task run that represents its call."""
    path, task = CallPath(str(root.id), "", (f"{root.id}@{root.run_count}", None, 0)), _calling_context()
    parameters: list[Mapping[str, Any]] = []
    if task is not None and task.task_run.flow_run_id is None:
        does = "" if calls else stable_digest(what)
        path = _call_in_task(root, task.task_run, _arguments_of(task), does, str(task.task_run.id), "")
    for run, call in calls:
        above, execution = path.key, path.caller[0]
        # The key `__parents__` is described at `TaskRun.task_inputs`.
        callers = call.task_inputs.get("__parents__", ())
        caller = next((each.id for each in callers if isinstance(each, TaskRunResult)), None)
        # A subflow's call is the same whatever it calls; the parameters that lead to a call belong to what it does.
        does = stable_digest([what, parameters]) if run.id == _this_run().id else ""
        if caller is None:
            place = f"{above}/{run.flow_id}"
            number = _number(run.id, f"{path.caller}/{place}-{does}") if does else call.dynamic_key
            path = CallPath(f"{place}-{does}:{number}", place, path.caller)
        elif task is not None and task.task_run.id == caller:
            path = _call_in_task(run, task.task_run, _arguments_of(task), does, above, execution)
        elif client is not None:  # only the server knows it: by the arguments of the flow run that it called
            digest = _digest_of(run.parameters)
            path = _call_in_task(run, client.read_task_run(caller), digest, does, above, execution)
        parameters.append(run.parameters)
        path = path._replace(caller=path.caller if does else (f"{execution}/{run.id}@{run.run_count}", None, 0))
    return path


def _calling_context() -> TaskRunContext | None:
    return TaskRunContext.get() or _calling_task.get()


def _arguments_of(task: TaskRunContext) -> str:
    return _arguments.setdefault(task.task_run.id, _digest_of(task.parameters))


def _digest_of(arguments: dict[str, Any]) -> str:
    return hash_objects(arguments) or stable_digest(arguments)


def _call_in_task(run: FlowRun, task: TaskRun, arguments: str, does: str, above: str, execution: str) -> CallPath:
    """Return which call a run is, of all that do the same by alike tasks in this `execution` of the tasks' flow run."""
    name = task.task_key.rpartition("-")[0]  # without the digest of its code
    place = f"{above}/{run.flow_id}-{stable_digest([name, arguments])}"
    of_tasks = _number(task.id, f"{execution}/{place}-{does}")
    number = _number(run.id, f"{execution}/{task.id}@{task.run_count}/{place}-{does}")
    return CallPath(f"{place}-{does}:{of_tasks}:{number}", place, (execution, task.id, task.run_count))


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
    task = _calling_context()
    advice = "; or call from tasks with different arguments, or one after the other"
    if task is not None and hash_objects(task.parameters) is None:
        advice = f": the arguments of task {task.task_run.name!r} cannot be told apart, since Prefect cannot hash them"
    with get_client(sync_client=True) as client:
        for _, run in others:
            state = client.read_flow_run(run).state
            if state is not None and not state.is_final():
                raise InvalidInput(
                    f"experiment: another call without a name runs now (flow run {run}), and a retry could not tell "
                    f"the two apart, since only their order differs. Pass experiment='...' in both{advice}"
                )


def _differs_by_order(key: str, other: str) -> bool:
    """Whether two keys differ first in the number of a call of the same flow by the same caller."""
    levels = zip(key.split("/"), other.split("/"), strict=False)
    one, two = next(((one, two) for one, two in levels if one != two), ("", ":"))
    return one.partition(":")[0] == two.partition(":")[0]
