"""Task runs of Prefect: their start, log lines, types and concurrency slots, and the end of lost task runs."""

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
from prefect.client.schemas.objects import State, StateType, TaskRun
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

from prefect_tune.prefect_api.api_client import is_temporary_error
from prefect_tune.prefect_api.call_paths import get_caller_ids
from prefect_tune.prefect_api.flow_runs import check_run_alive
from prefect_tune.prefect_api.flow_with_server import FlowWithServer
from prefect_tune.storage_retries import get_run_log, setting_context_variable

_TIMEOUT_SECONDS = 10.0
_POLL_INTERVAL_SECONDS = 30.0
_LIVE_STATE_TYPES = [StateType.PENDING, StateType.SCHEDULED, StateType.RUNNING]


def mark_task_runs_crashed(
    owner_run: str, is_lost: Callable[[TaskRun], bool], *, successor: str, has_owner_exited: bool
) -> None:
    """Set the state Crashed for a flow run's lost task runs, and for the task runs that they called.

    While the server shows the flow run as alive, wait, since it may not know yet that the run's process was killed.
    Task runs that have ended stay unchanged. If the server is silent or rejects a request, no further state is set.

    Args:
        owner_run: the id of the flow run, from a journal; if it is not a UUID, no state is set.
        is_lost: returns whether a task run that has not ended is lost.
        successor: the name of the new owner, for the message of the new states.
        has_owner_exited: whether the process of the flow run is known to have ended; if False, the server is queried.
    """
    with (
        suppress(PrefectException, httpx.HTTPError, OSError, RuntimeError, ValueError),
        get_client(sync_client=True, httpx_settings={"timeout": _TIMEOUT_SECONDS}) as client,
    ):
        flow_run = UUID(owner_run)
        while not has_owner_exited and check_run_alive(client.read_flow_run(flow_run), client):
            if not any(map(is_lost, _read_live_task_runs(client, flow_run))):
                return
            time.sleep(_POLL_INTERVAL_SECONDS)
        live = _read_live_task_runs(client, flow_run)
        pending = deque(run for run in live if is_lost(run))
        while pending:
            dead = pending.popleft()
            crashed: State[Any] = Crashed(message=f"its process was lost; {successor} took over")
            client.set_task_run_state(dead.id, crashed, force=True)
            pending.extend(run for run in live if dead.id in get_caller_ids(run))


def _read_live_task_runs(client: SyncPrefectClient, flow_run: UUID) -> list[TaskRun]:
    """Return all task runs that have not ended; read them in pages, since a server returns at most 200 by default."""
    flow_run_filter = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    live = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_LIVE_STATE_TYPES)))
    runs: list[TaskRun] = []
    while page := client.read_task_runs(
        flow_run_filter=flow_run_filter, task_run_filter=live, sort=TaskRunSort.ID_DESC, offset=len(runs)
    ):
        runs += page
    return runs


# Declare the public tasks' type. To pyright, Prefect's own type of `submit` is partly unknown, and lacks `wait_for`.
#
# To ask upstream: a valid signature instead of `submit(*args: P.args, wait_for=..., **kwargs: P.kwargs)`, with which
# pyright does not know the arguments, and mypy requires `return_state`.

_P = ParamSpec("_P")
_R = TypeVar("_R")

if TYPE_CHECKING:

    class PublicTask(Task[_P, _R]):
        """A Prefect task whose calls are type-checked; at run time it is a plain Prefect task.

        Calls accept `return_state=True`, like those of any Prefect task, but this type omits it.
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


# Omit Prefect's messages about the ends of inner tasks, and about unsent events, from the log of a search.
#
# To ask upstream: a task option that omits the message at the task's end; and a log message without the item's `repr`
# (14 lines for an event) when a service fails to process an item.

TRIAL_TASK_NAME = "run-trial"
"""The name of the task that runs an attempt. Prefect's message at its end is hidden, since the search logs the end."""
_ENGINE_MODULE = "task_engine"
_END_MESSAGE = "Finished in state"
_FAILED_MESSAGE = "Task run failed with state"
_SERVICES_LOGGER = "prefect._internal.concurrency"
_NOT_SENT_MESSAGE = "Service %r failed to process item %r"
_NOT_SENT_LOG_INTERVAL_SECONDS = 60.0
_hides_task_ends: ContextVar[bool] = ContextVar("prefect_tune_is_quiet", default=False)


