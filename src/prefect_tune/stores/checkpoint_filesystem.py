"""A read-only pyarrow file system with the files of one committed checkpoint, below the checkpoint's path."""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
import pyarrow.fs as arrow

from prefect_tune.core.checkpoints.manifest import FileRef, Manifest
from prefect_tune.core.errors import CheckpointNotFound
from prefect_tune.stores.local.staging import METADATA_FILE, add_metadata_file, read_committed_file, read_copy_metadata

if TYPE_CHECKING:
    from prefect_tune.stores.checkpoint_location import TargetFolder

_TIMEOUT = timedelta(minutes=5)
_BUFFER_BYTES, _MAX_READ_BYTES = 1 << 20, 1 << 25


def make_checkpoint_filesystem(folder: TargetFolder) -> arrow.FileSystem:
    """Return a read-only file system in which the files of the checkpoint at `folder` are below `folder.path`.

    Bytes are read and verified on demand. The file system can be pickled.
    """
    return arrow.PyFileSystem(_CheckpointHandler(folder))


class _CheckpointHandler(arrow.FileSystemHandler):  # type: ignore[misc]  # pyarrow ships no types
    def __init__(self, folder: TargetFolder) -> None:
        self._target_folder = folder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CheckpointHandler) and other._target_folder == self._target_folder

    def __hash__(self) -> int:
        return hash(self._target_folder.path)

    def __reduce__(self) -> tuple[type[_CheckpointHandler], tuple[TargetFolder]]:
        return _CheckpointHandler, (self._target_folder,)  # unpickling does not read the manifest; the first use does

    def get_type_name(self) -> str:
        return "prefect-tune"

    def normalize_path(self, path: str) -> str:
        return path.rstrip("/")

    def get_file_info(self, paths: Sequence[str]) -> list[arrow.FileInfo]:
        return [self._make_file_info(path) for path in paths]

    def get_file_info_selector(self, selector: arrow.FileSelector) -> list[arrow.FileInfo]:
        base = selector.base_dir.rstrip("/")
        if self._make_file_info(base).type != arrow.FileType.Directory:
            if selector.allow_not_found:
                return []
            raise FileNotFoundError(base)
        paths = [path for path in (*self._files_by_path, *self._folder_paths) if path.startswith(f"{base}/")]
        selected = paths if selector.recursive else [path for path in paths if "/" not in path[len(base) + 1 :]]
        return [self._make_file_info(path) for path in sorted(selected)]

    def open_input_file(self, path: str) -> pa.PythonFile:
        if not (file := self._files_by_path.get(path.rstrip("/"))):
            raise FileNotFoundError(path)
        manifest, metadata = self._manifest_and_metadata
        content: Any = _VerifiedFile(self._target_folder, manifest, file)
        if file.path == METADATA_FILE and metadata is not None:
            content = io.BytesIO(metadata)
        return pa.PythonFile(io.BufferedReader(content, _BUFFER_BYTES), mode="r")

    def open_input_stream(self, path: str) -> pa.PythonFile:
        return self.open_input_file(path)

    def _reject_write(self, *_: object) -> NoReturn:
        raise PermissionError(f"{self._target_folder.name}: a committed checkpoint is read-only; save a new one")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _reject_write
    move = copy_file = open_output_stream = open_append_stream = _reject_write

    @cached_property
    def _manifest_and_metadata(self) -> tuple[Manifest, bytes | None]:
        """The manifest, and the metadata file's content in a copy; the content is None if a copy keeps the file."""
        with self._target_folder.open(timeout=_TIMEOUT) as store:
            manifest = self._target_folder.read_manifest(store)
            if manifest is None:
                expected = "expected a committed checkpoint, found a plain directory"
                raise CheckpointNotFound(f"{self._target_folder.name}: {expected}")
            metadata = read_copy_metadata(store, manifest.key.metadata_folder, manifest)
        return add_metadata_file(manifest, metadata), metadata

    @cached_property
    def _files_by_path(self) -> dict[str, FileRef]:
        return {f"{self._target_folder.path}/{file.path}": file for file in self._manifest_and_metadata[0].files}

    @cached_property
    def _folder_paths(self) -> frozenset[str]:
        manifest, _ = self._manifest_and_metadata
        paths = [PurePosixPath(path) for path in (*(file.path for file in manifest.files), *manifest.empty_directories)]
        parents = {str(folder) for path in paths for folder in path.parents} - {"."}
        return frozenset(f"{self._target_folder.path}/{folder}" for folder in parents.union(manifest.empty_directories))

    def _make_file_info(self, path: str) -> arrow.FileInfo:
        normalized = path.rstrip("/")
        if file := self._files_by_path.get(normalized):
            return arrow.FileInfo(normalized, arrow.FileType.File, size=file.size_bytes)
        is_folder = normalized == self._target_folder.path or normalized in self._folder_paths
        return arrow.FileInfo(normalized, arrow.FileType.Directory if is_folder else arrow.FileType.NotFound)


class _VerifiedFile(io.RawIOBase):
    """One file of a checkpoint. A read fetches whole chunks in parallel, and keeps the last chunk in memory."""

    def __init__(self, folder: TargetFolder, manifest: Manifest, file: FileRef) -> None:
        self._target_folder = folder
        self._manifest = manifest
        self._file = file
        self._position = 0
        self._cache_start = 0
        self._cache = bytearray()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._file.size_bytes:
            return 0
        start, cached = self._cache_start, self._cache
        if not start <= self._position < start + len(cached):
            is_small = len(buffer) <= _BUFFER_BYTES  # if so, read only one chunk, because the next may never be needed
            start, cached = self._read_chunks(1 if is_small else min(len(buffer), _MAX_READ_BYTES))
        data = memoryview(cached)[self._position - start :][: len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read_chunks(self, length: int) -> tuple[int, bytearray]:
        """Read the chunks that hold the next `length` bytes; return the first chunk's offset and all bytes read."""
        first, end = self._position, self._position + length
        offsets = self._file.chunks_with_offset()
        wanted = [(start, chunk) for start, chunk in offsets if start < end and first < start + chunk.length]
        chunks = tuple(chunk for _, chunk in wanted)
        part = FileRef(path=self._file.path, size_bytes=sum(chunk.length for chunk in chunks), chunks=chunks)
        with self._target_folder.open(timeout=_TIMEOUT) as store:
            data = read_committed_file(store, self._manifest, part)
        last_start, last = wanted[-1]
        self._cache_start, self._cache = last_start, data[-last.length :]
        return wanted[0][0], data
