"""Searches of trainables that import PyTorch, Lightning, scikit-learn or XGBoost: prefect-tune, Ray Tune and Optuna.

    python -m benchmarks.imports --peers PYTHON [--running] [--write [TABLE]] [--rounds 3] [--only torch_mlp ...]

PYTHON is an interpreter with `ray[tune]`, Optuna and the four libraries, and nothing of ours; the interpreter that runs
this has ours and the libraries. Each search is a process of its own with an empty directory, two trials at a time; the
peers take turns. Ray runs with and without `reuse_actors`, Optuna as two processes that share a study in a file.
Searches of 200 trials run once, and without Ray's default: it takes ten times what it takes with 20. With `--running`
a Prefect server and a Ray cluster run already, and Optuna is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.measuring.cpu_group import cpu_group, sampling
from benchmarks.measuring.tables import describe_setup, format_table, write_section
from benchmarks.peers.real import Work
from benchmarks.throughput import Peer, make_environment, prefect_server, ray_cluster

_REPOSITORY = Path(__file__).parents[1]
_TIMEOUT_SECONDS = 900
_SHORT_SEARCH_TRIALS = 20
"""Trials of a search that every peer runs."""
_PEERS = {
    "ours": "prefect-tune",
    "ray-reuse": "Ray, reused actors",
    "ray": "Ray's default",
    "optuna": "Optuna, 2 processes",
}


WORKLOADS = tuple(
    Work(trainable, scheduler, trials, epochs, folder="")
    for trainable in ("torch_mlp", "torch_by_hand", "lightning_mlp", "sklearn_sgd", "xgboost_trees")
    for scheduler, trials, epochs in (("fifo", 20, 1), ("asha", 20, 16), ("fifo", 200, 1), ("asha", 200, 16))
)


@dataclass(frozen=True)
class Measurement:
    first_seconds: float
    """Until the first trial begins to train."""
    seconds: float
    cpu_seconds: float
    """Of all its processes, and of a server that ran already."""
    peak_mib: float
    """Of all its processes together; a page that several share counts once."""


def _run_search(peer: Peer, work: Work) -> Measurement:
    with tempfile.TemporaryDirectory() as folder, cpu_group() as group, (Path(folder) / "log").open("w+") as log:
        memory = [0.0]
        own = replace(work, folder=folder)
        command = [peer.python, "-m", "benchmarks.peers.real", peer.name, json.dumps(asdict(own))]
        server_cpu = peer.server.cpu_seconds() if peer.server else 0.0
        start = time.monotonic()
        with sampling(lambda: memory.append(group.memory_mib()), every_seconds=0.5):
            code = group.run(command, peer.environment, log, timeout_seconds=_TIMEOUT_SECONDS, directory=_REPOSITORY)
        end = time.monotonic()
        group.require_empty()
        if code:
            log.seek(0)
            raise RuntimeError(f"{peer.name}, {work}: exited with code {code}: {log.read()[-3000:]}")
        first = float(Path(own.first).read_text()) - start
        cpu = group.cpu_seconds() + (peer.server.cpu_seconds() - server_cpu if peer.server else 0.0)
        return Measurement(first, end - start, cpu, max(memory))


def _rounds(work: Work, peer: str, rounds: int) -> int:
    """Return how often `peer` runs: long searches are rarer."""
    if work.trials <= _SHORT_SEARCH_TRIALS:
        return 1 if peer == "ray" else rounds
    return 0 if peer == "ray" else 1


def _rows(work: Work, peers: Sequence[Peer], rounds: int) -> Iterator[list[str]]:
    measurements: dict[str, list[Measurement]] = {peer.name: [] for peer in peers if _rounds(work, peer.name, rounds)}
    for turn in range(rounds):
        for peer in peers:
            if turn < _rounds(work, peer.name, rounds):
                measurements[peer.name].append(_run_search(peer, work))
                print(_describe(work), peer.name, measurements[peer.name][-1], file=sys.stderr, flush=True)
    for name, measured in measurements.items():
        pairs = list(zip(measured, measurements["ours"], strict=False))
        ratio = [statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs)]
        ratio.append(statistics.median(theirs.cpu_seconds / ours.cpu_seconds for theirs, ours in pairs))
        columns = ("first_seconds", "seconds", "cpu_seconds", "peak_mib")
        first, seconds, cpu, mib = (statistics.median(getattr(one, column) for one in measured) for column in columns)
        figures = [f"{first:.1f}", f"{seconds:.1f}", f"{cpu:.1f}", f"{mib:,.0f}"]
        yield [_describe(work) if name == "ours" else "", _PEERS[name], *figures, *(f"{one:.2f}x" for one in ratio)]


def _describe(work: Work) -> str:
    return f"{work.trials} trials of {work.trainable}, {work.scheduler.upper()}, {work.epochs} epochs"


def _sentence(rows: Sequence[Sequence[str]]) -> str:
    """Return what the README says of the first search, that of PyTorch."""
    seconds = {peer: row[3] for peer, row in zip(_PEERS, rows, strict=True)}
    return (
        f"Trials share the import of their libraries: 20 that import PyTorch take {seconds['ours']} s, "
        f"with Ray's reused\nactors {seconds['ray-reuse']} s, with Ray's default {seconds['ray']} s, "
        f"with two processes of Optuna, which make nothing durable,\n"
        f"{seconds['optuna']} s ([benchmarks](benchmarks/README.md))."
    )


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True, metavar="PYTHON", help="an interpreter that has Ray and Optuna")
    parser.add_argument("--running", action="store_true", help="a Prefect server and a Ray cluster run already")
    parser.add_argument(
        "--write", nargs="?", const="imports", metavar="TABLE", help="which table of benchmarks/README.md to replace"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=None, help="modules of benchmarks.real")
    parser.add_argument("--trials", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--scheduler", nargs="+", default=["fifo", "asha"])
    parser.add_argument("--peer", nargs="+", default=list(_PEERS), help="which of them take turns")
    args = parser.parse_args()
    works = [
        work
        for work in WORKLOADS
        if work.trainable in (args.only or work.trainable)
        and work.trials in args.trials
        and work.scheduler in args.scheduler
    ]
    names = [name for name in _PEERS if name in {"ours", *args.peer} and not (args.running and name == "optuna")]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        environment = make_environment(Path(folder))
        path = os.pathsep.join([str(_REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])])
        environment |= {"PYTHONPATH": path, "BENCHMARK_PEER": "ray"}  # of the cluster: `real` sets its own
        ours, ray = Peer("ours", sys.executable, "", environment), Peer("ray", args.peers, "", environment)
        if args.running:
            ours = servers.enter_context(prefect_server(ours.python, environment))
            ray = servers.enter_context(ray_cluster(ray.python, environment))
        peers = [replace(ours if name == "ours" else ray, name=name) for name in names]
        once = Work("torch_mlp", "fifo", 2, 1, folder="")
        for peer in peers:  # so that databases and compiled modules are there
            _run_search(peer, once)
        rows = [row for work in works for row in _rows(work, peers, args.rounds)]
    head = ["search", "", "s to the first trial", "seconds", "CPU s", "peak MiB", "seconds of ours", "CPU of ours"]
    how = f"Medians of {args.rounds} rounds in turns; Ray's default, and searches of 200 trials, ran once."
    text = f"{format_table(head, rows)}\n\n{how} {describe_setup('prefect', 'torch')}"
    print(text)
    if args.write:
        write_section(args.write, text)
    if args.write == "imports":
        write_section("imports", _sentence(rows[: len(peers)]), _REPOSITORY / "README.md")


if __name__ == "__main__":
    _main()
