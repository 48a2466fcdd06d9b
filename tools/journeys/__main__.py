"""Run one small search for each journey, trace its value, and print the files that it passes.

A file is on a journey if one of its functions receives the value as an argument, or returns it. The files are in the
order in which they first do, and grouped by process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tools.journeys.sitecustomize import TRACED

ROOT = Path(__file__).resolve().parents[2]
_ROOMS = ("src/", "flows/", "tasks/", "blocks/")
_WIDTH = 120
_LABEL_WIDTH = 8


def trace_journey(journey: str) -> list[tuple[bool, str]]:
    """Run a scenario under the recorder.

    Returns:
        Whether it was in the search's process, and the path, of each file in the order of its first record.
    """
    with tempfile.TemporaryDirectory() as folder:
        record, target = Path(folder, "record"), Path(folder, "target")
        command = [sys.executable, "-m", "tools.journeys.scenarios"]
        if journey == "resume":
            subprocess.run([*command, "before", str(target)], cwd=ROOT, check=True)
        traced = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "TRACED_JOURNEY": journey,
            "TRACED_ROOT": f"{ROOT}/",
            "TRACED_RECORD": str(record),
        }
        with subprocess.Popen([*command, journey, str(target)], cwd=ROOT, env=traced) as search:
            if search.wait():
                raise RuntimeError(f"the scenario {journey} failed")
        lines = sorted((line.split() for line in record.read_text().splitlines()), key=lambda line: float(line[0]))
    processes: dict[str, bool] = {}
    for _, pid, path in lines:
        if path.startswith(_ROOMS):
            processes.setdefault(path.removeprefix("src/prefect_tune/"), int(pid) == search.pid)
    files = [(in_search, path) for path, in_search in processes.items()]
    if journey == "resume":  # it ends where the trial trains
        while files[-1][0]:
            files.pop()
    return files


def draw_journey(files: list[tuple[bool, str]]) -> str:
    """Return a paragraph for each stay in a process."""
    lines = []
    for in_search, stay in groupby(files, key=lambda file: file[0]):
        line = ("search" if in_search else "trial").ljust(_LABEL_WIDTH)
        for _, path in stay:
            if len(line) + len(path) > _WIDTH:
                lines.append(line.rstrip())
                line = " " * _LABEL_WIDTH
            line += f"{path}  "
        lines.append(line.rstrip())
    return "\n".join(lines)


def main(journeys: Sequence[str]) -> None:
    """Print the files of each journey, and their number."""
    for journey in journeys or TRACED:
        files = trace_journey(journey)
        print(f"{journey}: {len(files)} files", draw_journey(files), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
