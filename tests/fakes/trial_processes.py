"""Run attempts in real processes, and find every process that they leave."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from prefect_tune.attempt.processes.process_channel import NO_EXTRA_ENV, TrialChannel
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import serialize_for_trial
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.stoppers import MaxSteps, Never
from prefect_tune.core.messages.process_messages import FromTrial, Start, StepDone, TrainingEnded
from prefect_tune.stores.local.scratch import ScratchDirectory

_MARK = "PREFECT_TUNE_TEST_NURSERY"
PORTABLE = "PREFECT_TUNE_PORTABLE", "1"
"""The environment variable with which Linux does as other systems do: see `prefect_tune/linux.py`."""


def make_start(
    trainable: object, folder: Path, config: Mapping[str, Any] | None = None, *, steps: int | None = None, **fields: Any
) -> Start:
    """Describe an attempt without a checkpoint; a class trainable needs `steps` to end."""
    defaults: dict[str, Any] = {
        "experiment": "e",
        "trial": "t",
        "attempt": 1,
        "trainable": serialize_for_trial(trainable),
        "stopper": serialize_for_trial(Never() if steps is None else MaxSteps(steps)),
        "import_path": tuple(sys.path),
        "config": config or {},
        "directory": str(folder),
        "staging": str(folder),
        "restored_directory": None,
        "from_step": 0,
        "trained_seconds": 0.0,
        "reports": (),
        "cadence": Cadence(at_end=False),
        "async_commit": False,
    }
    return Start(**(defaults | fields))


@contextmanager
def supervised_process(start: Start, log: Log, environment: Mapping[str, str] = NO_EXTRA_ENV) -> Iterator[TrialChannel]:
    """Train in a process of its own, which ends with the block."""
    with TrialProcessPool(slots=0) as pool, pool.open_process(start, log, environment) as channel:
        yield channel


@contextmanager
def started_process(start: Start, log: Log, environment: Mapping[str, str] = NO_EXTRA_ENV) -> Iterator[TrialChannel]:
    """Train in a process that is not forked, as on systems other than Linux."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*PORTABLE)
        with supervised_process(start, log, environment) as channel:
            yield channel


def receive_messages(channel: TrialChannel, *, seconds: float = 60) -> Sequence[FromTrial]:
    """Return all messages of a trial until it ends or its process exits."""
    messages: list[FromTrial] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            message = channel.receive(timedelta(seconds=0.1))
        except EOFError:
            return messages
        if message is not None:
            messages.append(message)
        if isinstance(message, TrainingEnded):
            return messages
    raise AssertionError(f"not within {seconds:g} s: the end of a trial; its messages: {messages}")


def drop_seconds(message: FromTrial) -> FromTrial:
    """Return a message without the seconds that the trial measured."""
    return message.model_copy(update={"seconds": None}) if isinstance(message, TrainingEnded) else message


def receive_metrics(channel: TrialChannel) -> Mapping[str, Any]:
    """Return the metrics of the last step of a trial that ends well."""
    messages = receive_messages(channel)
    assert isinstance(messages[-1], TrainingEnded), messages
    return [message.report.metrics for message in messages if isinstance(message, StepDone)][-1]


class LogRecorder(logging.Handler):
    """Records each logged line, and the result of `probe` at that moment."""

    def __init__(self, probe: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._probe = probe
        self.lines: list[str] = []
        self.answers: list[object] = []

    @property
    def reasons(self) -> list[str]:
        """The lines except the progress of an import, which is logged on a slow machine."""
        return [line for line in self.lines if not line.endswith(" s so far)")]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.answers.append(self._probe())


def make_log(recorder: LogRecorder) -> logging.Logger:
    log = logging.Logger(f"trial-{uuid4().hex}")  # noqa: LOG001  used by one test only
    log.addHandler(recorder)
    return log


class Family:
    """Every process with this test's mark in its environment, also after its parent has exited."""

    def __init__(self) -> None:
        self._mark = f"{_MARK}={uuid4().hex}".encode()

    def pids(self, name: str | None = None) -> list[int]:
        """Return the living processes, or those of them with this `name`."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        marked = [pid for pid in pids if pid != os.getpid() and self._mark in read_proc(pid, "environ").split(b"\0")]
        return [pid for pid in marked if name is None or read_proc(pid, "comm") == f"{name}\n".encode()]

    def names(self) -> set[str]:
        return {read_proc(pid, "comm").decode().strip() for pid in self.pids()}

    def wait_for_one(self, name: str) -> int:
        """Wait for exactly one process of that name: a fork has its parent's name for a moment."""
        pids: list[int] = []

        def find_one() -> bool:
            pids[:] = self.pids(name)
            return len(pids) == 1

        wait_until(find_one, what=lambda: f"one process called {name}, not {pids}")
        return pids[0]

    def require_none(self, *, seconds: float = 10) -> None:
        wait_until(
            lambda: not self.pids(),
            seconds=seconds,
            what=lambda: f"the end of {[_describe(pid) for pid in self.pids()]}",
        )

    @property
    def variable(self) -> tuple[str, str]:
        name, _, value = self._mark.decode().partition("=")
        return name, value


@contextmanager
def family() -> Any:
    """Mark the processes that are started in the block; fail if one outlives it."""
    processes = Family()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*processes.variable)
        yield processes
    processes.require_none()


def wait_until(
    condition: Callable[[], object], *, seconds: float = 30, what: Callable[[], str] = lambda: "the expected state"
) -> None:
    """Return as soon as `condition()` holds; fail with `what()` when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    start = time.thread_time()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what()}")
        time.sleep(max(0.002, 3 * (time.thread_time() - start)))  # the awaited process needs the processor too
        start = time.thread_time()


def children_of(pid: int) -> list[int]:
    """Return the process ids of its children, zombies included."""
    return [int(child) for child in read_proc(pid, f"task/{pid}/children").split()]


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def no_leaks() -> Iterator[None]:
    """Fail when more descriptors are open or more threads run after the block than before it."""
    with ScratchDirectory():  # the first one of a process leaves its lock open
        pass
    before = count_descriptors(), threading.active_count()
    yield
    after = count_descriptors(), threading.active_count()
    assert after[0] <= before[0], f"{after[0]} descriptors, {before[0]} before"
    assert after[1] <= before[1], f"{after[1]} threads, {before[1]} before"


def _describe(pid: int) -> str:
    return f"{pid} {read_proc(pid, 'comm').decode().strip()} {read_proc(pid, 'cmdline').decode()[:80]!r}"


def read_proc(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
