"""A search of 100, 1,000 and 10,000 trials with `pt.tune`, and its resume with `pt.resume`, without the training.

    python -m benchmarks.long_search [--write] [--trials 100 1000 10000] [--scheduler asha]

The executor is a fake (`tests/fakes/searches/instant_executor.py`): its trials report at once what real ones report in
hours. Everything else is real: flow, tasks, search, scheduler, journal, on a target in memory (/dev/shm). Each size is
run by a process of its own, and resumed by another one, which is asked for one more sample.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.measuring.own_process import measured_by
from benchmarks.measuring.resident import resident_bytes
from benchmarks.measuring.tables import circumstances, table, write

_NAME = "long"
_STEPS = 9
_SLOTS = 16


class _Meter:
    """What a run of the flow asks of the target, and what it has cost by the time a trial starts."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.began = (time.perf_counter(), time.process_time())
        self.at_first: dict[str, Any] = {}
        self.cpu_at: dict[str, float] = {}

    def started(self, trial: str) -> None:
        self.cpu_at[trial] = time.thread_time()
        if not self.at_first:
            wall, cpu = self.began
            self.at_first = {
                "seconds": time.perf_counter() - wall,
                "cpu": time.process_time() - cpu,
                **{name: self.operations[name] for name in ("read", "list", "size")},
                "mib": resident_bytes("VmRSS") >> 20,
            }

    @contextmanager
    def counting(self) -> Iterator[None]:
        from prefect_tune.stores.posix_store import PosixStore

        def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                self.operations[name] += 1
                return real(*args, **options)

            return call

        names = ("read", "list", "size", "create", "put", "replace", "delete")
        with ExitStack() as patched:
            for name in names:
                patched.enter_context(patch.object(PosixStore, name, counted(name, getattr(PosixStore, name))))
            yield


def _search(act: str, target: str, trial_count: int, scheduler: str) -> Mapping[str, Any]:
    """Run the search, or resume it, in this process."""
    from prefect.testing.utilities import prefect_test_harness

    import prefect_tune as pt
    from prefect_tune.tuner import run_search
    from tests.fakes.searches.instant_executor import InstantExecutor

    schedulers = {
        "fifo": pt.FIFO(),
        "asha": pt.ASHA(_STEPS, variant="stopping"),
        "promotion": pt.ASHA(_STEPS, variant="promotion"),
    }
    space = {"lr": pt.loguniform(1e-4, 1e-1), "width": pt.choice([32, 64, 128]), "act": "relu", "betas": [0.9, 0.999]}
    meter = _Meter()
    executor = InstantExecutor(_STEPS, meter.started)
    with (
        prefect_test_harness(server_startup_timeout=300),
        patch.object(run_search, "LocalExecutor", lambda *_args, **_options: executor),
        meter.counting(),
    ):
        before = resident_bytes("VmRSS") >> 20
        meter.began = (time.perf_counter(), time.process_time())
        if act == "run":
            results = pt.tune(
                "benchmarks.measuring.trivial:train",
                space=space,
                target=target,
                experiment=_NAME,
                metric="loss",
                num_samples=trial_count,
                scheduler=schedulers[scheduler],
                stop={"step": _STEPS},
                max_concurrent_trials=_SLOTS,
                isolation="thread",
            )
        else:
            results = pt.resume(_NAME, target=target, num_samples=trial_count + 1)
    wall, cpu = meter.began
    return {
        "trials": len(results.trials),
        "entries": results.experiment.entry_count,
        "reports": executor.report_count,
        "first": meter.at_first,
        "seconds": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "loop_cpu": _spans(meter.cpu_at),
        "operations": dict(meter.operations),
        "before_mib": before,
        "peak_mib": resident_bytes("VmHWM") >> 20,
        "threads": threading.active_count(),
    }


def _spans(cpu_at: Mapping[str, float]) -> list[float]:
    """CPU seconds of the driver's thread for each trial, in tenths of the search."""
    times = list(cpu_at.values())
    if len(times) < 20:
        return []
    tenth = len(times) // 10
    return [(times[at + tenth - 1] - times[at]) / (tenth - 1) for at in range(0, tenth * 10, tenth)]


def _measured(act: str, target: Path, trial_count: int, scheduler: str) -> dict[str, Any]:
    where = ("--act", act, "--target", str(target))
    return measured_by("long_search", *where, "--trials", str(trial_count), "--scheduler", scheduler)


def _both(trial_count: int, scheduler: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what the search and its resume measured, each in a process of its own."""
    room = Path(tempfile.mkdtemp(prefix="prefect-tune-", dir="/dev/shm"))
    try:
        run = _measured("run", room, trial_count, scheduler)
        return run, _measured("resume", room, trial_count, scheduler)
    finally:
        shutil.rmtree(room)


_Row = tuple[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str]]
_ROWS: list[_Row] = [
    ("entries of the journal", lambda run, _: f"{run['entries']:,}"),
    ("reports", lambda run, _: f"{run['reports']:,}"),
    ("**search**: CPU, ms per trial", lambda run, _: f"{1e3 * run['cpu'] / run['trials']:.1f}"),
    ("of the driver's thread: in the first tenth → in the last", lambda run, _: _first_and_last(run["loop_cpu"])),
    ("objects written per trial", lambda run, _: f"{_written(run) / run['trials']:.2f}"),
    ("objects read and listed per trial", lambda run, _: f"{_looked(run['operations']) / run['trials']:.2f}"),
    ("memory, MiB: before → peak", lambda run, _: f"{run['before_mib']} → {run['peak_mib']}"),
    ("**resume**: s until a trial starts (≤ 5)", lambda _, it: f"**{it['first']['seconds']:.2f}**"),
    (
        "objects read until then (≤ 230: up to 199 entries since the last snapshot, and 31)",
        lambda _, it: f"**{it['first']['read']}**",
    ),
    ("listings and looks at sizes", lambda _, it: f"{it['first']['list']} and {it['first']['size']}"),
    ("memory, MiB: before → peak", lambda _, it: f"{it['before_mib']} → {it['peak_mib']}"),
]


def _first_and_last(spans: Sequence[float]) -> str:
    return f"{1e3 * spans[0]:.1f} → {1e3 * spans[-1]:.1f}" if spans else ""


def _written(run: Mapping[str, Any]) -> int:
    return sum(int(run["operations"].get(name, 0)) for name in ("create", "put", "replace"))


def _looked(operations: Mapping[str, int]) -> int:
    return operations.get("read", 0) + operations.get("list", 0)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--scheduler", choices=("fifo", "asha", "promotion"), default="asha")
    parser.add_argument("--act", choices=("run", "resume"))
    parser.add_argument("--target")
    asked = parser.parse_args()
    if asked.act:
        print(json.dumps(_search(asked.act, asked.target, asked.trials[0], asked.scheduler)))
        return
    found = [_both(count, asked.scheduler) for count in asked.trials]
    head = [f"trials, {asked.scheduler}", *(f"{run['trials']:,}" for run, _ in found)]
    rows = [[what, *(shown(*both) for both in found)] for what, shown in _ROWS]
    text = f"{table(head, rows)}\n\n{circumstances('prefect', 'pydantic')}"
    print(text)
    if asked.write:
        write("long_search", text)


if __name__ == "__main__":
    _main()
