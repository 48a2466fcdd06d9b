"""The same search with prefect-tune and with Ray Tune, in turns: trials and reports a second, delays, CPU time.

    python -m benchmarks.throughput --ray PYTHON [--write] [--rounds 3]

PYTHON is an interpreter with `ray[tune]` and nothing of ours. Each search is a process of its own (`peers/ours.py`,
`peers/ray_tune.py`), on a local directory, two trials at a time, with what each has for defaults, but for Ray's
`reuse_actors=True`, without which each of its trials costs a process. What they leave is removed at the end: ext4 looks
past every inode that was freed in the last minutes, and would make each search slower than the last.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.cpu_group import CpuGroup, cpu_group
from benchmarks.measuring.tables import describe_setup, format_table, publish_section, version_in
from tests.fakes.servers.processes import free_port

_REPOSITORY = Path(__file__).parents[1]
_TIMEOUT_SECONDS = 600
_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": "300",
}


@dataclass(frozen=True)
class Workload:
    """A search: how many trials, each of how many reports."""

    name: str
    kind: str
    trials: int
    reports: int


WORKLOADS = (
    Workload("200 trials of a function, 1 report each", "function", 200, 1),
    Workload("100 trials of a function, 10 reports each", "function", 100, 10),
    Workload("100 trials of a class, 10 reports and a checkpoint at the end each", "class", 100, 10),
    Workload("1 trial of a function that reports as fast as it can, 5,000 times", "function", 1, 5000),
)


@dataclass(frozen=True)
class Peer:
    """A library that runs the search: its interpreter, its script, and its environment."""

    name: str
    python: str
    script: str
    environment: Mapping[str, str]
    server: CpuGroup | None = None
    """The control group of its server, if that runs already."""


@dataclass(frozen=True)
class Measurement:
    trials_per_second: float
    """From the first trial's first step until the call returns."""
    reports_per_second: float
    first_after_start: float
    first_after_call: float
    whole: float
    cpu: float


_FIGURES: Sequence[tuple[str, Callable[[Measurement], float], str, bool]] = (
    ("trials/s", lambda it: it.trials_per_second, "{:.1f}", True),
    ("reports/s", lambda it: it.reports_per_second, "{:,.0f}", True),
    ("s to the first step, from the process's start", lambda it: it.first_after_start, "{:.1f}", False),
    ("s to the first step, from the call", lambda it: it.first_after_call, "{:.1f}", False),
    ("s in all", lambda it: it.whole, "{:.1f}", False),
    ("CPU s of all processes", lambda it: it.cpu, "{:.1f}", False),
)


def _run_search(peer: Peer, work: Workload, parent: Path) -> Measurement:
    folder = tempfile.mkdtemp(dir=parent)
    with cpu_group() as group, (Path(folder) / "log").open("w+") as log:
        server_cpu = peer.server.cpu_seconds() if peer.server else 0.0
        command = [peer.python, str(_REPOSITORY / "benchmarks" / peer.script), work.kind]
        start = time.monotonic()
        whole = [*command, str(work.trials), str(work.reports), folder]
        code = group.run(whole, peer.environment, log, timeout_seconds=_TIMEOUT_SECONDS)
        end = time.monotonic()
        group.require_empty()
        cpu = group.cpu_seconds() + (peer.server.cpu_seconds() - server_cpu if peer.server else 0.0)
        measured = _read_measurements(Path(folder), work, code)
    loop = measured["returned"] - measured["first"]
    return Measurement(
        trials_per_second=work.trials / loop,
        reports_per_second=work.trials * work.reports / loop,
        first_after_start=measured["first"] - start,
        first_after_call=measured["first"] - measured["called"],
        whole=end - start,
        cpu=cpu,
    )


def _read_measurements(folder: Path, work: Workload, code: int) -> Mapping[str, float]:
    try:
        measured: Mapping[str, float] = json.loads((folder / "measured.json").read_text())
    except FileNotFoundError:
        raise RuntimeError(f"{work}: exited with code {code}: {(folder / 'log').read_text()[-3000:]}") from None
    if (measured["trials"], measured["reports"]) != (work.trials, work.trials * work.reports):
        raise RuntimeError(f"{work}: not all trials were done: {measured}")
    return measured


