"""The manifest of a checkpoint, whose creation is the commit; verified reads of the blobs that it names; metadata."""

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
from prefect_tune.core.search.domains import as_dicts
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import CheckpointKey, Generation, PortablePath, TrialKey, number_in, numbered
from prefect_tune.core.storage.object_store import ObjectStore, create_or_recognize
from prefect_tune.core.values import Digest, StepReport, Value, digest_of

# A directory's bytes as chunks and blobs: large files split, small files packed together.
#
# Chunks are hashed, verified and deduplicated; blobs are uploaded. The cut depends on file sizes alone,
# so the same directory always gives the same blobs, and a retried upload finds those of a killed one.

CHUNK_BYTES = 4 * 1024 * 1024
BLOB_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FileStat:
    """One file of a staged directory: `/`-separated path below it, size and permission bits."""

    path: str
    size_bytes: int
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one staged file: the file's index in the list, and the run's offset and length."""

    file: int
    offset: int
    length: int


class Source(Protocol):
    """A staged directory, which no process writes to until the commit."""

    @property
    def files(self) -> Sequence[FileStat]:
        """The files, sorted by path."""
        ...

    @property
    def empty_directories(self) -> Sequence[str]:
        """Directories without any file below them, sorted."""
        ...

    def read_into(self, piece: Piece, buffer: memoryview) -> None:
        """Fill `buffer`, which is as long as the piece.

        Raises:
            StagedFilesChanged: the file is shorter now than when it was listed.
        """
        ...

    def require_unchanged(self) -> None:
        """Return if the directory is unchanged since it was listed, so that all reads saw one state of it.

        Raises:
            StagedFilesChanged: a file was written, added, replaced or removed since.
        """
        ...


def pieces(files: Sequence[FileStat], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Piece]:
    """Cut every file into runs of at most `chunk_bytes`; an empty file has none."""
    for index, file in enumerate(files):
        for offset in range(0, file.size_bytes, chunk_bytes):
            yield Piece(index, offset, min(chunk_bytes, file.size_bytes - offset))


def groups(cut: Iterable[Piece], blob_bytes: int = BLOB_BYTES) -> Iterator[tuple[Piece, ...]]:
    """Gather consecutive pieces into groups of at most `blob_bytes`, each one blob's worth."""
    group: list[Piece] = []
    filled = 0
    for piece in cut:
        if group and filled + piece.length > blob_bytes:
            yield tuple(group)
            group, filled = [], 0
        group.append(piece)
        filled += piece.length
    if group:
        yield tuple(group)


def blob_digest(chunks: Iterable[tuple[Digest, int]]) -> Digest:
    """Return the digest that names a blob: BLAKE3 over the `digest:length` lines of its chunks.

    The bytes are hashed once, chunk by chunk; naming the blob by its chunks costs no second pass
    and binds every byte just as well.
    """
    return digest_of("".join(f"{digest}:{length}\n" for digest, length in chunks).encode())


_Count = Annotated[int, Field(ge=0, lt=2**53)]  # the range of every JSON reader, and of every store's offsets


