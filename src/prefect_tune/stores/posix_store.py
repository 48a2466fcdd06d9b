"""An object store in files, on a local disk, NFS, or any other mounted file system.

A writer writes and syncs a hidden file, and then makes a hard link with the object's name to it. So a write is atomic
among the writers on all machines that mount the directory, and after a power cut an object is complete or absent. The
hidden name is removed once the object's name is synced; so a reader that finds both names syncs the object's folder.

A store never follows a symbolic link below the root, never puts a name into a folder before the folder's own name is
synced, and never replaces a file in a `create`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from prefect_tune.core.errors import AlreadyExists, CommitUnknown, ObjectNotFound, StoreRefused, StoreUnavailable
from prefect_tune.core.storage.object_store import (
    TEMPORARY_FOLDER,
    Buffer,
    ListedObject,
    validate_folder,
    validate_path,
)
from prefect_tune.linux import copy_range
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.parallel_map import ParallelStore

UNSUPPORTED_ERRNOS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY})
"""Error numbers of an operation that the file system does not support."""

_DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_TARGET_ADVICE = "use a local disk, NFS, or the storage's own target (S3, GCS, Azure) instead of this mount"
_UNSUPPORTED_MESSAGE = f"this file system does not support an operation that a store needs: {_TARGET_ADVICE}"
_NO_HARD_LINKS_MESSAGE = f"this file system has no hard links, which create-if-absent needs: {_TARGET_ADVICE}"
_EXPIRED_KEY_MESSAGE = "the ticket or key of this mount has expired, or is missing: renew it (kinit)"
_KEY_ERROR_NAMES = ("EKEYEXPIRED", "EKEYREVOKED", "EKEYREJECTED", "ENOKEY")  # Linux only
_REFUSAL_REASONS: Mapping[int, str] = MappingProxyType(
    {
        errno.EACCES: "this user has no permission",
        errno.EPERM: "this user has no permission, or the file system forbids this for all users",
        errno.EROFS: "the file system is mounted read-only",
        **{getattr(errno, name): _EXPIRED_KEY_MESSAGE for name in _KEY_ERROR_NAMES if hasattr(errno, name)},
        errno.EEXIST: "the name exists, and is not a plain file",
        errno.EFBIG: "the file is too large for this file system or this user's limit",
        errno.EISDIR: "a folder has this name",
        errno.ELOOP: "a symbolic link is in the path, and links are not followed",
        errno.EMLINK: "too many links or folders for this file system",
        errno.ENAMETOOLONG: "the name is too long for this file system",
        errno.ENOTDIR: "expected a folder, found a file or a symbolic link",
        errno.EXDEV: "a part of the target is another file system; mount that file system elsewhere",
    }
)
_TRANSIENT_REASONS: Mapping[int, str] = MappingProxyType(
    {
        errno.ESTALE: "the server has replaced the mounted directory; if retries do not help, mount it again",
        errno.ENOTCONN: "the process that serves this mount has ended: mount it again",
        errno.EIO: "the disk or the mount failed: see the kernel's log",
        errno.EMFILE: "this process has too many open files: raise its limit (ulimit -n)",
        errno.ENFILE: "this machine has too many open files",
    }
)

_NO_LINK_ERRNOS = (_DISK_FULL_ERRNOS | UNSUPPORTED_ERRNOS | _REFUSAL_REASONS.keys() | {errno.ENOENT}) - {errno.EEXIST}
"""Error numbers of `link` that prove that no link was made."""


def posix_store_error(error: OSError, operation: str) -> StoreRefused | StoreUnavailable:
    """Return the store error for `error`, with advice; `operation` names the operation and its path."""
    code = error.errno or 0
    if code in _DISK_FULL_ERRNOS:
        return StoreUnavailable(f"{operation}: the disk is full ({error.strerror}); free some space and try again")
    if code in UNSUPPORTED_ERRNOS:
        return StoreRefused(f"{operation}: {_UNSUPPORTED_MESSAGE} ({error.strerror})")
    if code in _REFUSAL_REASONS:
        return StoreRefused(f"{operation}: {_REFUSAL_REASONS[code]} ({error.strerror})")
    reason = _TRANSIENT_REASONS.get(code)
    return StoreUnavailable(f"{operation}: {reason} ({error.strerror})" if reason else f"{operation}: {error}")


# The system calls. Tests replace them with the calls of a simulated disk.

_NO_FOLDER_SYNC_ERRNOS = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FULL_FSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: flushes the drive's cache, too


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The result of `stat` for a name or an open file."""

    mode: int
    device: int
    inode: int
    link_count: int
    size_bytes: int
    modified_ns: int

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)


