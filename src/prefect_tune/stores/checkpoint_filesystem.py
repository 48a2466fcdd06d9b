"""A committed checkpoint as a read-only pyarrow file system, with its files below the checkpoint's path."""

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
from prefect_tune.stores.local.staging import METADATA_FILE, manifest_of_copy, metadata_of_copy, read_committed

if TYPE_CHECKING:
    from prefect_tune.stores.checkpoint_location import TargetPlace

_TIMEOUT = timedelta(minutes=5)
_BUFFER_BYTES, _AT_ONCE_BYTES = 1 << 20, 1 << 25


def committed_view(place: TargetPlace) -> arrow.FileSystem:
    """Return a read-only file system that shows the files of the checkpoint at `place` below `place.path`.

    Bytes are read when they are used, and verified. The file system can be pickled.
    """
    return arrow.PyFileSystem(_View(place))


class _View(arrow.FileSystemHandler):  # type: ignore[misc]  # pyarrow ships no types
    def __init__(self, place: TargetPlace) -> None:
        self._place = place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _View) and other._place == self._place

    def __hash__(self) -> int:
        return hash(self._place.path)

    def __reduce__(self) -> tuple[type[_View], tuple[TargetPlace]]:
        return _View, (self._place,)  # the manifest is read again where it is unpickled

    def get_type_name(self) -> str:
        return "prefect-tune"

    def normalize_path(self, path: str) -> str:
        return path.rstrip("/")

    def get_file_info(self, paths: Sequence[str]) -> list[arrow.FileInfo]:
        return [self._info(path) for path in paths]

    def get_file_info_selector(self, selector: arrow.FileSelector) -> list[arrow.FileInfo]:
        base = selector.base_dir.rstrip("/")
        if self._info(base).type != arrow.FileType.Directory:
            if selector.allow_not_found:
                return []
            raise FileNotFoundError(base)
        below = [path for path in (*self._files, *self._folders) if path.startswith(f"{base}/")]
        wanted = below if selector.recursive else [path for path in below if "/" not in path[len(base) + 1 :]]
        return [self._info(path) for path in sorted(wanted)]

    def open_input_file(self, path: str) -> pa.PythonFile:
        if not (file := self._files.get(path.rstrip("/"))):
            raise FileNotFoundError(path)
        manifest, metadata = self._copy
        content: Any = _VerifiedFile(self._place, manifest, file)
        if file.path == METADATA_FILE and metadata is not None:
            content = io.BytesIO(metadata)
        return pa.PythonFile(io.BufferedReader(content, _BUFFER_BYTES), mode="r")

    def open_input_stream(self, path: str) -> pa.PythonFile:
        return self.open_input_file(path)

    def _refuse(self, *_: object) -> NoReturn:
        raise PermissionError(f"{self._place.name}: a committed checkpoint is read-only; save a new one")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse

    @cached_property
    def _copy(self) -> tuple[Manifest, bytes | None]:
        """The manifest of a copy, and the bytes of its metadata file."""
        with self._place.open(timeout=_TIMEOUT) as store:
            manifest = self._place.manifest(store)
            if manifest is None:
                expected = "expected a committed checkpoint, found a plain directory"
                raise CheckpointNotFound(f"{self._place.name}: {expected}")
            metadata = metadata_of_copy(store, manifest.key.metadata_folder, manifest)
        return manifest_of_copy(manifest, metadata), metadata

    @cached_property
    def _files(self) -> dict[str, FileRef]:
        return {f"{self._place.path}/{file.path}": file for file in self._copy[0].files}

    @cached_property
    def _folders(self) -> frozenset[str]:
        manifest, _ = self._copy
        paths = [PurePosixPath(path) for path in (*(file.path for file in manifest.files), *manifest.empty_directories)]
        above = {str(folder) for path in paths for folder in path.parents} - {"."}
        return frozenset(f"{self._place.path}/{folder}" for folder in above.union(manifest.empty_directories))

    def _info(self, path: str) -> arrow.FileInfo:
        bare = path.rstrip("/")
        if file := self._files.get(bare):
            return arrow.FileInfo(bare, arrow.FileType.File, size=file.size_bytes)
        is_folder = bare == self._place.path or bare in self._folders
        return arrow.FileInfo(bare, arrow.FileType.Directory if is_folder else arrow.FileType.NotFound)


class _VerifiedFile(io.RawIOBase):
    """One file of a checkpoint, read by chunks: those of one call side by side. The last chunk is kept."""

    def __init__(self, place: TargetPlace, manifest: Manifest, file: FileRef) -> None:
        self._place = place
        self._manifest = manifest
        self._file = file
        self._at = 0
        self._kept_from = 0
        self._kept = bytearray()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._file.size_bytes:
            return 0
        begins, found = self._kept_from, self._kept
        if not begins <= self._at < begins + len(found):
            is_small = len(buffer) <= _BUFFER_BYTES  # what follows the chunk may never be asked for
            begins, found = self._chunks_of(1 if is_small else min(len(buffer), _AT_ONCE_BYTES))
        data = memoryview(found)[self._at - begins :][: len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _chunks_of(self, length: int) -> tuple[int, bytearray]:
        """Read the chunks that hold `length` bytes from the current position on; return where they begin, and them."""
        first, end = self._at, self._at + length
        placed = self._file.placed_chunks()
        wanted = [(start, each) for start, each in placed if start < end and first < start + each.length]
        chunks = tuple(each for _, each in wanted)
        alone = FileRef(path=self._file.path, size_bytes=sum(each.length for each in chunks), chunks=chunks)
        with self._place.open(timeout=_TIMEOUT) as store:
            found = read_committed(store, self._manifest, alone)
        last_start, last = wanted[-1]
        kept = found[-last.length :]
        self._kept_from, self._kept = last_start, kept
        return wanted[0][0], found
