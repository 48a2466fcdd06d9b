"""Fixtures: processes that run flows and can be killed, and the targets that they write to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil  # type: ignore[import-untyped]  # the package has no types
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from pydantic import SecretStr

from prefect_tune.blocks import LocalTarget, S3Target
from tests.fakes.command_line import PROGRAM
from tests.fakes.searches.left_experiments import require_booked_seconds
from tests.fakes.servers.moto_server import aws_client
from tests.fakes.servers.processes import free_port, running_server
from tests.fakes.trial_processes import PORTABLE
from tests.flows.driver import Drivers
from tests.flows.interruptions.trouble import Trouble, recording_logs

BUCKET = "durable"
POOL = "tune-test"
_REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def slot_seconds(tmp_path: Path) -> Iterator[None]:
    """After a test, require that each slot's seconds are booked once, also in killed searches."""
    yield
    require_booked_seconds(tmp_path)


@pytest.fixture
def drivers(prefect_server: str, tmp_path: Path) -> Iterator[Drivers]:
    """Run flows in child processes against the session's server."""
    drivers = Drivers(prefect_server, tmp_path)
    yield drivers
    drivers.close()


@pytest.fixture(params=["forked", "started"])
def process_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of trials, like on Linux, or start them, like on other systems."""
    if request.param == "started":
        monkeypatch.setenv(*PORTABLE)


@pytest.fixture
def local_target(tmp_path: Path) -> LocalTarget:
    return LocalTarget(path=str(tmp_path / "target"))


@pytest.fixture
def trouble(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trouble]:
    """An experiment in this process that fails like its configuration says."""
    request.getfixturevalue("prefect_server" if "waiting_run" in request.fixturenames else "no_prefect_server")
    with recording_logs() as records:
        yield Trouble(tmp_path, records)


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a moto server in another process, with one bucket."""
    port, log = free_port(), tmp_path_factory.mktemp("moto") / "log"
    command = [sys.executable, "-m", "tests.fakes.servers.moto_server", "-H", "127.0.0.1", "-p", str(port)]
    with running_server(command, port, log):
        aws_client(f"http://127.0.0.1:{port}").create_bucket(Bucket=BUCKET)
        yield port


@pytest.fixture
def s3_target(s3_port: int) -> S3Target:
    return s3_at(s3_port)


def s3_at(port: int, *, request_timeout_seconds: float = 60) -> S3Target:
    """Return a new prefix in the bucket, through `port`."""
    return S3Target(
        bucket=BUCKET,
        prefix=uuid4().hex,
        region="us-east-1",
        endpoint_url=f"http://127.0.0.1:{port}",
        allow_http=True,
        access_key_id="test",
        secret_access_key=SecretStr("test"),
        request_timeout_seconds=request_timeout_seconds,
    )


@pytest.fixture
def environment(prefect_server: str) -> dict[str, str]:
    return {
        **os.environ,
        "PREFECT_API_URL": prefect_server,
        "PYTHONPATH": str(_REPOSITORY),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }


@pytest.fixture
def deployment(environment: dict[str, str]) -> None:
    """The flows, deployed to a pool without a worker."""
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"), overwrite=True)
    command = [*PROGRAM, "deploy", "--work-pool", POOL, "--no-automations"]
    process = subprocess.run(command, env=environment, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture
def worker(deployment: None, environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process worker of the pool."""
    del deployment
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--limit", "2"]
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
    yield process
    process.terminate()
    with suppress(subprocess.TimeoutExpired):  # the worker waits for its runs
        process.wait(60)
        return
    for survivor in [*psutil.Process(process.pid).children(recursive=True), process]:
        survivor.kill()
    process.wait(60)
