"""The Prefect API goes away: training continues, commits stay valid, and the flow completes once the API is back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.search.domains import grid_search
from tests.fakes.servers.tcp_proxy import TcpProxy
from tests.flows.driver import Drivers, until
from tests.flows.interruptions.mlp_training import MlpTraining
from tests.flows.training import owners_at, state_of_flow_run, trial_at
from tests.trainables.witness import acts_of

_NAME = "api"
_STEPS = 40


@pytest.fixture
def proxy(prefect_server: str) -> Iterator[TcpProxy]:
    port = urlsplit(prefect_server).port
    assert port is not None
    with TcpProxy(port) as passing:
        yield passing


def _training(drivers: Drivers, proxy: TcpProxy, target: LocalTarget, folder: Path, *, gate_step: int) -> MlpTraining:
    """Return a training whose flow reaches its server through the proxy; it waits before step `gate_step`."""
    training = MlpTraining(drivers, target, folder, _NAME, _STEPS, api_url=f"{proxy.url}/api")
    training.hold_at(gate_step)
    return training


_WAYS: dict[str, Callable[[TcpProxy], None]] = {
    "down": TcpProxy.refuse,
    "hung": TcpProxy.swallow,
    "failing": TcpProxy.answer_503,
}


@pytest.mark.long
@pytest.mark.parametrize("way", ["down", pytest.param("hung", marks=pytest.mark.deep), "failing"])
def test_training_goes_on_while_the_server_is_away_and_the_run_completes_when_it_is_back(
    drivers: Drivers, proxy: TcpProxy, local_target: LocalTarget, tmp_path: Path, way: str
) -> None:
    training = _training(drivers, proxy, local_target, tmp_path, gate_step=38)
    driver = training.start()
    training.until(lambda: training.committed() >= 5)
    _WAYS[way](proxy)
    training.until(lambda: training.committed() == 35)
    proxy.restore()
    training.gate.touch()
    training.require_identical_end(driver.wait())
    assert training.acts("begin") == list(range(1, _STEPS + 1))
    assert state_of_flow_run(owners_at(local_target, _NAME)[driver.pid])[0] == "Completed"
    assert "Exception in thread" not in driver.log


def test_a_server_that_is_away_at_the_end_costs_no_step(
    drivers: Drivers, proxy: TcpProxy, local_target: LocalTarget, tmp_path: Path
) -> None:
    training = _training(drivers, proxy, local_target, tmp_path, gate_step=30)
    driver = training.start()
    training.until(lambda: training.committed() == 25)
    proxy.refuse()
    training.gate.touch()
    training.until(lambda: trial_at(local_target, _NAME).status is Status.COMPLETED)
    proxy.restore()
    driver.wait()
    training.require_identical_end()
    again = training.start().wait()
    assert (again["status"], again["attempts"]) == ("completed", 1)


@pytest.mark.deep
@pytest.mark.parametrize("seconds", [6, 60])
def test_a_search_goes_on_while_the_server_is_away_and_the_ui_is_complete_afterwards(
    drivers: Drivers, proxy: TcpProxy, local_target: LocalTarget, tmp_path: Path, seconds: float
) -> None:
    witness, rows, steps = tmp_path / "witness", [3, 5, 8, 13, 21, 34], 6
    driver = drivers.start(
        "tests.trainables.digits_table:DigitsTable",
        {"row": grid_search(rows), "witness": str(witness), "step_seconds": seconds / 10},
        flow="tune",
        target=local_target,
        experiment=_NAME,
        metric="error",
        num_samples=1,
        stop={"step": steps},
        max_concurrent_trials=2,
        checkpoint=Cadence(every_steps=2),
        api_url=f"{proxy.url}/api",
    )

    def trained() -> int:
        return sum(each.act == "trained" for each in acts_of(witness))

    until(lambda: trained() >= 3, seconds=90, what=lambda: driver.log[-3000:])
    began, before = time.monotonic(), trained()
    proxy.refuse()
    until(lambda: time.monotonic() - began >= seconds, seconds=seconds + 30, what=lambda: "the outage")
    during = trained() - before
    proxy.restore()
    outcome = driver.wait(seconds=240)
    assert outcome.get("trials") == {f"{number:05d}": "completed" for number in range(len(rows))}, outcome
    assert during >= steps, driver.log[-3000:]  # some trial was begun and ended meanwhile
    assert trained() == len(rows) * steps  # none twice
    state, _ = state_of_flow_run(run := owners_at(local_target, _NAME)[driver.pid])
    assert state == "Completed"
    until(lambda: _task_runs_of(run) == (len(rows), {"Completed"}), seconds=60, what=lambda: str(_task_runs_of(run)))


def _task_runs_of(flow_run: Owner) -> tuple[int, set[str]]:
    """Return how many trials completed by the server's records, and the states of all task runs."""
    only = FlowRunFilter.model_validate({"id": {"any_": [str(flow_run.flow_run)]}})
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=only, limit=200)
    trained = sum(run.name.startswith("train ") and run.state_name == "Completed" for run in runs)
    return trained, {str(run.state_name) for run in runs}
