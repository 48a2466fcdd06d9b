"""The processor time of sampling a trial's processes: one process, one with 100 threads, and one with 8 children.

    python -m benchmarks.sampling

The meter of an attempt looks ten times a second for 20 s, as the supervisor does; the loop itself is not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

SECONDS = 20.0
_SLEEP = "import time; time.sleep(600)"
_THREADS = f"import threading; [threading.Thread(target=lambda: exec({_SLEEP!r})).start() for _ in range(100)]"
_CHILDREN = f"import subprocess, sys, time; [subprocess.Popen([sys.executable, '-c', {_SLEEP!r}]) for _ in range(8)]"
KINDS = {"one process": _SLEEP, "100 threads": _THREADS, "8 children": f"{_CHILDREN}; {_SLEEP}"}


def loop(call: Callable[[], None]) -> float:
    """Return the processor time of a loop as the supervisor's, in seconds."""
    start, end = time.process_time(), time.monotonic() + SECONDS
    while time.monotonic() < end:
        call()
        time.sleep(0.1)
    return time.process_time() - start


def main() -> None:
    """Print a row for each kind of trial."""
    from prefect_tune.attempt.usage_meter import UsageMeter

    print("| the trial | a sample, ms | of one processor |")
    print("|---|---|---|")
    for name, code in KINDS.items():
        trial = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        try:
            time.sleep(2)
            meter = UsageMeter()
            start = time.process_time()
            meter.on_loaded(trial.pid)
            one = time.process_time() - start
            share = (loop(partial(meter.sample_if_due, "training")) - loop(lambda: None)) / SECONDS
        finally:
            os.killpg(trial.pid, 9)
            trial.wait()
        print(f"| {name} | {1000 * one:.2f} | {share:.3%} |")


if __name__ == "__main__":
    main()
