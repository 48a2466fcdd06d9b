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

from benchmarks.measuring.own_process import measure_in_process
from benchmarks.measuring.resident import resident_bytes
from benchmarks.measuring.tables import describe_setup, format_table, publish_section

_NAME = "long"
_STEPS = 9
_SLOTS = 16


class _Meter:
    """What a run of the flow asks of the target, and what it has cost by the time a trial starts."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.start = (time.perf_counter(), time.process_time())
        self.at_first: dict[str, Any] = {}
        self.cpu_at: dict[str, float] = {}

    def on_trial_started(self, trial: str) -> None:
        self.cpu_at[trial] = time.thread_time()
        if not self.at_first:
            wall, cpu = self.start
            self.at_first = {
                "seconds": time.perf_counter() - wall,
                "cpu": time.process_time() - cpu,
                **{name: self.operations[name] for name in ("read", "list", "size")},
                "mib": resident_bytes("VmRSS") >> 20,
            }

    @contextmanager
    def counting(self) -> Iterator[None]:
        from prefect_tune.stores.posix_store import PosixStore

        def count_calls(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                self.operations[name] += 1
                return real(*args, **options)

            return call

        with ExitStack() as stack:
            for name in ("read", "list", "size", "create", "put", "replace", "delete"):
                stack.enter_context(patch.object(PosixStore, name, count_calls(name, getattr(PosixStore, name))))
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
    executor = InstantExecutor(_STEPS, meter.on_trial_started)
    with (
        prefect_test_harness(server_startup_timeout=300),
        patch.object(run_search, "LocalExecutor", lambda *_args, **_options: executor),
        meter.counting(),
    ):
        before = resident_bytes("VmRSS") >> 20
        meter.start = (time.perf_counter(), time.process_time())
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
    wall, cpu = meter.start
    return {
        "trials": len(results.trials),
        "entries": results.experiment.entry_count,
        "reports": executor.report_count,
        "first": meter.at_first,
        "seconds": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "loop_cpu": _cpu_by_tenth(meter.cpu_at),
        "operations": dict(meter.operations),
        "before_mib": before,
        "peak_mib": resident_bytes("VmHWM") >> 20,
        "threads": threading.active_count(),
    }


def _cpu_by_tenth(cpu_at: Mapping[str, float]) -> list[float]:
    """CPU seconds of the driver's thread for each trial, in tenths of the search."""
    times = list(cpu_at.values())
    if len(times) < 20:
        return []
    tenth = len(times) // 10
    return [(times[index + tenth - 1] - times[index]) / (tenth - 1) for index in range(0, tenth * 10, tenth)]


def _measure(act: str, target: Path, trial_count: int, scheduler: str) -> dict[str, Any]:
    options = ("--act", act, "--target", str(target))
    return measure_in_process("long_search", *options, "--trials", str(trial_count), "--scheduler", scheduler)


def _measure_both(trial_count: int, scheduler: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what the search and its resume measured, each in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="prefect-tune-", dir="/dev/shm"))
    try:
        run = _measure("run", folder, trial_count, scheduler)
        return run, _measure("resume", folder, trial_count, scheduler)
    finally:
        shutil.rmtree(folder)


_Row = tuple[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str]]
_ROWS: list[_Row] = [
    ("entries of the journal", lambda run, _: f"{run['entries']:,}"),
    ("reports", lambda run, _: f"{run['reports']:,}"),
    ("**search**: CPU, ms per trial", lambda run, _: f"{1e3 * run['cpu'] / run['trials']:.1f}"),
    ("of the driver's thread: in the first tenth → in the last", lambda run, _: _first_and_last(run["loop_cpu"])),
    ("objects written per trial", lambda run, _: f"{_count_written(run) / run['trials']:.2f}"),
    ("objects read and listed per trial", lambda run, _: f"{_count_read(run) / run['trials']:.2f}"),
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


def _count_written(run: Mapping[str, Any]) -> int:
    return sum(int(run["operations"].get(name, 0)) for name in ("create", "put", "replace"))


def _count_read(run: Mapping[str, Any]) -> int:
    return sum(int(run["operations"].get(name, 0)) for name in ("read", "list"))


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--scheduler", choices=("fifo", "asha", "promotion"), default="asha")
    parser.add_argument("--act", choices=("run", "resume"))
    parser.add_argument("--target")
    args = parser.parse_args()
    if args.act:
        print(json.dumps(_search(args.act, args.target, args.trials[0], args.scheduler)))
        return
    runs = [_measure_both(count, args.scheduler) for count in args.trials]
    head = [f"trials, {args.scheduler}", *(f"{run['trials']:,}" for run, _ in runs)]
    rows = [[name, *(show(*both) for both in runs)] for name, show in _ROWS]
    text = f"{format_table(head, rows)}\n\n{describe_setup('prefect', 'pydantic')}"
    publish_section("long_search", text, write=args.write)


if __name__ == "__main__":
    _main()
