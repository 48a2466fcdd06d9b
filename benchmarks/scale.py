"""An experiment of 100, 1,000 and 10,000 trials: the reads of opening it, the cost of an entry, its memory.

    python -m benchmarks.scale [--write] [--trials 100 1000 10000]

A history of six entries for each trial, sixteen trials at a time, is written once to a store in memory, which counts;
then it lies on a disk and on an object store on loopback, and a process of its own opens it there.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from benchmarks.measuring.long_history import History, write_history
from benchmarks.measuring.opening import Measurement
from benchmarks.measuring.own_process import measure_in_process
from benchmarks.measuring.s3_process import S3SinkProcess
from benchmarks.measuring.tables import describe_setup, format_table, publish_section
from tests.fakes.stores.object_stores import object_store

_KIB, _MIB = 1 << 10, 1 << 20
_LATENCY = timedelta(milliseconds=10)
_MAX_SECONDS, _MAX_OBJECTS = 5.0, 30


@dataclass(frozen=True, slots=True)
class Scale:
    """One size: the history, and what opening it cost."""

    history: History
    local: Measurement
    owned: Measurement
    """Taken over on the disk: opened, and an entry written."""
    remote: Measurement
    remote_requests: int
    distant: Measurement
    """The same, each reply 10 ms late."""

    @property
    def meets_limits(self) -> bool:
        """Whether the limits are kept."""
        openings = (self.local, self.owned, self.remote, self.distant)
        max_objects = self.history.tail + _MAX_OBJECTS
        return all(it.wall_seconds <= _MAX_SECONDS and it.objects_read <= max_objects for it in openings)


@contextmanager
def _history_folder(history: History) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="prefect-tune-"))
    try:
        for path, data in history.objects.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        yield folder
    finally:
        shutil.rmtree(folder)


def _upload(history: History, endpoint: str) -> None:
    store = object_store(endpoint, prefix="runs", seconds=1800)
    for _ in store.map(lambda item: store.put(*item), history.objects.items()):
        pass
    store.close()


def _measure_opening(act: str, *options: str) -> Measurement:
    return Measurement(**measure_in_process("measuring.opening", act, *options))


def measure(trial_count: int) -> Scale:
    """Write a history of so many trials, and open it on a disk and on an object store."""
    history = write_history(trial_count)
    with _history_folder(history) as folder:
        local = _measure_opening("load", "--directory", str(folder))
        owned = _measure_opening("own", "--directory", str(folder))
    with S3SinkProcess() as sink:
        _upload(history, sink.endpoint)
        sink.take_counts()
        remote = _measure_opening("load", "--endpoint", sink.endpoint)
        requests = sink.take_counts()["requests"]
        sink.set_latency(_LATENCY)
        distant = _measure_opening("load", "--endpoint", sink.endpoint)
    return Scale(history, local, owned, remote, requests, distant)


_Row = tuple[str, Callable[[Scale], str]]
_ROWS: Sequence[_Row] = [
    ("entries of the journal", lambda it: f"{it.history.entries:,}"),
    ("entries after the last snapshot: as many as there can be", lambda it: f"{it.history.tail:,}"),
    ("**opening**: objects read besides these (≤ 30)", lambda it: f"**{it.remote.objects_read - it.history.tail}**"),
    ("requests, listings and a look for a later entry included", lambda it: f"{it.remote_requests}"),
    ("MiB read", lambda it: f"{it.remote.bytes_read / _MIB:.2f}"),
    ("s from a disk, wall / CPU (≤ 5)", lambda it: _seconds(it.local)),
    ("s from a disk, taken over and the due snapshot written", lambda it: _seconds(it.owned)),
    ("s from an object store", lambda it: _seconds(it.remote)),
    ("s from an object store, 10 ms away", lambda it: _seconds(it.distant)),
    ("**an entry**: CPU, µs", lambda it: f"{it.history.append_microseconds:.0f}"),
    ("requests", lambda it: f"{it.history.requests:.2f}"),
    ("bytes sent", lambda it: f"{it.history.entry_bytes:.0f}"),
    ("**snapshots**, off its path, for each entry: CPU, µs", lambda it: f"{it.history.late_microseconds:.0f}"),
    ("requests", lambda it: f"{it.history.late_requests:.2f}"),
    ("bytes sent", lambda it: f"{it.history.late_bytes:,.0f}"),
    ("the last one, MiB", lambda it: f"{it.history.snapshot_bytes / _MIB:.2f}"),
    ("**memory** of the process that opened it, MiB: before → with it (peak)", lambda it: _memory(it.local)),
]


def _seconds(measured: Measurement) -> str:
    return f"{measured.wall_seconds:.2f} / {measured.cpu_seconds:.2f}"


def _memory(measured: Measurement) -> str:
    sizes = (measured.rss_before_bytes, measured.rss_bytes, measured.peak_rss_bytes)
    before, held, peak = (size >> 20 for size in sizes)
    return f"{before} → {held} ({peak})"


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1000, 10_000])
    args = parser.parse_args()
    scales = [measure(count) for count in args.trials]
    head = ["trials", *(f"{scale.history.trials:,}" for scale in scales)]
    rows = [[name, *(show(scale) for scale in scales)] for name, show in _ROWS]
    rows.append(["limits kept", *("yes" if scale.meets_limits else "**no**" for scale in scales)])
    text = f"{format_table(head, rows)}\n\n{describe_setup('rpds-py', 'pydantic', 'obstore')}"
    publish_section("scale", text, write=args.write)


if __name__ == "__main__":
    _main()
