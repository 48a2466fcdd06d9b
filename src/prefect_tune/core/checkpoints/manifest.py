"""Manifests (creating one commits a checkpoint), verified reads of their blobs, and user metadata of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, Self

from pydantic import Field, model_validator
from pydantic_core import from_json

from prefect_tune.core.errors import (
    AlreadyExists,
    CheckpointCorrupt,
    CommitUnknown,
    InvalidInput,
    ObjectNotFound,
    StoreUnavailable,
)
from prefect_tune.core.search.domains import convert_to_dicts
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import (
    CheckpointKey,
    Generation,
    PortablePath,
    TrialKey,
    document_number,
    document_path,
)
from prefect_tune.core.storage.object_store import ObjectStore, create_idempotently
from prefect_tune.core.values import Digest, StepReport, Value, hash_bytes

# Divide the bytes of a directory into chunks and blobs: large files are split, small files are packed together.
#
# Chunks are hashed, verified and deduplicated; blobs are uploaded. The split depends on file sizes alone, so the same
# directory always gives the same blobs, and a retried upload can use the blobs that a killed upload has written.

CHUNK_BYTES = 4 * 1024 * 1024
BLOB_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FileStat:
    """One file of a staged directory: its `/`-separated relative path, size and permission bits."""

    path: str
    size_bytes: int
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of bytes of a staged file: the file's index in `StagedDirectory.files`, the range's offset and length."""

    file: int
    offset: int
    length: int


