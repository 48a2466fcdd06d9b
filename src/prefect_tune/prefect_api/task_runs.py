"""Task runs of Prefect: how they start, what they log, how their calls are typed, and how dead ones end."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast, overload
from uuid import UUID

import httpx
from prefect import Task, task, task_engine
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
from prefect.concurrency._sync import concurrency
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.futures import PrefectFuture, PrefectFutureList
from prefect.states import Crashed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import quote
from prefect.utilities.callables import get_call_parameters

from prefect_tune.prefect_api.api_client import is_temporary
from prefect_tune.prefect_api.flow_runs import is_alive
from prefect_tune.prefect_api.flow_with_server import FlowWithServer
from prefect_tune.storage_retries import run_log, set_to

_TIMEOUT_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 30.0
_LIVE = [StateType.PENDING, StateType.SCHEDULED, StateType.RUNNING]


def set_crashed(owner_run: str, is_dead: Callable[[TaskRun], bool], *, successor: str, has_ended: bool) -> None:
    """Set the task runs of a flow run that `is_dead`, and those that they called, to Crashed, once the run is dead.

    While it may be alive, this waits: the server may not know yet that a process was killed. Ended task runs stay as
    they are. If the server does not answer or refuses, nothing is set: states only inform.

    Args:
        owner_run: the flow run, as a journal names it: what is no id of a run is none.
        is_dead: whether a task run is to be set, if it has not ended.
        successor: what took over, for the message of the new states.
        has_ended: whether the process of the flow run is known to have ended; else the server is asked.
    """
    with (
        suppress(PrefectException, httpx.HTTPError, OSError, RuntimeError, ValueError),
        get_client(sync_client=True, httpx_settings={"timeout": _TIMEOUT_SECONDS}) as client,
    ):
        flow_run = UUID(owner_run)
        while not has_ended and is_alive(client.read_flow_run(flow_run), client):
            if not any(map(is_dead, _live_task_runs(client, flow_run))):
                return
            time.sleep(_LOOK_AGAIN_SECONDS)
        live = _live_task_runs(client, flow_run)
        waiting = deque(each for each in live if is_dead(each))
        while waiting:
            dead = waiting.popleft()
            crashed: State[Any] = Crashed(message=f"its process was lost; {successor} took over")
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


# The type of the public tasks: Prefect's own types of `submit` are partly unknown to pyright, and lack `wait_for`.
#
# To ask upstream: `submit(*args: P.args, wait_for=..., **kwargs: P.kwargs)` is no valid signature, so that pyright
# takes its arguments as unknown, and mypy asks for `return_state` too.

_P = ParamSpec("_P")
_R = TypeVar("_R")

if TYPE_CHECKING:

    class PublicTask(Task[_P, _R]):
        """A Prefect task whose calls are checked; at run time it is a plain one.

        `return_state=True` is left out of the types: the calls take it as any task of Prefect.
        """

        def __call__(self, *args: _P.args, **options: _P.kwargs) -> _R:  # type: ignore[override]  # see above
            ...

        @overload  # type: ignore[override]  # see above
        def submit(self, *args: _P.args, **options: _P.kwargs) -> PrefectFuture[_R]: ...
        @overload
        def submit(self, *args: Any, wait_for: Iterable[PrefectFuture[Any]], **options: Any) -> PrefectFuture[_R]: ...
        def submit(self, *args: Any, **options: Any) -> PrefectFuture[_R]: ...

        def map(self, *args: Any, **options: Any) -> PrefectFutureList[_R]:  # type: ignore[override]  # see above
            ...


def public_task(**options: Any) -> Callable[[Callable[_P, _R]], PublicTask[_P, _R]]:
    """Return a decorator that makes a Prefect task, with the options of `prefect.task`."""
    return cast("Callable[[Callable[_P, _R]], PublicTask[_P, _R]]", task(**options))


# Keep Prefect's messages about the ends of inner tasks, and its events that were not sent, out of a search's log.
#
# To ask upstream: an option of a task that leaves out the message of its end; that a service which fails to process an
# item logs no `repr` of it: that of an event has 14 lines.

RUN_TRIAL = "run-trial"
"""The name of the task of an attempt: the log of its search says how it ended."""
_ENGINE = "task_engine"
_ENDED = "Finished in state"
_RETURNED_FAILED = "Task run failed with state"
_SERVICES = "prefect._internal.concurrency"
_NOT_SENT = "Service %r failed to process item %r"
_NOT_SENT_AGAIN_SECONDS = 60.0
_is_quiet: ContextVar[bool] = ContextVar("prefect_tune_is_quiet", default=False)


@contextmanager
def quiet_inner_tasks() -> Iterator[None]:
    """Leave out what Prefect logs about the ends of tasks in this context, except failures, and of attempts.

    An item that one of Prefect's services could not send, such as an event while the server is down, is one line
    without the item, at most once a minute. At the log level DEBUG nothing is left out.
    """
    logging.getLogger(_SERVICES).addFilter(_without_item)  # adding it again has no effect
    logging.getLogger("prefect.task_runs").addFilter(_says_more)
    with set_to(_is_quiet, True):  # noqa: FBT003 - the value of the variable
        yield


def _says_more(record: logging.LogRecord) -> bool:
    """Whether a record says more than that a task has ended. Messages that Prefect words otherwise are kept."""
    if record.module != _ENGINE or logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        return True
    message, is_attempt = str(record.msg), getattr(record, "task_name", "") == RUN_TRIAL
    if message.startswith(_ENDED):
        return not (is_attempt or (_is_quiet.get() and record.levelno <= logging.INFO))
    return not (is_attempt and message.startswith(_RETURNED_FAILED))


_last_logged = {"seconds": -_NOT_SENT_AGAIN_SECONDS}


def _without_item(record: logging.LogRecord) -> bool:
    """Replace the item in the message of a service that could not send it; drop the message within the same minute."""
    if record.msg != _NOT_SENT or not record.args or logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        return True
    service, now = next(iter(record.args)), time.monotonic()
    if now - _last_logged["seconds"] < _NOT_SENT_AGAIN_SECONDS:
        return False
    _last_logged["seconds"] = now
    record.msg = "Prefect's %s could not send an item: its server may be down. Training continues."
    record.args = (service,)
    return True


# Run a task without the state Pending, which costs a Prefect server as much as each of its other two states.
#
# For each state of a task run Prefect's client sends an event, and its server stores the state in a transaction of its
# own. A task that is called, and waits for nothing, is Pending for less than a millisecond.
#
# To ask upstream: that such a task run begins with Running; or that the server stores states in batches by default, as
# `PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE` allows.

# None in a release of Prefect without it. The public `Task.create_local_run` is asynchronous, and opens a client.
_create = getattr(task_engine, "_create_task_run_locally", None)


def run_here(task: Task[_P, _R], *args: _P.args, **options: _P.kwargs) -> _R:
    """Run a synchronous task as `task(...)` does, in this thread; its task run begins with the state Running.

    With tags it begins with Pending: it may wait for a slot of their concurrency limits. No argument may hold a future
    of Prefect's. Raises what the task raises.
    """
    return cast("_R", _run(task, "result", args, options))


def skip_prefect_introspection(argument: _R) -> _R:
    """Mark a task's argument so that Prefect does not search it for futures."""
    return cast("_R", quote(argument))


