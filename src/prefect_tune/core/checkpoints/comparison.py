"""Compare a directory with a committed checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from prefect_tune.core.checkpoints.chunking import Piece, Source
from prefect_tune.core.checkpoints.manifest import FileRef, Manifest
from prefect_tune.core.models import digest_of

__all__ = ["has_same_files"]


def has_same_files(manifest: Manifest, source: Source) -> bool:
    """Return whether `source` has the files, bytes and empty directories of the checkpoint; permissions may differ.

    It reads the directory, and nothing from the target.

    Raises:
        StagedFilesChanged: a file is shorter now than when it was listed.
    """
    sizes = {file.path: file.size_bytes for file in source.files}
    if sizes != {file.path: file.size_bytes for file in manifest.files}:
        return False
    if sorted(source.empty_directories) != sorted(manifest.empty_directories):
        return False
    indexes = {file.path: index for index, file in enumerate(source.files)}
    return all(_has_same_bytes(file, indexes[file.path], source) for file in manifest.files)


def _has_same_bytes(file: FileRef, index: int, source: Source) -> bool:
    return all(digest == _digest(piece, source) for piece, digest in _pieces(file, index))


def _pieces(file: FileRef, index: int) -> Iterator[tuple[Piece, str]]:
    offset = 0
    for chunk in file.chunks:
        yield Piece(index, offset, chunk.length), chunk.digest
        offset += chunk.length


def _digest(piece: Piece, source: Source) -> str:
    buffer = memoryview(bytearray(piece.length))
    source.read_into(piece, buffer)
    return digest_of(buffer)
