"""The cost of a search's visibility: report, progress, events and assets, against the same search without them.

    python -m benchmarks.visible [--write] [--rounds 3]

Two trials train at once on two cores, and each step computes for 100 ms: any other computation, in the search, in the
Prefect server or in a thread, slows them down. Both searches are processes of their own, in turns, and use the same
server, whose CPU time is counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.measuring.cpu_group import cpu_group
from benchmarks.measuring.tables import describe_setup, format_table, publish_section
from benchmarks.peers.visible import compute
from benchmarks.throughput import Peer, make_environment, prefect_server

STEP_SECONDS = 0.1
TRIALS, STEPS = 12, 60
LIMIT = 0.03
_LIMITED = ("seconds of the search", "CPU seconds in all")
"""Wall seconds of the same search vary by more than the limit from run to run; CPU seconds do not."""
_HEAD = ("two trials at a time, each step computes for 100 ms", "without", "with everything", "more", "met")


def _units() -> int:
    """Return the units of work that take this machine 100 ms."""
    compute(200)
    start = time.process_time()
    compute(1000)
    return round(1000 * STEP_SECONDS / (time.process_time() - start))


def _run_search(server: Peer, variant: str, units: int) -> Mapping[str, float]:
    assert server.server is not None
    with tempfile.TemporaryDirectory() as folder, cpu_group() as group:
        server_cpu = server.server.cpu_seconds()
        script = str(Path(__file__).parent / "peers/visible.py")
        command = [server.python, script, variant, str(units), str(TRIALS), str(STEPS), folder]
        command = group.inside(command)
        process = subprocess.run(command, env=server.environment, capture_output=True, text=True, check=False)
        if process.returncode:
            raise RuntimeError(process.stderr[-3000:])
        group.require_empty()
        measured = json.loads(Path(folder, "measured.json").read_text())
        if measured["steps"] != TRIALS * STEPS:
            raise RuntimeError(f"not all trials were done: {measured}")
        search_cpu, added_cpu = group.cpu_seconds(), server.server.cpu_seconds() - server_cpu
        return {
            "seconds of the search": measured["seconds"],
            "CPU seconds of its processes": search_cpu,
            "CPU seconds of the server": added_cpu,
            "CPU seconds in all": search_cpu + added_cpu,
        }


def _row(name: str, plain: float, visible: float, *, is_limited: bool) -> list[str]:
    share = visible / plain - 1 if plain else 0.0
    limit, verdict = (f" (≤ {LIMIT:.0%})", "yes" if share <= LIMIT else "**no**") if is_limited else ("", "")
    return [name, f"{plain:.1f}", f"{visible:.1f}", f"{share:+.1%}{limit}", verdict]


def main() -> None:
    """Measure, print the table, and write it if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    args, units = parser.parse_args(), _units()
    measurements: dict[str, list[Mapping[str, float]]] = {"plain": [], "shown": []}
    with tempfile.TemporaryDirectory() as home, prefect_server(sys.executable, make_environment(Path(home))) as server:
        _run_search(server, "shown", max(1, units // 20))  # one-time work happens here
        for _ in range(args.rounds):
            for variant, measured in measurements.items():
                measured.append(_run_search(server, variant, units))
    names = measurements["plain"][0]
    medians = {
        variant: {name: statistics.median(measured[name] for measured in rounds) for name in names}
        for variant, rounds in measurements.items()
    }
    rows = [_row(name, medians["plain"][name], medians["shown"][name], is_limited=name in _LIMITED) for name in names]
    steps = f"{TRIALS} trials of {STEPS} steps, a checkpoint every 10; medians of {args.rounds}. "
    text = f"{format_table(_HEAD, rows)}\n\n{steps}{describe_setup('prefect')}"
    publish_section("visible", text, write=args.write)


if __name__ == "__main__":
    main()
