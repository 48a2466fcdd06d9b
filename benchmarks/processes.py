"""The cost of a process for an attempt: started with all imports, forked, or kept from the trial before.

python -m benchmarks.processes [--write]

Each attempt trains one empty step and is read to its end, without a Prefect server and without a target. CPU
is that of all processes together, as a difference between many attempts and few, so that what is paid once does not
count.
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from benchmarks.measuring.tables import describe_setup, format_table, publish_section
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.messages.process_messages import FromTrial, StepDone, TrainingEnded
from tests.fakes.trial_processes import make_start, supervised_process

FEW = 5
_LOG = logging.getLogger("benchmarks.processes")
_TIMEOUT = timedelta(seconds=60)
_SUBREAPER_EXIT_SECONDS = 0.5


@dataclass(frozen=True)
class Way:
    """A way to provide processes."""

    name: str
    trainable: str
    """As a trial's process imports it; nothing for a Python that does nothing."""
    attempts: int
    forks: bool = False
    steps: int | None = None
    is_weighed: bool = False


WAYS = (
    Way("a Python that does nothing, for comparison", "", 40),
    Way("a process of its own", "benchmarks.measuring.trivial:train", 25, is_weighed=True),
    Way("forked", "benchmarks.measuring.trivial:train", 200, forks=True, is_weighed=True),
    Way("kept (`reset_config`)", "benchmarks.measuring.trivial:Resettable", 500, forks=True, steps=1),
)


@dataclass(frozen=True)
class Measurement:
    wall_ms: float
    cpu_ms: float
    at_once_per_second: float
    memory_mib: float | None


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    rows = []
    for way in WAYS:
        measured = _measure(way)
        memory = "" if measured.memory_mib is None else f"{measured.memory_mib:.1f}"
        per_second = f"{measured.at_once_per_second:.0f}"
        rows.append([way.name, f"{measured.wall_ms:.1f}", f"{measured.cpu_ms:.1f}", per_second, memory])
    head = ["an attempt's process", "wall, ms", "CPU, ms", "attempts/s, 2 at once", "memory of its own, MiB"]
    text = f"{format_table(head, rows)}\n\nWall times are medians. {describe_setup('pydantic', 'cloudpickle')}"
    publish_section("processes", text, write=args.write)


def _measure(way: Way) -> Measurement:
    few_cpu, _, _ = _run(way, FEW)
    many_cpu, walls, _ = _run(way, FEW + way.attempts)
    _, _, per_second = _run(way, way.attempts, at_once=2)
    cpu_ms = (many_cpu - few_cpu) / way.attempts * 1e3
    return Measurement(statistics.median(walls[FEW:]) * 1e3, cpu_ms, per_second, _memory_mib(way))


def _run(way: Way, attempts: int, *, at_once: int = 1) -> tuple[float, list[float], float]:
    """Return the CPU seconds, the seconds of each attempt, and how many there were in a second after the first."""
    before = _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        attempt = stack.enter_context(_Attempts(way, Path(folder))) if way.trainable else _run_empty_python
        executor = stack.enter_context(ThreadPoolExecutor(at_once))
        attempt()
        start = time.perf_counter()
        walls = list(executor.map(lambda _: attempt(), range(attempts - 1)))
        seconds = time.perf_counter() - start
    return _cpu_seconds() - before, walls, (attempts - 1) / seconds


def _cpu_seconds() -> float:
    """Of this process, and of all those below it that have ended and were waited for."""
    usages = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _run_empty_python() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-S", "-E", "-c", "pass"], check=True)
    return time.perf_counter() - start


class _Attempts:
    """Attempts of one way, one call each."""

    def __init__(self, way: Way, folder: Path) -> None:
        self._way = way
        self._folder = folder
        self._pool = TrialProcessPool(slots=2)

    def __enter__(self) -> Callable[[], float]:
        return self._time_attempt

    def __exit__(self, *_: object) -> None:
        self._pool.end_idle_processes()
        time.sleep(_SUBREAPER_EXIT_SECONDS)  # and what they used is counted
        self._pool.__exit__()

    def _time_attempt(self) -> float:
        start = time.perf_counter()
        self.run(self._way.trainable)
        return time.perf_counter() - start

    def run(self, trainable: str) -> list[FromTrial]:
        """Run an attempt; return its output."""
        open_channel = self._pool.open_process if self._way.forks else supervised_process
        config = {"forks": self._way.forks}
        start = make_start(trainable, self._folder, config, steps=self._way.steps)
        messages: list[FromTrial] = []
        with open_channel(start, _LOG) as channel:
            while not (messages and isinstance(messages[-1], TrainingEnded)):
                messages += [message] if (message := channel.receive(_TIMEOUT)) else []
        if failures := [message for message in messages if isinstance(message, TrainingEnded) and message.raised]:
            raise RuntimeError(f"{trainable}: {failures}")
        return messages


def _memory_mib(way: Way) -> float | None:
    """The median memory of an attempt: of its process, and of those above it that are there for it alone."""
    if not way.is_weighed:
        return None
    weights = []
    with tempfile.TemporaryDirectory() as folder:
        attempts = _Attempts(way, Path(folder))
        with attempts:
            for _ in range(FEW):
                messages = attempts.run("benchmarks.measuring.trivial:weigh")
                reports = [message.report for message in messages if isinstance(message, StepDone)]
                weights += [float(str(report.metrics["mib"])) for report in reports]
    return statistics.median(weights)


if __name__ == "__main__":
    _main()
