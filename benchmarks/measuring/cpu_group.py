"""The CPU time of a process and of all its descendants, unreaped ones included, as the kernel counts it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO
from uuid import uuid4

__all__ = ["CpuGroup", "cpu_group", "sampling"]

_V1 = Path("/sys/fs/cgroup/cpuacct")
_V2 = Path("/sys/fs/cgroup")


class CpuGroup:
    """A control group. Processes started with `inside` belong to it, and so do all their descendants."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that joins the group and then becomes `command`."""
        return ["sh", "-c", f'echo $$ > {self._folder}/cgroup.procs && exec "$@"', "sh", *command]

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: TextIO,
        *,
        timeout_seconds: float,
        directory: Path | None = None,
    ) -> int:
        """Run a command inside, with its output in `log`; return its exit code."""
        return subprocess.run(
            self.inside(command),
            env=environment,
            cwd=directory,
            stdout=log,
            stderr=log,
            timeout=timeout_seconds,
            check=False,
        ).returncode

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its processes so far, ended ones included."""
        v1 = self._folder / "cpuacct.usage"
        if v1.exists():
            return int(v1.read_text()) / 1e9
        lines = (self._folder / "cpu.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("usage_usec ")) / 1e6

    def pids(self) -> list[int]:
        """Return the processes that live."""
        return [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]

    def memory_mib(self) -> float:
        """Return the memory of all that live; a page that several share counts once."""
        return sum(map(_proportional_kib, self.pids())) / 1024

    def kill(self) -> None:
        """`kill -9` all of them, until none lives."""
        self.require_empty(seconds=0)

    def require_empty(self, *, seconds: float = 30) -> None:
        """Give the remaining processes time to end, then kill them: all were started here."""
        end = time.monotonic() + seconds
        while pids := self.pids():
            if time.monotonic() >= end:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _proportional_kib(pid: int) -> int:
    with suppress(OSError):  # it has ended
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 0


@contextmanager
def sampling(sample: Callable[[], object], *, every_seconds: float) -> Iterator[None]:
    """Call `sample` every so often, in a thread, for the time of the block."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(every_seconds):
            sample()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@contextmanager
def cpu_group() -> Iterator[CpuGroup]:
    """Make a group, for the time of the block. It takes root, or a group that was handed over."""
    folder = (_V1 if _V1.is_dir() else _V2) / f"prefect-tune-{uuid4().hex[:8]}"
    folder.mkdir()
    group = CpuGroup(folder)
    try:
        yield group
    finally:
        group.require_empty()
        folder.rmdir()
