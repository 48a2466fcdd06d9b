"""*Suspend* of a flow run: detect it, keep it from interrupting tasks, and give it an input form.

To ask upstream: a public `is_suspended()`; a context in which tasks still run, so that a suspended run can save;
`suspend_flow_run` on a run that is Suspended already; and that form and state are set in one request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.input import RunInput, keyset_from_paused_state

from prefect_tune.prefect_api.compatibility import prefect_changed

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
    """Set a running or suspended flow run to `state`, Suspended or Paused, with the form that *Resume* asks.

    `suspend_flow_run` and `pause_flow_run` save the form after the state: a process that ends in between leaves a run
    that the UI cannot resume, and they refuse a run that was suspended in the UI. So the form is saved first. The state
    is forced: the server's rules refuse it for a suspended run, and from 3.9 on delete the form when they accept it.

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
