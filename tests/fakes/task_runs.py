"""The task runs of a flow run on the Prefect server, which receives them with a delay."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId


def states_of_attempts(flow_run: str | UUID | None) -> Mapping[str, tuple[str | None, str | None]]:
    """Return name and message of the state of each attempt's task run, by the name of the run."""
    only = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(str(flow_run))]))
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=only, limit=200)
    ours = sorted((each for each in runs if each.name.startswith("train ")), key=lambda each: each.name)
    return {each.name: (each.state_name, each.state.message if each.state else None) for each in ours}
