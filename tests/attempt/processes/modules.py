"""Modules that are written for one test, record each import, and are trained in a pool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import absolute_sys_path
from prefect_tune.core.messages.process_messages import Start
from prefect_tune.runtime.trainable import Reuse
from tests.fakes.trial_processes import (
    Family,
    LogRecorder,
    family,
    make_log,
    make_start,
    receive_metrics,
    wait_until,
)

TRAIN = """
import os

with open({witness!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")

{body}


def train(config):
    return {{"pid": os.getpid(), **measured(config)}}
"""
QUIET = "def measured(config): return {'x': config['x']}"


class Module:
    """A module `training_<n>` with a function `train`, that notes each import."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._witness = folder / "imports"
        self.name = f"training_{time.monotonic_ns()}"

    def write(self, body: str = QUIET) -> None:
        text = TRAIN.format(witness=str(self._witness), body=dedent(body))
        (self._folder / f"{self.name}.py").write_text(text)

    def start(self, x: int = 0) -> Start:
        """Return the start of a trial of one step."""
        start = make_start(os.getcwd, self._folder, {"x": x}, steps=1)  # replaced by the name in the next line
        return start.model_copy(update={"trainable": f"{self.name}:train", "import_path": absolute_sys_path()})

    @property
    def imports(self) -> list[int]:
        """Return the processes that imported the module."""
        return [int(line) for line in self._witness.read_text().split()] if self._witness.exists() else []


@pytest.fixture
def ours() -> Iterator[Family]:
    with family() as found:
        yield found


@pytest.fixture
def recorder() -> LogRecorder:
    return LogRecorder()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Module(tmp_path)
    made.write()
    return made


Trains = Callable[..., Any]


@pytest.fixture
def trains(module: Module, ours: Family, recorder: LogRecorder) -> Trains:
    """Train one trial after the other in a pool; return their metrics."""
    del ours

    def train(count: int, reuse: Reuse = "auto") -> list[dict[str, Any]]:
        found = []
        with TrialProcessPool(slots=2, reuse=reuse) as pool:
            for number in range(count):
                with pool.open_process(module.start(number), make_log(recorder)) as channel:
                    found.append(dict(receive_metrics(channel)))
        return found

    return train


def different(found: list[dict[str, Any]], name: str = "pid") -> int:
    return len({each[name] for each in found})


# One pool of trial processes for all tests of a module, so that each attempt takes milliseconds.


@pytest.fixture(scope="module")
def whole_family() -> Iterator[Family]:
    """All processes that the tests of the module start."""
    with family() as found:
        yield found


@pytest.fixture(scope="module")
def one_pool(whole_family: Family, request: pytest.FixtureRequest) -> Iterator[TrialProcessPool]:
    """A pool with as many slots as the module's `SLOTS`, or one."""
    assert not whole_family.pids()
    with TrialProcessPool(slots=getattr(request.module, "SLOTS", 1)) as made:
        yield made


@pytest.fixture
def pool(one_pool: TrialProcessPool, whole_family: Family) -> Iterator[TrialProcessPool]:
    """The module's pool; no test leaves a trial in it."""
    yield one_pool
    one_pool.end_idle_processes()
    wait_until(lambda: whole_family.names() <= {"tune-forkserver"}, what=lambda: f"the end of {whole_family.names()}")
