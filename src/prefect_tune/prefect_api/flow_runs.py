"""Flow runs of Prefect: their identity, what their states say, *Suspend*, and an end in Failed without a traceback."""

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
from typing import IO, Any, NoReturn, TypeVar, cast
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

from prefect_tune.prefect_api.api_client import prefect_changed

# End a flow run in Failed with an error of our own, without a traceback of this package in its log.

_R = TypeVar("_R")


def failed_by(error: Exception, returns: type[_R]) -> _R:
    """Return a value for a flow to return, in place of one of type `returns`: the flow run then fails by `error`.

    Prefect raises `error` where the flow was called, or returns the state where one was asked for. Its message is
    that of the state. If the flow raised the error, Prefect would log where.

    A flow with retries raises the error: Prefect 3.8 runs a flow again after an error only, and would leave a run that
    returns its failure scheduled.
    """
    del returns
    context = FlowRunContext.get()
    if context is not None and context.flow is not None and context.flow.retries:
        raise error
    return cast("_R", Failed(message=str(error), data=error))


# What the states of a flow run say: whether it is alive, and who started it last, a person or an automation.
#
# To ask upstream: that a state records who set it, a person or an automation.

_BY_A_PERSON = frozenset({StateType.PAUSED, StateType.FAILED, StateType.CANCELLED, StateType.COMPLETED})
_RETRIED = "Retr"
"""Begins the messages of a retry: "Retry from the UI", "Retried via CLI"."""
_RESUMED = "Resuming"


def in_order(states: Sequence[State[Any]]) -> Sequence[State[Any]]:
    """Return the states of a run, oldest first."""
    return sorted(states, key=lambda each: each.timestamp)


def is_started_by_hand(states: Sequence[State[Any]]) -> bool:
    """Whether a person resumed or retried the run at its last start.

    A run that has not crashed is started again by a person: automations of this package restart only crashed ones. Of
    a crashed run only the state's message says so. If Prefect words it otherwise, a retry of a crashed run counts as
    automatic; the run that ends with `CrashLoop` then is Failed, and its retry counts as a person's.
    """
    started = [(before, each) for before, each in pairwise((None, *in_order(states))) if each and _is_scheduled(each)]
    if not started:
        return False
    before, last = started[-1]
    if before is not None and before.type in _BY_A_PERSON:
        return True
    return (last.message or "").startswith(_RETRIED)


def is_resumed(states: Sequence[State[Any]]) -> bool:
    """Whether *Resume* is among these states of a run, which follow its suspension; a forced retry is no *Resume*."""
    return any(_is_scheduled(each) and each.name == _RESUMED for each in states)


def is_alive(run: FlowRun, client: SyncPrefectClient) -> bool:
    """Whether the run waits for a person, or sent a heartbeat within three periods, if heartbeats are on."""
    if run.state is None or not (run.state.is_running() or run.state.is_paused() or run.state.is_cancelling()):
        return False
    every = get_current_settings().flows.heartbeat_frequency
    if run.state.is_paused() or every is None:
        # Without heartbeats, nothing tells a run that is being cancelled from one whose worker has gone.
        return not run.state.is_cancelling()
    patience = timedelta(seconds=3 * every)
    signs = EventFilter(
        occurred=EventOccurredFilter(since=datetime.now(UTC) - patience),
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
        order=EventOrder.DESC,
    )
    began = run.state.timestamp
    return datetime.now(UTC) - began < patience or bool(client.read_events(signs, limit=1).events)


def _is_scheduled(state: State[Any]) -> bool:
    return state.type is StateType.SCHEDULED


# *Suspend* of a flow run: detect it, keep it from interrupting tasks, and give it an input form.
#
# To ask upstream: a public `is_suspended()`; a context in which tasks still run, so that a suspended run can save;
# `suspend_flow_run` on a run that is Suspended already; and that form and state are set in one request.

_FIELD = "flow_run_suspension_request"


def is_suspended() -> bool:
    """Whether the flow run of this context was suspended. It makes no request: Prefect watches the run's state."""
    return suspended_state() is not None


def suspended_state() -> State[Any] | None:
    """Return the state with which the flow run of this context was suspended; None if it was not."""
    context = FlowRunContext.get()
    return _suspension_of(context).get_state() if context else None


@contextmanager
def ignoring_suspension() -> Iterator[None]:
    """Let tasks in this context run although the flow run is suspended.

    Otherwise Prefect raises `Pause` in the thread that submits the next task, which may be the one that saves.

    Raises:
        TuneError: this Prefect has no known way to do so.
    """
    context = FlowRunContext.get()
    if context is None:
        yield
        return
    with context.model_copy(update={_FIELD: type(_suspension_of(context))()}):
        yield


