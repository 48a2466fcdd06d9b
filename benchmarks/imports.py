"""Searches of trainables that import PyTorch, Lightning, scikit-learn or XGBoost: prefect-tune, Ray Tune and Optuna.

    python -m benchmarks.imports --peers PYTHON [--write] [--rounds 3] [--only torch_mlp ...]

PYTHON is an interpreter with `ray[tune]`, Optuna and the four libraries, and nothing of ours; the interpreter that runs
this has ours and the libraries. Each search is a process of its own with an empty directory, two trials at a time; the
peers take turns. Ray runs with and without `reuse_actors`, Optuna as two processes that share a study in a file.
Searches of 200 trials run once, and without Ray's default: it takes ten times what it takes with 20.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.measuring.cpu_group import cpu_group, sampling
from benchmarks.measuring.tables import circumstances, table, write
from benchmarks.peers.real import Work
from benchmarks.throughput import surroundings

_REPOSITORY = Path(__file__).parents[1]
_PATIENCE_SECONDS = 900
_SHORT = 20
"""Trials of a search that every peer runs."""
_PEERS = {
    "ours": "prefect-tune",
    "ray-reuse": "Ray, reused actors",
    "ray": "Ray's default",
    "optuna": "Optuna, 2 processes",
}


WORKLOADS = tuple(
    Work(trainable, scheduler, trials, epochs, room="")
    for trainable in ("torch_mlp", "lightning_mlp", "sklearn_sgd", "xgboost_trees")
    for scheduler, trials, epochs in (("fifo", 20, 1), ("asha", 20, 16), ("fifo", 200, 1), ("asha", 200, 16))
)


@dataclass(frozen=True)
class Measured:
    seconds: float
    cpu_seconds: float
    peak_mib: float
    """Of all its processes together; a page that several share counts once."""


def _searched(peer: str, python: str, work: Work, environment: Mapping[str, str]) -> Measured:
    with tempfile.TemporaryDirectory() as room, cpu_group() as group, (Path(room) / "log").open("w+") as log:
        memory = [0.0]
        command = [python, "-m", "benchmarks.peers.real", peer, json.dumps(asdict(replace(work, room=room)))]
        began = time.monotonic()
        with sampling(lambda: memory.append(group.memory_mib()), every_seconds=0.5):
            path = {"PYTHONPATH": str(_REPOSITORY)}
            code = group.run(
                command, {**environment, **path}, log, timeout_seconds=_PATIENCE_SECONDS, directory=_REPOSITORY
            )
        ended = time.monotonic()
        group.require_empty()
        if code:
            log.seek(0)
            raise RuntimeError(f"{peer}, {work}: exited with code {code}: {log.read()[-3000:]}")
        return Measured(ended - began, group.cpu_seconds(), max(memory))


def _rounds(work: Work, peer: str, rounds: int) -> int:
    """Return how often `peer` runs: long searches are rarer."""
    if work.trials <= _SHORT:
        return 1 if peer == "ray" else rounds
    return 0 if peer == "ray" else 1


def _rows(work: Work, pythons: Mapping[str, str], rounds: int, environment: Mapping[str, str]) -> Iterator[list[str]]:
    found: dict[str, list[Measured]] = {peer: [] for peer in pythons if _rounds(work, peer, rounds)}
    for turn in range(rounds):
        for peer, each in found.items():
            if turn < _rounds(work, peer, rounds):
                each.append(_searched(peer, pythons[peer], work, environment))
                print(_named(work), peer, each[-1], file=sys.stderr, flush=True)
    for peer, each in found.items():
        pairs = list(zip(each, found["ours"], strict=False))
        ratio = [statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs)]
        ratio.append(statistics.median(theirs.cpu_seconds / ours.cpu_seconds for theirs, ours in pairs))
        medians = [
            statistics.median(getattr(one, name) for one in each) for name in ("seconds", "cpu_seconds", "peak_mib")
        ]
        shown = [f"{medians[0]:.1f}", f"{medians[1]:.1f}", f"{medians[2]:,.0f}"]
        yield [_named(work) if peer == "ours" else "", _PEERS[peer], *shown, *(f"{one:.2f}x" for one in ratio)]


def _named(work: Work) -> str:
    return f"{work.trials} trials of {work.trainable}, {work.scheduler.upper()}, {work.epochs} epochs"


def _sentence(rows: Sequence[Sequence[str]]) -> str:
    """Return what the README says of the first search, that of PyTorch."""
    seconds = {peer: row[2] for peer, row in zip(_PEERS, rows, strict=True)}
    return (
        f"Trials share the import of their libraries: 20 that import PyTorch take {seconds['ours']} s, "
        f"with Ray's reused\nactors {seconds['ray-reuse']} s, with Ray's default {seconds['ray']} s, "
        f"with two processes of Optuna, which make nothing durable,\n"
        f"{seconds['optuna']} s ([benchmarks](benchmarks/README.md))."
    )


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True, metavar="PYTHON", help="an interpreter that has Ray and Optuna")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=None, help="modules of benchmarks.real")
    parser.add_argument("--trials", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--scheduler", nargs="+", default=["fifo", "asha"])
    parser.add_argument("--peer", nargs="+", default=list(_PEERS), help="which of them take turns")
    asked = parser.parse_args()
    works = [
        each
        for each in WORKLOADS
        if each.trainable in (asked.only or each.trainable)
        and each.trials in asked.trials
        and each.scheduler in asked.scheduler
    ]
    pythons = {
        peer: sys.executable if peer == "ours" else asked.peers for peer in _PEERS if peer in {"ours", *asked.peer}
    }
    with tempfile.TemporaryDirectory() as folder:
        environment = surroundings(Path(folder))
        once = Work("torch_mlp", "fifo", 2, 1, room="")
        for peer, python in pythons.items():  # so that databases and compiled modules are there
            _searched(peer, python, once, environment)
        rows = [row for work in works for row in _rows(work, pythons, asked.rounds, environment)]
    head = ["search", "", "seconds", "CPU s", "peak MiB", "seconds of ours", "CPU of ours"]
    how = f"Medians of {asked.rounds} rounds in turns; Ray's default, and searches of 200 trials, ran once."
    text = f"{table(head, rows)}\n\n{how} {circumstances('prefect', 'torch')}"
    print(text)
    if asked.write:
        write("imports", text)
        write("imports", _sentence(rows[: len(pythons)]), _REPOSITORY / "README.md")


if __name__ == "__main__":
    _main()
