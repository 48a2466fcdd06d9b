"""Save and restore of a checkpoint: ours, Ray's way and the raw-socket limit, on one store, in one run.

    python -m benchmarks.transfer [--write] [--rounds 3] [--only NAME ...] [--divide 1]

Every client is a process of its own; the rounds are interleaved (Ray, ours, raw, Ray, ...), so that a busy neighbour
meets all of them; figures are medians. Ours hashes and verifies everything, the other two nothing.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

from benchmarks.measuring.clients import CLIENTS, Measured
from benchmarks.measuring.own_process import measured_by
from benchmarks.measuring.s3_process import S3SinkProcess
from benchmarks.measuring.tables import circumstances, table, write

__all__ = ["CASES", "Case", "fill", "memory_room", "require_equal", "run_client"]

_ACTS = ("save", "restore")


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint's shape, the store's latency, and how much faster than Ray's way ours has to be."""

    name: str
    file_count: int
    file_bytes: int
    latency: timedelta
    least_ratio: float


CASES = (
    Case("1 file of 1 GiB", 1, 1 << 30, timedelta(0), 1.5),
    Case("64 files of 16 MiB", 64, 16 << 20, timedelta(0), 1.5),
    Case("2,000 files of 128 KiB", 2000, 128 << 10, timedelta(0), 4),
    Case("2,000 files of 128 KiB, 25 ms", 2000, 128 << 10, timedelta(milliseconds=25), 30),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One transfer as the client measured it and the store counted it."""

    measured: Measured
    requests: int


Runs = Mapping[tuple[str, str], Sequence[Run]]


@contextmanager
def memory_room() -> Iterator[Path]:
    """A folder in memory, so that no disk is measured."""
    shared = Path("/dev/shm")
    room = Path(tempfile.mkdtemp(prefix="prefect-tune-", dir=shared if shared.is_dir() else None))
    try:
        yield room
    finally:
        shutil.rmtree(room)


def fill(directory: Path, file_count: int, file_bytes: int) -> None:
    """Make `directory` with so many files of so many random bytes."""
    directory.mkdir()
    for number in range(file_count):
        with (directory / f"file-{number:05d}").open("wb") as file:
            left = file_bytes
            while left:
                left -= file.write(os.urandom(min(left, 1 << 24)))


def run_client(client: str, act: str, endpoint: str, directory: Path, *options: str) -> Measured:
    """Run one transfer in a process of its own."""
    where = ("--endpoint", endpoint, "--directory", str(directory))
    return Measured(**measured_by("measuring.clients", client, act, *where, *options))


def _rounds(sink: S3SinkProcess, room: Path, rounds: int) -> Runs:
    runs: dict[tuple[str, str], list[Run]] = {(client, act): [] for client in CLIENTS for act in _ACTS}
    source, restored = room / "source", room / "restored"
    for _ in range(rounds):
        for client in CLIENTS:
            for act, directory in (("save", source), ("restore", restored)):
                sink.counted()
                measured = run_client(client, act, sink.endpoint, directory)
                runs[client, act].append(Run(measured, sink.counted()["requests"]))
            require_equal(source, restored)
            shutil.rmtree(restored)
            sink.drop()
    return runs


def require_equal(source: Path, restored: Path) -> None:
    """Compare two directories, byte for byte."""
    names = sorted(path.name for path in source.iterdir())
    same, *_ = filecmp.cmpfiles(source, restored, names, shallow=False)
    if sorted(same) != names:
        raise AssertionError(f"{len(names) - len(same)} of {len(names)} files did not come back as they were")
    filecmp.clear_cache()


def _wall(runs: Sequence[Run]) -> float:
    return median(run.measured.wall_seconds for run in runs)


def _cpu(runs: Sequence[Run]) -> float:
    return median(run.measured.cpu_seconds for run in runs)


def _rows(case: Case, runs: Runs) -> Iterator[list[str]]:
    for act in _ACTS:
        ray, ours, raw = (runs[client, act] for client in CLIENTS)
        seconds = [f"{_wall(each):.2f} / {_cpu(each):.2f}" for each in (ray, ours, raw)]
        faster, cpu = _wall(ray) / _wall(ours), _cpu(ours) / _cpu(ray)
        good = faster >= case.least_ratio and cpu <= 1
        peak = " → ".join(f"{max(run.measured.peak_rss_bytes for run in each) >> 20}" for each in (ray, ours))
        requests = f"{ray[0].requests:,} → {ours[0].requests:,}"
        ratios = [f"**{faster:.1f}x** (≥ {case.least_ratio:g})", f"{cpu:.2f} (≤ 1)"]
        limit = f"{_wall(ours) / _wall(raw):.1f}x / {_cpu(ours) / _cpu(raw):.1f}x"
        yield [f"{act}, {case.name}", *seconds, *ratios, limit, requests, peak, "yes" if good else "**no**"]


_HEAD = [
    "what",
    "Ray's way, s wall / CPU",
    "ours",
    "raw sockets",
    "faster than Ray's way",
    "CPU of Ray's way",
    "of the raw limit, wall / CPU",
    "requests, Ray's → ours",
    "peak RSS, MiB",
    "met",
]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--divide", type=int, default=1, help="make every file this many times smaller")
    asked = parser.parse_args()
    rows: list[list[str]] = []
    with S3SinkProcess() as sink:
        for case in (case for case in CASES if case.name in asked.only):
            with memory_room() as room:
                fill(room / "source", case.file_count, case.file_bytes // asked.divide)
                sink.set_latency(case.latency)
                rows += _rows(case, _rounds(sink, room, asked.rounds))
    text = f"{table(_HEAD, rows)}\n\nMedians of {asked.rounds}. {circumstances('pyarrow', 'obstore', 'blake3')}"
    print(text)
    if asked.write:
        write("transfer", text)


if __name__ == "__main__":
    _main()
