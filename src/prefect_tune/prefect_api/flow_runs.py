"""Flow runs of Prefect: failure without a traceback, their states, *Suspend*, *Cancel*, and their console output."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn, TypeVar, cast
from uuid import UUID

import httpx
from prefect._internal import control_listener
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventOrder, EventResourceFilter
from prefect.exceptions import Abort, ObjectNotFound, TerminationSignal
from prefect.input import RunInput, keyset_from_paused_state
from prefect.settings import get_current_settings
from prefect.states import Failed
from rich.console import Console

from prefect_tune.prefect_api.api_client import prefect_changed_error

# Let a flow run fail with our own error, without a traceback of this package in its log.

_R = TypeVar("_R")


def make_failed_result(error: Exception, returns: type[_R]) -> _R:
    """Return what a flow must return, in place of a value of type `returns`, so that its run fails with `error`.

    Prefect raises `error` in the caller of the flow, or returns the state if the caller requested the state. The state
    has the message of the error. If the flow raised the error itself, Prefect would log a traceback.

    If the flow has retries, this function raises `error`, because Prefect 3.8 retries a flow only after an exception.
    If such a flow returned its failure, its run would stay scheduled.
    """
    del returns
    context = FlowRunContext.get()
    if context is not None and context.flow is not None and context.flow.retries:
        raise error
    return cast("_R", Failed(message=str(error), data=error))


# The states of a flow run: whether it is alive, and whether a user or an automation started it last.
#
# To ask upstream: that a state records whether a user or an automation set it.

_ENDED_WITHOUT_CRASH = frozenset({StateType.PAUSED, StateType.FAILED, StateType.CANCELLED, StateType.COMPLETED})
_RETRY_PREFIX = "Retr"
"""The prefix of a retry's message, such as "Retry from the UI" or "Retried via CLI"."""
_RESUMING = "Resuming"


def sort_states(states: Sequence[State[Any]]) -> Sequence[State[Any]]:
    """Return the states of a run, oldest first."""
    return sorted(states, key=lambda state: state.timestamp)


def was_restarted_by_user(states: Sequence[State[Any]]) -> bool:
    """Return whether the run's last start was a *Resume* or a *Retry* by a user.

    Only a user can restart a run that has not crashed, because automations of this package restart only crashed runs.
    For a crashed run, only the state's message shows who restarted it. If Prefect changes this message, a user's retry
    of a crashed run counts as automatic. The run may then fail with `CrashLoop`; a retry after that counts as a user's.
    """
    pairs = pairwise((None, *sort_states(states)))
    starts = [(old, new) for old, new in pairs if new and new.type is StateType.SCHEDULED]
    if not starts:
        return False
    before, start = starts[-1]
    if before is not None and before.type in _ENDED_WITHOUT_CRASH:
        return True
    return (start.message or "").startswith(_RETRY_PREFIX)


def has_resume_state(states: Sequence[State[Any]]) -> bool:
    """Return whether a run was resumed, given its states since the suspension. A forced retry is no *Resume*."""
    return any(state.type is StateType.SCHEDULED and state.name == _RESUMING for state in states)


def check_run_alive(run: FlowRun, client: SyncPrefectClient) -> bool:
    """Return whether the run is paused, or is running and (if heartbeats are on) began or sent a heartbeat recently."""
    if run.state is None or not (run.state.is_running() or run.state.is_paused() or run.state.is_cancelling()):
        return False
    period = get_current_settings().flows.heartbeat_frequency
    if run.state.is_paused() or period is None:
        # Without heartbeats, a run that is being cancelled may be a run whose worker has exited, so it counts as ended.
        return not run.state.is_cancelling()
    timeout = timedelta(seconds=3 * period)
    heartbeats = EventFilter(
        occurred=EventOccurredFilter(since=datetime.now(UTC) - timeout),
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
        order=EventOrder.DESC,
    )
    began = run.state.timestamp
    return datetime.now(UTC) - began < timeout or bool(client.read_events(heartbeats, limit=1).events)


# *Suspend* of a flow run: detect it, prevent it from interrupting tasks, and add an input form. To ask upstream: a
# public `is_suspended()`; a context in which tasks still run, so that a suspended run can save;
# `suspend_flow_run` for a run that is already Suspended; and that form and state are set in one request.

_SUSPENSION_FIELD = "flow_run_suspension_request"


def is_flow_run_suspended() -> bool:
    """Return whether this context's flow run was suspended; this needs no request, since Prefect observes the state."""
    return get_suspension_state() is not None


def get_suspension_state() -> State[Any] | None:
    """Return the state with which the flow run of this context was suspended; None if the run was not suspended."""
    context = FlowRunContext.get()
    return _get_suspension_request(context).get_state() if context else None


@contextmanager
def ignoring_suspension() -> Iterator[None]:
    """Let tasks in this context run even if the flow run is suspended.

    Otherwise Prefect raises `Pause` in the thread that submits the next task, possibly in the thread that saves.

    Raises:
        TuneError: this release of Prefect has no known way to ignore a suspension.
    """
    context = FlowRunContext.get()
    if context is None:
        yield
        return
    with context.model_copy(update={_SUSPENSION_FIELD: type(_get_suspension_request(context))()}):
        yield


