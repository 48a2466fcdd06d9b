"""Read a checkpoint back, verifying every byte while it streams; what does not verify is never handed out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from prefect_tune.core.chunks import BLOB_BYTES
from prefect_tune.core.commit import Mapper
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, ObjectNotFound
from prefect_tune.core.layout import CheckpointKey
from prefect_tune.core.manifest import ChunkRef, Manifest, decode_manifest
from prefect_tune.core.stale_reads import unless_retired
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.values import digest_of

__all__ = ["Sink", "read_manifest", "restore", "verify"]


class Sink(Protocol):
    """Where restored bytes go: a fresh directory that nobody sees until it is whole."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put verified bytes into file number `file` of the manifest at `offset`."""
        ...


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A chunk, and where in the directory it goes."""

    file: int
    offset: int
    chunk: ChunkRef


@dataclass(frozen=True, slots=True)
class _Read:
    """One request: neighbouring chunks of one blob."""

    blob: int
    chunks: tuple[_Wanted, ...]

    @property
    def start(self) -> int:
        return self.chunks[0].chunk.offset

    @property
    def length(self) -> int:
        return max(wanted.chunk.offset + wanted.chunk.length for wanted in self.chunks) - self.start


def read_manifest(store: ObjectStore, key: CheckpointKey) -> Manifest:
    """Return the manifest of `key`, checked to be the one that the key names.

    Raises:
        CheckpointNotFound: the target answered that there is none.
        CheckpointCorrupt: it is torn, altered or another checkpoint's.
    """
    try:
        manifest = decode_manifest(store.read(key.manifest_path), key.manifest_path)
    except ObjectNotFound as absent:
        raise CheckpointNotFound(f"{key.manifest_path}: no such checkpoint is committed") from absent
    found = (manifest.experiment, manifest.trial, manifest.step, manifest.sequence)
    if found != (key.trial.experiment, key.trial.trial, key.step, key.sequence):
        raise CheckpointCorrupt(f"{key.manifest_path}: holds the manifest of another checkpoint: {found}")
    return manifest


def restore(store: ObjectStore, manifest: Manifest, sink: Sink, *, side_by_side: Mapper) -> None:
    """Write every byte of `manifest` to `sink`, each chunk verified before it is written.

    Raises:
        CheckpointCorrupt: bytes are missing or differ from their digest, on a second reading too.
        CheckpointNotFound: it was retired, and bytes of it were deleted, while it was read.
    """
    with unless_retired(store, manifest.key):
        for _ in side_by_side(lambda read: _fetch(store, manifest, read, sink), _reads(manifest)):
            pass


def verify(store: ObjectStore, manifest: Manifest, *, side_by_side: Mapper) -> None:
    """Read and check every byte of `manifest`, keeping none. Raises as `restore` does."""
    restore(store, manifest, _Nowhere(), side_by_side=side_by_side)


class _Nowhere:
    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Drop the bytes; that they were verified is all that was wanted."""


def _reads(manifest: Manifest) -> Iterator[_Read]:
    of_blob: dict[int, list[_Wanted]] = {}
    for index, file in enumerate(manifest.files):
        offset = 0
        for chunk in file.chunks:
            of_blob.setdefault(chunk.blob, []).append(_Wanted(index, offset, chunk))
            offset += chunk.length
    for blob, wanted in of_blob.items():
        yield from _runs(blob, sorted(wanted, key=lambda each: each.chunk.offset))


def _runs(blob: int, wanted: list[_Wanted]) -> Iterator[_Read]:
    """Chunks that touch or overlap share a request; bytes nobody wants are not fetched.

    No request is larger than what we write as one blob, or one chunk: what a foreign manifest makes of
    its blobs does not decide how much memory is used here.
    """
    run: list[_Wanted] = []
    end = 0
    for each in wanted:
        begun = run[0].chunk.offset if run else 0
        if run and (each.chunk.offset > end or each.chunk.offset + each.chunk.length - begun > BLOB_BYTES):
            yield _Read(blob, tuple(run))
            run, end = [], 0
        run.append(each)
        end = max(end, each.chunk.offset + each.chunk.length)
    yield _Read(blob, tuple(run))


def _fetch(store: ObjectStore, manifest: Manifest, read: _Read, sink: Sink) -> None:
    """A mismatch is read a second time, so that a flaw of the wire is not taken for one of the store."""
    try:
        data = _verified(store, manifest, read)
    except CheckpointCorrupt:
        data = _verified(store, manifest, read)
    for wanted in read.chunks:
        start = wanted.chunk.offset - read.start
        sink.write(wanted.file, wanted.offset, data[start : start + wanted.chunk.length])


def _verified(store: ObjectStore, manifest: Manifest, read: _Read) -> memoryview:
    path = manifest.blob_path(read.blob)
    try:
        data = memoryview(store.read(path, offset=read.start, length=read.length))
    except ObjectNotFound as missing:
        raise CheckpointCorrupt(f"{path}: {read.length} bytes at {read.start} are missing: no such blob") from missing
    if len(data) != read.length:
        raise CheckpointCorrupt(f"{path}: expected {read.length} bytes at {read.start}, found {len(data)}")
    for wanted in read.chunks:
        start = wanted.chunk.offset - read.start
        found = digest_of(data[start : start + wanted.chunk.length])
        if found != wanted.chunk.digest:
            name = manifest.files[wanted.file].path
            raise CheckpointCorrupt(
                f"{name!r} in {path} at {wanted.chunk.offset}: expected blake3 {wanted.chunk.digest[:12]}…, "
                f"found {found[:12]}… ({wanted.chunk.length} bytes)"
            )
    return data
