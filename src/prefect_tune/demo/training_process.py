"""A process that runs the flow, as a user's script would, and the handle with which the demo follows and kills it."""

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
from prefect_tune.core.models import Value

WEIGHTS_FILE = "weights.npy"
_STEP = re.compile(r"\bstep (\d+): loss \S+, accuracy (\S+)")
_LAST_LINES = 15


class TrainingParameters(Value):
    """The parameters of the flow."""

    target: str
    experiment: str
    steps: int
    save_every: int
    width: int


class TrainingProcess:
    """A process that runs the flow, and everything it logs."""

    def __init__(self, process: subprocess.Popen[str], output: IO[str]) -> None:
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.step = 0
        """The newest step it has trained."""
        self.accuracy = 0.0
        self._reading = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reading.start()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def begin(self, parameters: TrainingParameters) -> None:
        """Have the process run the flow."""
        stdin = cast("IO[str]", self._process.stdin).fileno()
        with suppress(BrokenPipeError):  # it has ended; `wait` returns its exit code
            os.write(stdin, f"{parameters.model_dump_json()}\n".encode())

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
            last = "\n".join(self._last_lines)
            raise TuneError(f"a run of the demo ended with exit code {code}; last output:\n{last}")

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self._last_lines.append(line.rstrip("\n"))
            if trained := _STEP.search(line):
                self.step, self.accuracy = int(trained[1]), float(trained[2])


@contextmanager
def training_process(environment: Mapping[str, str]) -> Iterator[TrainingProcess]:
    """Start a process that imports what it needs and waits for `begin`. It is gone when the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(environment),
        start_new_session=True,  # Ctrl-C is for the demo, which then ends it
    )
    with cast("IO[str]", process.stdin), cast("IO[str]", process.stdout) as output:
        run = TrainingProcess(process, output)
        try:
            yield run
        finally:
            process.kill()
            run.wait()


def _train() -> None:
    from prefect_tune.core.checkpoints.cadence import Cadence
    from prefect_tune.core.experiment.retention import Retention
    from prefect_tune.flows.durable_trainable import durable_trainable

    line = sys.stdin.readline()
    if not line:
        return  # the demo has ended
    parameters = TrainingParameters.model_validate_json(line)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    durable_trainable(
        "prefect_tune.demo.model:Digits",
        {"width": parameters.width, "batch": 128, "rate": 0.001, "seed": 7},
        target=parameters.target,
        experiment=parameters.experiment,
        stop={"step": parameters.steps},
        checkpoint=Cadence(every_steps=parameters.save_every, every_seconds=None),
        retention=Retention(last=2),
    )


def _end_with_parent() -> None:
    """Exit when stdin is closed: nothing is written to it after the parameters."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    _train()
