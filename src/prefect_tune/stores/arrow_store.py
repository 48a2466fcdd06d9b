"""An object store on any file system that pyarrow or fsspec can open; safe for one writer at a time."""

from __future__ import annotations

import errno
import io
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pyarrow.fs as arrow
from pyarrow import PythonFile

from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.storage.object_store import (
    TEMPORARY_FOLDER,
    Buffer,
    ListedObject,
    validate_folder,
    validate_path,
)
from prefect_tune.stores.deadline import Deadline, named_lock
from prefect_tune.stores.parallel_map import ParallelStore
from prefect_tune.stores.posix_store import posix_store_error

# Map the exceptions of pyarrow's and fsspec's clients to store errors.

_PERMANENT_ERRORS = (PermissionError, ValueError, TypeError, NotImplementedError, ImportError)


def arrow_store_error(error: Exception, operation: str) -> StoreRefused | StoreUnavailable:
    """Convert `error`, from a file system's client, to a store error; `operation` names the operation and its path.

    An unknown error counts as transient. If that is wrong, only a bounded number of retries is wasted; a transient
    error that counted as permanent would end the work.
    """
    if isinstance(error, OSError) and error.errno not in {None, errno.EINVAL}:  # EINVAL: s3fs received a truncated body
        return posix_store_error(error, operation)
    message = str(error).partition("\n")[0] or type(error).__name__
    return (StoreRefused if isinstance(error, _PERMANENT_ERRORS) else StoreUnavailable)(f"{operation}: {message}")


_MAX_TEMPFILE_AGE = timedelta(days=1)
_OBJECT_STORAGE_TYPES = frozenset({"s3", "gcs", "abfs"})
"""pyarrow's own object storages, in which an object appears when its upload is complete, and cannot be renamed."""
_BUCKET_TYPES = _OBJECT_STORAGE_TYPES | {
    f"py::fsspec+{name}" for name in ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "obs")
}


