"""Read the bytes of a manifest from the store in few requests, each chunk verified against its digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from prefect_tune.core.checkpoints.manifest import BLOB_BYTES, ChunkRef, Manifest, Piece, Source
from prefect_tune.core.errors import CheckpointCorrupt, ObjectNotFound
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap
from prefect_tune.core.values import digest_of


class Sink(Protocol):
    """The destination of restored bytes, such as a fresh directory that is not visible until it is complete."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put verified bytes into file number `file` of the manifest at `offset`."""
        ...


class NoSink:
    """Drops verified bytes, for a caller that only verifies."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Drop the bytes."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A chunk, and the file and offset that it is restored to."""

    file: int
    offset: int
    chunk: ChunkRef


@dataclass(frozen=True, slots=True)
class Read:
    """One request: neighboring chunks of one blob."""

    blob: int
    chunks: tuple[_Wanted, ...]

    @property
    def start(self) -> int:
        return self.chunks[0].chunk.offset

    @property
    def length(self) -> int:
        return max(wanted.chunk.offset + wanted.chunk.length for wanted in self.chunks) - self.start


def reads(manifest: Manifest) -> Iterator[Read]:
    """Yield the reads that together fetch every byte of `manifest`.

    Chunks that touch or overlap share one, and bytes of no chunk are not fetched. A read is at most `BLOB_BYTES` long,
    or one chunk, so that the blob sizes of a foreign manifest do not determine the memory used here.
    """
    of_blob: dict[int, list[_Wanted]] = {}
    for index, file in enumerate(manifest.files):
        for offset, chunk in file.placed_chunks():
            of_blob.setdefault(chunk.blob, []).append(_Wanted(index, offset, chunk))
    for blob, chunks in of_blob.items():
        run: list[_Wanted] = []
        end = 0
        for wanted in sorted(chunks, key=lambda each: each.chunk.offset):
            chunk_end = wanted.chunk.offset + wanted.chunk.length
            if run and (wanted.chunk.offset > end or chunk_end - run[0].chunk.offset > BLOB_BYTES):
                yield Read(blob, tuple(run))
                run, end = [], 0
            run.append(wanted)
            end = max(end, chunk_end)
        yield Read(blob, tuple(run))


def fetch(store: ObjectStore, manifest: Manifest, read: Read, sink: Sink) -> None:
    """Write the chunks of one request to `sink`, each verified.

    After a mismatch the bytes are read a second time, so that a transmission error is not taken for damage.

    Raises:
        CheckpointCorrupt: bytes are missing or differ from their digest.
    """
    try:
        data = _verified(store, manifest, read)
    except CheckpointCorrupt:
        data = _verified(store, manifest, read)
    for wanted in read.chunks:
        start = wanted.chunk.offset - read.start
        sink.write(wanted.file, wanted.offset, data[start : start + wanted.chunk.length])


def _verified(store: ObjectStore, manifest: Manifest, read: Read) -> memoryview:
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


# Compare a directory with a committed checkpoint.


def has_same_files(manifest: Manifest, source: Source, *, side_by_side: ParallelMap = map) -> bool:
    """Return whether `source` has the files, bytes and empty directories of the checkpoint; permissions may differ.

    It reads the directory, and nothing from the target.

    Raises:
        StagedFilesChanged: a file is shorter now than when it was listed.
    """
    sizes = {file.path: file.size_bytes for file in source.files}
    if sizes != {file.path: file.size_bytes for file in manifest.files}:
        return False
    if set(source.empty_directories) != set(manifest.empty_directories):
        return False
    indexes = {file.path: index for index, file in enumerate(source.files)}
    chunks = (
        (Piece(indexes[file.path], offset, chunk.length), chunk)
        for file in manifest.files
        for offset, chunk in file.placed_chunks()
    )

    def is_same(wanted: tuple[Piece, ChunkRef]) -> bool:
        buffer = memoryview(bytearray(wanted[0].length))
        source.read_into(wanted[0], buffer)
        return digest_of(buffer) == wanted[1].digest

    return all(side_by_side(is_same, chunks))
