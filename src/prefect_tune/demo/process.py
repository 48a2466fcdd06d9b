"""The process of an act, seen from the demo: how far it has trained, and how it ended."""

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
from prefect_tune.demo.act import ActRequest

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
        """Have it run the flow."""
        request = cast("IO[str]", self._process.stdin).fileno()
        with suppress(BrokenPipeError):  # it has ended, and `wait` tells why
            os.write(request, f"{act.model_dump_json()}\n".encode())

    def kill(self) -> None:
        """Send SIGKILL: no handler runs, nothing is flushed."""
        self._process.kill()

    def wait(self) -> int:
        """Return its exit code, once everything that it said has been read; minus the signal that ended it."""
        code = self._process.wait()
        self._reading.join()
        return code

    def require_success(self) -> None:
        """Wait for it.

        Raises:
            TuneError: it failed; what it said last is in the message.
        """
        if code := self.wait():
            raise TuneError(f"a run of the demo ended with exit code {code}; it said:\n" + "\n".join(self._said))

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self._said.append(line.rstrip("\n"))
            if trained := _STEP.search(line):
                self.step, self.accuracy = int(trained[1]), float(trained[2])


@contextmanager
def act_process(environment: Mapping[str, str]) -> Iterator[ActProcess]:
    """Start the process of an act, which imports what it needs and waits. It is gone when the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "prefect_tune.demo.act"],
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
