"""The clusters that run the trials, Dask's and Ray's: each part in a control group, to measure and to kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from benchmarks.cluster.work import RAY_CPUS, Work, steps_of
from benchmarks.measuring.cpu_group import CpuGroup, cpu_group
from tests.fakes.servers.processes import free_port

__all__ = ["Cluster", "dask_cluster", "ray_cluster"]

_REPOSITORY = Path(__file__).parents[2]
_START_SECONDS = 240
_WORKERS_END_SECONDS = 120
_WORKERS = 4
_PRELOAD = ("--preload", "prefect_tune.tasks")  # else the first trial has each process import it in its event loop


_DASK = {  # as docs/recipes/dask.md advises for many trials
    "DASK_DISTRIBUTED__ADMIN__LOW_LEVEL_LOG_LENGTH": "20",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
}


Groups: TypeAlias = Mapping[str, CpuGroup]


class Cluster(ABC):
    """Runs searches as a process of its own, on a cluster that runs already."""

    module: str
    """The search: `benchmarks.cluster.<module>`."""

    def __init__(self, python: str, environment: Mapping[str, str], folder: Path, groups: Groups) -> None:
        self.groups = groups
        self.log = folder / "log"
        self.folder = folder
        self._python = python
        # Compiled modules, and the trainable, as an installation has them.
        self._environment = {**environment, "PYTHONPATH": str(_REPOSITORY)}
        self._port = free_port()

    @abstractmethod
    def start(self, work: Work) -> None:
        """Start the parts that do not run yet; return once the cluster accepts work."""

    @abstractmethod
    def kill_worker(self, work: Work) -> None:
        """`kill -9` the worker that has trained the latest step."""

    @abstractmethod
    def kill_machine(self) -> None:
        """`kill -9` the search, and the machine on which the cluster's scheduler runs."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address that a search connects to."""

    def search(self, work: Work, act: str) -> subprocess.Popen[bytes]:
        """Start the search: `new`, or the `resume` of one that was killed."""
        command = [self._python, "-m", f"benchmarks.cluster.{self.module}", work.with_address(self.address).json(), act]
        return self._start_part("driver", command)

    def end(self) -> None:
        for group in self.groups.values():
            group.kill()

    def _start_part(self, part: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.groups[part].inside(command),
                env=self._environment,
                cwd=_REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait_for(self, name: str, command: Sequence[str]) -> None:
        """Wait until the command succeeds."""
        end = time.monotonic() + _START_SECONDS
        while subprocess.run(command, env=self._environment, capture_output=True, check=False).returncode:
            if time.monotonic() > end:
                raise RuntimeError(f"{name} did not start: {self.log.read_text()[-3000:]}")
            time.sleep(0.5)


class _Dask(Cluster):
    module = "ours"

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def start(self, work: Work) -> None:
        scheduler = [self._python, "-m", "distributed.cli.dask_scheduler", "--no-dashboard", *_PRELOAD]
        if not self.groups["Dask scheduler"].pids():
            self._start_part("Dask scheduler", [*scheduler, "--host", "127.0.0.1", "--port", str(self._port)])
        threads = str(-(-work.concurrent // _WORKERS))
        worker = [self._python, "-m", "distributed.cli.dask_worker", self.address, "--no-dashboard"]
        if not self.groups["workers"].pids():
            sizes = ["--nworkers", str(_WORKERS), "--nthreads", threads, "--memory-limit", "0"]
            options = [*_PRELOAD, "--local-directory", str(self.folder / "dask")]
            self._start_part("workers", [*worker, *sizes, *options])
        connected = (
            f"from distributed import Client; Client('{self.address}').wait_for_workers({_WORKERS}, timeout=120)"
        )
        self._wait_for("the Dask cluster", [self._python, "-c", connected])

    def kill_worker(self, work: Work) -> None:
        latest = list(steps_of(work.record))[-1].pid
        while Path(f"/proc/{latest}/comm").read_text().startswith("trial"):
            latest = int(Path(f"/proc/{latest}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(latest, signal.SIGKILL)

    def kill_machine(self) -> None:
        self.groups["driver"].kill()
        self.groups["Dask scheduler"].kill()
        # Without a scheduler, workers end by themselves within a minute; what has started them starts them again.
        self.groups["workers"].require_empty(seconds=_WORKERS_END_SECONDS)


class _Ray(Cluster):
    module = "ray_tune"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self, work: Work) -> None:
        del work
        ray = str(Path(self._python).with_name("ray"))
        head = [ray, "start", "--head", "--block", f"--num-cpus={RAY_CPUS}", "--include-dashboard=false"]
        if not self.groups["workers"].pids():
            self._start_part("workers", [*head, f"--port={self._port}", f"--temp-dir={self.folder / 'ray'}"])
        self._wait_for("the Ray cluster", [ray, "status", f"--address={self.address}"])
        time.sleep(5)  # it answers before its node takes work

    def kill_worker(self, work: Work) -> None:
        os.kill(list(steps_of(work.record))[-1].pid, signal.SIGKILL)

    def kill_machine(self) -> None:
        self.end()  # without its head node, nothing of a Ray cluster lives


@contextmanager
def _groups(*parts: str) -> Iterator[Groups]:
    """Yield a group for each part; in the end, kill what lives in them."""
    with ExitStack() as stack:
        groups = {part: stack.enter_context(cpu_group()) for part in parts}
        for group in groups.values():
            stack.callback(group.kill)
        yield groups


@contextmanager
def dask_cluster(environment: Mapping[str, str], folder: Path) -> Iterator[Cluster]:
    """Yield a cluster of Dask that is not started yet; `environment` says which Prefect server."""
    with _groups("driver", "Dask scheduler", "workers") as groups:
        yield _Dask(sys.executable, {**environment, **_DASK}, folder, groups)


@contextmanager
def ray_cluster(python: str, environment: Mapping[str, str], folder: Path) -> Iterator[Cluster]:
    """Yield a cluster of Ray that is not started yet."""
    with _groups("driver", "workers") as groups:
        yield _Ray(python, environment, folder, groups)