class StagedDirectory(Protocol):
    """A directory that is being saved as a checkpoint; no process may write to it until the commit."""

    @property
    def files(self) -> Sequence[FileStat]:
        """The files, sorted by path."""

    @property
    def empty_directories(self) -> Sequence[str]:
        """Directories without any file below them, sorted."""

    def read_into(self, piece: FileRange, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `piece`; raise `StagedFilesChanged` if the file has become shorter."""

    def require_unchanged(self) -> None:
        """Raise `StagedFilesChanged` if a file was written, added, replaced or removed after the files were listed.

        If this raises no error, all earlier reads saw the same state of the directory.
        """


def split_files(files: Sequence[FileStat], chunk_bytes: int = CHUNK_BYTES) -> Iterator[FileRange]:
    """Split every file into pieces of at most `chunk_bytes`; an empty file has no pieces."""
    for index, file in enumerate(files):
        for offset in range(0, file.size_bytes, chunk_bytes):
            yield FileRange(index, offset, min(chunk_bytes, file.size_bytes - offset))


def pack_ranges(ranges: Iterable[FileRange], blob_bytes: int = BLOB_BYTES) -> Iterator[tuple[FileRange, ...]]:
    """Pack consecutive pieces into groups of at most `blob_bytes`; a save sends each group as at most one blob."""
    group: list[FileRange] = []
    filled = 0
    for piece in ranges:
        if group and filled + piece.length > blob_bytes:
            yield tuple(group)
            group, filled = [], 0
        group.append(piece)
        filled += piece.length
    if group:
        yield tuple(group)


def compute_blob_digest(chunks: Iterable[tuple[Digest, int]]) -> Digest:
    """Return the digest that names a blob: BLAKE3 over the `digest:length` lines of its chunks.

    The name depends on every byte, although each byte is hashed only once, for the digest of its chunk.
    """
    return hash_bytes("".join(f"{digest}:{length}\n" for digest, length in chunks).encode())


_Count = Annotated[int, Field(ge=0, lt=2**53)]  # all JSON readers and all stores support these integers


class ChunkRef(Value):
    """A chunk of a file: the index of the blob that holds it, the offset in that blob, the length, and the digest."""

    blob: _Count
    offset: _Count
    length: Annotated[int, Field(gt=0, le=CHUNK_BYTES)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class BlobRef(Value):
    """A blob: its path relative to the folder of the experiment's generation, and its size."""

    path: PortablePath
    size_bytes: _Count


class FileRef(Value):
    """One file of the checkpoint: path, size, permission bits and its chunks, in order."""

    path: PortablePath
    size_bytes: _Count
    mode: Annotated[int, Field(ge=0, le=0o777)] = 0o644
    chunks: tuple[ChunkRef, ...] = ()

    @model_validator(mode="after")
    def _check_size(self) -> FileRef:
        total = sum(chunk.length for chunk in self.chunks)
        if total != self.size_bytes:
            raise ValueError(f"{self.path!r}: expected {self.size_bytes} bytes of chunks, found {total}")
        return self

    def chunks_with_offset(self) -> Iterator[tuple[int, ChunkRef]]:
        """Yield each chunk with its offset in the file."""
        offset = 0
        for chunk in self.chunks:
            yield offset, chunk
            offset += chunk.length


class CheckpointMetadata(Value):
    """The metadata of a checkpoint; every field is plain JSON."""

    attempt: int
    term: int
    write_id: str
    created_at: str
    parent: str | None = None
    metrics: Mapping[str, object] = Field(default_factory=dict)
    user_metadata: Mapping[str, object] = Field(default_factory=dict)
    fingerprint: Mapping[str, str] = Field(default_factory=dict)
    trained_seconds: float = 0.0
    reports: tuple[StepReport, ...] = ()
    """The reports that were not journaled when the save began; an owner that adopts the checkpoint journals them."""


class FileLayout(Value):
    """The files of a checkpoint, or of a node's part of a checkpoint, and the blobs that hold the files' bytes."""

    experiment: str
    generation: Generation
    trial: str
    step: int
    sequence: int
    blobs: tuple[BlobRef, ...]
    files: tuple[FileRef, ...]
    empty_directories: tuple[PortablePath, ...] = ()

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        for blob in self.blobs:
            if not blob.path.startswith(f"trials/{self.trial}/blobs/"):
                raise ValueError(f"{blob.path!r} is not a blob of trial {self.trial!r}")
        for file in self.files:
            for chunk in file.chunks:
                if chunk.blob >= len(self.blobs):
                    raise ValueError(f"{file.path!r}: blob {chunk.blob} does not exist")
                if chunk.offset + chunk.length > self.blobs[chunk.blob].size_bytes:
                    raise ValueError(f"{file.path!r}: a chunk ends beyond blob {chunk.blob}")
        files = [file.path for file in self.files]
        file_paths = set(files)
        if len(file_paths) != len(files) or file_paths & set(self.empty_directories):
            raise ValueError("two files or directories have the same path")
        for path in (*files, *self.empty_directories):
            parents = path.split("/")[:-1]
            if any("/".join(parents[:depth]) in file_paths for depth in range(1, len(parents) + 1)):
                raise ValueError(f"{path!r} is below a file")
        return self

    @property
    def key(self) -> CheckpointKey:
        trial = TrialKey(experiment=self.experiment, generation=self.generation, trial=self.trial)
        return CheckpointKey(trial=trial, step=self.step, sequence=self.sequence)

    @property
    def size_bytes(self) -> int:
        """The size of the restored directory."""
        return sum(file.size_bytes for file in self.files)

    def blob_path(self, index: int) -> str:
        """Return the path of blob `index`, relative to the target's root."""
        return f"{self.experiment}/{self.generation}/{self.blobs[index].path}"

    def blob_paths(self) -> frozenset[str]:
        """Return the paths of all blobs, relative to the target's root."""
        return frozenset(self.blob_path(index) for index in range(len(self.blobs)))


class Manifest(FileLayout, Document):
    """A committed checkpoint: its files, and its `metadata`."""

    format: Literal["prefect-tune/checkpoint"] = "prefect-tune/checkpoint"
    version: Literal[3] = 3
    metadata: CheckpointMetadata


# Read from the store, in few requests, the files that a manifest lists, and verify each chunk by its digest.


class FileSink(Protocol):
    """The destination of restored bytes, such as a new directory that becomes visible when it is complete."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write verified bytes into a file at `offset`; `file` is the index of the file in the manifest."""


class NullSink:
    """Discards verified bytes, for a caller that only verifies."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class _PlacedChunk:
    """A chunk, and the file and offset to which it is restored."""

    file: int
    offset: int
    chunk: ChunkRef


@dataclass(frozen=True, slots=True)
class RangeRead:
    """One request to the store, which reads neighboring chunks of one blob."""

    blob: int
    chunks: tuple[_PlacedChunk, ...]

    @property
    def start(self) -> int:
        return self.chunks[0].chunk.offset

    @property
    def length(self) -> int:
        return max(placed.chunk.offset + placed.chunk.length for placed in self.chunks) - self.start


def plan_reads(manifest: Manifest) -> Iterator[RangeRead]:
    """Yield the reads that together fetch every byte of the files in `manifest`.

    Adjacent and overlapping chunks share a read; bytes outside all chunks are not fetched. A read is never longer than
    `BLOB_BYTES`, so larger blobs, which only another program can have written, cannot exhaust this process's memory.
    """
    chunks_of_blob: dict[int, list[_PlacedChunk]] = {}
    for index, file in enumerate(manifest.files):
        for offset, chunk in file.chunks_with_offset():
            chunks_of_blob.setdefault(chunk.blob, []).append(_PlacedChunk(index, offset, chunk))
    for blob, chunks in chunks_of_blob.items():
        batch: list[_PlacedChunk] = []
        end = 0
        for placed in sorted(chunks, key=lambda placed: placed.chunk.offset):
            chunk_end = placed.chunk.offset + placed.chunk.length
            if batch and (placed.chunk.offset > end or chunk_end - batch[0].chunk.offset > BLOB_BYTES):
                yield RangeRead(blob, tuple(batch))
                batch, end = [], 0
            batch.append(placed)
            end = max(end, chunk_end)
        yield RangeRead(blob, tuple(batch))


def fetch_chunks(store: ObjectStore, manifest: Manifest, read: RangeRead, sink: FileSink) -> None:
    """Read the chunks of one request, verify them, and write them to `sink`.

    Bytes that are missing or differ are read a second time, so that a transmission error is not reported as damage.

    Raises:
        CheckpointCorrupt: bytes are missing or differ from their digest.
    """
    try:
        data = _read_and_verify(store, manifest, read)
    except CheckpointCorrupt:
        data = _read_and_verify(store, manifest, read)
    for placed in read.chunks:
        start = placed.chunk.offset - read.start
        sink.write(placed.file, placed.offset, data[start : start + placed.chunk.length])


def _read_and_verify(store: ObjectStore, manifest: Manifest, read: RangeRead) -> memoryview:
    path = manifest.blob_path(read.blob)
    try:
        data = memoryview(store.read(path, offset=read.start, length=read.length))
    except ObjectNotFound as missing:
        raise CheckpointCorrupt(f"{path}: {read.length} bytes at {read.start} are missing: no such blob") from missing
    if len(data) != read.length:
        raise CheckpointCorrupt(f"{path}: expected {read.length} bytes at {read.start}, found {len(data)}")
    for placed in read.chunks:
        start = placed.chunk.offset - read.start
        actual = hash_bytes(data[start : start + placed.chunk.length])
        if actual != placed.chunk.digest:
            name = manifest.files[placed.file].path
            raise CheckpointCorrupt(
                f"{name!r} in {path} at {placed.chunk.offset}: expected blake3 {placed.chunk.digest[:12]}…, "
                f"found {actual[:12]}… ({placed.chunk.length} bytes)"
            )
    return data


# User metadata can change after the checkpoint's commit: each change is a numbered version, created only if absent.
#
# The highest number is the current version. A version is neither rewritten nor deleted while the checkpoint exists. If
# a version were deleted, a slow writer could store its change under that low number, where no reader would find it.

_MAX_TRIES = 1000  # `update_metadata` fails after so many faster writers; usually the store's timeout comes first


class _MetadataVersion(Document):
    format: Literal["prefect-tune/metadata"] = "prefect-tune/metadata"
    version: Literal[1] = 1
    write_id: str
    metadata: Mapping[str, object]


def normalize_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return `metadata` as its readers will get it back from JSON.

    Raises:
        InvalidInput: JSON cannot represent a value in `metadata` (a tensor, a NaN, a cycle, a lone surrogate).
    """
    if not isinstance(metadata, Mapping):
        raise InvalidInput(f"metadata: expected a dict, found {type(metadata).__name__}")
    try:
        decoded: dict[str, object] = from_json(json.dumps(convert_to_dicts(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as invalid:
        raise InvalidInput(f"metadata: not valid JSON: {invalid}; convert it, or save it as a file") from invalid
    return decoded


def read_newest_metadata(store: ObjectStore, folder: str) -> dict[str, object] | None:
    """Return the newest metadata in `folder`; None if there are none. Raise `CheckpointCorrupt` if they are damaged."""
    newest = _read_newest_version(store, folder)
    return dict(newest[1].metadata) if newest else None


def update_metadata(
    store: ObjectStore,
    folder: str,
    change: Callable[[Mapping[str, object]], Mapping[str, object]],
    *,
    initial: Mapping[str, object],
    write_id: str,
) -> dict[str, object]:
    """Apply `change` to the newest metadata, or to `initial` if there is none; store the result as the next version.

    Returns the result. If two writers race, the second change is applied to the result of the first, so no change is
    lost. `change` must be idempotent, because it can be called several times, also with its own earlier result.

    Raises:
        CommitUnknown: twice, the target did not say whether it had written the version.
        StoreUnavailable: in 1000 tries, another writer was faster.
    """
    first_error: CommitUnknown | None = None
    for _ in range(_MAX_TRIES):
        newest = _read_newest_version(store, folder)
        if newest and newest[1].write_id == write_id:
            return dict(newest[1].metadata)
        latest, current = (newest[0], newest[1].metadata) if newest else (0, initial)
        revision = _MetadataVersion(write_id=write_id, metadata=normalize_metadata(change(current)))
        try:
            create_idempotently(store, document_path(folder, latest + 1), seal(revision))
        except AlreadyExists:
            continue  # another writer has created this version: apply the change to that writer's metadata
        except CommitUnknown as outcome:
            if first_error:
                raise
            first_error = outcome  # try again; the next round finds this `write_id` if the version was written
        else:
            return dict(revision.metadata)
    raise StoreUnavailable(f"{folder}: {_MAX_TRIES} other writers were faster; try again")


def _read_newest_version(store: ObjectStore, folder: str) -> tuple[int, _MetadataVersion] | None:
    number = max((document_number(folder, listed.path) or 0 for listed in store.list(folder)), default=0)
    newest = read_sealed(store, _MetadataVersion, document_path(folder, number), CheckpointCorrupt) if number else None
    # A listing may be stale, so look for later versions.
    while later := read_sealed(store, _MetadataVersion, document_path(folder, number + 1), CheckpointCorrupt):
        number, newest = number + 1, later
    return (number, newest) if newest else None
