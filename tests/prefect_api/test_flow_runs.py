"""The parts of Prefect's *Suspend* that the package needs, and its error if they are missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect import flow, task
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.states import Suspended

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import TrialFailed, TuneError
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.prefect_api.api_client import MIN_TESTED_VERSION
from prefect_tune.prefect_api.flow_runs import ignoring_suspension, is_flow_run_suspended, make_failed_result
from tests.flows.training import experiment_at


@task
def _save() -> str:
    return "saved"


@pytest.mark.usefixtures("prefect_server")
def test_a_suspended_run_is_noticed_and_saves_before_prefect_ends_it() -> None:
    results: list[object] = []

    def train() -> None:
        results.append(is_flow_run_suspended())
        context = FlowRunContext.get()
        assert context is not None
        context.flow_run_suspension_request.mark_requested(Suspended())
        results.append(is_flow_run_suspended())
        with ignoring_suspension():
            results.append(_save())
        _save()

    with pytest.raises(Pause):
        run_flow(flow(name="suspended")(train))
    assert results == [False, True, "saved"]


@pytest.mark.usefixtures("prefect_server")
def test_a_prefect_without_it_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FlowRunContext.model_fields, "flow_run_suspension_request")

    def train() -> None:
        with ignoring_suspension():
            raise AssertionError

    with pytest.raises(TuneError, match=r"Prefect 3\..* has changed: .* is missing; .*: install one of these, or a"):
        flow(name="refused")(train)()


def test_the_oldest_prefect_that_is_tested_is_the_oldest_allowed() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"prefect>={MIN_TESTED_VERSION.removesuffix(".0")},<4"' in pyproject


# A flow that ends with an error of this package fails, and is retried if it has retries.


pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.mark.parametrize(("retries", "runs"), [(0, 1), (2, 3)])
def test_the_error_is_raised_where_the_flow_is_called_after_all_of_its_retries(retries: int, runs: int) -> None:
    calls = []

    @flow(retries=retries)
    def fail() -> str:
        calls.append(1)
        return make_failed_result(TrialFailed("as expected"), str)

    with pytest.raises(TrialFailed, match="as expected"):
        fail()
    assert len(calls) == runs


def test_the_state_is_failed_with_the_error_and_its_message() -> None:
    @flow
    def fail() -> str:
        return make_failed_result(TrialFailed("as expected"), str)

    state = fail(return_state=True)
    assert (state.is_failed(), state.message) == (True, "as expected")
    assert isinstance(state.result(raise_on_failure=False), TrialFailed)


# A run continues without a reader of its log, for example after a kill of its worker.


SCRIPT = """
import sys
import prefect_tune as pt
from tests.trainables.counting import Fragile

pt.tune(
    Fragile, {"x": pt.grid_search([1, 2]), "gate": sys.argv[2]}, target=sys.argv[1], experiment="e", metric="loss",
    stop={"step": 9}, num_samples=1, checkpoint=pt.Cadence(every_steps=1),
)
print("the end", flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_search_whose_log_nobody_reads_any_more_trains_to_its_end(prefect_server: str, tmp_path: Path) -> None:
    script, gate = tmp_path / "script.py", tmp_path / "gate"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "runs"), str(gate)],
        env={**os.environ, "PREFECT_API_URL": prefect_server, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("runs/e/1/trials/*/checkpoints/0000000001-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.stdout is not None
    process.stdout.close()
    gate.touch()
    assert process.wait(240) == 0
    trials = experiment_at(LocalTarget(path=str(tmp_path / "runs")), "e").trials.values()
    assert [(trial.status, trial.attempt, trial.step) for trial in trials] == [(Status.COMPLETED, 1, 9)] * 2
