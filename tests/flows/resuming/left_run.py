"""The run of a deployment that waits for an input form, and is started again as a worker would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.input import RunInput
from prefect.states import AwaitingRetry

from prefect_tune.suspension import Shown, last_form, leave_with


class LeftRun:
    """A flow run whose code runs in this process."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client = client
        deployment = client.create_deployment(client.create_flow(flow(name="asks")(_nothing)), name="asks")
        self.id: UUID = client.create_flow_run_from_deployment(deployment).id

    def within(self, act: Callable[[], object]) -> Any:
        """Start the run, and call the function in it."""
        return run_flow(flow(name="asks")(act), flow_run=self._client.read_flow_run(self.id))

    def ask(self, form: type[RunInput]) -> None:
        with pytest.raises(Pause):
            self.within(lambda: leave_with(form))

    def resume(self, answer: Mapping[str, object] | None = None) -> None:
        self._client.resume_flow_run(self.id, run_input=None if answer is None else dict(answer))

    def retry(self) -> None:
        self._client.set_flow_run_state(self.id, AwaitingRetry(), force=True)

    def last_form(self) -> Shown | None:
        found: list[Shown | None] = []
        self.within(lambda: found.append(last_form()))
        return found[0]

    def page(self) -> str:
        """Return the text above the form that the run waits with."""
        state = self._client.read_flow_run(self.id).state
        keyset = state.state_details.run_input_keyset if state else None
        assert keyset is not None
        return self._client.read_flow_run_input(self.id, keyset["description"])

    def has_answered(self, forms: int) -> None:
        """Write the stored inputs that many earlier forms leave behind."""
        for number in range(forms):
            for kind in ("schema", "description", "response"):
                key = f"suspended-prefect-tune-{number:012}-{kind}"
                self._client.create_flow_run_input(self.id, key, '{"go_on": true}')


def _nothing() -> None:
    """A flow that no worker starts."""