def run_to_state(task: Task[_P, Any], *args: _P.args, **options: _P.kwargs) -> State[Any]:
    """Run a task as `run_here` does, and return the final state of its run; an error of the task is in the state."""
    return cast("State[Any]", _run(task, "state", args, options))


def _run(
    task: Task[Any, Any],
    returned: Literal["result", "state"],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> object:
    args = tuple(map(quote, args))  # else Prefect searches them for futures
    options = {name: quote(value) for name, value in options.items()}
    parameters = get_call_parameters(task.fn, args, options)
    task_run = _create(task, parameters=parameters) if _create else None
    if task_run is None or task_run.tags:
        return task(*args, **options, return_state=returned == "state")
    return task_engine.run_task(task, task_run=task_run, parameters=parameters, return_type=returned)


# How many tasks a task runner of threads runs at once.
#
# To ask upstream: a public `max_workers` of `ThreadPoolTaskRunner`.


def max_workers_here() -> int | None:
    """Return `max_workers` of this flow's task runner, as given or set; None if it is unlimited, or no thread pool."""
    runner = context.task_runner if (context := FlowRunContext.get()) is not None else None
    found = getattr(runner, "_max_workers", None) if isinstance(runner, ThreadPoolTaskRunner) else None
    return found if isinstance(found, int) and found < sys.maxsize else None


# Slots of Prefect's concurrency limits for attempts: wait for them without losing the attempt, until it is to stop.
#
# Prefect's own wait ends with an error if a limit is 0 at the moment (HTTP 422), and nothing else ends it.
#
# To ask upstream: a wait that a caller can end; that a limit of 0 is answered as one without free slots, by HTTP 423.

_TRY, _PAUSE = timedelta(seconds=5), timedelta(seconds=2)
_LEASE = timedelta(seconds=60)  # the slot of a killed process is free after this time
_NONE_FREE, _BELOW_REQUEST = 423, 422
_stop: ContextVar[threading.Event | None] = ContextVar("prefect_tune_stop_of_waits", default=None)


def holding_concurrency_limits(limits: Sequence[str], stop: threading.Event) -> AbstractContextManager[None]:
    """Return a block that waits for a slot in all `limits` and holds it; it begins without one once `stop` is set.

    While the API is unreachable, or a limit is 0, it waits. If a lease cannot be renewed later, the block continues; if
    it cannot be released at the end, the slot is free a minute later.
    """
    lease_seconds = _LEASE.total_seconds()
    options: dict[str, Any] = {"lease_duration": lease_seconds, "raise_on_lease_renewal_failure": False}
    return _holding(list(limits), stop, partial(concurrency, list(limits), **options))


def ending_waits(stop: threading.Event) -> AbstractContextManager[None]:
    """Have tasks that are called in this block wait for slots of their tags as above: `stop` ends the wait."""
    return set_to(_stop, stop)


@contextmanager
def _holding(
    names: Sequence[str], stop: threading.Event, slots_of: Callable[..., AbstractContextManager[None]]
) -> Iterator[None]:
    is_logged = False
    with ExitStack() as held:
        while names and not stop.is_set():
            # Prefect asks for one caller after another: each asks once, and not longer while the API fails.
            slots = slots_of(max_retries=0, timeout_seconds=_TRY.total_seconds())
            try:
                slots.__enter__()
                held.callback(_release, slots)
                break
            except TimeoutError:
                continue
            except ConcurrencySlotAcquisitionError as error:
                cause = error.__cause__
                status = cause.response.status_code if isinstance(cause, httpx.HTTPStatusError) else None
                if status not in (_NONE_FREE, _BELOW_REQUEST) and not is_temporary(cause):
                    raise
                if status == _BELOW_REQUEST and not is_logged:
                    run_log().warning("a concurrency limit among %s is 0: the trial waits", ", ".join(names))
                    is_logged = True
                stop.wait(_PAUSE.total_seconds())
        yield


def _release(slots: AbstractContextManager[None]) -> None:
    with suppress(httpx.HTTPError):  # an error here must not fail an attempt that has ended
        slots.__exit__(None, None, None)


def _concurrency(names: list[str], **options: Any) -> AbstractContextManager[None]:
    """Wait for the slots of a task's tags: in a flow of ours as above, in others as Prefect does."""
    context, stop = FlowRunContext.get(), _stop.get()
    if stop is None and (context is None or not isinstance(context.flow, FlowWithServer)):
        return concurrency(names, **options)
    return _holding(names, stop or threading.Event(), partial(concurrency, names, **options))


# Prefect's engine finds its wait for the slots of a task's tags under this name; it has no public hook.
if "_concurrency" in vars(task_engine):
    vars(task_engine)["_concurrency"] = _concurrency