class FileSystemCalls:
    """One method per system call. Each `name` is a single path component, and is looked up in the open `folder`.

    Only `open_root` follows symbolic links. A failed call raises the system's `OSError`.
    """

    def open_root(self, path: str) -> int:
        return os.open(path, _FOLDER_FLAGS)

    def open_folder(self, name: str, folder: int) -> int:
        return os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)

    def open_file(self, name: str, folder: int) -> int:
        # With O_NONBLOCK, opening a named pipe does not block forever.
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)

    def create_file(self, name: str, folder: int) -> int:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)

    def close(self, file: int) -> None:
        os.close(file)

    def write(self, file: int, data: memoryview) -> int:
        return os.write(file, data)

    def pread(self, file: int, length: int, offset: int) -> bytes:
        return os.pread(file, length, offset)

    def copy_range(self, source: int, file: int, length: int, offset: int) -> int:
        return copy_range(source, file, length, offset)

    def fsync(self, file: int) -> None:
        if _FULL_FSYNC is not None:  # pragma: no cover - macOS only
            fcntl.fcntl(file, _FULL_FSYNC)
        else:
            os.fsync(file)

    def fsync_folder(self, folder: int) -> None:
        try:
            os.fsync(folder)
        except OSError as error:
            # Ignore these errors, which some network and FUSE file systems return because they cannot sync a folder.
            if error.errno not in _NO_FOLDER_SYNC_ERRNOS:
                raise

    def sync(self) -> None:
        os.sync()

    def link(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder, follow_symlinks=False)

    def rename(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)

    def unlink(self, name: str, folder: int) -> None:
        os.unlink(name, dir_fd=folder)

    def mkdir(self, name: str, folder: int) -> None:
        os.mkdir(name, dir_fd=folder)

    def rmdir(self, name: str, folder: int) -> None:
        os.rmdir(name, dir_fd=folder)

    def fstat(self, file: int) -> FileStatus:
        return _to_file_status(os.fstat(file))

    def stat(self, name: str, folder: int) -> FileStatus:
        return _to_file_status(os.stat(name, dir_fd=folder, follow_symlinks=False))

    def listdir(self, folder: int) -> list[str]:
        return os.listdir(folder)

    def is_empty_folder(self, folder: int) -> bool:
        with os.scandir(folder) as entries:
            return next(entries, None) is None


def _to_file_status(status: os.stat_result) -> FileStatus:
    return FileStatus(status.st_mode, status.st_dev, status.st_ino, status.st_nlink, status.st_size, status.st_mtime_ns)


# The store.

_MAX_TEMPFILE_AGE = timedelta(days=1)
_MAX_WRITE_BYTES = 16 << 20  # the limit for one system call, since the deadline is checked between calls
_MAX_READ_BYTES = 64 << 20
_MAX_PUBLISHES = 100  # the maximum number of tries to publish a file; a try fails if a delete removes its empty folder


@dataclass(frozen=True, slots=True)
class _TempFile:
    """A complete, synced file that is not published yet."""

    name: str
    folder: int
    status: FileStatus


