"""The parts of Prefect's *Suspend* that the package needs, and its error where they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect import flow, task
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.states import Suspended

from prefect_tune.core.errors import TuneError
from prefect_tune.prefect_api.api_client import OLDEST_TESTED
from prefect_tune.prefect_api.flow_runs import ignoring_suspension, is_suspended


@task
def _saves() -> str:
    return "saved"


@pytest.mark.usefixtures("prefect_server")
def test_a_suspended_run_is_noticed_and_saves_before_prefect_ends_it() -> None:
    seen: list[object] = []

    def train() -> None:
        seen.append(is_suspended())
        context = FlowRunContext.get()
        assert context is not None
        context.flow_run_suspension_request.mark_requested(Suspended())
        seen.append(is_suspended())
        with ignoring_suspension():
            seen.append(_saves())
        _saves()

    with pytest.raises(Pause):
        run_flow(flow(name="suspended")(train))
    assert seen == [False, True, "saved"]


@pytest.mark.usefixtures("prefect_server")
def test_a_prefect_without_it_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FlowRunContext.model_fields, "flow_run_suspension_request")

    def train() -> None:
        with ignoring_suspension():
            raise AssertionError

    with pytest.raises(TuneError, match=r"Prefect 3\..* has changed: .* is gone, .*: install one of these, or a newer"):
        flow(name="refused")(train)()


def test_the_oldest_prefect_that_is_tested_is_the_oldest_allowed() -> None:
    allowed = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'"prefect>={OLDEST_TESTED.removesuffix(".0")},<4"' in allowed