class ChunkRef(Value):
    """A run of a file's bytes: the blob that holds it, the offset in the blob, the length and the digest."""

    blob: _Count
    offset: _Count
    length: Annotated[int, Field(gt=0, le=CHUNK_BYTES)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class BlobRef(Value):
    """A blob: its path below the folder of the experiment's generation, and its size."""

    path: PortablePath
    size_bytes: _Count


class FileRef(Value):
    """One file of the checkpoint: path, size, permission bits and the chunks that make it up, in order."""

    path: PortablePath
    size_bytes: _Count
    mode: Annotated[int, Field(ge=0, le=0o777)] = 0o644
    chunks: tuple[ChunkRef, ...] = ()

    @model_validator(mode="after")
    def _adds_up(self) -> FileRef:
        found = sum(chunk.length for chunk in self.chunks)
        if found != self.size_bytes:
            raise ValueError(f"{self.path!r}: expected {self.size_bytes} bytes of chunks, found {found}")
        return self

    def placed_chunks(self) -> Iterator[tuple[int, ChunkRef]]:
        """Yield each chunk after its offset in the file."""
        offset = 0
        for chunk in self.chunks:
            yield offset, chunk
            offset += chunk.length


class About(Value):
    """The metadata of a checkpoint; every field is plain JSON."""

    attempt: int
    term: int
    write_id: str
    created_at: str
    parent: str | None = None
    metrics: Mapping[str, object] = Field(default_factory=dict)
    metadata: Mapping[str, object] = Field(default_factory=dict)
    fingerprint: Mapping[str, str] = Field(default_factory=dict)
    trained_seconds: float = 0.0
    reports: tuple[StepReport, ...] = ()
    """Reports that were not journaled when the save began: an owner that adopts the save journals them."""


class Contents(Value):
    """The files of a checkpoint, or of a node's part of it, and the blobs that hold their bytes."""

    experiment: str
    generation: Generation
    trial: str
    step: int
    sequence: int
    blobs: tuple[BlobRef, ...]
    files: tuple[FileRef, ...]
    empty_directories: tuple[PortablePath, ...] = ()

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        for blob in self.blobs:
            if not blob.path.startswith(f"trials/{self.trial}/blobs/"):
                raise ValueError(f"{blob.path!r} is not a blob of trial {self.trial!r}")
        for file in self.files:
            for chunk in file.chunks:
                if chunk.blob >= len(self.blobs):
                    raise ValueError(f"{file.path!r}: there is no blob {chunk.blob}")
                if chunk.offset + chunk.length > self.blobs[chunk.blob].size_bytes:
                    raise ValueError(f"{file.path!r}: a chunk ends beyond blob {chunk.blob}")
        files = [file.path for file in self.files]
        taken = set(files)
        if len(taken) != len(files) or taken & set(self.empty_directories):
            raise ValueError("two files or directories have the same path")
        for path in (*files, *self.empty_directories):
            parents = path.split("/")[:-1]
            if any("/".join(parents[:depth]) in taken for depth in range(1, len(parents) + 1)):
                raise ValueError(f"{path!r} is below a file")
        return self

    @property
    def key(self) -> CheckpointKey:
        """The key of the checkpoint."""
        trial = TrialKey(experiment=self.experiment, generation=self.generation, trial=self.trial)
        return CheckpointKey(trial=trial, step=self.step, sequence=self.sequence)

    @property
    def size_bytes(self) -> int:
        """The size of the restored directory."""
        return sum(file.size_bytes for file in self.files)

    def blob_path(self, index: int) -> str:
        """Return the path of blob `index` from the target's root."""
        return f"{self.experiment}/{self.generation}/{self.blobs[index].path}"

    def blob_paths(self) -> frozenset[str]:
        """Return the paths of all its blobs from the target's root."""
        return frozenset(self.blob_path(index) for index in range(len(self.blobs)))


class Manifest(Contents, Document):
    """A committed checkpoint: its metadata (`about`) and its contents."""

    format: Literal["prefect-tune/checkpoint"] = "prefect-tune/checkpoint"
    version: Literal[2] = 2
    about: About


# Read the bytes of a manifest from the store in few requests, each chunk verified against its digest.


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


# User metadata of a checkpoint, written after its commit as numbered versions, each created only if absent.
#
# The highest number counts. A version is neither rewritten nor deleted while the checkpoint exists: otherwise a
# slow writer could create a version with a freed number, and believe that its change counts.

_TRIES = 1000  # each lost race is another writer's success; the store's deadline ends the loop earlier


class _Revision(Document):
    format: Literal["prefect-tune/metadata"] = "prefect-tune/metadata"
    version: Literal[1] = 1
    write_id: str
    metadata: Mapping[str, object]


def plain_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return `metadata` as it will be read back from JSON.

    Raises:
        InvalidInput: JSON cannot represent it (an object, a NaN, a cycle, a lone surrogate).
    """
    if not isinstance(metadata, Mapping):
        raise InvalidInput(f"metadata: expected a dict, found {type(metadata).__name__}")
    try:
        said: dict[str, object] = from_json(json.dumps(as_dicts(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as unsaid:
        raise InvalidInput(f"metadata: not valid JSON: {unsaid}; convert it, or save it as a file") from unsaid
    return said


def newest_metadata(store: ObjectStore, folder: str) -> dict[str, object] | None:
    """Return the newest version in `folder`; None where there is none.

    Raises:
        CheckpointCorrupt: the newest version is altered.
    """
    newest = _newest(store, folder)
    return dict(newest[1].metadata) if newest else None


def revise_metadata(
    store: ObjectStore,
    folder: str,
    change: Callable[[Mapping[str, object]], Mapping[str, object]],
    *,
    before: Mapping[str, object],
    write_id: str,
) -> dict[str, object]:
    """Add a version: `change` of the newest one, or of `before` where there is none; return it.

    When writers race, no change is lost: the second is applied to what the first wrote. `change` may be called
    several times, and must be idempotent.

    Raises:
        CommitUnknown: the target did not say whether it wrote, twice.
        StoreUnavailable: other writers were faster 1000 times.
    """
    unknown: CommitUnknown | None = None
    for _ in range(_TRIES):
        newest = _newest(store, folder)
        if newest and newest[1].write_id == write_id:
            return dict(newest[1].metadata)
        number, current = (newest[0], newest[1].metadata) if newest else (0, before)
        revision = _Revision(write_id=write_id, metadata=plain_metadata(change(current)))
        try:
            create_or_recognize(store, numbered(folder, number + 1), seal(revision))
        except AlreadyExists:
            continue  # another writer was faster: apply the change to what it wrote
        except CommitUnknown as outcome:
            if unknown:
                raise
            unknown = outcome  # write the same number again: both writes hold the same version
        else:
            return dict(revision.metadata)
    raise StoreUnavailable(f"{folder}: {_TRIES} other writers were faster; try again")


def _newest(store: ObjectStore, folder: str) -> tuple[int, _Revision] | None:
    number = max((number_in(folder, listed.path) or 0 for listed in store.list(folder)), default=0)
    newest = read_sealed(store, _Revision, numbered(folder, number), CheckpointCorrupt) if number else None
    # A listing may lag behind its store.
    while later := read_sealed(store, _Revision, numbered(folder, number + 1), CheckpointCorrupt):
        number, newest = number + 1, later
    return (number, newest) if newest else None