class PosixStore(ParallelStore):
    """Objects as files below the directory `root`, which must exist; `make_root` creates such a directory.

    The hidden files of a killed writer are removed by a later writer, after a day. The deadline is checked between
    system calls. Only a `SubprocessStore` around this store can end a system call that hangs on a dead NFS server.
    """

    def __init__(self, root: Path, *, deadline: Deadline | None = None, calls: FileSystemCalls | None = None) -> None:
        self.root = root
        self._deadline = deadline or Deadline.never()
        self._calls = calls or FileSystemCalls()
        self._root_identity: tuple[int, int] | None = None
        self._has_removed_stale_files = False

    @property
    def has_conditional_create(self) -> bool:
        return True

    def create(self, path: str, data: Buffer) -> None:
        folder, _, name = validate_path(path).rpartition("/")
        with self._open_root("create", path) as root, self._temp_file(root, partial(self._write_all, (data,))) as temp:
            self._publish_file(root, folder, temp, lambda target: self._create_link(temp, target, name, path))

    def put(self, path: str, data: Buffer) -> None:
        """An existing object of the same size is not written again."""
        folder, _, name = validate_path(path).rpartition("/")
        with self._open_root("put", path) as root:
            if self._object_size(root, path) == memoryview(data).nbytes:
                return
            with self._temp_file(root, partial(self._write_all, (data,))) as temp:
                self._publish_file(root, folder, temp, lambda target: self._link_or_replace(temp, target, name))

    def copy(self, source: str, path: str) -> None:
        """An existing object of the same size is not written again."""
        folder, _, name = validate_path(path).rpartition("/")
        with self._open_root("copy", path) as root, self._open_object(root, source) as (file, size_bytes):
            if self._object_size(root, path) == size_bytes:
                return
            with self._temp_file(root, partial(self._copy_bytes, file, size_bytes)) as temp:
                self._publish_file(root, folder, temp, lambda target: self._link_or_replace(temp, target, name))

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        folder, _, name = validate_path(path).rpartition("/")
        with self._open_root("replace", path) as root, self._temp_file(root, partial(self._write_all, pieces)) as temp:
            self._publish_file(root, folder, temp, lambda target: self._replace_object(temp, target, name))

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        with self._open_root("read", path) as root, self._open_object(root, path) as (file, size_bytes):
            end = size_bytes if length is None else min(size_bytes, offset + length)
            pieces: list[bytes] = []
            while offset < end:
                self._deadline.check(f"read of {path}")
                piece = self._calls.pread(file, min(end - offset, _MAX_READ_BYTES), offset)
                if not piece:
                    break
                pieces.append(piece)
                offset += len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def size(self, path: str) -> int | None:
        with self._open_root("size", path) as root:
            return self._object_size(root, path)

    def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
        folder = validate_folder(prefix)
        with self._open_root("list", prefix) as root, ExitStack() as stack:
            start = self._open_folder(stack, root, folder)
            objects = [] if start is None else list(self._iter_objects(start, f"{folder}/" if folder else "", after))
        return sorted(objects, key=lambda listed: listed.path)

    def delete(self, paths: Sequence[str]) -> None:
        """Folders that become empty are removed too."""
        folders_and_names = sorted(validate_path(path).rpartition("/")[::2] for path in paths)
        with self._open_root("delete", ", ".join(paths[:3])) as root:
            for folder, names in groupby(folders_and_names, key=lambda pair: pair[0]):
                with ExitStack() as stack:
                    fd = self._open_folder(stack, root, folder)
                    if fd is not None:
                        for _, name in names:
                            self._deadline.check(f"delete of {name!r}")
                            with suppress(FileNotFoundError, IsADirectoryError):
                                self._calls.unlink(name, fd)
                        self._calls.fsync_folder(fd)  # else, a power cut could bring back a manifest without its blobs
                self._prune_empty_folders(root, folder)

    # Names and folders.

    @contextmanager
    def _open_root(self, operation: str, path: str) -> Iterator[int]:
        """Open the root for one operation; convert each `OSError` of the operation to a store error."""
        description = f"{operation} of {path!r} in {self.root}"
        self._deadline.check(description)
        try:
            with ExitStack() as stack:
                try:
                    root = self._close_on_exit(stack, self._calls.open_root(os.fspath(self.root)))
                    status = self._calls.fstat(root)
                except FileNotFoundError as error:
                    raise StoreUnavailable(
                        f"{description}: the root does not exist: correct its path, mount its file system, or create it"
                    ) from error
                identity = (status.device, status.inode)
                if identity != (self._root_identity or identity):
                    raise StoreUnavailable(
                        f"{description}: the root is not the same directory as before; was it unmounted or replaced?"
                    )
                self._root_identity = identity
                yield root
        except OSError as error:
            raise posix_store_error(error, description) from error

    def _close_on_exit(self, stack: ExitStack, file: int) -> int:
        stack.callback(self._calls.close, file)
        return file

    def _open_folder(self, stack: ExitStack, root: int, folder: str) -> int | None:
        """Open `folder` component by component, without following links; return None if it does not exist."""
        fd = root
        for name in folder.split("/") if folder else ():
            try:
                fd = self._close_on_exit(stack, self._calls.open_folder(name, fd))
            except FileNotFoundError:
                return None
            except NotADirectoryError:
                if self._calls.stat(name, fd).is_symlink:
                    raise
                return None  # an object has this name, so there is no such folder
        return fd

    def _open_or_create_folder(self, stack: ExitStack, root: int, folder: str) -> int:
        """Open `folder`, and create missing folders; sync each folder's name before anything is put into the folder."""
        parent, fd, exists = root, root, True
        for name in folder.split("/") if folder else ():
            try:
                parent, fd = fd, self._close_on_exit(stack, self._calls.open_folder(name, fd))
            except FileNotFoundError:
                if exists:
                    self._fsync_name_if_empty(fd, parent)
                exists = False
                with suppress(FileExistsError):
                    self._calls.mkdir(name, fd)
                parent, fd = fd, self._close_on_exit(stack, self._calls.open_folder(name, fd))
                self._calls.fsync_folder(parent)
        if exists:
            self._fsync_name_if_empty(fd, parent)
        return fd

    def _fsync_name_if_empty(self, folder: int, parent: int) -> None:
        """Sync the name of `folder` if the folder is empty, since its creator may have died before syncing it.

        A folder with entries needs no sync, since its name and its parents' names were synced before the first entry.
        """
        if folder != parent and self._calls.is_empty_folder(folder):
            self._calls.fsync_folder(parent)

    def _stat_or_none(self, folder: int, name: str) -> FileStatus | None:
        try:
            return self._calls.stat(name, folder)
        except FileNotFoundError:
            return None

    def _fsync_folder_if_linked_twice(self, folder: int, status: FileStatus) -> None:
        """If an object has two links, sync its folder, so that the name survives a power cut; reject symbolic links."""
        if status.is_symlink:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if status.link_count > 1:
            self._calls.fsync_folder(folder)

    def _object_size(self, root: int, path: str) -> int | None:
        folder, _, name = validate_path(path).rpartition("/")
        with ExitStack() as stack:
            fd = self._open_folder(stack, root, folder)
            status = None if fd is None else self._stat_or_none(fd, name)
            if fd is None or status is None or status.is_folder:
                return None
            self._fsync_folder_if_linked_twice(fd, status)
            return status.size_bytes

    @contextmanager
    def _open_object(self, root: int, path: str) -> Iterator[tuple[int, int]]:
        folder, _, name = validate_path(path).rpartition("/")
        with ExitStack() as stack:
            fd = self._open_folder(stack, root, folder)
            try:
                file = None if fd is None else self._close_on_exit(stack, self._calls.open_file(name, fd))
            except FileNotFoundError:
                file = None
            status = None if file is None else self._calls.fstat(file)
            if fd is None or file is None or status is None or status.is_folder:
                raise ObjectNotFound(f"{path}: no such object in {self.root}")
            if not status.is_file:
                raise StoreRefused(f"{path} in {self.root}: expected a plain file, found something else")
            self._fsync_folder_if_linked_twice(fd, status)
            yield file, status.size_bytes

    def _iter_objects(self, folder: int, prefix: str, after: str) -> Iterator[ListedObject]:
        """Yield the objects below an open folder, unordered; skip entries that are deleted during the iteration."""
        for name in self._calls.listdir(folder):
            path = prefix + name
            status = None if path == TEMPORARY_FOLDER else self._stat_or_none(folder, name)
            if status is None:
                continue
            if status.is_file and path > after:
                yield ListedObject(path, status.size_bytes)
            elif status.is_folder and (f"{path}/" > after or after.startswith(f"{path}/")):
                with ExitStack() as stack, suppress(FileNotFoundError):
                    self._deadline.check(f"list of {path}")
                    inner = self._close_on_exit(stack, self._calls.open_folder(name, folder))
                    yield from self._iter_objects(inner, f"{path}/", after)

    # Write a hidden file, and publish it by a hard link, which never replaces another file.

    @contextmanager
    def _temp_file(self, root: int, fill: Callable[[int], None]) -> Iterator[_TempFile]:
        """Yield a hidden, synced file that `fill` has written; at the end, remove its hidden name."""
        with ExitStack() as stack:
            try:
                folder = self._close_on_exit(stack, self._calls.open_folder(TEMPORARY_FOLDER, root))
            except FileNotFoundError:
                with suppress(FileExistsError):
                    self._calls.mkdir(TEMPORARY_FOLDER, root)
                folder = self._close_on_exit(stack, self._calls.open_folder(TEMPORARY_FOLDER, root))
            name = uuid.uuid4().hex
            file = self._close_on_exit(stack, self._calls.create_file(name, folder))
            try:
                fill(file)
                self._calls.fsync(file)
                status = self._calls.fstat(file)
                self._remove_stale_files(folder, status.modified_ns)
                yield _TempFile(name, folder, status)
            except BaseException:
                # If the file was published, keep its hidden name, so that the next reader finds two links, and syncs.
                with suppress(OSError):
                    if self._calls.fstat(file).link_count <= 1:
                        self._calls.unlink(name, folder)
                raise
            self._remove_temp_name(name, folder)

    def _write_all(self, pieces: Iterable[Buffer], file: int) -> None:
        for piece in pieces:
            unwritten = memoryview(piece).cast("B")
            while unwritten:
                self._deadline.check("write")
                unwritten = unwritten[self._calls.write(file, unwritten[:_MAX_WRITE_BYTES]) :]

    def _copy_bytes(self, source: int, size_bytes: int, file: int) -> None:
        offset = 0
        while offset < size_bytes:
            self._deadline.check("copy")
            count = self._calls.copy_range(source, file, min(size_bytes - offset, _MAX_WRITE_BYTES), offset)
            if not count:
                raise StoreUnavailable(f"copy: expected {size_bytes} bytes, found {offset}; try again")
            offset += count

    def _publish_file(self, root: int, folder: str, temp: _TempFile, publish: Callable[[int], None]) -> None:
        """Open `folder` and call `publish` with it; repeat both if a delete removed the empty folder in between."""
        for _ in range(_MAX_PUBLISHES):
            self._deadline.check(f"publishing in {folder!r}")
            try:
                with ExitStack() as stack:
                    publish(self._open_or_create_folder(stack, root, folder))
                return
            except FileNotFoundError as error:
                if self._stat_or_none(temp.folder, temp.name) is None:
                    message = f"{temp.name}: removed from {TEMPORARY_FOLDER!r} before it was published; try again"
                    raise StoreUnavailable(message) from error
        raise StoreUnavailable(f"{folder!r} in {self.root}: deleted {_MAX_PUBLISHES} times during one write; try again")

    def _create_link(self, temp: _TempFile, folder: int, name: str, path: str) -> None:
        """Publish `temp` as `name`, which must not exist.

        Raises:
            AlreadyExists: another file has this name.
            CommitUnknown: it is unknown whether the link exists; or the link exists, but its folder cannot be synced.
        """
        try:
            self._link_file(temp, name, folder)
        except OSError as error:
            if error.errno in _NO_LINK_ERRNOS:
                raise
            try:  # the link may exist although the call failed, since NFS can lose a reply
                existing = self._stat_or_none(folder, name)
            except OSError as stat_error:
                raise CommitUnknown(f"{name!r} in {self.root}: {error}, and then {stat_error}") from error
            if existing is None:
                raise CommitUnknown(f"{name!r} in {self.root}: {error}; the name does not exist yet") from error
            if existing.inode != temp.status.inode:
                if existing.is_folder:
                    raise OSError(errno.EISDIR, os.strerror(errno.EISDIR)) from error
                self._fsync_folder_if_linked_twice(folder, existing)
                raise AlreadyExists(f"{path}: exists already in {self.root}") from error
        try:
            self._calls.fsync_folder(folder)
        except OSError as error:
            raise CommitUnknown(f"{path} in {self.root}: written, but its folder cannot be synced: {error}") from error

    def _link_or_replace(self, temp: _TempFile, folder: int, name: str) -> None:
        """Publish `temp` as `name`; replace an existing file only if it has another size, and so must be damaged."""
        try:
            self._link_file(temp, name, folder)
        except FileExistsError:
            existing = self._stat_or_none(folder, name)
            if existing is not None and not existing.is_file:
                raise
            if existing is None or existing.size_bytes != temp.status.size_bytes:
                self._replace_by_rename(temp, folder, name)
        self._calls.fsync_folder(folder)

    def _replace_object(self, temp: _TempFile, folder: int, name: str) -> None:
        """Publish `temp` as `name`, and replace an existing file; reject an existing folder or link."""
        existing = self._stat_or_none(folder, name)
        if existing is not None and not existing.is_file:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._replace_by_rename(temp, folder, name)
        self._calls.fsync_folder(folder)

    def _link_file(self, temp: _TempFile, name: str, folder: int) -> None:
        try:
            self._calls.link(temp.name, temp.folder, name, folder)
        except OSError as error:
            if error.errno in UNSUPPORTED_ERRNOS | {errno.EPERM}:
                raise StoreRefused(f"link in {self.root}: {_NO_HARD_LINKS_MESSAGE} ({error.strerror})") from error
            raise

    def _replace_by_rename(self, temp: _TempFile, folder: int, name: str) -> None:
        second_name = f"{temp.name}-again"
        self._link_file(temp, second_name, temp.folder)  # so that the file has two links until the folder is synced
        try:
            self._calls.rename(second_name, temp.folder, name, folder)
        except BaseException:
            self._remove_temp_name(second_name, temp.folder)
            raise

    # Remove hidden files and empty folders.

    def _remove_temp_name(self, name: str, folder: int) -> None:
        """Remove a hidden name; if that fails, `_remove_stale_files` of a later store removes it."""
        with suppress(OSError):
            self._calls.unlink(name, folder)

    def _prune_empty_folders(self, root: int, folder: str) -> None:
        while folder:
            parent, _, name = folder.rpartition("/")
            with ExitStack() as stack:
                fd = self._open_folder(stack, root, parent)
                try:
                    if fd is not None:
                        self._calls.rmdir(name, fd)
                except OSError:  # the folder is not empty or cannot be removed; an empty folder does no harm
                    return
            folder = parent

    def _remove_stale_files(self, folder: int, now_ns: int) -> None:
        """Remove hidden files older than a day, once per `PosixStore`; `now_ns` is the time by the file system's clock.

        If the writer of such a file is still alive, it can no longer link the file, so it publishes nothing.
        """
        if self._has_removed_stale_files:
            return
        self._has_removed_stale_files = True
        for name in self._calls.listdir(folder):
            with suppress(OSError):  # another writer removed the file first, or another user owns it
                status = self._calls.stat(name, folder)
                if timedelta(microseconds=(now_ns - status.modified_ns) / 1000) >= _MAX_TEMPFILE_AGE:
                    if status.link_count > 1:  # the object's name may be unsynced, and no reader would sync it later
                        self._calls.sync()
                    self._calls.unlink(name, folder)


