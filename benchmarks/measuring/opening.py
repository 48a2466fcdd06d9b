"""One process that opens an experiment and continues it, measured from inside; it prints JSON.

    python -m benchmarks.measuring.opening load|own --directory PATH
    python -m benchmarks.measuring.opening load|own --endpoint URL

Imports are not measured; the client's connection is.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measuring.long_history import NAME, OWNER, new_stamp
from benchmarks.measuring.resident import resident_bytes
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal import journal
from prefect_tune.core.journal.journal import is_snapshot_due, write_snapshot
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import Buffer, ObjectStore
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.stores.memory_store import StoreWrapper
from tests.fakes.stores.object_stores import object_store

__all__ = ["Measurement"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one act cost."""

    wall_seconds: float
    cpu_seconds: float
    objects_read: int
    bytes_read: int
    rss_before_bytes: int
    rss_bytes: int
    """With the experiment in memory."""
    peak_rss_bytes: int
    trials: int


class _CountingStore(StoreWrapper):
    """A store that counts its reads."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.operations: Counter[str] = Counter()
        self.bytes_read = 0

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Buffer:
        data = super().read(path, offset=offset, length=length)
        self.operations["read"] += 1
        self.bytes_read += len(data)
        return data


def _load(store: ObjectStore) -> Experiment:
    return journal.load_experiment(store, JournalKey(experiment=NAME, generation=1))


def _own(store: ObjectStore) -> Experiment:
    experiment = journal.acquire_ownership(store, JournalKey(experiment=NAME, generation=1), OWNER, new_stamp(1 << 99))
    if is_snapshot_due(experiment, experiment.entry_count - 1):
        write_snapshot(store, experiment)
    return experiment


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=("load", "own"))
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--endpoint")
    args = parser.parse_args()
    inner = object_store(args.endpoint, prefix="runs") if args.endpoint else PosixStore(args.directory)
    store = _CountingStore(inner)
    gc.collect()
    before = resident_bytes("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    experiment = (_load if args.act == "load" else _own)(store)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    gc.collect()
    reads = (store.operations["read"], store.bytes_read)
    memory = (before, resident_bytes("VmRSS"), resident_bytes("VmHWM"))
    measured = Measurement(wall, cpu, *reads, *memory, len(experiment.trials))
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    _main()
