"""A user of the Prefect UI: the requests that its buttons send, and the data that it shows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import LogFilter
from prefect.client.schemas.objects import State, StateDetails, StateType
from prefect.client.schemas.responses import SetStateStatus


def eventually(what: str, holds: Callable[[], object], patience: timedelta = timedelta(seconds=150)) -> None:
    """Return as soon as it holds; fail when that takes longer than `patience`."""
    end = time.monotonic() + patience.total_seconds()
    while not holds():
        assert time.monotonic() < end, f"not within {patience}: {what}"
        time.sleep(0.2)


class Ui:
    """Sends the requests that the UI of Prefect 3.8.8 sends."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client = client

    def start(self, deployment: str, **parameters: object) -> UUID:
        found = self._client.read_deployment_by_name(f"{deployment}/{deployment}")
        return self._client.create_flow_run_from_deployment(found.id, parameters=parameters).id

    def state(self, run: UUID) -> State[Any]:
        state = self._client.read_flow_run(run).state
        assert state is not None
        return state

    def suspend(self, run: UUID) -> None:
        suspended: State[Any] = State(type=StateType.PAUSED, name="Suspended")
        suspended.state_details = StateDetails(pause_reschedule=True)
        assert self._client.set_flow_run_state(run, suspended, force=True).status is SetStateStatus.ACCEPT

    def form(self, run: UUID, *, but: str = "") -> tuple[Mapping[str, Any], str]:
        """Wait for a form other than the page `but`; return its schema and its page."""
        found: list[tuple[Mapping[str, Any], str]] = []

        def shown() -> bool:
            keyset = self.state(run).state_details.run_input_keyset
            if keyset is None:
                return False
            schema, page = (
                json.loads(self._client.read_flow_run_input(run, keyset[it])) for it in ("schema", "description")
            )
            found[:] = [(schema, page)]
            return page != but

        eventually(f"a form; it is {self.state(run)}\n{self.log(run)}", shown)
        return found[-1]

    def resume(self, run: UUID, **answer: object) -> None:
        assert self._client.resume_flow_run(run, run_input=answer or None).status is SetStateStatus.ACCEPT

    def retry(self, run: UUID, message: str = "Retry from the UI") -> None:
        retried: State[Any] = State(type=StateType.SCHEDULED, name="AwaitingRetry", message=message)
        self._client.set_flow_run_state(run, retried, force=True)

    def cancel(self, run: UUID) -> None:
        self._client.set_flow_run_state(run, State(type=StateType.CANCELLING, name="Cancelling"), force=True)

    def log(self, run: UUID) -> str:
        only = LogFilter.model_validate({"flow_run_id": {"any_": [str(run)]}})
        return "\n".join(each.message for each in self._client.read_logs(only, limit=200))

    def history(self, run: UUID) -> list[State[Any]]:
        """Its states, oldest first."""
        return sorted(self._client.read_flow_run_states(run), key=lambda each: each.timestamp)

    def until_final(self, run: UUID) -> State[Any]:
        eventually("the end", lambda: self.state(run).is_final())
        return self.state(run)

    def process_of(self, run: UUID) -> int:
        """The process that the worker runs the flow in: it reports `host:pid`."""
        return int(str(self._client.read_flow_run(run).infrastructure_pid).rpartition(":")[2])
