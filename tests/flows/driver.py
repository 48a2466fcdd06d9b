"""A process that calls the flow and can be killed; it is forked from a process that has imported all modules."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeAlias
from uuid import uuid4

from tests.fakes.task_runners import dask, ray
from tests.fakes.trial_processes import PORTABLE, read_proc, wait_until
from tests.flows.forked_programs import get_preloaded_context, start_own_session

Flow: TypeAlias = Literal["durable_trainable", "tune", "tune on Dask", "tune on Ray"]

_MARK = "PREFECT_TUNE_TEST_DRIVER"


@dataclass(frozen=True)
class Write:
    """A write to a local target, counted from 1: a driver crashes before it, or after it if `is_done`."""

    number: int
    is_done: bool


@dataclass(frozen=True)
class Driver:
    """A running call of the flow, in a session of its own."""

    process: BaseProcess
    folder: Path
    mark: str

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the flow's process alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the flow's process alone with SIGKILL."""
        with suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)
        self.process.join(20)

    def kill_everything(self) -> None:
        """Kill the flow and the trial with SIGKILL, like a failure of the machine."""
        for pid in (self.pid, *self.find_trial_pids()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join(20)

    def find_trial_pids(self) -> Sequence[int]:
        """Find the processes that train in `/proc`, without the flow's own records."""
        module, pids = b"prefect_tune.runtime.processes.trial_process", self.find_descendants()
        return [p for p in pids if read_proc(p, "comm") == b"trial\n" or module in read_proc(p, "cmdline").split(b"\0")]

    def find_descendants(self) -> Sequence[int]:
        """Find every live descendant of the flow's process, also those whose parent has exited."""
        mark = f"{_MARK}={self.mark}".encode()
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
        return [pid for pid in pids if pid != self.pid and mark in read_proc(pid, "environ").split(b"\0")]

    def require_no_leftovers(self) -> None:
        """Fail if a process that the flow started outlives it by 10 s."""
        wait_until(
            lambda: not self.find_descendants(), seconds=10, what=lambda: f"the end of {self.find_descendants()}"
        )

    def wait_until(self, condition: Callable[[], object], *, seconds: float = 90) -> None:
        wait_until(condition, seconds=seconds, what=lambda: self.log[-3000:])

    def wait(self, *, seconds: float = 240) -> Mapping[str, Any]:
        """Wait until the flow ends by itself; return its result, or `{"error": class, "message": text}`."""
        self.process.join(seconds)
        assert not self.process.is_alive(), f"still runs after {seconds:g} s:\n{self.log[-4000:]}"
        return self.read_outcome()

    def read_outcome(self) -> Mapping[str, Any]:
        """Return the flow's result or error; empty if it was killed."""
        path = self.folder / "outcome.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}


class Drivers:
    """Starts drivers; none outlives the `with` block."""

    def __init__(self, api_url: str, folder: Path) -> None:
        self._api_url = api_url
        self._folder = folder
        self._started: list[Driver] = []
        self._context = get_preloaded_context()

    def start(
        self,
        *arguments: Any,
        api_url: str | None = None,
        flow: Flow = "durable_trainable",
        crash_at: Write | None = None,
        **options: Any,
    ) -> Driver:
        """Call the flow with these arguments in a new process."""
        mark = uuid4().hex
        folder = self._folder / f"driver-{len(self._started)}"
        folder.mkdir(parents=True)
        environment = {name: os.environ[name] for name in PORTABLE[:1] if name in os.environ}
        environment |= {_MARK: mark, "OPENBLAS_NUM_THREADS": "1"}
        call = (str(folder), environment, api_url or self._api_url, flow, crash_at, arguments, options)
        process = self._context.Process(target=_drive, args=call, daemon=False)
        process.start()
        driver = Driver(process, folder, mark)
        self._started.append(driver)
        return driver

    def close(self) -> None:
        """Kill the drivers that still run, including stopped ones."""
        for driver in self._started:
            if driver.is_alive():
                driver.kill_everything()
            driver.require_no_leftovers()

    @property
    def last(self) -> Driver:
        return self._started[-1]


def _drive(
    folder: str,
    environment: Mapping[str, str],
    api_url: str,
    flow: Flow,
    crash_at: Write | None,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> None:
    start_own_session(Path(folder, "log"))
    os.chdir(folder)
    os.environ.update(environment)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    write_count = _count_writes(crash_at)
    with temporary_settings({PREFECT_API_URL: api_url}):
        try:
            outcome = _CALLS[flow](arguments, options)
        except BaseException as error:  # noqa: BLE001  the process's edge: any error becomes its outcome
            outcome = {"error": type(error).__name__, "message": str(error)}
    path = Path(folder) / "outcome.json"
    path.with_suffix(".new").write_text(json.dumps({**outcome, "writes": next(write_count) - 1}))
    path.with_suffix(".new").rename(path)
    if "error" in outcome:
        raise SystemExit(3)


def _count_writes(crash_at: Write | None) -> Iterator[int]:
    """Count the files that this process writes to local targets; crash before or after one of them."""
    from prefect_tune.stores.posix_store import PosixStore

    writes, crash = itertools.count(1), crash_at or Write(number=0, is_done=False)

    def make_fatal(write: Callable[..., None]) -> Callable[..., None]:
        def write_or_crash(*args: object) -> None:
            number = next(writes)
            if number == crash.number and not crash.is_done:
                os._exit(9)
            write(*args)
            if number == crash.number:
                os._exit(9)

        return write_or_crash

    for name in ("create", "put", "replace"):
        setattr(PosixStore, name, make_fatal(getattr(PosixStore, name)))
    return writes


def _run_training(arguments: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    from prefect_tune.flows.durable_trainable import durable_trainable

    result = durable_trainable(*arguments, **options)
    return {
        "status": str(result.status),
        "reason": result.reason,
        "step": result.step,
        "metrics": dict(result.metrics),
        "attempts": result.attempts,
        "recomputed_steps": result.recomputed_steps,
        "checkpoint": result.checkpoint.path if result.checkpoint else None,
    }


def _run_search(
    arguments: Sequence[Any], options: Mapping[str, Any], runner: Callable[[], Any] | None = None
) -> Mapping[str, Any]:
    from prefect_tune.flows.tune import tune

    flow = tune if runner is None else tune.with_options(task_runner=runner())
    results = flow(*arguments, **options)
    return {"trials": {trial.id: str(trial.status) for trial in results.trials.values()}}


_CALLS: Mapping[Flow, Callable[[Sequence[Any], Mapping[str, Any]], Mapping[str, Any]]] = {
    "durable_trainable": _run_training,
    "tune": _run_search,
    "tune on Dask": partial(_run_search, runner=dask),
    "tune on Ray": partial(_run_search, runner=ray),
}
