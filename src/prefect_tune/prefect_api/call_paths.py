"""Separate a flow run's log and tags from its caller's, and give each call a key that stays the same in a retry.

The key determines the default name and seed of an experiment, and prevents a retry from adding samples again.
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
from prefect_tune.runtime.load_named import compute_stable_digest

# Run each of our flow runs in its own context, separate from the context of its caller.
#
# To ask upstream: a flow run should leave the context of the task that called it; a task should be able to reject tags.

_Value = TypeVar("_Value")
_task_variable: ContextVar[TaskRunContext | None] = cast("Any", TaskRunContext.__var__)
_calling_task: ContextVar[TaskRunContext | None] = ContextVar("prefect_tune_calling_task", default=None)
_caller_tags: ContextVar[frozenset[str]] = ContextVar("prefect_tune_callers_tags", default=frozenset())


@contextmanager
def isolated_run_context() -> Iterator[None]:
    """Run this block outside the context of the task that called the flow run, and without the caller's tags.

    In a flow that was called by a task, Prefect logs to the calling task and treats it as the current task. Each task
    inherits its caller's tags and their concurrency limits, so an upload would wait for a slot that its trial holds.
    """
    flow, task = FlowRunContext.get(), TaskRunContext.get()
    tags, held_tags = TagsContext.get().current_tags, task.task_run.tags if task is not None else ()
    with ExitStack() as resets:
        _set_context_variable(resets, _caller_tags, frozenset(tags).difference(held_tags))
        if flow and flow.flow_run and task and task.task_run.flow_run_id != flow.flow_run.id:
            _set_context_variable(resets, _calling_task, task)
            _set_context_variable(resets, _task_variable, None)
        resets.enter_context(TagsContext(current_tags=set()))
        yield


def _set_context_variable(resets: ExitStack, variable: ContextVar[_Value], value: _Value) -> None:
    resets.callback(variable.reset, variable.set(value))


def get_caller_tags() -> frozenset[str]:
    """Return the caller's tags, which apply to the trials too, except the tags whose slots the calling task holds."""
    return _caller_tags.get()


# Make the key of a call.

_runs_by_caller: defaultdict[str, list[UUID]] = defaultdict(list)
"""By caller: the runs that the caller has called in this process, in order."""
_runs_by_key: dict[str, UUID] = {}
"""By key: the flow run of this process that has claimed the key."""
_argument_digests: dict[UUID, str] = {}
"""By task run: the digest of its arguments when it first called a flow; the task may change them before a retry."""
_guard = threading.Lock()


class CallPath(NamedTuple):
    """Identifies the call of a flow run."""

    key: str
    """The key stays the same if this run, or a run that called it, is started again by any means."""
    prefix: str
    """The prefix of the key, which identifies the caller and the called flow; empty for a run without a caller."""
    caller: tuple[str, UUID | None, int]
    """The id and run count of the calling flow run, as text; the id of the calling task run; and its run count."""


def current_call_path(purpose: object = "") -> CallPath:
    """Return the path of this flow run's call: the id of the root run and, for each level, the flow and its call.

    A run that is started again keeps its id, but its subflow runs and task runs may be new runs. If a run calls the
    search several times, each call has another key. Journals and experiment names contain these keys. If the key of a
    call changed when its run was started again, the call would add samples again, or train from step 0.

    The key has a digest of `purpose` and of the parameters of the subflow runs between the root run and this call. A
    caller's calls with equal digests, and the subflow runs in between, are numbered in order. Tasks run concurrently,
    so they are identified by name and arguments, and then numbered. Without a flow run, the root is the task run.

    To ask upstream: an id for each call, which stays the same when the caller is retried.
    """
    run, calls = current_flow_run(), deque[tuple[FlowRun, TaskRun]]()
    if run.parent_task_run_id is None:
        return _build_path(run, (), purpose, None)
    with get_client(sync_client=True) as client:
        while run.parent_task_run_id is not None:
            call = client.read_task_run(run.parent_task_run_id)
            calls.appendleft((run, call))
            if call.flow_run_id is None:
                break
            run = client.read_flow_run(call.flow_run_id)
        return _build_path(run, calls, purpose, client)