class ArrowStore(ParallelStore):
    """An `ObjectStore` below the folder `root` of a pyarrow file system.

    `create` checks that the object is missing, writes it, and reads it back. Another process could write in between,
    so only one process may write. On a file system that is not an object storage, an object is first written to a
    hidden name and then moved, so that a failed write leaves no partial object. The size is checked after each write.

    A missing root is an error. With `create_root`, only a missing bucket is an error; a missing folder counts as empty,
    and the first write creates it. The deadline is checked between calls; only a `SubprocessStore` ends a hung call.
    """

    def __init__(
        self, filesystem: arrow.FileSystem, root: str, *, deadline: Deadline | None = None, create_root: bool = False
    ) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._deadline = deadline or Deadline.never()
        self._is_object_storage = filesystem.type_name in _OBJECT_STORAGE_TYPES
        self._skips_root_check = create_root and filesystem.type_name not in _BUCKET_TYPES
        self._has_removed_stale_files = False
        # Used for `rm_file`: pyarrow would call `rm`, which reads "?" and "*" as patterns and relies on old listings.
        self._fsspec = getattr(getattr(filesystem, "handler", None), "fs", None)

    @property
    def has_conditional_create(self) -> bool:
        return False

    def create(self, path: str, data: Buffer) -> None:
        """The creation is atomic only while no other process writes."""
        lock_name = f"{self._filesystem.type_name} {self._full_path(path)}"
        operation = f"create of {path!r}"
        with named_lock(lock_name, operation, self._deadline):
            if self.size(path) is not None:
                raise AlreadyExists(f"{path}: an object with this name exists already")
            staged = self._stage_object((data,), operation)
            try:
                self._publish_object(staged, path, (data,), operation)
                written = self.read(path)
            except (StoreUnavailable, ObjectNotFound) as error:
                raise CommitUnknown(f"{error}; the object may have been written: read it back") from error
            if bytes(written) != bytes(data):
                raise AlreadyExists(f"{path}: another writer wrote other bytes; this target is safe for one writer")

    def put(self, path: str, data: Buffer) -> None:
        """An existing object of the same size is not written again."""
        if self.size(path) != memoryview(data).nbytes:
            operation = f"put of {path!r}"
            self._publish_object(self._stage_object((data,), operation), path, (data,), operation)

    def copy(self, source: str, path: str) -> None:
        """An existing object of the same size is not written again."""
        source_path, full_path, operation = self._full_path(source), self._full_path(path), f"copy of {source!r}"
        if (size_bytes := self.size(source)) is None:
            raise ObjectNotFound(f"{source}: no such object in {self._root}")
        if self.size(path) == size_bytes:
            return
        hidden_path = None if self._is_object_storage else self._make_temporary_path()
        try:
            with self._converting_errors(operation):
                if hidden_path is not None:
                    self._filesystem.create_dir(hidden_path.rpartition("/")[0], recursive=True)
                if self._fsspec is None:
                    self._filesystem.copy_file(source_path, hidden_path or full_path)
                else:
                    try:
                        self._fsspec.cp_file(source_path, hidden_path or full_path)
                    except NotImplementedError:  # e.g. sftp, whose server cannot copy
                        with self._filesystem.open_input_file(source_path) as file:
                            self._write_object(hidden_path or full_path, (file.read_buffer(),))
                self._check_size(hidden_path or full_path, size_bytes)
        except (StoreUnavailable, StoreRefused):
            self._remove_partial_object(hidden_path or full_path, size_bytes)
            if self.size(source) is None:
                raise ObjectNotFound(f"{source}: no such object in {self._root}") from None
            raise
        if hidden_path is not None:
            self._publish_object((hidden_path, size_bytes), path, (), operation)

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        """On a file system that is not an object storage, the object is briefly missing."""
        operation = f"replace of {path!r}"
        self._publish_object(self._stage_object(pieces, operation), path, pieces, operation)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Buffer:
        full_path = self._full_path(path)
        operation = f"read of {path!r}"
        self._deadline.check(operation)
        try:
            with self._converting_errors(operation), self._filesystem.open_input_file(full_path) as file:
                size_bytes = file.size()
                end = size_bytes if length is None else min(size_bytes, offset + length)
                file.seek(min(offset, size_bytes))
                data = memoryview(file.read_buffer(max(0, end - offset)))
        except (StoreUnavailable, StoreRefused):
            if self.size(path) is None:
                raise ObjectNotFound(f"{path}: no such object in {self._root}") from None
            raise
        if len(data) < end - offset:
            raise StoreUnavailable(f"{operation}: expected {end - offset} bytes, got {len(data)}")
        return data

    def size(self, path: str) -> int | None:
        full_path = self._full_path(path)
        with self._converting_errors(f"size of {path!r}"):
            size_bytes = self._object_size(full_path)
        if size_bytes is None:
            self._check_root(f"size of {path!r}")
        return size_bytes

    def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
        folder = validate_folder(prefix)
        base = self._full_path(folder) if folder else self._root
        with self._converting_errors(f"list of {prefix!r}"):
            self._invalidate_listings()
            is_object = bool(folder) and self._filesystem.get_file_info(base).type == arrow.FileType.File
            selector = arrow.FileSelector(base or "/", recursive=True, allow_not_found=True)
            infos = [] if is_object else self._filesystem.get_file_info(selector)
        if not infos:
            self._check_root(f"list of {prefix!r}")
        root_prefix = f"{self._root.lstrip('/')}/" if self._root else ""
        infos = [info for info in infos if info.is_file]
        files = (ListedObject(info.path.lstrip("/").removeprefix(root_prefix), info.size or 0) for info in infos)
        objects = (file for file in files if file.path > after and not file.path.startswith(f"{TEMPORARY_FOLDER}/"))
        return sorted(objects, key=lambda listed: listed.path)

    def delete(self, paths: Sequence[str]) -> None:
        full_paths = [self._full_path(path) for path in paths]
        for full_path in full_paths:
            with self._converting_errors(f"delete of {full_path!r}"):
                exists = self._object_size(full_path) is not None
                if exists:
                    self._remove_file(full_path)
            if not exists:
                self._check_root(f"delete of {full_path!r}")

    def _full_path(self, path: str) -> str:
        relative = validate_path(path)
        return f"{self._root}/{relative}" if self._root else relative

    def _make_temporary_path(self) -> str:
        hidden = f"{TEMPORARY_FOLDER}/{uuid.uuid4().hex}"
        return f"{self._root}/{hidden}" if self._root else hidden

    @contextmanager
    def _converting_errors(self, operation: str) -> Iterator[None]:
        """Check the deadline, and convert every error of the client to a store error."""
        description = f"{operation} in {self._root or '/'}"
        self._deadline.check(description)
        try:
            yield
        except TuneError:
            raise
        except Exception as error:  # fsspec's clients share no error class
            raise arrow_store_error(error, description) from error

    def _invalidate_listings(self) -> None:
        if self._fsspec is not None:
            self._fsspec.invalidate_cache()

    def _object_size(self, full_path: str) -> int | None:
        self._invalidate_listings()
        info = self._filesystem.get_file_info(full_path)
        return info.size if info.type == arrow.FileType.File else None

    def _check_root(self, operation: str) -> None:
        """Raise an error if the root is missing (an unmounted folder, a deleted bucket)."""
        if self._skips_root_check or not self._root:
            return
        is_bucket = self._filesystem.type_name in _BUCKET_TYPES
        root = self._root.lstrip("/").partition("/")[0] if is_bucket else self._root
        with self._converting_errors(operation):
            kind = self._filesystem.get_file_info(root).type
        if kind == arrow.FileType.NotFound and is_bucket:
            raise StoreRefused(f"{operation}: there is no bucket {root!r}: correct its name, or create it")
        if kind == arrow.FileType.NotFound:
            raise StoreUnavailable(
                f"{operation}: the root {root!r} does not exist: correct it, mount its file system, or create it"
            )
        self._skips_root_check = True

    def _write_object(self, full_path: str, pieces: Iterable[Buffer]) -> int:
        """Write `pieces` to `full_path`, check the size on the target, and return the size."""
        if not self._is_object_storage:
            self._filesystem.create_dir(full_path.rpartition("/")[0], recursive=True)
        size_bytes = 0
        try:
            stream = self._filesystem.open_output_stream(full_path)
            try:
                for piece in pieces:
                    self._deadline.check(f"write of {full_path}")
                    size_bytes += memoryview(piece).nbytes
                    stream.write(memoryview(piece).cast("B") if len(piece) else b"")
            finally:
                stream.close()  # also after an error, so that pyarrow does not store a partial object later
            self._check_size(full_path, size_bytes)
        except Exception:
            self._remove_partial_object(full_path, size_bytes)
            raise
        return size_bytes

    def _check_size(self, full_path: str, size_bytes: int) -> None:
        if (actual_bytes := self._object_size(full_path)) != size_bytes:
            actual = "no object" if actual_bytes is None else f"{actual_bytes} bytes"
            raise StoreUnavailable(
                f"{full_path}: sent {size_bytes} bytes and the client reported success, but the target has {actual}"
            )

    def _remove_partial_object(self, full_path: str, size_bytes: int) -> None:
        """Remove the partial object that a failed write may have left; keep a complete object."""
        with suppress(Exception):  # the caller raises the write's error; the next put replaces a partial object
            if self._object_size(full_path) not in (None, size_bytes):
                self._remove_file(full_path)

    def _stage_object(self, pieces: Iterable[Buffer], operation: str) -> tuple[str, int] | None:
        """Write `pieces` to a hidden path; return the path and the size. On an object storage, do nothing."""
        if self._is_object_storage:
            return None
        with self._converting_errors(operation):
            hidden_path = self._make_temporary_path()
            size_bytes = self._write_object(hidden_path, pieces)
            if not self._has_removed_stale_files:  # remove, once per store, files of killed writers, over a day old
                self._has_removed_stale_files = True
                now = self._filesystem.get_file_info(hidden_path).mtime  # the time by the target's own clock
                for info in self._filesystem.get_file_info(arrow.FileSelector(hidden_path.rpartition("/")[0])):
                    if now and info.mtime and now - info.mtime > _MAX_TEMPFILE_AGE:
                        self._remove_file(info.path)
        return hidden_path, size_bytes

    def _publish_object(self, staged: tuple[str, int] | None, path: str, pieces: Iterable[Buffer], action: str) -> None:
        full_path = self._full_path(path)
        with self._converting_errors(action):
            if staged is None:
                self._write_object(full_path, pieces)
                return
            hidden_path, size_bytes = staged
            self._filesystem.create_dir(full_path.rpartition("/")[0], recursive=True)
            if self._object_size(full_path) is not None:
                self._remove_file(full_path)  # because on some file systems a move cannot replace an object
            if self._fsspec is not None:
                self._fsspec.mv(hidden_path, full_path)  # pyarrow's `move` would add an option that sftp rejects
            else:
                self._filesystem.move(hidden_path, full_path)
            self._check_size(full_path, size_bytes)

    def _remove_file(self, full_path: str) -> None:
        with suppress(FileNotFoundError):
            if self._fsspec is not None:
                self._fsspec.rm_file(full_path)
            else:
                self._filesystem.delete_file(full_path)


def open_fsspec(scheme: str, root: str, options: Mapping[str, Any] | None = None) -> ArrowStore:
    """Open the folder `root` with fsspec's file system for `scheme`; the first write creates a missing root.

    Raises:
        StoreRefused: the scheme is unknown, its package is missing, or its file system rejects `options`.
        StoreUnavailable: the server cannot be reached.
    """
    import fsspec

    try:
        filesystem = fsspec.filesystem(scheme, **(options or {}))
    except Exception as error:  # fsspec's clients share no error class
        raise arrow_store_error(error, f"opening {scheme}://") from error
    handler = _MemoryHandler(filesystem) if scheme == "memory" else arrow.FSSpecHandler(filesystem)
    return ArrowStore(arrow.PyFileSystem(handler), root, create_root=True)


class _MemoryHandler(arrow.FSSpecHandler):  # type: ignore[misc]  # pyarrow has no types
    """Opens a new file for each reader, because readers of one file in fsspec's memory share its position."""

    def open_input_file(self, path: str) -> PythonFile:
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        return PythonFile(io.BytesIO(self.fs.store[path].getvalue()), mode="r")
