"""Compare a directory with a committed checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from prefect_tune.core.checkpoints.chunking import Piece, Source
from prefect_tune.core.checkpoints.commit import ParallelMap
from prefect_tune.core.checkpoints.manifest import ChunkRef, Manifest
from prefect_tune.core.models import digest_of

__all__ = ["has_same_files"]


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
    return all(side_by_side(lambda wanted: _is_chunk(source, *wanted), _chunks(manifest, source)))


def _chunks(manifest: Manifest, source: Source) -> Iterator[tuple[Piece, ChunkRef]]:
    indexes = {file.path: index for index, file in enumerate(source.files)}
    for file in manifest.files:
        for offset, chunk in file.placed_chunks():
            yield Piece(indexes[file.path], offset, chunk.length), chunk


def _is_chunk(source: Source, piece: Piece, chunk: ChunkRef) -> bool:
    buffer = memoryview(bytearray(piece.length))
    source.read_into(piece, buffer)
    return digest_of(buffer) == chunk.digest