@contextmanager
def quieting_inner_tasks() -> Iterator[None]:
    """Hide Prefect's log lines about the ends of attempts, and, inside the `with` block, of successful tasks.

    While the server is down, Prefect logs a message for each item, such as an event, that it cannot send. Only one of
    these messages is logged per minute, and without the item. At the log level DEBUG, nothing is hidden.
    """
    logging.getLogger(_SERVICES_LOGGER).addFilter(_filter_unsent_record)  # adding it again has no effect
    logging.getLogger("prefect.task_runs").addFilter(_filter_task_end_record)
    with setting_context_variable(_hides_task_ends, True):  # noqa: FBT003 - the value of the variable
        yield


def _filter_task_end_record(record: logging.LogRecord) -> bool:
    """Return whether to log the record; False if it is a message about a task's end that is to be hidden."""
    if record.module != _ENGINE_MODULE or logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        return True
    message, is_attempt = str(record.msg), getattr(record, "task_name", "") == TRIAL_TASK_NAME
    if message.startswith(_END_MESSAGE):
        return not (is_attempt or (_hides_task_ends.get() and record.levelno <= logging.INFO))
    return not (is_attempt and message.startswith(_FAILED_MESSAGE))


_last_log_time = {"seconds": -_NOT_SENT_LOG_INTERVAL_SECONDS}


def _filter_unsent_record(record: logging.LogRecord) -> bool:
    """Return whether to log the record. Let only one message about unsent items pass per minute, without the item."""
    if record.msg != _NOT_SENT_MESSAGE or not record.args or logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        return True
    service, now = next(iter(record.args)), time.monotonic()
    if now - _last_log_time["seconds"] < _NOT_SENT_LOG_INTERVAL_SECONDS:
        return False
    _last_log_time["seconds"] = now
    record.msg = "Prefect's %s could not send an item: its server may be down. Training continues."
    record.args = (service,)
    return True


# Skip the state Pending of a called task that waits for nothing: its run would leave that state within a millisecond.
#
# Pending costs as much as Running or the final state: for each state of a task run, Prefect's client sends an event,
# and the server stores the state in a separate transaction.
#
# To ask upstream: that such a task run begins with Running; or that the server stores states in batches by default, as
# `PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE` allows.

# Private to Prefect; None if Prefect lacks it. The public `Task.create_local_run` is asynchronous, and opens a client.
_create_task_run = getattr(task_engine, "_create_task_run_locally", None)


def run_task_inline(task: Task[_P, _R], *args: _P.args, **options: _P.kwargs) -> _R:
    """Run a synchronous task in this thread, like `task(...)`; its task run begins with the state Running.

    A task with tags begins with Pending, since it may wait for slots of the tags' concurrency limits. Arguments must
    not contain Prefect futures. Raises the error of the task.
    """
    return cast("_R", _run_task(task, "result", args, options))


def skip_prefect_introspection(argument: _R) -> _R:
    """Mark a task's argument so that Prefect does not search it for futures."""
    return cast("_R", quote(argument))


def run_task_to_state(task: Task[_P, Any], *args: _P.args, **options: _P.kwargs) -> State[Any]:
    """Run a task like `run_task_inline`; return the final state of its run, which contains the task's error, if any."""
    return cast("State[Any]", _run_task(task, "state", args, options))


def _run_task(
    task: Task[Any, Any], return_type: Literal["result", "state"], args: tuple[Any, ...], options: dict[str, Any]
) -> object:
    args = tuple(map(quote, args))  # so that Prefect does not search them for futures
    options = {name: quote(value) for name, value in options.items()}
    parameters = get_call_parameters(task.fn, args, options)
    task_run = _create_task_run(task, parameters=parameters) if _create_task_run else None
    if task_run is None or task_run.tags:
        return task(*args, **options, return_state=return_type == "state")
    return task_engine.run_task(task, task_run=task_run, parameters=parameters, return_type=return_type)


# Read the maximum number of concurrent tasks of a thread pool task runner.
#
# To ask upstream: a public `max_workers` of `ThreadPoolTaskRunner`.


