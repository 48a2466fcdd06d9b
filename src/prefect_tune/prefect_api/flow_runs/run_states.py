"""What the states of a flow run say: whether it is alive, and who started it last, a person or an automation.

To ask upstream: that a state records who set it, a person or an automation.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventOrder, EventResourceFilter
from prefect.settings import get_current_settings

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
