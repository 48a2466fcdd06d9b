"""The demo's handle of a process that runs the flow: its progress, its exit code, and how to kill it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, cast

from prefect_tune.core.errors import TuneError
from prefect_tune.demo.worker import ActRequest

__all__ = ["ActProcess", "act_process"]

_STEP = re.compile(r"\bstep (\d+): loss \S+, accuracy (\S+)")
_LAST_WORDS = 15


class ActProcess:
    """A process that runs the flow, and everything it logs."""

    def __init__(self, process: subprocess.Popen[str], output: IO[str]) -> None:
        self._process = process
        self._said: deque[str] = deque(maxlen=_LAST_WORDS)
        self.step = 0
        """The newest step it has trained."""
        self.accuracy = 0.0
        self._reading = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reading.start()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def begin(self, act: ActRequest) -> None:
        """Send the request, on which the process runs the flow."""
        request = cast("IO[str]", self._process.stdin).fileno()
        with suppress(BrokenPipeError):  # it has ended; `wait` returns its exit code
            os.write(request, f"{act.model_dump_json()}\n".encode())

    def kill(self) -> None:
        """Send SIGKILL: no handler runs, nothing is flushed."""
        self._process.kill()

    def wait(self) -> int:
        """Read all its output, and return its exit code, or minus the signal that killed it."""
        code = self._process.wait()
        self._reading.join()
        return code

    def require_success(self) -> None:
        """Wait for it.

        Raises:
            TuneError: it failed; the message has its last output.
        """
        if code := self.wait():
            raise TuneError(f"a run of the demo ended with exit code {code}; last output:\n" + "\n".join(self._said))

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self._said.append(line.rstrip("\n"))
            if trained := _STEP.search(line):
                self.step, self.accuracy = int(trained[1]), float(trained[2])


@contextmanager
def act_process(environment: Mapping[str, str]) -> Iterator[ActProcess]:
    """Start the process of an act, which imports what it needs and waits. It is gone when the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "prefect_tune.demo.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(environment),
        start_new_session=True,  # Ctrl-C is for the demo, which then ends it
    )
    with cast("IO[str]", process.stdin), cast("IO[str]", process.stdout) as output:
        run = ActProcess(process, output)
        try:
            yield run
        finally:
            process.kill()
            run.wait()
