"""The audit of a search of 100, 1,000 and 10,000 trials: how long it derives all proposals and decisions again.

    python -m benchmarks.audits [--write] [--trials 100 1000 10000]

The search is the driver of `pt.tune` with simulated trials, sixteen at a time, on a target in memory (/dev/shm): its
journal holds a proposal, a start, a decision at each rung and an end of each trial. A process of its own audits it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.measuring.own_process import measured_by
from benchmarks.measuring.resident import resident_bytes
from benchmarks.measuring.tables import circumstances, table, write

_MOST_SECONDS = 30.0


def _search(target: str, trial_count: int) -> None:
    import prefect_tune as pt
    from prefect_tune.blocks import LocalTarget
    from tests.fakes.searches.planned_search import STEPS, PlannedSearch

    search = PlannedSearch(LocalTarget(path=target), slots=16)
    search.run(scheduler=pt.ASHA(STEPS, variant="stopping"), num_samples=trial_count)


def _audited(target: str) -> Mapping[str, Any]:
    """Audit the search in this process; the imports are not counted."""
    from prefect_tune.tuner.audit import audit

    wall, cpu = time.perf_counter(), time.process_time()
    report = audit("e", target=target)
    return {
        "summary": report.summary,
        "entries": report.entry_count,
        "seconds": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "mib": resident_bytes("VmHWM") >> 20,
    }


def _measured(trial_count: int) -> Mapping[str, Any]:
    room = tempfile.mkdtemp(prefix="prefect-tune-", dir="/dev/shm")
    try:
        _search(room, trial_count)
        return measured_by("audits", "--audit", room)
    finally:
        shutil.rmtree(room)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--audit", metavar="TARGET", help="audit the search there, in this process")
    asked = parser.parse_args()
    if asked.audit:
        print(json.dumps(_audited(asked.audit)))
        return
    rows = []
    for count in asked.trials:
        found = _measured(count)
        kept = "yes" if found["seconds"] <= _MOST_SECONDS else "**no**"
        seconds = f"{found['seconds']:.1f} / {found['cpu']:.1f}"
        rows.append([f"{count:,}", f"{found['entries']:,}", found["summary"], seconds, str(found["mib"]), kept])
    head = ["trials", "entries", "result", "s, wall (≤ 30) / CPU", "peak memory, MiB", "limit kept"]
    text = f"{table(head, rows)}\n\n{circumstances('pydantic', 'rpds-py')}"
    print(text)
    if asked.write:
        write("audits", text)


if __name__ == "__main__":
    _main()
