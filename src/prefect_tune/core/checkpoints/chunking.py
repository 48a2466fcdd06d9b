"""A directory's bytes as chunks and blobs: large files split, small files packed together.

Chunks are hashed, verified and deduplicated; blobs are uploaded. The cut depends on file sizes alone,
so the same directory always gives the same blobs, and a retried upload finds those of a killed one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefect_tune.core.models import Digest, digest_of

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
