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
from prefect_tune.core.storage.object_store import TEMPORARY, Buffer, Listed, checked_folder, checked_path
from prefect_tune.stores.deadline import Deadline, one_at_a_time
from prefect_tune.stores.parallel_map import ParallelStore
from prefect_tune.stores.posix_store import as_store_error

# Map the exceptions of pyarrow's and fsspec's clients to store errors.

_NEVER_WORKS = (PermissionError, ValueError, TypeError, NotImplementedError, ImportError)


def as_arrow_error(error: Exception, what: str) -> StoreRefused | StoreUnavailable:
    """Return the store error for `error`, which a file system's client raised during `what`.

    An error that is not known to be permanent counts as transient: retries are bounded, but an error that is
    wrongly called permanent ends the work.
    """
    if isinstance(error, OSError) and error.errno not in {None, errno.EINVAL}:  # EINVAL: s3fs, for a truncated body
        return as_store_error(error, what)
    said = str(error).partition("\n")[0] or type(error).__name__
    return (StoreRefused if isinstance(error, _NEVER_WORKS) else StoreUnavailable)(f"{what}: {said}")


_LEFTOVER_AFTER = timedelta(days=1)
_WHOLE_OR_NOTHING = frozenset({"s3", "gcs", "abfs"})
"""Native object storages: an object appears when its upload completes, and there is no rename."""
_BUCKETS = _WHOLE_OR_NOTHING | {
    f"py::fsspec+{name}" for name in ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "obs")
}


