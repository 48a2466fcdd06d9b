"""Whether a run that was started again may take its experiment over: not in a crash loop, and not from the living."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import NoReturn
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventOrder, EventResourceFilter
from prefect.exceptions import Abort, ObjectNotFound, PrefectException
from prefect.logging import get_run_logger
from prefect.settings import get_current_settings
from prefect.states import Cancelled

from prefect_tune.core.errors import CrashLoop
from prefect_tune.core.events import Owner
from prefect_tune.core.experiment import Experiment
from prefect_tune.tasks.stamp import this_owner

__all__ = ["owner_after"]

_BY_HAND = ("Retr",)
"""How the messages begin of the states that Prefect's UI and command line give a run that somebody retries."""


def owner_after(known: Experiment, max_restarts: int, *, answered: bool = False) -> Owner:
    """Return who is to own the experiment, of which this is `known`.

    Args:
        known: the experiment, before it is opened.
        max_restarts: how many in a row that no person asked for may come to nothing.
        answered: whether this process goes on since a person has just answered it.

    Raises:
        CrashLoop: automations have started this run again and again, and nothing came of it.
        Abort: the run was started by a schedule, and the experiment's last run is alive, or waits for a person: this
            one is Cancelled, and nothing was touched.
    """
    owner, before = this_owner(), known.owner
    if before is None or before.flow_run is None or owner.flow_run is None:
        return owner
    if before.flow_run != owner.flow_run:
        _leave_to_the_living(known.name, before)
        return owner
    if answered or _is_started_by_hand(UUID(owner.flow_run)):
        return owner.model_copy(update={"by_hand": True})
    if known.restarts >= max_restarts:
        raise CrashLoop(
            f"experiment {known.name!r}: this run was started again {known.restarts} times in a row, and each time it "
            "ended before a checkpoint was committed or a trial decided about. It is not started again by itself. "
            "Look at the log of the last one, mend the cause, and press Retry, or resume the experiment: then it "
            "counts from 0"
        )
    return owner


def _is_started_by_hand(flow_run: UUID) -> bool:
    """Whether it was a person who had the run go on: by Resume, by Retry. Of what is not known it is not said."""
    try:
        with get_client(sync_client=True) as client:
            states = client.read_flow_run_states(flow_run)
    except (PrefectException, HTTPError, OSError):
        return False
    scheduled = [each for each in states if each.type is StateType.SCHEDULED]
    last = max(scheduled, key=lambda each: each.timestamp, default=None)
    return last is not None and (last.name == "Resuming" or (last.message or "").startswith(_BY_HAND))


def _leave_to_the_living(experiment: str, owner: Owner) -> None:
    """A schedule is in no hurry: what the last run has not saved yet would be lost."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or not run.auto_scheduled or owner.flow_run is None:
        return
    with suppress(ObjectNotFound, PrefectException, HTTPError, OSError), get_client(sync_client=True) as client:
        other = client.read_flow_run(UUID(owner.flow_run))
        if _is_alive(other, client):
            _end_cancelled(run, f"experiment {experiment!r}: its last run, {other.name}, still goes on", client)


def _is_alive(run: FlowRun, client: SyncPrefectClient) -> bool:
    """Whether it waits for a person, or has given a sign of life lately."""
    if run.state is None or not (run.state.is_running() or run.state.is_paused()):
        return False
    every = get_current_settings().flows.heartbeat_frequency
    if run.state.is_paused() or every is None:
        return True
    patience = timedelta(seconds=3 * every)
    signs = EventFilter(
        occurred=EventOccurredFilter(since=datetime.now(UTC) - patience),
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
        order=EventOrder.DESC,
    )
    began = run.state.timestamp
    return datetime.now(UTC) - began < patience or bool(client.read_events(signs, limit=1).events)


def _end_cancelled(run: FlowRun, why: str, client: SyncPrefectClient) -> NoReturn:
    get_run_logger().warning("%s: this scheduled one ends, and touches nothing", why)
    client.set_flow_run_state(run.id, Cancelled(name="Skipped", message=f"Skipped: {why}."), force=True)
    raise Abort(why)
