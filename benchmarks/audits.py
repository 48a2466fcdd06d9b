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

from benchmarks.measuring.own_process import measure_in_process
from benchmarks.measuring.resident import resident_bytes
from benchmarks.measuring.tables import describe_setup, format_table, publish_section

_MAX_SECONDS = 30.0


def _run_search(target: str, trial_count: int) -> None:
    import prefect_tune as pt
    from prefect_tune.blocks import LocalTarget
    from tests.fakes.searches.planned_search import STEPS, PlannedSearch

    search = PlannedSearch(LocalTarget(path=target), slots=16)
    search.run(scheduler=pt.ASHA(STEPS, variant="stopping"), num_samples=trial_count)


def _run_audit(target: str) -> Mapping[str, Any]:
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


def _measure(trial_count: int) -> Mapping[str, Any]:
    folder = tempfile.mkdtemp(prefix="prefect-tune-", dir="/dev/shm")
    try:
        _run_search(folder, trial_count)
        return measure_in_process("audits", "--audit", folder)
    finally:
        shutil.rmtree(folder)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--audit", metavar="TARGET", help="audit the search there, in this process")
    args = parser.parse_args()
    if args.audit:
        print(json.dumps(_run_audit(args.audit)))
        return
    rows = []
    for count in args.trials:
        measured = _measure(count)
        verdict = "yes" if measured["seconds"] <= _MAX_SECONDS else "**no**"
        seconds, mib = f"{measured['seconds']:.1f} / {measured['cpu']:.1f}", str(measured["mib"])
        rows.append([f"{count:,}", f"{measured['entries']:,}", measured["summary"], seconds, mib, verdict])
    head = ["trials", "entries", "result", "s, wall (≤ 30) / CPU", "peak memory, MiB", "limit kept"]
    text = f"{format_table(head, rows)}\n\n{describe_setup('pydantic', 'rpds-py')}"
    publish_section("audits", text, write=args.write)


if __name__ == "__main__":
    _main()
