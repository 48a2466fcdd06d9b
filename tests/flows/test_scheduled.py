"""A schedule that fires three times, by Prefect's own scheduler and worker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_tune.blocks import LocalTarget
from tests.fakes.processes import free_port
from tests.flows.training import experiment_at

_BIN = Path(sys.executable).parent
_PATIENCE = timedelta(minutes=10)
_EVERY_SECONDS = 20


@contextmanager
def running(environment: Mapping[str, str], directory: Path, *command: str) -> Iterator[None]:
    with (directory / f"{command[0]}-{command[1]}.log").open("wb") as log:
        process = subprocess.Popen([str(_BIN / command[0]), *command[1:]], env=environment, cwd=directory, stdout=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def states(client: SyncPrefectClient) -> list[str]:
    only = DeploymentFilter(name=DeploymentFilterName(any_=["often"]))
    return [str(each.state_name) for each in client.read_flow_runs(deployment_filter=only)]


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_a_schedule_that_fires_three_times_extends_one_experiment_each_time(tmp_path: Path) -> None:
    """Each run takes longer than the period, so that others fire meanwhile, and are cancelled."""
    port, target = free_port(), LocalTarget(path=str(tmp_path / "target"))
    url = f"http://127.0.0.1:{port}/api"
    environment = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }
    parameters = {
        "trainable": "tests.trainables.digits_table:DigitsTable",
        "space": '{"row": {"randint": [0, 160]}, "step_seconds": 2}',
        "target": target.uri,
        "metric": "error",
        "stop": '{"step": 8}',
        "samples_per_run": "2",
        "max_concurrent_trials": "1",
    }
    given = [word for name, value in parameters.items() for word in ("--param", f"{name}={value}")]
    often = ("--name", "often", "--work-pool", "often", "--no-automations", "--every-seconds", str(_EVERY_SECONDS))
    with (
        running(environment, tmp_path, "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)),
        temporary_settings({PREFECT_API_URL: url}),
        get_client(sync_client=True) as client,
    ):
        _until("the server answers", lambda: client.api_healthcheck() is None)
        for command in (
            ("prefect", "work-pool", "create", "often", "--type", "process"),
            ("prefect-tune", "deploy", "tune", *often, *given),
        ):
            subprocess.run([str(_BIN / command[0]), *command[1:]], env=environment, check=True)
        with running(environment, tmp_path, "prefect", "worker", "start", "--pool", "often"):
            _until("three runs are over", lambda: states(client).count("Completed") >= 3)
            _until("one too many has fired", lambda: "Cancelled" in states(client))
        experiment = experiment_at(target, "often")
        assert len(experiment.extensions) >= 3
        assert set(experiment.extensions.values()) == {2}
        assert len(experiment.trials) >= 6
        assert not {"Failed", "Crashed"} & set(states(client))


def _until(what: str, holds: object) -> None:
    assert callable(holds)
    end = time.monotonic() + _PATIENCE.total_seconds()
    while not holds():
        assert time.monotonic() < end, f"not within {_PATIENCE}: {what}"
        time.sleep(1)
