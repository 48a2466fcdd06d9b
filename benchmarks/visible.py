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
from benchmarks.measuring.tables import circumstances, table, write
from benchmarks.peers.visible import compute
from benchmarks.throughput import Peer, prefect_server, surroundings

STEP_SECONDS = 0.1
TRIALS, STEPS = 12, 60
LIMIT = 0.03
_LIMITED = ("seconds of the search", "CPU seconds in all")
"""Wall seconds of the same search vary by more than the limit from run to run; CPU seconds do not."""
_HEAD = ("two trials at a time, each step computes for 100 ms", "without", "with everything", "more", "met")


def _units() -> int:
    """Return the units of work that take this machine 100 ms."""
    compute(200)
    began = time.process_time()
    compute(1000)
    return round(1000 * STEP_SECONDS / (time.process_time() - began))


def _searched(server: Peer, shown: str, units: int) -> Mapping[str, float]:
    assert server.server is not None
    with tempfile.TemporaryDirectory() as room, cpu_group() as group:
        served = server.server.cpu_seconds()
        script = str(Path(__file__).parent / "peers/visible.py")
        command = [server.python, script, shown, str(units), str(TRIALS), str(STEPS), room]
        done = subprocess.run(
            group.inside(command), env=server.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        group.require_empty()
        measured = json.loads(Path(room, "measured.json").read_text())
        if measured["steps"] != TRIALS * STEPS:
            raise RuntimeError(f"not all trials were done: {measured}")
        searching, serving = group.cpu_seconds(), server.server.cpu_seconds() - served
        return {
            "seconds of the search": measured["seconds"],
            "CPU seconds of its processes": searching,
            "CPU seconds of the server": serving,
            "CPU seconds in all": searching + serving,
        }


def _row(name: str, plain: float, shown: float, *, is_limited: bool) -> list[str]:
    more = shown / plain - 1 if plain else 0.0
    met = ("yes" if more <= LIMIT else "**no**") if is_limited else ""
    return [name, f"{plain:.1f}", f"{shown:.1f}", f"{more:+.1%}" + (f" (≤ {LIMIT:.0%})" if is_limited else ""), met]


def main() -> None:
    """Measure, print the table, and write it if asked to."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--write", action="store_true")
    given, units = asked.parse_args(), _units()
    found: dict[str, list[Mapping[str, float]]] = {"plain": [], "shown": []}
    with tempfile.TemporaryDirectory() as home, prefect_server(sys.executable, surroundings(Path(home))) as server:
        _searched(server, "shown", max(1, units // 20))  # one-time work happens here
        for _ in range(given.rounds):
            for shown, measured in found.items():
                measured.append(_searched(server, shown, units))
    names = found["plain"][0]
    medians = {
        shown: {name: statistics.median(each[name] for each in rounds) for name in names}
        for shown, rounds in found.items()
    }
    rows = [_row(name, medians["plain"][name], medians["shown"][name], is_limited=name in _LIMITED) for name in names]
    steps = f"{TRIALS} trials of {STEPS} steps, a checkpoint every 10; medians of {given.rounds}. "
    text = f"{table(_HEAD, rows)}\n\n{steps}{circumstances('prefect')}"
    print(text)
    if given.write:
        write("visible", text)


if __name__ == "__main__":
    main()
