"""A trial's files, and a target for them that can block, fail and be inspected."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from prefect_tune.artifact_sync import ArtifactMirror
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import DeadlineExceeded
from prefect_tune.core.storage.object_store import Buffer, ObjectStore
from tests.fakes.checkpoints import read_files
from tests.fakes.stores.memory_store import ParallelMemoryStore

FILES = {"log.txt": b"line\n", "plots/loss.svg": b"<svg/>", "empty": b"", "big.bin": bytes(range(256)) * 70_000}
REMOTE = "digits/1/trials/best/artifacts"


class Bucket(ParallelMemoryStore):
    """A memory store that a test can block, up to its timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.writers = 0
        self.writers_max = 0
        self.failures: list[Exception] = []
        self.timeout = timedelta(minutes=1)

    def put(self, path: str, data: Buffer) -> None:
        with self._writing():
            super().put(path, data)

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        with self._writing():
            super().replace(path, pieces)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self.writers += 1
        self.writers_max = max(self.writers, self.writers_max)
        try:
            if not self.gate.wait(self.timeout.total_seconds()):
                raise DeadlineExceeded("held")
            if self.failures:
                raise self.failures.pop(0)
            yield
        finally:
            self.writers -= 1


BUCKETS: dict[str, Bucket] = {}


class BucketTarget(StorageTarget):
    _block_type_slug = "bucket-of-a-test"
    name: str

    @property
    def uri(self) -> str:
        return f"bucket://{self.name}"

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        BUCKETS[self.name].timeout = timeout
        yield BUCKETS[self.name]


def download_files(store: ObjectStore, tmp_path: Path, remote: str = REMOTE) -> dict[str, bytes]:
    """Return the files that a reader of the target gets."""
    folder = tmp_path / f"downloaded-{time.monotonic_ns()}"
    ArtifactMirror(folder).download(store, remote, ())
    return read_files(folder)