class ArrowStore(ParallelStore):
    """An `ObjectStore` below the folder `root` of a pyarrow file system.

    `create` checks, writes and reads back, which is not atomic between processes: only one process may write.
    On a file system that is not an object storage, an object is written under a hidden name and then moved, so
    that a failed write leaves no partial object. Every write compares the size that the target then shows.

    A missing root is an error; with `makes_root` it counts as empty, and the first write makes it (never a bucket).

    The deadline is checked between calls. A call that hangs can only be ended by `IsolatedStore`, from outside.
    """

    def __init__(
        self, filesystem: arrow.FileSystem, root: str, *, deadline: Deadline | None = None, makes_root: bool = False
    ) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._deadline = deadline or Deadline.never()
        self._is_whole_or_nothing = filesystem.type_name in _WHOLE_OR_NOTHING
        self._root_was_seen = makes_root and filesystem.type_name not in _BUCKETS
        self._has_swept = False
        # fsspec's own delete reads "?" and "*" in a name as a pattern, and trusts its cached listings.
        handler = getattr(filesystem, "handler", None)
        self._fsspec = getattr(handler, "fs", None)

    @property
    def conditional_create(self) -> bool:
        return False

    def create(self, path: str, data: Buffer) -> None:
        """Atomic only while no other process writes."""
        place = f"{self._filesystem.type_name} {self._full(path)}"
        what = f"create of {path!r}"
        with one_at_a_time(place, what, self._deadline):
            if self.size(path) is not None:
                raise AlreadyExists(f"{path}: an object with this name exists already")
            staged = self._staged((data,), what)
            try:
                self._publish(staged, path, (data,), what)
                found = self.read(path)
            except (StoreUnavailable, ObjectNotFound) as error:
                raise CommitUnknown(f"{error}; the object may have been written: read it back") from error
            if bytes(found) != bytes(data):
                raise AlreadyExists(f"{path}: another writer wrote other bytes; this target is safe for one writer")

    def put(self, path: str, data: Buffer) -> None:
        """An existing object of the same size is not written again."""
        if self.size(path) != memoryview(data).nbytes:
            what = f"put of {path!r}"
            self._publish(self._staged((data,), what), path, (data,), what)

    def copy(self, source: str, path: str) -> None:
        """An existing object of the same size is not written again."""
        full_source, full, what = self._full(source), self._full(path), f"copy of {source!r}"
        if (size_bytes := self.size(source)) is None:
            raise ObjectNotFound(f"{source}: no such object in {self._root}")
        if self.size(path) == size_bytes:
            return
        hidden = None if self._is_whole_or_nothing else self._hidden()
        try:
            with self._store_errors(what):
                if hidden is not None:
                    self._filesystem.create_dir(hidden.rpartition("/")[0], recursive=True)
                if self._fsspec is None:
                    self._filesystem.copy_file(full_source, hidden or full)
                else:
                    try:
                        self._fsspec.cp_file(full_source, hidden or full)
                    except NotImplementedError:  # such as sftp: its server cannot copy
                        with self._filesystem.open_input_file(full_source) as file:
                            self._write(hidden or full, (file.read_buffer(),))
                self._check_size(hidden or full, size_bytes)
        except (StoreUnavailable, StoreRefused):
            self._discard(hidden or full, size_bytes)
            if self.size(source) is None:
                raise ObjectNotFound(f"{source}: no such object in {self._root}") from None
            raise
        if hidden is not None:
            self._publish((hidden, size_bytes), path, (), what)

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        """On a file system that is not an object storage, there is no object at `path` for a moment."""
        what = f"replace of {path!r}"
        self._publish(self._staged(pieces, what), path, pieces, what)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Buffer:
        full = self._full(path)
        what = f"read of {path!r}"
        self._deadline.check(what)
        try:
            with self._store_errors(what), self._filesystem.open_input_file(full) as file:
                size_bytes = file.size()
                end = size_bytes if length is None else min(size_bytes, offset + length)
                file.seek(min(offset, size_bytes))
                found = memoryview(file.read_buffer(max(0, end - offset)))
        except (StoreUnavailable, StoreRefused):
            if self.size(path) is None:
                raise ObjectNotFound(f"{path}: no such object in {self._root}") from None
            raise
        if len(found) < end - offset:
            raise StoreUnavailable(f"{what}: expected {end - offset} bytes, got {len(found)}")
        return found

    def size(self, path: str) -> int | None:
        full = self._full(path)
        with self._store_errors(f"size of {path!r}"):
            size_bytes = self._size_of(full)
        if size_bytes is None:
            self._check_root(f"size of {path!r}")
        return size_bytes

    def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
        folder = checked_folder(prefix)
        base = self._full(folder) if folder else self._root
        with self._store_errors(f"list of {prefix!r}"):
            self._look_afresh()
            is_object = bool(folder) and self._filesystem.get_file_info(base).type == arrow.FileType.File
            selector = arrow.FileSelector(base or "/", recursive=True, allow_not_found=True)
            infos = [] if is_object else self._filesystem.get_file_info(selector)
        if not infos:
            self._check_root(f"list of {prefix!r}")
        above = f"{self._root.lstrip('/')}/" if self._root else ""
        found = (Listed(info.path.lstrip("/").removeprefix(above), info.size or 0) for info in infos if info.is_file)
        wanted = (listed for listed in found if listed.path > after and not listed.path.startswith(f"{TEMPORARY}/"))
        return sorted(wanted, key=lambda listed: listed.path)

    def delete(self, paths: Sequence[str]) -> None:
        fulls = [self._full(path) for path in paths]
        for full in fulls:
            with self._store_errors(f"delete of {full!r}"):
                is_there = self._size_of(full) is not None
                if is_there:
                    self._remove(full)
            if not is_there:
                self._check_root(f"delete of {full!r}")

    def _full(self, path: str) -> str:
        checked = checked_path(path)
        return f"{self._root}/{checked}" if self._root else checked

    def _hidden(self) -> str:
        hidden = f"{TEMPORARY}/{uuid.uuid4().hex}"
        return f"{self._root}/{hidden}" if self._root else hidden

    @contextmanager
    def _store_errors(self, what: str) -> Iterator[None]:
        """Raise every error of the client as an error of the store; check the deadline first."""
        where = f"{what} in {self._root or '/'}"
        self._deadline.check(where)
        try:
            yield
        except TuneError:
            raise
        except Exception as error:  # fsspec's clients have no common class of errors
            raise as_arrow_error(error, where) from error

    def _look_afresh(self) -> None:
        if self._fsspec is not None:
            self._fsspec.invalidate_cache()

    def _size_of(self, full: str) -> int | None:
        self._look_afresh()
        info = self._filesystem.get_file_info(full)
        return info.size if info.type == arrow.FileType.File else None

    def _check_root(self, what: str) -> None:
        """Raise if the root itself is missing (an unmounted folder, a deleted bucket) rather than one object."""
        if self._root_was_seen or not self._root:
            return
        is_bucket = self._filesystem.type_name in _BUCKETS
        root = self._root.lstrip("/").partition("/")[0] if is_bucket else self._root
        with self._store_errors(what):
            kind = self._filesystem.get_file_info(root).type
        if kind == arrow.FileType.NotFound and is_bucket:
            raise StoreRefused(f"{what}: there is no bucket {root!r}: correct its name, or create it")
        if kind == arrow.FileType.NotFound:
            raise StoreUnavailable(
                f"{what}: the root {root!r} does not exist: correct it, mount what holds it, or create it"
            )
        self._root_was_seen = True

    def _write(self, full: str, pieces: Iterable[Buffer]) -> int:
        """Write `pieces` at `full`, and return their size once the target shows all of them there."""
        if not self._is_whole_or_nothing:
            self._filesystem.create_dir(full.rpartition("/")[0], recursive=True)
        size_bytes = 0
        try:
            stream = self._filesystem.open_output_stream(full)
            try:
                for piece in pieces:
                    self._deadline.check(f"write of {full}")
                    size_bytes += memoryview(piece).nbytes
                    stream.write(memoryview(piece).cast("B") if len(piece) else b"")
            finally:
                stream.close()  # pyarrow closes it in any case, and makes an object of the bytes so far
            self._check_size(full, size_bytes)
        except Exception:
            self._discard(full, size_bytes)
            raise
        return size_bytes

    def _check_size(self, full: str, size_bytes: int) -> None:
        found = self._size_of(full)
        if found != size_bytes:
            there = "no object" if found is None else f"{found} bytes"
            raise StoreUnavailable(
                f"{full}: sent {size_bytes} bytes and the client reported success, but the target has {there}"
            )

    def _discard(self, full: str, size_bytes: int) -> None:
        """Remove the partial object that a failed write may have left; keep a complete one."""
        with suppress(Exception):  # the write's own error is raised; the next put replaces a partial object
            if self._size_of(full) not in (None, size_bytes):
                self._remove(full)

    def _staged(self, pieces: Iterable[Buffer], what: str) -> tuple[str, int] | None:
        """Write `pieces` under a hidden name, and return it and their size; None on an object storage."""
        if self._is_whole_or_nothing:
            return None
        with self._store_errors(what):
            hidden = self._hidden()
            size_bytes = self._write(hidden, pieces)
            if not self._has_swept:  # what killed writers left is removed a day later, by the target's own clock
                self._has_swept = True
                now = self._filesystem.get_file_info(hidden).mtime
                for info in self._filesystem.get_file_info(arrow.FileSelector(hidden.rpartition("/")[0])):
                    if now and info.mtime and now - info.mtime > _LEFTOVER_AFTER:
                        self._remove(info.path)
        return hidden, size_bytes

    def _publish(self, staged: tuple[str, int] | None, path: str, pieces: Iterable[Buffer], what: str) -> None:
        full = self._full(path)
        with self._store_errors(what):
            if staged is None:
                self._write(full, pieces)
                return
            hidden, size_bytes = staged
            self._filesystem.create_dir(full.rpartition("/")[0], recursive=True)
            if self._size_of(full) is not None:
                self._remove(full)  # not every file system's move replaces
            if self._fsspec is not None:
                self._fsspec.mv(hidden, full)  # pyarrow's adapter adds an option that sftp does not know
            else:
                self._filesystem.move(hidden, full)
            self._check_size(full, size_bytes)

    def _remove(self, full: str) -> None:
        with suppress(FileNotFoundError):
            if self._fsspec is not None:
                self._fsspec.rm_file(full)
            else:
                self._filesystem.delete_file(full)


def open_fsspec(scheme: str, root: str, options: Mapping[str, Any] | None = None) -> ArrowStore:
    """Open the folder `root`, which the first write makes if it is missing, with fsspec's file system for `scheme`.

    Raises:
        StoreRefused: the scheme is unknown, its package is missing, or it does not take these options.
        StoreUnavailable: it cannot be reached.
    """
    import fsspec

    try:
        filesystem = fsspec.filesystem(scheme, **(options or {}))
    except Exception as error:  # fsspec's clients have no common class of errors
        raise as_arrow_error(error, f"opening {scheme}://") from error
    handler = _MemoryHandler(filesystem) if scheme == "memory" else arrow.FSSpecHandler(filesystem)
    return ArrowStore(arrow.PyFileSystem(handler), root, makes_root=True)


class _MemoryHandler(arrow.FSSpecHandler):  # type: ignore[misc]  # pyarrow has no types
    """Each reader gets a file of its own: fsspec's memory gives all threads one, with one position."""

    def open_input_file(self, path: str) -> PythonFile:
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        return PythonFile(io.BytesIO(self.fs.store[path].getvalue()), mode="r")
