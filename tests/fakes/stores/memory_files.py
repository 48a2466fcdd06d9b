"""Both ends of a transfer in memory: a directory to save, and a directory to restore into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefect_tune.core.checkpoints.manifest import FileRange, FileStat, Manifest
from prefect_tune.core.restore import restore_files
from prefect_tune.core.storage.object_store import ObjectStore


class MemoryFiles:
    """A `Source`: paths to bytes."""

    def __init__(self, content: Mapping[str, bytes], empty_directories: Sequence[str] = ()) -> None:
        self._content = dict(sorted(content.items()))
        self.files = [FileStat(path, len(data)) for path, data in self._content.items()]
        self.empty_directories = sorted(empty_directories)

    def read_into(self, piece: FileRange, buffer: memoryview) -> None:
        data = self._content[self.files[piece.file].path]
        buffer[:] = data[piece.offset : piece.offset + piece.length]

    def require_unchanged(self) -> None:
        """Do nothing: no other process can write to it."""


class MemorySink:
    """A `FileSink`: what was written, by path."""

    def __init__(self, manifest: Manifest) -> None:
        self._paths = [file.path for file in manifest.files]
        self._content = {file.path: bytearray(file.size_bytes) for file in manifest.files}

    def write(self, file: int, offset: int, data: memoryview) -> None:
        self._content[self._paths[file]][offset : offset + len(data)] = data

    @property
    def content(self) -> dict[str, bytes]:
        return {path: bytes(data) for path, data in self._content.items()}


def load_files(store: ObjectStore, manifest: Manifest) -> dict[str, bytes]:
    """Return the files of a checkpoint, every byte verified."""
    sink = MemorySink(manifest)
    restore_files(store, manifest, sink)
    return sink.content