def _suspension_of(context: FlowRunContext) -> Any:
    """Return Prefect's request to suspend, which its threads share through the context."""
    if _FIELD not in FlowRunContext.model_fields:
        raise prefect_changed(f"FlowRunContext.{_FIELD} is gone, without which a suspended run cannot save")
    return getattr(context, _FIELD)


def set_with_form(client: SyncPrefectClient, run_id: UUID, state: State[Any], form: type[RunInput]) -> None:
    """Set a running or suspended flow run to `state`, which is Suspended, with the form that *Resume* asks.

    `suspend_flow_run` saves the form after the state: a process that ends in between leaves a run that the UI cannot
    resume, and it refuses a run that was suspended in the UI. So the form is saved first. The state is forced: the
    server's rules refuse it for a suspended run, and from 3.9 on delete the form when they accept it.

    Raises:
        Abort: the run is neither running nor suspended any more.
    """
    keyset = keyset_from_paused_state(state)
    state.state_details.run_input_keyset = {str(name): each for name, each in keyset.items()}
    form.save(keyset, run_id)
    now = client.read_flow_run(run_id).state
    if now is None or not (now.is_running() or now.is_paused()):
        raise Abort(f"The flow run is {now.name if now else 'deleted'} now: this process leaves it so.")
    state.state_details.pause_timeout = state.state_details.pause_timeout or now.state_details.pause_timeout
    client.set_flow_run_state(run_id, state, force=True)


# *Cancel* of a flow run, noticed by the run itself: its worker may have been killed, and a script has none.
#
# A worker that lives sends SIGTERM within seconds. Either way the trials save, and the run ends as Cancelled.
#
# To ask upstream: that a run observes its own cancellation, as it observes its suspension.

_ENGINE_SETS_STATE = "PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS"
_CANCELLED = {"type": {"any_": ["CANCELLING", "CANCELLED"]}}


@contextmanager
def watching_cancellation(period: timedelta) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the flow run of this context, or one that called it, was cancelled.

    It makes no request: a thread asks the server once per `period`, and again while the server does not answer.
    """
    closed, is_cancelled = threading.Event(), threading.Event()

    def watch() -> None:
        runs: Sequence[UUID] = ()
        while not closed.wait(period.total_seconds()):
            try:
                with get_client(sync_client=True) as client:
                    runs = runs or _runs_of_process(client)
                    only = FlowRunFilter.model_validate({"id": {"any_": runs}, "state": _CANCELLED})
                    if client.read_flow_runs(flow_run_filter=only, limit=1):
                        is_cancelled.set()
                        return
            except (httpx.HTTPError, ObjectNotFound):
                continue

    if FlowRunContext.get() is not None:
        threading.Thread(target=copy_context().run, args=(watch,), name="cancellation", daemon=True).start()
    try:
        yield is_cancelled.is_set
    finally:
        closed.set()


def _runs_of_process(client: SyncPrefectClient) -> Sequence[UUID]:
    """Return the flow run of this context and those that called it, up to the one that the process was started for."""
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
    """Raise what a worker's *Cancel* raises; the flow runs of this process then end as Cancelled.

    Raises:
        TerminationSignal: always.
    """
    if control_listener.get_intent() is None:
        control_listener._set_intent("cancel")  # noqa: SLF001 - as the listener does when the worker asks
        os.environ[_ENGINE_SETS_STATE] = "true"  # the worker that would set it did not ask: it may be gone
    raise TerminationSignal(signal.SIGTERM)


def end_cancellation() -> bool:
    """Return whether the present `TerminationSignal` is a *Cancel*, which is then over for the rest of the process."""
    is_cancelled = control_listener.get_intent() == "cancel"
    if is_cancelled:
        control_listener.clear_intent()
    return is_cancelled


# Keep a run alive when the reader of its log is gone: a worker that was killed has held the pipe of its output.
#
# Rich exits the process, or the thread, that prints to a broken pipe, and Prefect's console handler lets that pass. The
# log still goes to Prefect's API, and to all other handlers.
#
# To ask upstream: that `PrefectConsoleHandler` treats a broken pipe as any other error of a handler.


def outlive_log_reader() -> None:
    """From now on, drop what is logged to the console of this process once its reader is gone. Call it at any time."""
    from prefect_tune.terminal.live_display import console_handlers  # the flows import this module

    for handler in console_handlers():
        console = getattr(handler, "console", None)
        if isinstance(console, Console):
            vars(console)["on_broken_pipe"] = partial(_fall_silent, console)


def _fall_silent(console: Console) -> None:
    """Print nothing more; send other output, such as `print`, to nowhere if its reader is gone too."""
    console.quiet = True
    for stream in (console.file, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is no file, closed, or None
            _redirect_if_broken(stream)


def _redirect_if_broken(stream: IO[str]) -> None:
    number = stream.fileno()
    poll = select.poll()
    poll.register(number, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):  # the second: on macOS
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, number)
    finally:
        os.close(nowhere)
