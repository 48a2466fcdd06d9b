"""Leave a flow run suspended with a form, and find what it was answered with: Prefect's side of asking a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn
from uuid import UUID, uuid4

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRunInput, State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause
from prefect.input import RunInput
from prefect.input.run_input import keyset_from_base_key
from prefect.states import Suspended

__all__ = ["Reply", "can_be_suspended", "forget", "leave_with", "leave_without", "replies"]

_PREFIX = "prefect-tune-"
_RESPONSE = "-response"
_SCHEMA = "-schema"
_MOST_INPUTS = 200


@dataclass(frozen=True, slots=True)
class Reply:
    """What a form was answered with."""

    key: str
    """Of the form: no other has it."""
    to: str
    """What the form was about."""
    answer: Mapping[str, object]


def can_be_suspended() -> bool:
    """Whether the process may leave the flow run of this context, to be started again by a worker on *Resume*."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return run is not None and run.deployment_id is not None and run.parent_task_run_id is None


def leave_with(form: type[RunInput], about: str) -> NoReturn:
    """Have the flow run be Suspended with `form`, and leave it.

    Args:
        about: what `replies` tells the reply by, once there is one: small letters, digits and dashes.

    Raises:
        Pause: always, but for one case: the process ends, and the run is started again on *Resume*.
        Abort: the run was resumed, or ended, meanwhile: it is somebody else's.
    """
    key = f"{_PREFIX}{about}-{uuid4().hex[:12]}"
    keyset = keyset_from_base_key(f"suspended-{key}")
    with get_client(sync_client=True) as client:
        run_id = _run_id()
        form.save(keyset, run_id)  # first: a run that waits for a form which is not there cannot be resumed
        now = client.read_flow_run(run_id).state
        if now is None or not (now.is_running() or _is_suspended(now)):
            raise Abort(f"The flow run is {now.name if now else 'gone'} meanwhile: it is left as it is.")
        state: State[Any] = Suspended(pause_key=key)
        state.state_details.pause_timeout = now.state_details.pause_timeout
        state.state_details.run_input_keyset = {str(name): given for name, given in keyset.items()}
        # A run that was suspended by somebody else has no form: Prefect's rules would not let it have one any more.
        client.set_flow_run_state(run_id, state, force=True)
    raise Pause(state=state)


def leave_without() -> NoReturn:
    """Leave a flow run that is suspended as it is. Raises `Pause`, always."""
    context = FlowRunContext.get()
    state = context.flow_run_suspension_request.get_state() if context else None
    raise Pause(state=state)


def replies() -> Sequence[Reply]:
    """Return what this flow run's forms were answered with, oldest first.

    Who resumes it and leaves the form as it is, answers with nothing, of which Prefect keeps nothing.
    """
    if not can_be_suspended():
        return []
    run, prefix = _run_id(), f"suspended-{_PREFIX}"
    with get_client(sync_client=True) as client:
        found = client.filter_flow_run_input(run, key_prefix=prefix, limit=_MOST_INPUTS, exclude_keys=set())
        found.sort(key=lambda each: str(each.created))
        given = {_form_of(each): each.decoded_value for each in found if each.key.endswith(_RESPONSE)}
        forms = [each for each in found if each.key.endswith(_SCHEMA)]
        if forms and _form_of(forms[-1]) not in given and _is_resumed(client, forms[-1].created):
            given[_form_of(forms[-1])] = {}
    return [_reply(key, answer) for key, answer in given.items()]


def _form_of(given: FlowRunInput) -> str:
    return given.key.removeprefix("suspended-").rpartition("-")[0]


def _is_resumed(client: SyncPrefectClient, since: datetime | None) -> bool:
    states = client.read_flow_run_states(_run_id())
    return since is not None and any(each.name == "Resuming" and each.timestamp > since for each in states)


def forget(reply: Reply) -> None:
    """Have a reply not be found again."""
    with get_client(sync_client=True) as client:
        client.delete_flow_run_input(_run_id(), key=f"suspended-{reply.key}{_RESPONSE}")


def _reply(key: str, answer: Any) -> Reply:
    return Reply(key, key.removeprefix(_PREFIX).rpartition("-")[0], answer if isinstance(answer, Mapping) else {})


def _is_suspended(state: State[Any]) -> bool:
    return state.is_paused() and state.name == "Suspended"


def _run_id() -> UUID:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("only a flow run can be suspended")
    return context.flow_run.id
