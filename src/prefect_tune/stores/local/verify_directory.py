"""Verify a local directory against a manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prefect_tune.core.checkpoints.chunking import Piece
from prefect_tune.core.checkpoints.manifest import ChunkRef, Manifest
from prefect_tune.core.errors import InvalidInput, StagedFilesChanged
from prefect_tune.core.models import digest_of
from prefect_tune.stores.local.staging import StagedFiles, transfer_pool


def holds_exactly(manifest: Manifest, directory: Path) -> bool:
    """Read `directory` and return whether it has exactly the files and folders of `manifest`, byte for byte."""
    try:
        staged = StagedFiles(directory)
        found = [(file.path, file.size_bytes) for file in staged.files]
        if found != sorted((file.path, file.size_bytes) for file in manifest.files):
            return False
        if set(staged.empty_directories) != set(manifest.empty_directories):
            return False
        with transfer_pool() as readers:
            return all(readers(lambda wanted: _is_chunk(staged, *wanted), _chunks(staged, manifest)))
    except (InvalidInput, StagedFilesChanged):
        return False


def _chunks(staged: StagedFiles, manifest: Manifest) -> Iterator[tuple[Piece, ChunkRef]]:
    index_of = {file.path: index for index, file in enumerate(staged.files)}
    for file in manifest.files:
        offset = 0
        for chunk in file.chunks:
            yield Piece(index_of[file.path], offset, chunk.length), chunk
            offset += chunk.length


def _is_chunk(staged: StagedFiles, piece: Piece, chunk: ChunkRef) -> bool:
    buffer = memoryview(bytearray(piece.length))
    staged.read_into(piece, buffer)
    return digest_of(buffer) == chunk.digest
