"""The manifest of a checkpoint: its creation is the commit, and it names the blobs of every file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, Self

from pydantic import Field, model_validator

from prefect_tune.core.errors import CheckpointCorrupt
from prefect_tune.core.storage.documents import Document, seal, unseal
from prefect_tune.core.storage.layout import CheckpointKey, Generation, PortablePath, TrialKey
from prefect_tune.core.storage.object_store import Buffer
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
        _require_a_tree([file.path for file in self.files], self.empty_directories)
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


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's bytes: canonical JSON that carries its own digest."""
    return seal(manifest)


def decode_manifest(data: Buffer, where: str) -> Manifest:
    """Read a manifest, and verify its digest, version, types, sizes and paths.

    Raises:
        CheckpointCorrupt: it is torn or altered, or describes an impossible directory or paths outside of it.
        UnknownVersion: a newer prefect-tune wrote it.
    """
    return unseal(Manifest, data, where, CheckpointCorrupt)


def _require_a_tree(files: Sequence[str], directories: Sequence[str]) -> None:
    taken = set(files)
    if len(taken) != len(files) or taken & set(directories):
        raise ValueError("two files or directories have the same path")
    for path in (*files, *directories):
        parents = path.split("/")[:-1]
        if any("/".join(parents[:depth]) in taken for depth in range(1, len(parents) + 1)):
            raise ValueError(f"{path!r} is below a file")
