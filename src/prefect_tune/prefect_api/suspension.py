"""*Suspend* of a flow run: detect it, keep it from interrupting tasks, and give it an input form.

To ask upstream: a public `is_suspended()`; a context in which tasks still run, so that a suspended run can save;
`suspend_flow_run` on a run that is Suspended already; and that it saves the form before the state, not after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import SetStateStatus
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.input import RunInput, keyset_from_paused_state
from prefect.states import Suspended

from prefect_tune.prefect_api.compatibility import prefect_changed

__all__ = ["ignoring_suspension", "is_suspended", "suspend_with_form", "suspended_state"]

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


def suspend_with_form(client: SyncPrefectClient, run_id: UUID, form: type[RunInput], key: str) -> State[Any]:
    """Set a running or suspended flow run to Suspended with `form`; return the state.

    `suspend_flow_run(wait_for_input=...)` refuses a run that was suspended in the UI. And it saves the form after the
    state: a process that ends in between leaves a run that the UI cannot resume.

    Args:
        client: a client of the run's server.
        run_id: the flow run.
        form: its fields and description.
        key: identifies the form among those of the run.

    Raises:
        Abort: the run is neither running nor suspended any more.
    """
    state: State[Any] = Suspended(pause_key=key)
    keyset = keyset_from_paused_state(state)
    state.state_details.run_input_keyset = {str(name): each for name, each in keyset.items()}
    form.save(keyset, run_id)
    if client.set_flow_run_state(run_id, state).status is SetStateStatus.ACCEPT:
        return state
    now = client.read_flow_run(run_id).state
    if now is None or not now.is_paused():
        raise Abort(f"The flow run is {now.name if now else 'deleted'} now: this process leaves it so.")
    state.state_details.pause_timeout = now.state_details.pause_timeout
    client.set_flow_run_state(run_id, state, force=True)  # the server's rules allow no form for a suspended run
    return state
