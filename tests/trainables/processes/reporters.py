"""Trainables that report from threads, from forked children, and from started processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import prefect_tune as pt
from prefect_tune.runtime.trainable import StopTraining

Config = Mapping[str, Any]
THREADS = 4
_FORK = multiprocessing.get_context("fork")
_SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def _pool(context: Any) -> Iterator[Any]:
    """Open a pool of one child, which ends by a message, not by a signal."""
    pool = context.Pool(1)
    yield pool
    pool.close()
    pool.join()


def _run_in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    threads = [threading.Thread(target=copy_context().run, args=(work, number)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def report_from_threads(config: Config) -> None:
    """Report `config["times"]` steps in each thread, every fifth with a checkpoint."""

    def work(number: int) -> None:
        for index in range(config["times"]):
            metrics = {"thread": number, "index": index, "padding": "x" * 5_000}
            if index % 5 == 4:
                directory = pt.get_trial().new_checkpoint_dir()
                (directory / "said").write_text(f"{number} {index}")
                pt.report(metrics, checkpoint=pt.Checkpoint.from_directory(directory))
            else:
                pt.report(metrics)
            assert not pt.get_trial().should_checkpoint

    _run_in_threads(work)


def report_forever_in_threads(_config: Config) -> None:
    def work(number: int) -> None:
        while True:
            pt.report({"thread": number})

    _run_in_threads(work, 2)


def leave_reporting_to_thread(config: Config) -> None:
    """Report in a thread; the trainable itself never checks whether it still runs."""
    import prefect_tune.runtime.session

    prefect_tune.runtime.session._RETURN_TIMEOUT = timedelta(seconds=0.2)  # a test need not wait for 20 s

    def work() -> None:
        with suppress(StopTraining):
            while True:
                pt.report({"loss": 1.0})

    threading.Thread(target=copy_context().run, args=(work,), daemon=True).start()
    deadline = time.monotonic() + config.get("seconds", 600)
    while time.monotonic() < deadline:
        time.sleep(0.01)


def _report() -> None:
    pt.report({"from": "a child"})


def _read_should_checkpoint() -> None:
    pt.get_trial().should_checkpoint  # noqa: B018  it reads a message


def _report_step() -> None:
    pt.report_step({"from": "a child"}, lambda _: None)


_CALLS: Mapping[str, Callable[[], None]] = {
    "report": _report,
    "report_step": _report_step,
    "should_checkpoint": _read_should_checkpoint,
}


def report_from_child(config: Config) -> Config:
    """Call `config["call"]` in a child, forked or spawned, while a thread reports without end; report its error."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            pt.report({"from": "the trial"})

    thread = threading.Thread(target=copy_context().run, args=(work,))
    thread.start()
    context: Any = _FORK if config["how"] == "fork" else _SPAWN
    with _pool(context) as pool:
        results = [pool.apply_async(_call_in_child, (config["call"],)) for _ in range(5)]
        errors = {result.get(60) for result in results}
    done.set()
    thread.join()
    return {"said": sorted(errors)}


def _call_in_child(call: str) -> str:
    try:
        _CALLS[call]()
    except pt.InvalidInput as error:
        return str(error)
    return "nothing"


def _read_trial(_: int) -> tuple[str, int, bool]:
    trial = pt.get_trial()
    return trial.id, trial.step, pt.get_checkpoint() is None


def read_trial_from_child(_config: Config) -> Config:
    with _pool(_FORK) as pool:
        return {"found": pool.map(_read_trial, [0])[0]}


def leave_from_child(config: Config) -> Config:
    """Fork; the child leaves the trainable as `config["how"]` says; the parent reports its exit code."""
    pt.report({"loss": 1.0})
    if (child := os.fork()) == 0:
        match config["how"]:
            case "return":
                return {"from": "the child"}
            case "raise":
                raise RuntimeError("the child's own error")
            case _:
                sys.exit(config["how"])
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status)}


def _list_sockets(_: int = 0) -> list[str]:
    links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sorted(link for link in links if link.startswith("socket:"))


def show_sockets(_config: Config) -> Config:
    """Report the sockets of this process, and which of them a forked child and a started program inherit."""
    here = _list_sockets()
    with _pool(_FORK) as pool:
        forked = pool.map(_list_sockets, [0])[0]
    program = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    return {
        "here": len(here),
        "forked": [socket for socket in here if socket in forked],
        "program": [socket for socket in here if socket in program.stdout],
    }


def report_from_started_program(config: Config) -> Config:
    """Start `config["arguments"]`, or this program again; report its output, or the error of starting it."""
    program = ["-m", str(sys.modules["__main__"].__spec__.name), *sys.argv[1:]]  # type: ignore[union-attr]  # it was run by -m
    try:
        process = subprocess.run(
            [sys.executable, *config.get("arguments", program)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **config.get("environment", {})},
        )
    except pt.InvalidInput as error:
        return {"refused": str(error)}
    return {"said": process.stdout + process.stderr, "code": process.returncode}


def write_to_sockets(config: Config) -> None:
    """Write `config["bytes"]` to each socket of this process, like code with a wrong descriptor."""
    pt.report({"loss": 1.0})
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink() and str(entry.readlink()).startswith("socket:"):
            os.write(int(entry.name), bytes.fromhex(config["bytes"]))
    time.sleep(60)


@dataclass(frozen=True)
class _Directory:
    """A checkpoint of another package."""

    path: str


def report_directory(config: Config) -> None:
    """Report the checkpoint `config["path"]`, which is relative to the directory `config["seen_from"]`."""
    os.chdir(config["seen_from"])
    checkpoint: Any = _Directory(config["path"])
    pt.report({"loss": 1.0}, checkpoint=checkpoint)


def report_remote_checkpoint(config: Config) -> None:
    os.chdir(config["seen_from"])
    pt.report({"loss": 1.0}, checkpoint=pt.Checkpoint("s3://bucket/checkpoint"))
