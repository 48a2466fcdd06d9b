"""Suspend or pause a flow run with an input form, and read its answer: the Prefect side of questions to a person."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause
from prefect.input import RunInput
from prefect.states import Paused, Suspended

from prefect_tune.blocks.resolve_target import deployment_of_run
from prefect_tune.prefect_api.api_errors import is_temporary
from prefect_tune.prefect_api.flow_runs.run_states import in_order, is_resumed
from prefect_tune.prefect_api.flow_runs.suspension import set_with_form, suspended_state

_PREFIX = "prefect-tune-"
_POLL_INTERVAL = timedelta(seconds=2)
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Shown:
    """A form with which a flow run was suspended."""

    key: str
    """Identifies this form."""
    about: str
    """The topic of the form, as given to `leave_with`."""
    answer: Mapping[str, object] | None
    """The answer, by field; None if the run has not been resumed."""


def can_be_suspended() -> bool:
    """Whether this flow run can be suspended: it is of a deployment, whose worker starts it again, and no subflow."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return deployment_of_run() is not None and run is not None and run.parent_task_run_id is None


def leave_with(form: type[RunInput], about: str) -> NoReturn:
    """Set the flow run to Suspended with `form`, and end this process's part in it.

    Args:
        about: the topic that `last_form` returns: small letters, digits and dashes.

    Raises:
        Pause: the run is Suspended: the process is to end, and *Resume* starts the run again.
        Abort: the run was resumed in another process, or has ended, meanwhile.
    """
    state: State[Any] = Suspended(pause_key=f"{_PREFIX}{about}-{uuid4().hex[:12]}")
    with get_client(sync_client=True) as client:
        set_with_form(client, _run_id(), state, form)
    raise Pause(state=state)


def pause_with(form: type[RunInput], timeout: timedelta) -> Mapping[str, object]:
    """Set the flow run Paused with `form`, wait in this process for *Resume*, and return the answer.

    Returns:
        The answer, by field; empty if the form was submitted unchanged.

    Raises:
        Abort: the run has ended, or was cancelled before or while it waited.
    """
    state: State[Any] = Paused(timeout_seconds=int(timeout.total_seconds()), pause_key=uuid4().hex)
    run_id = _run_id()
    with get_client(sync_client=True) as client:
        set_with_form(client, run_id, state, form)
        resumed = _state_after_pause(client, run_id)
        if not resumed.is_running():
            raise Abort(f"The flow run is {resumed.name} now, without an answer: its process ends.")
        return _read(lambda: _stored_answer(client, run_id, state.state_details.run_input_keyset or {})) or {}


def _state_after_pause(client: SyncPrefectClient, run_id: UUID) -> State[Any]:
    while (now := _read(lambda: client.read_flow_run(run_id).state)) is None or now.is_paused():
        time.sleep(_POLL_INTERVAL.total_seconds())
    return now


def _read(ask: Callable[[], _Read]) -> _Read:
    """Return the API's answer; retry without limit while it fails: the run waits there, Paused or resumed."""
    while True:
        try:
            return ask()
        except httpx.HTTPError as error:
            if not is_temporary(error):
                raise
        time.sleep(_POLL_INTERVAL.total_seconds())


def leave_without() -> NoReturn:
    """End this process's part in a suspended flow run, whose state stays. Always raises `Pause`."""
    raise Pause(state=suspended_state())


def last_form() -> Shown | None:
    """Return the form with which this flow run was last suspended, and its answer; None if it never was.

    The form is found by the run's states, all of which Prefect lists; of inputs it lists only the oldest 200.
    """
    if not can_be_suspended():
        return None
    run = _run_id()
    with get_client(sync_client=True) as client:
        states = in_order(client.read_flow_run_states(run))
        since = max((number for number, each in enumerate(states) if _is_ours(each)), default=None)
        if since is None:
            return None
        details = states[since].state_details
        answer = _stored_answer(client, run, details.run_input_keyset or {})
    if answer is None and is_resumed(states[since:]):
        answer = {}  # Prefect stores no input for an untouched form
    key = str(details.pause_key)
    return Shown(key, key.removeprefix(_PREFIX).rpartition("-")[0], answer)


def _is_ours(state: State[Any]) -> bool:
    return state.is_paused() and str(state.state_details.pause_key).startswith(_PREFIX)


def _stored_answer(client: SyncPrefectClient, run: UUID, keyset: Mapping[str, str]) -> Mapping[str, object] | None:
    found = client.filter_flow_run_input(run, key_prefix=keyset["response"], limit=1, exclude_keys=set())
    answer = found[0].decoded_value if found else None
    return answer if isinstance(answer, Mapping) else None


def _run_id() -> UUID:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("only a flow run can be suspended")
    return context.flow_run.id