def current_flow_run() -> FlowRun:
    """Return the flow run of this context; raise `RuntimeError` if there is none."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("a suspension or a default name needs a flow run: expected a flow run, found none")
    return context.flow_run


def _build_path(
    root: FlowRun, calls: Collection[tuple[FlowRun, TaskRun]], purpose: object, client: SyncPrefectClient | None
) -> CallPath:
    """Return the path of the last of `calls`, each a pair of a flow run and the task run that represents its call."""
    path, task = CallPath(str(root.id), "", (f"{root.id}@{root.run_count}", None, 0)), _get_calling_task()
    parameters: list[Mapping[str, Any]] = []
    if task is not None and task.task_run.flow_run_id is None:
        action = "" if calls else compute_stable_digest(purpose)
        path = _build_task_path(root, task.task_run, _digest_task_arguments(task), action, str(task.task_run.id), "")
    for run, call in calls:
        parent, execution = path.key, path.caller[0]
        caller = next(iter(get_caller_ids(call)), None)
        # Only the last call has an action: a digest of `purpose` and of the parameters of the runs before it.
        action = compute_stable_digest([purpose, parameters]) if run.id == current_flow_run().id else ""
        if caller is None:
            prefix = f"{parent}/{run.flow_id}"
            number = _assign_call_number(run.id, f"{path.caller}/{prefix}-{action}") if action else call.dynamic_key
            path = CallPath(f"{prefix}-{action}:{number}", prefix, path.caller)
        elif task is not None and task.task_run.id == caller:
            path = _build_task_path(run, task.task_run, _digest_task_arguments(task), action, parent, execution)
        elif client is not None:  # the task's arguments are unknown here, so use the called run's parameters
            digest = _digest_arguments(run.parameters)
            path = _build_task_path(run, client.read_task_run(caller), digest, action, parent, execution)
        parameters.append(run.parameters)
        path = path._replace(caller=path.caller if action else (f"{execution}/{run.id}@{run.run_count}", None, 0))
    return path


def get_caller_ids(run: TaskRun) -> list[UUID]:
    """Return the ids of the task runs that called `run`; Prefect's `TaskRun.task_inputs` documents `__parents__`."""
    return [caller.id for caller in run.task_inputs.get("__parents__", ()) if isinstance(caller, TaskRunResult)]


def _get_calling_task() -> TaskRunContext | None:
    return TaskRunContext.get() or _calling_task.get()


def _digest_task_arguments(task: TaskRunContext) -> str:
    return _argument_digests.setdefault(task.task_run.id, _digest_arguments(task.parameters))


def _digest_arguments(arguments: dict[str, Any]) -> str:
    return hash_objects(arguments) or compute_stable_digest(arguments)


def _build_task_path(run: FlowRun, task: TaskRun, arguments: str, action: str, parent: str, execution: str) -> CallPath:
    """Return the path of a call from a task, with a number among equal tasks of `execution`, and among equal calls."""
    name = task.task_key.rpartition("-")[0]  # without the digest of the task's code
    prefix = f"{parent}/{run.flow_id}-{compute_stable_digest([name, arguments])}"
    task_number = _assign_call_number(task.id, f"{execution}/{prefix}-{action}")
    number = _assign_call_number(run.id, f"{execution}/{task.id}@{task.run_count}/{prefix}-{action}")
    return CallPath(f"{prefix}-{action}:{task_number}:{number}", prefix, (execution, task.id, task.run_count))


def _assign_call_number(run: UUID, caller: str) -> int:
    with _guard:
        runs = _runs_by_caller[caller]
        if run not in runs:
            runs.append(run)
        return runs.index(run)


def claim_call_key(key: str) -> None:
    """Claim this run's key; reject it if it differs from the key of a running call only by the order of calls.

    Raises:
        InvalidInput: the key is rejected, since a retry may change the order of calls. The running call continues.
    """
    with _guard:
        others = [(other, run) for other, run in _runs_by_key.items() if _differ_by_order(key, other)]
        _runs_by_key[key] = current_flow_run().id
    if not others:
        return
    task = _get_calling_task()
    advice = "; or call from tasks with different arguments, or one after another"
    if task is not None and hash_objects(task.parameters) is None:
        advice = f": the arguments of task {task.task_run.name!r} cannot be compared, since Prefect cannot hash them"
    with get_client(sync_client=True) as client:
        for _, run in others:
            state = client.read_flow_run(run).state
            if state is not None and not state.is_final():
                raise InvalidInput(
                    f"experiment: another call without a name is running (flow run {run}), and a retry could not "
                    f"distinguish the two, since only their order differs. Pass experiment='...' in both{advice}"
                )


def _differ_by_order(key: str, other: str) -> bool:
    """Return whether two keys first differ in the number of a call, made by the same caller and of the same flow."""
    levels = zip(key.split("/"), other.split("/"), strict=False)
    first, second = next(((first, second) for first, second in levels if first != second), ("", ":"))
    return first.partition(":")[0] == second.partition(":")[0]
