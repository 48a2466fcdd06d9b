"""The cost of one more trial: CPU time of Prefect's engine, its server, the search, and the trial's process.

    python -m benchmarks.trial_cost [--write] [--rounds 3]

Each figure is a slope: that of a search of 120 trials less that of one of 20, divided by 100, so that what a search
costs once does not count. The server is running already: with its defaults, and with the settings that a search gives
the server that it starts for itself.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.cpu_group import cpu_group
from benchmarks.measuring.tables import describe_setup, format_table, publish_section
from benchmarks.throughput import Peer, make_environment, prefect_server
from prefect_tune.prefect_api.flow_with_server import LIGHT_SERVER_SETTINGS

_FEW, _MANY = 20, 120
_TIMEOUT_SECONDS = 600
_EVENT_DELAY_SECONDS = 7.0  # the server stores events every 5 s


@dataclass(frozen=True)
class _Work:
    name: str
    script: str
    before: Sequence[str] = ()
    after: Sequence[str] = ()


_TASKS = (
    _Work("an empty task of Prefect, submitted", "peers/tasks.py", ["submitted"]),
    _Work("an empty task, as a search runs it: without the state Pending", "peers/tasks.py", ["short"]),
)
_TRIALS = (
    _Work("a trial of a function, 1 report", "peers/ours.py", ["function"], ["1"]),
    _Work("a trial of a class, 10 reports, a checkpoint at its end", "peers/ours.py", ["class"], ["10"]),
)
_SERVERS: Mapping[str, Mapping[str, str]] = {
    "its defaults": {},
    "the settings of a search's own server": LIGHT_SERVER_SETTINGS,
}
_TABLES = ("task_run", "task_run_state", "events", "log")  # tables of the server's database
_HEAD = (
    "CPU ms of one more",
    "Prefect's engine",
    "the search",
    "the trial's process",
    "the server, for task runs",
    "the server, for the rest",
    "in all",
    "task runs",
    "their states",
    "events",
    "log entries",
)


@dataclass(frozen=True)
class _Cost:
    """CPU ms of one more task or trial, and the rows that the server stores of it."""

    process: float
    children: float
    server: float
    task_runs: float
    states: float
    events: float
    logs: float

    def row(self, name: str, of_a_task: _Cost) -> list[str]:
        """Return the table's row; Prefect's share is that of its task runs, each as `of_a_task`."""
        engine, recorder = self.task_runs * of_a_task.process, self.task_runs * of_a_task.server
        parts = (engine, self.process - engine, self.children, recorder, self.server - recorder)
        rows = (self.task_runs, self.states, self.events, self.logs)
        return [name, *(f"{figure:.1f}" for figure in (*parts, sum(parts), *rows))]


def _measure(server: Peer, work: _Work, count: int, parent: Path) -> Sequence[float]:
    """Return the CPU ms of the search's process, of its children and of the server, then the rows stored."""
    if server.server is None:
        raise ValueError("expected a running server")
    folder, rows_before = Path(tempfile.mkdtemp(dir=parent)), _count_rows(server)
    with cpu_group() as group, (folder / "log").open("w+") as log:
        server_cpu = server.server.cpu_seconds()
        script = str(Path(__file__).parent / work.script)
        command = [server.python, script, *work.before, str(count), *work.after, str(folder)]
        if group.run(command, server.environment, log, timeout_seconds=_TIMEOUT_SECONDS):
            raise RuntimeError((folder / "log").read_text()[-3000:])
        group.require_empty()
        time.sleep(_EVENT_DELAY_SECONDS)
        own = json.loads((folder / "measured.json").read_text())["cpu"]
        seconds = (own, group.cpu_seconds() - own, server.server.cpu_seconds() - server_cpu)
    rows = [after - before for after, before in zip(_count_rows(server), rows_before, strict=True)]
    return [*(1000 * value for value in seconds), *rows]


def _count_rows(server: Peer) -> Sequence[int]:
    database = Path(server.environment["PREFECT_HOME"], "prefect.db")
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return [connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in _TABLES]


def _costs(server: Peer, work: _Work, rounds: int, folder: Path) -> tuple[_Cost, _Cost]:
    """Return the cost of one more trial or task, and the fixed cost; medians of the rounds."""
    costs = []
    for _ in range(rounds):
        fewer, more = (_measure(server, work, count, folder) for count in (_FEW, _MANY))
        slope = [(b - a) / (_MANY - _FEW) for a, b in zip(fewer, more, strict=True)]
        once = [all_of_them - _FEW * one for all_of_them, one in zip(fewer, slope, strict=True)]
        costs.append((slope, once))
        print(work.name, [round(one, 1) for one in slope], file=sys.stderr, flush=True)
    slope, once = (list(map(statistics.median, zip(*part, strict=True))) for part in zip(*costs, strict=True))
    return _Cost(*slope), _Cost(*once)


def _section(name: str, server: Peer, rounds: int, folder: Path) -> str:
    for work in (*_TASKS, *_TRIALS):
        _measure(server, work, 2, folder)  # so that compiled modules are there
    tasks, trials = ([_costs(server, work, rounds, folder) for work in works] for works in (_TASKS, _TRIALS))
    rows = [cost.row(work.name, cost) for work, (cost, _) in zip(_TASKS, tasks, strict=True)]
    rows += [cost.row(work.name, tasks[-1][0]) for work, (cost, _) in zip(_TRIALS, trials, strict=True)]
    once = trials[0][1]
    summary = (
        f"A search of functions costs once: {once.process / 1000:.1f} CPU s in its process, most of it imports, "
        f"{once.children / 1000:.1f} in the processes that its trials are forked from, "
        f"{once.server / 1000:.1f} on the server."
    )
    return f"**A Prefect server with {name}**\n\n{format_table(_HEAD, rows)}\n\n{summary}"


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--rounds", type=int, default=3)
    args, parts = parser.parse_args(), []
    for name, settings in _SERVERS.items():
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            environment = make_environment(folder / "prefect")
            with prefect_server(sys.executable, {**environment, **settings}) as server:
                parts.append(_section(name, server, args.rounds, folder))
    parts.append(f"Medians of {args.rounds}. {describe_setup('prefect', 'pydantic')}")
    text = "\n\n".join(parts)
    publish_section("trial_cost", text, write=args.write)


if __name__ == "__main__":
    _main()