def make_environment(prefect_home: Path) -> dict[str, str]:
    """The environment of both: no user settings, and modules compiled once, as an installation has them."""
    excluded = ("PREFECT_", "RAY_", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(excluded)}
    return {**inherited, **_QUIET, "PREFECT_HOME": str(prefect_home)}


@contextmanager
def prefect_server(python: str, environment: Mapping[str, str]) -> Iterator[Peer]:
    """A server as `prefect start server` runs it, on the same database."""
    port = free_port()
    with cpu_group() as group:
        command = [python, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"]
        with _running(group, command, environment):
            _wait_for(port)
            url = f"http://127.0.0.1:{port}/api"
            yield Peer("ours", python, "peers/ours.py", {**environment, "PREFECT_API_URL": url}, group)


@contextmanager
def ray_cluster(python: str, environment: Mapping[str, str]) -> Iterator[Peer]:
    port = free_port()
    with cpu_group() as group:
        ray = str(Path(python).with_name("ray"))
        command = [ray, "start", "--head", "--block", "--num-cpus=2", "--include-dashboard=false", f"--port={port}"]
        with _running(group, command, environment):
            _wait_for(port)
            time.sleep(10)  # the port is there before the node is
            address = {"RAY_ADDRESS": f"127.0.0.1:{port}"}
            yield Peer("Ray", python, "peers/ray_tune.py", {**environment, **address}, group)


@contextmanager
def _running(group: CpuGroup, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    devnull = subprocess.DEVNULL
    process = subprocess.Popen(group.inside(command), env=environment, stdout=devnull, stderr=devnull)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def _wait_for(port: int) -> None:
    end = time.monotonic() + 900  # the first start on a busy machine runs every migration
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"no process listens on port {port}")


def _compare(ours: Peer, ray: Peer, work: Workload, rounds: int, folder: Path) -> list[list[str]]:
    """One row for each figure: medians, and the median of the rounds' ratios."""
    mine, theirs = [], []
    for _ in range(rounds):
        mine.append(_run_search(ours, work, folder))
        theirs.append(_run_search(ray, work, folder))
        print(work.name, mine[-1], theirs[-1], sep="\n", file=sys.stderr, flush=True)
    rows = []
    for name, figure, form, more_is_better in _FIGURES:
        a, b = [figure(measured) for measured in mine], [figure(measured) for measured in theirs]
        ratio = statistics.median(x / y if more_is_better else y / x for x, y in zip(a, b, strict=True))
        medians = [form.format(statistics.median(values)) for values in (a, b)]
        rows.append([name, *medians, f"{ratio:.2f}x{'' if ratio >= 1 else ': **behind**'}"])
    return rows


def _section(title: str, rows: Sequence[Sequence[str]]) -> str:
    return f"**{title}**\n\n{format_table(['', 'prefect-tune', 'Ray Tune', 'ahead by'], rows)}"


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", required=True, metavar="PYTHON", help="an interpreter that has ray[tune]")
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--rounds", type=int, default=3)
    numbers = range(len(WORKLOADS))
    parser.add_argument("--only", type=int, nargs="+", default=numbers, help="workloads by number, from 0")
    args = parser.parse_args()
    works = [WORKLOADS[number] for number in args.only]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        environment = make_environment(folder / "prefect")
        ours = Peer("ours", sys.executable, "peers/ours.py", environment)
        ray = Peer("Ray", args.ray, "peers/ray_tune.py", environment)
        for peer in (ours, ray):
            _run_search(peer, Workload("once, so that databases and modules are there", "function", 2, 1), folder)
        parts = [_section(work.name, _compare(ours, ray, work, args.rounds, folder)) for work in works]
        with prefect_server(sys.executable, environment) as server, ray_cluster(args.ray, environment) as cluster:
            rows = _compare(server, cluster, works[0], args.rounds, folder)
        parts.append(_section(f"{works[0].name}; a Prefect server and a Ray cluster are running already", rows))
    versions = f"{describe_setup('prefect', 'pydantic')[:-1]}, ray {version_in(args.ray, 'ray')}."
    parts.append(f"Medians of {args.rounds} rounds. {versions}")
    text = "\n\n".join(parts)
    publish_section("throughput", text, write=args.write)


if __name__ == "__main__":
    _main()