def _get_suspension_request(context: FlowRunContext) -> Any:
    """Return the suspension request, which Prefect's threads share through the context."""
    if _SUSPENSION_FIELD not in FlowRunContext.model_fields:
        raise prefect_changed_error(
            f"FlowRunContext.{_SUSPENSION_FIELD} is missing; without it a suspended run cannot save"
        )
    return getattr(context, _SUSPENSION_FIELD)


def set_state_with_form(client: SyncPrefectClient, run_id: UUID, state: State[Any], form: type[RunInput]) -> None:
    """Set a running or suspended flow run to the Suspended `state`, with the form that *Resume* shows.

    `suspend_flow_run` saves the form after the state, so the UI cannot resume the run if the process ends in between.
    It also rejects a run that was suspended in the UI. This function saves the form first, and forces the state:
    without force, a server would reject the state for a suspended run, or (from 3.9 on) accept it and delete the form.

    Raises:
        Abort: the run is no longer running or suspended.
    """
    keyset = keyset_from_paused_state(state)
    state.state_details.run_input_keyset = {str(name): key for name, key in keyset.items()}
    form.save(keyset, run_id)
    current = client.read_flow_run(run_id).state
    if current is None or not (current.is_running() or current.is_paused()):
        raise Abort(f"The flow run is now {current.name if current else 'deleted'}, so its state is not set.")
    state.state_details.pause_timeout = state.state_details.pause_timeout or current.state_details.pause_timeout
    client.set_flow_run_state(run_id, state, force=True)


# *Cancel* of a flow run, detected by the run itself, since its worker may have been killed, and a script has no worker.
#
# A live worker sends SIGTERM within seconds. With and without a worker, the trials save, and the run ends as Cancelled.
#
# To ask upstream: that a run observes its own cancellation, like its suspension.

_CANCELLATION_HOOKS_VARIABLE = "PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS"
_CANCELLED_FILTER = {"type": {"any_": ["CANCELLING", "CANCELLED"]}}


@contextmanager
def watching_cancellation(period: timedelta) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the flow run of this context, or a run that called it, was cancelled.

    The function makes no request, because a thread asks the server once per `period`, also after an error.
    """
    closed, is_cancelled = threading.Event(), threading.Event()

    def poll_server() -> None:
        runs: Sequence[UUID] = ()
        while not closed.wait(period.total_seconds()):
            try:
                with get_client(sync_client=True) as client:
                    runs = runs or _read_run_and_caller_ids(client)
                    cancelled = FlowRunFilter.model_validate({"id": {"any_": runs}, "state": _CANCELLED_FILTER})
                    if client.read_flow_runs(flow_run_filter=cancelled, limit=1):
                        is_cancelled.set()
                        return
            except (httpx.HTTPError, ObjectNotFound):
                continue

    if FlowRunContext.get() is not None:
        threading.Thread(target=copy_context().run, args=(poll_server,), name="cancellation", daemon=True).start()
    try:
        yield is_cancelled.is_set
    finally:
        closed.set()


def _read_run_and_caller_ids(client: SyncPrefectClient) -> Sequence[UUID]:
    """Return the ids of this context's flow run and its callers, up to the run for which the process was started."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    runs: list[UUID] = []
    while run is not None:
        runs.append(run.id)
        if run.parent_task_run_id is None or run.deployment_id is not None:
            break
        caller = client.read_task_run(run.parent_task_run_id).flow_run_id
        run = client.read_flow_run(caller) if caller is not None else None
    return runs


def raise_cancellation() -> NoReturn:
    """Raise `TerminationSignal`, as if a worker had cancelled the run; this process's flow runs end as Cancelled."""
    if control_listener.get_intent() is None:
        control_listener._set_intent("cancel")  # noqa: SLF001 - like the listener when the worker cancels
        os.environ[_CANCELLATION_HOOKS_VARIABLE] = "true"  # normally set by the worker, which may have exited
    raise TerminationSignal(signal.SIGTERM)


def clear_cancellation() -> bool:
    """Return whether the current `TerminationSignal` is a *Cancel*; if so, clear Prefect's record of it."""
    is_cancelled = control_listener.get_intent() == "cancel"
    if is_cancelled:
        control_listener.clear_intent()
    return is_cancelled


# Keep a run alive when the reader of its log has exited, such as a killed worker that read the log from a pipe.
#
# Rich ends the process or thread that prints to a broken pipe; Prefect's console handler does not prevent this. The
# log still reaches Prefect's API and all other handlers.
#
# To ask upstream: that `PrefectConsoleHandler` treats a broken pipe like any other error of a handler.


def ignore_broken_log_pipe() -> None:
    """Drop console log lines of this process after their reader has exited. May be called at any time."""
    from prefect_tune.terminal.live_display import find_console_handlers  # imported late, as flows import this module

    for handler in find_console_handlers():
        console = getattr(handler, "console", None)
        if isinstance(console, Console):
            vars(console)["on_broken_pipe"] = partial(_silence_console, console)


def _silence_console(console: Console) -> None:
    """Silence the console; discard other output, such as that of `print`, if its reader has exited too."""
    console.quiet = True
    for stream in (console.file, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the stream is not a file, is closed, or is None
            descriptor, poll = stream.fileno(), select.poll()
            poll.register(descriptor, 0)
            if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):  # POLLHUP: on macOS
                null = os.open(os.devnull, os.O_WRONLY)
                try:
                    os.dup2(null, descriptor)
                finally:
                    os.close(null)