def make_root(root: Path) -> None:
    """Create the root directory of a store and its missing parents, and sync them; do nothing if the root exists.

    Raises:
        StoreRefused: no permission, or `root` is not a directory.
        StoreUnavailable: the disk is full or does not answer.
    """
    if root.is_dir():
        return
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        for folder in reversed(missing):
            try:
                folder.mkdir(exist_ok=True)
            except FileNotFoundError as error:
                if not folder.parent.is_dir():
                    raise
                raise StoreRefused(  # e.g. /proc, where users cannot create files
                    f"making {folder}: this file system cannot make a folder there ({error.strerror})"
                ) from error
            sync_folder(folder.parent)
        if not root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(root))
    except OSError as error:
        raise posix_store_error(error, f"making {root}") from error


def open_posix_store(root: Path, *, must_exist: bool, deadline: Deadline | None = None) -> PosixStore:
    """Open the folder `root`; if `must_exist` is False, create it first. Raises like `make_root`."""
    if not must_exist:
        make_root(root)
    return PosixStore(root, deadline=deadline)


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder`, so that they survive a power cut."""
    fd = os.open(folder, _FOLDER_FLAGS)
    try:
        FileSystemCalls().fsync_folder(fd)
    finally:
        os.close(fd)


def remove_tree(directory: str | Path) -> None:
    """Remove a directory and everything that a trainable created in it; ignore files that cannot be removed."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
    except RecursionError:  # `rmtree` calls itself for each level of folders; `rm` does not
        subprocess.run(["rm", "-rf", "--", str(directory)], stderr=subprocess.DEVNULL, check=False)
