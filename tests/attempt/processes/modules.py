"""Write modules that record each import, and train them in a pool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import get_absolute_sys_path
from prefect_tune.core.messages.process_messages import Start
from prefect_tune.runtime.trainable import Reuse
from tests.fakes.trial_processes import Family, LogRecorder, family, make_log, make_start, receive_metrics, wait_until

TRAIN = """
import os

with open({witness!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")

{body}


def train(config):
    return {{"pid": os.getpid(), **measure(config)}}
"""
QUIET = "def measure(config): return {'x': config['x']}"


class Module:
    """A module `training_<n>` with a function `train` that records each import."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._witness = folder / "imports"
        self.name = f"training_{time.monotonic_ns()}"

    def write(self, body: str = QUIET) -> None:
        text = TRAIN.format(witness=str(self._witness), body=dedent(body))
        (self._folder / f"{self.name}.py").write_text(text)

    def start(self, x: int = 0) -> Start:
        """Return the start message of a trial of one step."""
        start = make_start(os.getcwd, self._folder, {"x": x}, steps=1)  # the next line replaces the trainable
        return start.model_copy(update={"trainable": f"{self.name}:train", "import_path": get_absolute_sys_path()})

    @property
    def imports(self) -> list[int]:
        """Return the processes that imported the module."""
        return [int(line) for line in self._witness.read_text().split()] if self._witness.exists() else []


@pytest.fixture
def processes() -> Iterator[Family]:
    with family() as processes:
        yield processes


@pytest.fixture
def recorder() -> LogRecorder:
    return LogRecorder()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = Module(tmp_path)
    module.write()
    return module


Trainer = Callable[..., Any]


@pytest.fixture
def train_trials(module: Module, processes: Family, recorder: LogRecorder) -> Trainer:
    """Train trials one after another in a pool; return their metrics."""
    del processes

    def train(count: int, reuse: Reuse = "auto") -> list[dict[str, Any]]:
        results = []
        with TrialProcessPool(slots=2, reuse=reuse) as pool:
            for number in range(count):
                with pool.open_process(module.start(number), make_log(recorder)) as channel:
                    results.append(dict(receive_metrics(channel)))
        return results

    return train


def count_distinct(results: list[dict[str, Any]], name: str = "pid") -> int:
    return len({metrics[name] for metrics in results})


# One pool of trial processes for all tests of a module, so that each attempt takes milliseconds.


@pytest.fixture(scope="module")
def module_processes() -> Iterator[Family]:
    """All processes that the test module starts."""
    with family() as processes:
        yield processes


@pytest.fixture(scope="module")
def module_pool(module_processes: Family, request: pytest.FixtureRequest) -> Iterator[TrialProcessPool]:
    """A pool with as many slots as the module's `SLOTS`, or one."""
    assert not module_processes.pids()
    with TrialProcessPool(slots=getattr(request.module, "SLOTS", 1)) as pool:
        yield pool


@pytest.fixture
def pool(module_pool: TrialProcessPool, module_processes: Family) -> Iterator[TrialProcessPool]:
    """The module's pool; no test leaves a trial in it."""
    yield module_pool
    module_pool.end_idle_processes()
    names = module_processes.names
    wait_until(lambda: names() <= {"tune-forkserver"}, what=lambda: f"the end of {names()}")
