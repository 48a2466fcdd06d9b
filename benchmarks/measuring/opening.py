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

__all__ = ["Measured"]


@dataclass(frozen=True, slots=True)
class Measured:
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


class _Counted(StoreWrapper):
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
    opened = journal.acquire_ownership(store, JournalKey(experiment=NAME, generation=1), OWNER, new_stamp(1 << 99))
    if is_snapshot_due(opened, opened.entry_count - 1):
        write_snapshot(store, opened)
    return opened


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=("load", "own"))
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--endpoint")
    asked = parser.parse_args()
    inner = object_store(asked.endpoint, prefix="runs") if asked.endpoint else PosixStore(asked.directory)
    store = _Counted(inner)
    gc.collect()
    before = resident_bytes("VmRSS")
    started, cpu = time.perf_counter(), time.process_time()
    experiment = (_load if asked.act == "load" else _own)(store)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    gc.collect()
    reads = store.operations["read"]
    measured = Measured(
        wall,
        cpu,
        reads,
        store.bytes_read,
        before,
        resident_bytes("VmRSS"),
        resident_bytes("VmHWM"),
        len(experiment.trials),
    )
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    _main()
