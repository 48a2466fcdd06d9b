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

from benchmarks.measuring.clients import CLIENTS, Measurement
from benchmarks.measuring.own_process import measure_in_process
from benchmarks.measuring.s3_process import S3SinkProcess
from benchmarks.measuring.tables import describe_setup, format_table, publish_section

__all__ = ["CASES", "Case", "fill", "memory_folder", "require_equal", "run_client"]

_ACTS = ("save", "restore")


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint's shape, the store's latency, and how much faster than Ray's way ours has to be."""

    name: str
    file_count: int
    file_bytes: int
    latency: timedelta
    min_ratio: float


CASES = (
    Case("1 file of 1 GiB", 1, 1 << 30, timedelta(0), 1.5),
    Case("64 files of 16 MiB", 64, 16 << 20, timedelta(0), 1.5),
    Case("2,000 files of 128 KiB", 2000, 128 << 10, timedelta(0), 4),
    Case("2,000 files of 128 KiB, 25 ms", 2000, 128 << 10, timedelta(milliseconds=25), 30),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One transfer as the client measured it and the store counted it."""

    measured: Measurement
    requests: int


Runs = Mapping[tuple[str, str], Sequence[Run]]


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory, so that no disk is measured."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="prefect-tune-", dir=shared if shared.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def fill(directory: Path, file_count: int, file_bytes: int) -> None:
    """Make `directory` with so many files of so many random bytes."""
    directory.mkdir()
    for number in range(file_count):
        with (directory / f"file-{number:05d}").open("wb") as file:
            left = file_bytes
            while left:
                left -= file.write(os.urandom(min(left, 1 << 24)))


def run_client(client: str, act: str, endpoint: str, directory: Path, *options: str) -> Measurement:
    """Run one transfer in a process of its own."""
    location = ("--endpoint", endpoint, "--directory", str(directory))
    return Measurement(**measure_in_process("measuring.clients", client, act, *location, *options))


def _rounds(sink: S3SinkProcess, folder: Path, rounds: int) -> Runs:
    runs: dict[tuple[str, str], list[Run]] = {(client, act): [] for client in CLIENTS for act in _ACTS}
    source, restored = folder / "source", folder / "restored"
    for _ in range(rounds):
        for client in CLIENTS:
            for act, directory in (("save", source), ("restore", restored)):
                sink.take_counts()
                measured = run_client(client, act, sink.endpoint, directory)
                runs[client, act].append(Run(measured, sink.take_counts()["requests"]))
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
        seconds = [f"{_wall(client_runs):.2f} / {_cpu(client_runs):.2f}" for client_runs in (ray, ours, raw)]
        faster, cpu = _wall(ray) / _wall(ours), _cpu(ours) / _cpu(ray)
        peaks = (max(run.measured.peak_rss_bytes for run in client_runs) >> 20 for client_runs in (ray, ours))
        requests = f"{ray[0].requests:,} → {ours[0].requests:,}"
        ratios = [f"**{faster:.1f}x** (≥ {case.min_ratio:g})", f"{cpu:.2f} (≤ 1)"]
        limit = f"{_wall(ours) / _wall(raw):.1f}x / {_cpu(ours) / _cpu(raw):.1f}x"
        verdict = "yes" if faster >= case.min_ratio and cpu <= 1 else "**no**"
        yield [f"{act}, {case.name}", *seconds, *ratios, limit, requests, " → ".join(map(str, peaks)), verdict]


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
    args = parser.parse_args()
    rows: list[list[str]] = []
    with S3SinkProcess() as sink:
        for case in (case for case in CASES if case.name in args.only):
            with memory_folder() as folder:
                fill(folder / "source", case.file_count, case.file_bytes // args.divide)
                sink.set_latency(case.latency)
                rows += _rows(case, _rounds(sink, folder, args.rounds))
    text = f"{format_table(_HEAD, rows)}\n\nMedians of {args.rounds}. {describe_setup('pyarrow', 'obstore', 'blake3')}"
    publish_section("transfer", text, write=args.write)


if __name__ == "__main__":
    _main()
