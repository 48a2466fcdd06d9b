"""The last line of a run that a signal ended: how to resume, by what Prefect offers for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from prefect_tune.core.experiment.experiment import nothing_yet
from prefect_tune.suspension.suspend_loop import resumable
from tests.fakes.checkpoints import first_generation


@pytest.mark.parametrize(
    ("deployment", "advice"),
    [
        (None, "run it again under the same experiment name, to resume"),
        (uuid4(), "press Retry, or run it again under the same experiment name, to resume"),
    ],
    ids=["a script", "a run of a deployment"],
)
def test_only_for_a_run_of_a_deployment_retry_is_named(
    monkeypatch: pytest.MonkeyPatch, deployment: UUID | None, advice: str
) -> None:
    run = FlowRun(flow_id=uuid4(), deployment_id=deployment)
    monkeypatch.setattr(FlowRunContext, "get", lambda: cast("FlowRunContext", SimpleNamespace(flow_run=run)))
    assert resumable(nothing_yet(first_generation("e"))) == f"experiment 'e': all 0 trials have ended; {advice}"
