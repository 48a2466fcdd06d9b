"""A user's installation: a Prefect server with its UI, a process worker, and the deployments."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID, uuid4

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun

from prefect_tune.prefect_api.local_server import PrefectServer, start_prefect_server
from tests.fakes.servers.prefect_database import IN_MEMORY

_POOL = "training"
_MARK = "PREFECT_TUNE_TEST_INSTALLATION"
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Installation:
    """A server that answers, and a worker that runs its deployments."""

    api_url: str
    log: Path
    """The output of the worker and its runs."""
    server_log: Path

    @property
    def ui_url(self) -> str:
        return self.api_url.removesuffix("/api")

    @contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        with SyncPrefectClient(self.api_url) as client:
            yield client

    def start(self, flow: str, **parameters: Any) -> UUID:
        """Start the deployment of that name, as a user's script would; return its run."""
        with self.client() as client:
            deployment = client.read_deployment_by_name(f"{flow}/{flow}")
            return client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id

    def run(self, flow_run: UUID) -> FlowRun:
        with self.client() as client:
            return client.read_flow_run(flow_run)

    def runs(self) -> Mapping[UUID, FlowRun]:
        with self.client() as client:
            return {each.id: each for each in client.read_flow_runs()}

    def knows_of_a_kill(self) -> bool:
        """Whether the worker has reported the kill too: it does so 10 to 30 s later, and then logs this line."""
        return "flow_runs.worker - Check whether the flow run exceeded its memory" in self.log.read_text()

    def kill(self, flow_run: UUID) -> None:
        """`kill -9` of the process in which the worker runs it: it is reported as `host:pid`."""
        os.kill(int(str(self.run(flow_run).infrastructure_pid).rpartition(":")[2]), signal.SIGKILL)


@contextmanager
def installed(folder: Path, migrated: Path) -> Iterator[Installation]:
    """Install it below `folder`, on a copy of a database that has its tables, and end all of it with the block."""
    mark = uuid4().hex
    with TemporaryDirectory(dir=IN_MEMORY) as memory, _server_log(folder).open("wb") as log:
        database = Path(memory, "prefect.db")
        settings = {
            **os.environ,
            _MARK: mark,
            "PREFECT_HOME": str(folder),
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
            "PREFECT_API_LOG_RETRYABLE_ERRORS": "true",  # why it was too busy
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": str(_REPOSITORY),
        }
        shutil.copy(migrated, database)
        server = start_prefect_server(settings, log)
        try:
            assert server.answers(), _server_log(folder).read_text()
            with _deployed(server, settings, folder) as installation:
                yield installation
        finally:
            server.end()
            _end_all(mark)


def _server_log(folder: Path) -> Path:
    return folder / "server.log"


@contextmanager
def _deployed(server: PrefectServer, settings: Mapping[str, str], folder: Path) -> Iterator[Installation]:
    environment = {**settings, "PREFECT_API_URL": server.url}
    installation = Installation(server.url, folder / "worker.log", _server_log(folder))
    with installation.client() as client:
        client.create_work_pool(WorkPoolCreate(name=_POOL, type="process"))
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", _POOL, "--limit", "4"]
    with installation.log.open("wb") as log:
        worker = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        _deploy(environment)
        yield installation
    finally:
        worker.terminate()
        with suppress(subprocess.TimeoutExpired):
            worker.wait(10)


def _deploy(environment: Mapping[str, str]) -> None:
    command = [
        str(Path(sys.executable).with_name("prefect-tune")),
        "deploy",
        "tune",
        "resume",
        "--work-pool",
        _POOL,
        "--no-automations",
    ]
    done = subprocess.run(command, env=environment, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _end_all(mark: str) -> None:
    """End all processes started here that still run: flows of a dead worker, and their children."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid() and _is_marked(entry, mark):
            with suppress(ProcessLookupError):
                os.kill(int(entry.name), signal.SIGKILL)


def _is_marked(process: Path, mark: str) -> bool:
    with suppress(OSError):
        return f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
    return False
