"""Trainables that compute in child processes of each common library, and report steps once the workers run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import prefect_tune as pt
from tests.trainables.witness import acts_of, record_act

Config = Mapping[str, Any]
Metrics = Mapping[str, Any]
OpenWorkers = Callable[[Config], Any]


def train_with_workers(config: Config) -> None:
    """Report steps while workers of kind `config["way"]` run; end after `config["steps"]`, or when stopped."""
    with WORKERS[config["way"]](config):
        for step in range(int(config["steps"])):
            with TemporaryDirectory() as directory:
                Path(directory, "step").write_text(str(step))
                pt.report({"step": step}, checkpoint=pt.Checkpoint.from_directory(directory))
            record_act(config["witness"], "trained", step)
            time.sleep(0.02)


def run_worker(witness: str, seconds: float = 600) -> None:
    """Record an act, and work for a long time."""
    record_act(witness, "worker", 0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def _wait_for_workers(config: Config, count: int) -> None:
    while sum(act.act == "worker" for act in acts_of(Path(config["witness"]))) < count:
        time.sleep(0.005)


@contextmanager
def _pool(config: Config, method: str) -> Iterator[None]:
    """Leaving `with Pool()` terminates workers in the middle of what they do."""
    with multiprocessing.get_context(method).Pool(2) as pool:
        pool.map_async(run_worker, [config["witness"]] * 2, chunksize=1)
        _wait_for_workers(config, 2)
        yield


@contextmanager
def _executor(config: Config) -> Iterator[None]:
    """Open an executor; leaving its `with` waits for the workers, so these are brief."""
    with ProcessPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(run_worker, config["witness"], 0.5)
        _wait_for_workers(config, 2)
        yield


@contextmanager
def _loky(config: Config) -> Iterator[None]:
    """Open reusable workers with a file in shared memory: joblib's defaults."""
    import numpy as np
    from joblib import Parallel, delayed  # type: ignore[import-untyped]  # the package has no types

    big = np.zeros(1 << 18)
    with Parallel(n_jobs=2) as parallel:
        assert parallel(delayed(_sum)(big, config["witness"]) for _ in range(4)) == [0.0] * 4
        _wait_for_workers(config, 2)
        yield


def _sum(numbers: Any, witness: str) -> float:
    record_act(witness, "worker", 0)
    return float(numbers.sum())


@contextmanager
def _subprocess(config: Config) -> Iterator[None]:
    with subprocess.Popen(["sh", "-c", "sleep 600; true"]) as child:
        record_act(config["witness"], "worker", 0)
        try:
            yield
        finally:
            child.kill()  # the shell; its `sleep` lives on


@contextmanager
def _daemon(config: Config) -> Iterator[None]:
    """Start a worker that is forked twice, in its own session, and never ended."""
    script = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
    subprocess.run([sys.executable, "-S", "-c", script], check=True)
    record_act(config["witness"], "worker", 0)
    yield


@contextmanager
def _memory_segment(config: Config) -> Iterator[None]:
    """Open a segment; only multiprocessing's resource tracker removes it if its owner is killed."""
    with closing(SharedMemory(create=True, size=1 << 16)) as memory:
        Path(config["witness"]).with_suffix(".shared").write_text(memory.name)
        record_act(config["witness"], "worker", 0)
        yield
        memory.unlink()


@contextmanager
def _data_loader(config: Config) -> Iterator[None]:
    """Stay in the middle of an epoch of PyTorch's DataLoader."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.arange(10_000)), num_workers=2, persistent_workers=True)
    with ExitStack() as stack:
        batches = iter(loader)
        next(batches)
        record_act(config["witness"], "worker", 0)
        stack.callback(batches._shutdown_workers)  # type: ignore[attr-defined]  # as its `__del__`
        yield


WORKERS: Mapping[str, OpenWorkers] = {
    "fork": partial(_pool, method="fork"),
    "forkserver": partial(_pool, method="forkserver"),
    "spawn": partial(_pool, method="spawn"),
    "ProcessPoolExecutor": _executor,
    "loky": _loky,
    "subprocess": _subprocess,
    "daemon": _daemon,
    "shared memory": _memory_segment,
    "DataLoader": _data_loader,
}


def leave_shared_memory(config: Config) -> None:
    """Wait, with a segment in shared memory and a process that ignores SIGTERM."""
    subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 600"])
    with _memory_segment(config):
        time.sleep(600)


def terminate_workers(config: Config) -> Metrics:
    """End a forked worker like multiprocessing; report its exit codes."""
    return {"codes": [_terminate_worker(config, signal_number) for signal_number in (signal.SIGTERM, signal.SIGINT)]}


def _terminate_worker(config: Config, signal_number: int, *, is_immediate: bool = False) -> int | None:
    gate = Path(f"{config['witness']}.{signal_number}")
    worker = multiprocessing.get_context("fork").Process(target=_touch_and_wait, args=(gate,))
    worker.start()
    while not is_immediate and not gate.exists():
        time.sleep(0.001)
    os.kill(worker.pid or 0, signal_number)
    deadline = time.monotonic() + 60
    # `join` returns without a code while another thread's `start` reaps this worker (`multiprocessing._cleanup`).
    while (code := worker.exitcode) is None and time.monotonic() < deadline:
        worker.join(0.01)
    return code


def _touch_and_wait(gate: Path) -> None:
    gate.touch()
    while True:  # Python handles a SIGINT that comes just before a sleep after that sleep
        time.sleep(0.01)


def terminate_early(config: Config) -> Metrics:
    """End forked workers as soon as they exist, before they run any code."""
    codes = [_terminate_worker(config, signal.SIGTERM, is_immediate=True) for _ in range(int(config["rounds"]))]
    return {"codes": sorted(set(codes), key=str)}


def fork_from_threads(config: Config) -> Metrics:
    """Fork and end workers in several threads at once."""
    with ThreadPoolExecutor(4) as threads:
        codes = list(threads.map(lambda _: _terminate_worker(config, signal.SIGTERM), range(12)))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return {"codes": sorted(set(codes), key=str), "blocked": len(blocked), "threads": threading.active_count()}
