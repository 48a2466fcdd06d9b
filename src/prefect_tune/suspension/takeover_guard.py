"""Decide whether a flow run may take over its experiment: not in a crash loop, and not from a live run."""

from __future__ import annotations

from contextlib import suppress
from typing import NoReturn
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, PrefectException
from prefect.logging import get_run_logger
from prefect.states import Cancelled

from prefect_tune.core.errors import CrashLoop
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events import Owner
from prefect_tune.journal_access import current_owner
from prefect_tune.prefect_api.flow_runs import is_alive, is_started_by_hand


def owner_after(known: Experiment, max_restarts: int, *, answered: bool = False) -> Owner:
    """Return the owner with which this run is to open the experiment.

    Args:
        known: the experiment, before it is opened.
        max_restarts: how many automatic restarts in a row may end without progress.
        answered: whether a person has just answered this process.

    Raises:
        CrashLoop: this run was restarted automatically `max_restarts` times without progress.
        Abort: a schedule started this run, and the experiment's last run is alive, or waits for a person: this run is
            set to Cancelled, and the target is unchanged.
    """
    owner, before = current_owner(), known.owner
    if before is None or before.flow_run is None or owner.flow_run is None:
        return owner
    if before.flow_run != owner.flow_run:
        _leave_to_the_living(known.name, before)
        return owner
    if answered or _is_by_hand(UUID(owner.flow_run)):
        return owner.model_copy(update={"by_hand": True})
    if known.restarts >= max_restarts:
        raise CrashLoop(
            f"experiment {known.name!r}: this run was restarted {known.restarts} times in a row, and each time it "
            "ended before it committed a checkpoint or decided about a trial. It is not restarted automatically any "
            "more. Read the log of its last start, remove the cause, then press Retry or resume the experiment: "
            "the count starts at 0 again"
        )
    return owner


def _is_by_hand(flow_run: UUID) -> bool:
    """Whether a person resumed or retried the run; False if the Prefect server does not answer."""
    try:
        with get_client(sync_client=True) as client:
            states = client.read_flow_run_states(flow_run)
    except (PrefectException, HTTPError, OSError):
        return False
    return is_started_by_hand(states)


def _leave_to_the_living(experiment: str, owner: Owner) -> None:
    """Cancel a scheduled run while the last run is alive: a takeover would lose its unsaved steps."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or not run.auto_scheduled or owner.flow_run is None:
        return
    with suppress(PrefectException, HTTPError, OSError), get_client(sync_client=True) as client:
        other = client.read_flow_run(UUID(owner.flow_run))
        if is_alive(other, client):
            _end_cancelled(run, f"experiment {experiment!r}: its last run, {other.name}, has not ended", client)


def _end_cancelled(run: FlowRun, why: str, client: SyncPrefectClient) -> NoReturn:
    get_run_logger().warning("%s: this scheduled run ends, and changes nothing", why)
    client.set_flow_run_state(run.id, Cancelled(name="Skipped", message=f"Skipped: {why}."))
    raise Abort(why)