def current_max_workers() -> int | None:
    """Return `max_workers` of this flow's task runner; None if the runner has no limit or is no thread pool."""
    runner = context.task_runner if (context := FlowRunContext.get()) is not None else None
    count = getattr(runner, "_max_workers", None) if isinstance(runner, ThreadPoolTaskRunner) else None
    return count if isinstance(count, int) and count < sys.maxsize else None


# Wait for slots of Prefect's concurrency limits without failing the attempt; end the wait when the attempt must stop.
#
# Prefect's own wait fails if a limit is 0 (HTTP 422), and cannot be ended by the caller.
#
# To ask upstream: a wait that a caller can end; HTTP 423 for a limit of 0, as for a limit without free slots.

_ACQUIRE_TIMEOUT, _RETRY_INTERVAL = timedelta(seconds=5), timedelta(seconds=2)
_LEASE_DURATION = timedelta(seconds=60)  # the slot of a killed process becomes free after this time
_NO_FREE_SLOT_STATUS, _LIMIT_TOO_LOW_STATUS = 423, 422
_slot_wait_stop: ContextVar[threading.Event | None] = ContextVar("prefect_tune_slot_wait_stop", default=None)


def holding_concurrency_limits(limits: Sequence[str], stop: threading.Event) -> AbstractContextManager[None]:
    """Return a context that waits for a slot of each of `limits`, and holds the slots.

    The wait continues while the API is unreachable or a limit is 0, and ends when `stop` is set. If the lease of a slot
    cannot be renewed, the `with` block continues. If a slot cannot be released at the end, the slot becomes free after
    a minute.
    """
    lease_seconds = _LEASE_DURATION.total_seconds()
    options: dict[str, Any] = {"lease_duration": lease_seconds, "raise_on_lease_renewal_failure": False}
    return _holding_slots(list(limits), stop, partial(concurrency, list(limits), **options))


def ending_slot_waits(stop: threading.Event) -> AbstractContextManager[None]:
    """Return a context in which tasks stop waiting for the slots of their tags when `stop` is set."""
    return setting_context_variable(_slot_wait_stop, stop)


@contextmanager
def _holding_slots(
    names: Sequence[str], stop: threading.Event, request_slots: Callable[..., AbstractContextManager[None]]
) -> Iterator[None]:
    is_logged = False
    with ExitStack() as held_slots:
        while names and not stop.is_set():
            # Prefect sends these requests one after another, so this one must time out soon, to let the next be sent.
            slots = request_slots(max_retries=0, timeout_seconds=_ACQUIRE_TIMEOUT.total_seconds())
            try:
                slots.__enter__()
                held_slots.callback(_release_slots, slots)
                break
            except TimeoutError:
                continue
            except ConcurrencySlotAcquisitionError as error:
                cause = error.__cause__
                status = cause.response.status_code if isinstance(cause, httpx.HTTPStatusError) else None
                if status not in (_NO_FREE_SLOT_STATUS, _LIMIT_TOO_LOW_STATUS) and not is_temporary_error(cause):
                    raise
                if status == _LIMIT_TOO_LOW_STATUS and not is_logged:
                    get_run_log().warning("a concurrency limit among %s is 0: the trial waits", ", ".join(names))
                    is_logged = True
                stop.wait(_RETRY_INTERVAL.total_seconds())
        yield


def _release_slots(slots: AbstractContextManager[None]) -> None:
    with suppress(httpx.HTTPError):  # an error here must not fail an attempt that has ended
        slots.__exit__(None, None, None)


def _holding_tag_slots(names: list[str], **options: Any) -> AbstractContextManager[None]:
    """Return the context that waits for the slots of a task's tags: in other packages' flows, Prefect's own context."""
    context, stop = FlowRunContext.get(), _slot_wait_stop.get()
    if stop is None and (context is None or not isinstance(context.flow, FlowWithServer)):
        return concurrency(names, **options)
    return _holding_slots(names, stop or threading.Event(), partial(concurrency, names, **options))


# Replace the context in which Prefect's engine waits for the slots of a task's tags; there is no public hook for it.
if "_concurrency" in vars(task_engine):
    vars(task_engine)["_concurrency"] = _holding_tag_slots
