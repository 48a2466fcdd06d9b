"""A process that calls the flow and can be killed; it is forked from a process that has imported everything already."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeAlias
from uuid import uuid4

from tests.fakes.task_runners import dask, ray
from tests.fakes.trial_processes import PORTABLE, read_proc, wait_until
from tests.flows.forked_programs import in_own_session, preloaded

Flow: TypeAlias = Literal["durable_trainable", "tune", "tune on Dask", "tune on Ray"]

_MARK = "PREFECT_TUNE_TEST_DRIVER"


@dataclass(frozen=True)
class Write:
    """A write to a local target, counted from 1, at which a driver dies."""

    number: int
    is_done: bool
    """Whether the write is done before the driver dies."""


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

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the flow's process alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """`kill -9` of the flow's process alone."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.join(20)

    def kill_everything(self) -> None:
        """`kill -9` of the flow and of the trial, almost at once: as when the machine fails."""
        trials = self.trials()
        for pid in (self.pid, *trials):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join(20)

    def trials(self) -> Sequence[int]:
        """Return the processes that train, found in `/proc`, not by the flow's own records."""
        started = b"prefect_tune.runtime.processes.trial_process"
        return [
            pid
            for pid in self.family()
            if read_proc(pid, "comm") == b"trial\n" or started in read_proc(pid, "cmdline").split(b"\0")
        ]

    def family(self) -> Sequence[int]:
        """Return every live descendant of this process, also those with another parent by now."""
        mark = f"{_MARK}={self.mark}".encode()
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
        return [pid for pid in pids if pid != self.pid and mark in read_proc(pid, "environ").split(b"\0")]

    def require_no_leftovers(self) -> None:
        """Fail if a process that it started outlives it by more than a moment."""
        wait_until(lambda: not self.family(), seconds=10, what=lambda: f"the end of {self.family()}")

    def wait(self, *, seconds: float = 240) -> Mapping[str, Any]:
        """Wait until it has ended by itself; return its result, or `{"error": class, "message": text}`."""
        self.process.join(seconds)
        if self.process.is_alive():
            raise AssertionError(f"still runs after {seconds:g} s:\n{self.log[-4000:]}")
        return self.outcome()

    def outcome(self) -> Mapping[str, Any]:
        """Return its result or error; empty if it was killed."""
        path = self.folder / "outcome.json"
        found: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found


class Drivers:
    """Starts drivers; none outlives the `with` block."""

    def __init__(self, api_url: str, folder: Path) -> None:
        self._api_url = api_url
        self._folder = folder
        self._started: list[Driver] = []
        self._context = preloaded()

    def start(
        self,
        *arguments: Any,
        api_url: str | None = None,
        flow: Flow = "durable_trainable",
        dies_at: Write | None = None,
        **options: Any,
    ) -> Driver:
        """Call the flow with these arguments in a new process."""
        mark = uuid4().hex
        folder = self._folder / f"driver-{len(self._started)}"
        folder.mkdir(parents=True)
        environment = {name: os.environ[name] for name in PORTABLE[:1] if name in os.environ}
        environment |= {_MARK: mark, "OPENBLAS_NUM_THREADS": "1"}
        call = (str(folder), environment, api_url or self._api_url, flow, dies_at, arguments, options)
        process = self._context.Process(target=_drive, args=call, daemon=False)
        process.start()
        driver = Driver(process, folder, mark)
        self._started.append(driver)
        return driver

    def close(self) -> None:
        """End those that still run, stopped ones among them."""
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
    dies_at: Write | None,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> None:
    in_own_session(Path(folder, "log"))
    os.chdir(folder)
    os.environ.update(environment)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    writes = _counted_writes(dies_at)
    with temporary_settings({PREFECT_API_URL: api_url}):
        outcome = {**_CALLS[flow](arguments, options), "writes": next(writes) - 1}
    path = Path(folder) / "outcome.json"
    path.with_suffix(".new").write_text(json.dumps(outcome))
    path.with_suffix(".new").rename(path)
    if "error" in outcome:
        raise SystemExit(3)


def _counted_writes(dies_at: Write | None) -> Iterator[int]:
    """Count the files that this process writes to local targets; die before or after one of them."""
    from prefect_tune.stores.posix_store import PosixStore

    writes, dying = itertools.count(1), dies_at or Write(number=0, is_done=False)

    def counted(write: Callable[..., None]) -> Callable[..., None]:
        def write_or_die(*given: object) -> None:
            number = next(writes)
            if number == dying.number and not dying.is_done:
                os._exit(9)
            write(*given)
            if number == dying.number:
                os._exit(9)

        return write_or_die

    for name in ("create", "put", "replace"):
        setattr(PosixStore, name, counted(getattr(PosixStore, name)))
    return writes


def _outcome(call: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return call()
    except BaseException as error:  # noqa: BLE001  the process's edge: any error becomes its outcome
        return {"error": type(error).__name__, "message": str(error)}


def _trained(arguments: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _searched(
    arguments: Sequence[Any], options: Mapping[str, Any], runner: Callable[[], Any] | None = None
) -> Mapping[str, Any]:
    from prefect_tune.flows.tune import tune

    flow = tune if runner is None else tune.with_options(task_runner=runner())
    results = flow(*arguments, **options)
    return {"trials": {each.id: str(each.status) for each in results.trials.values()}}


_CALLS: Mapping[Flow, Callable[[Sequence[Any], Mapping[str, Any]], Mapping[str, Any]]] = {
    "durable_trainable": lambda arguments, options: _outcome(lambda: _trained(arguments, options)),
    "tune": lambda arguments, options: _outcome(lambda: _searched(arguments, options)),
    "tune on Dask": lambda arguments, options: _outcome(lambda: _searched(arguments, options, dask)),
    "tune on Ray": lambda arguments, options: _outcome(lambda: _searched(arguments, options, ray)),
}
