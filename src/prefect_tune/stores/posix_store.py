"""An object store in files, on a local disk, NFS, or any other mounted file system.

An object is written under a hidden name, synced, and hard-linked to its own name: atomic between writers on all
machines that mount the directory, and complete after a power cut. The file has two links until its own name is synced;
a reader that finds two links syncs the folder before it uses the object.

Never: a symbolic link followed below the root; a name in a folder whose own name is not synced; another file replaced
by a create.
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
from prefect_tune.core.storage.object_store import TEMPORARY, Buffer, Listed, checked_folder, checked_path
from prefect_tune.linux import copy_range
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.parallel_map import ParallelStore

UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY})
"""Error numbers by which a file system says that it does not support an operation."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_INSTEAD = "use a local disk, NFS, or the storage's own target (S3, GCS, Azure) in place of this mount"
_CANNOT = f"this file system does not support an operation that a store needs: {_INSTEAD}"
_NO_LINKS = f"this file system has no hard links, which create-if-absent needs: {_INSTEAD}"
_KEYS = "the ticket or key of this mount has expired, or is missing: renew it (kinit)"
_KEY_ERRORS = ("EKEYEXPIRED", "EKEYREVOKED", "EKEYREJECTED", "ENOKEY")  # Linux only
_REFUSED: Mapping[int, str] = MappingProxyType(
    {
        errno.EACCES: "this user has no permission",
        errno.EPERM: "this user has no permission, or the file system forbids it to all users",
        errno.EROFS: "the file system is mounted read-only",
        **{getattr(errno, name): _KEYS for name in _KEY_ERRORS if hasattr(errno, name)},
        errno.EEXIST: "a name exists that is not a plain file",
        errno.EFBIG: "the file is too large for this file system or this user's limit",
        errno.EISDIR: "a folder has this name",
        errno.ELOOP: "a symbolic link is in the path, and links are not followed",
        errno.EMLINK: "too many links or folders for this file system",
        errno.ENAMETOOLONG: "the name is too long for this file system",
        errno.ENOTDIR: "expected a folder, found a file or a symbolic link",
        errno.EXDEV: "a part of the target is another file system; mount it elsewhere",
    }
)
_PASSING: Mapping[int, str] = MappingProxyType(
    {
        errno.ESTALE: "the server has replaced the mounted directory; if retries do not help, mount it again",
        errno.ENOTCONN: "the process that serves this mount has ended: mount it again",
        errno.EIO: "the disk or the mount fails: look at the kernel's log",
        errno.EMFILE: "this process has too many open files: raise its limit (ulimit -n)",
        errno.ENFILE: "this machine has too many open files",
    }
)

_NOT_LINKED = (_FULL | UNSUPPORTED | _REFUSED.keys() | {errno.ENOENT}) - {errno.EEXIST}
"""Error numbers after which a link was certainly not made."""


def as_store_error(error: OSError, what: str) -> StoreRefused | StoreUnavailable:
    """Return the store error for `error`, with advice; `what` is the operation and its path."""
    number = error.errno or 0
    if number in _FULL:
        return StoreUnavailable(f"{what}: the disk is full ({error.strerror}); free some space and try again")
    if number in UNSUPPORTED:
        return StoreRefused(f"{what}: {_CANNOT} ({error.strerror})")
    if number in _REFUSED:
        return StoreRefused(f"{what}: {_REFUSED[number]} ({error.strerror})")
    reason = _PASSING.get(number)
    return StoreUnavailable(f"{what}: {reason} ({error.strerror})" if reason else f"{what}: {error}")


# The system calls, which tests replace by those of a simulated disk.

_NOTHING_TO_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: its fsync() stops at the drive's cache


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What `stat` says about a name or an open file."""

    mode: int
    device: int
    inode: int
    links: int
    size_bytes: int
    modified_ns: int

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)


class FileSystemCalls:
    """The calls of this machine's kernel, one per method; names are single path components below an open folder.

    Only `open_root` follows symbolic links. Every call raises the system's `OSError`.
    """

    def open_root(self, path: str) -> int:
        return os.open(path, _FOLDER)

    def open_folder(self, name: str, folder: int) -> int:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)

    def open_file(self, name: str, folder: int) -> int:
        # O_NONBLOCK: opening a named pipe must not block for ever.
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)

    def new_file(self, name: str, folder: int) -> int:
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
        if _FULL_SYNC is not None:  # pragma: no cover - macOS only
            fcntl.fcntl(file, _FULL_SYNC)
        else:
            os.fsync(file)

    def fsync_folder(self, folder: int) -> None:
        try:
            os.fsync(folder)
        except OSError as error:
            # Some network and FUSE file systems have nothing to sync in a folder, and say so this way.
            if error.errno not in _NOTHING_TO_SYNC:
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

    def status(self, file: int) -> FileStatus:
        return _status(os.fstat(file))

    def status_of(self, name: str, folder: int) -> FileStatus:
        return _status(os.stat(name, dir_fd=folder, follow_symlinks=False))

    def names(self, folder: int) -> list[str]:
        return os.listdir(folder)

    def is_empty(self, folder: int) -> bool:
        with os.scandir(folder) as entries:
            return next(entries, None) is None


def _status(found: os.stat_result) -> FileStatus:
    return FileStatus(found.st_mode, found.st_dev, found.st_ino, found.st_nlink, found.st_size, found.st_mtime_ns)


# The store.

_LEFTOVER_AFTER = timedelta(days=1)
_WRITE_BYTES = 16 << 20  # per write; the deadline is checked before each
_READ_BYTES = 64 << 20
_RACES = 100  # tries to publish, while deletes prune the folder


@dataclass(frozen=True, slots=True)
class _Temporary:
    """A complete, synced file that is not published yet."""

    name: str
    folder: int
    status: FileStatus


class PosixStore(ParallelStore):
    """Objects as files below `root`, which must exist (`make_root`).

    Hidden files of killed writers are removed by a later writer, after a day. The deadline is checked between system
    calls. A call that hangs (a dead NFS server) can only be ended by `IsolatedStore`, from outside.
    """

    def __init__(self, root: Path, *, deadline: Deadline | None = None, calls: FileSystemCalls | None = None) -> None:
        self.root = root
        self._deadline = deadline or Deadline.never()
        self._calls = calls or FileSystemCalls()
        self._identity: tuple[int, int] | None = None
        self._has_swept = False

    @property
    def conditional_create(self) -> bool:
        return True

    def create(self, path: str, data: Buffer) -> None:
        folder, _, name = checked_path(path).rpartition("/")
        with self._operation("create", path) as root, self._temporary(root, partial(self._write, (data,))) as fresh:
            self._publish(root, folder, fresh, lambda target: self._link_new(fresh, target, name, path))

    def put(self, path: str, data: Buffer) -> None:
        """An existing object of the same size is not written again."""
        folder, _, name = checked_path(path).rpartition("/")
        with self._operation("put", path) as root:
            if self._size(root, path) == memoryview(data).nbytes:
                return
            with self._temporary(root, partial(self._write, (data,))) as fresh:
                self._publish(root, folder, fresh, lambda target: self._link_or_rename(fresh, target, name))

    def copy(self, source: str, path: str) -> None:
        """An existing object of the same size is not written again."""
        folder, _, name = checked_path(path).rpartition("/")
        with self._operation("copy", path) as root, self._opened_file(root, source) as (file, size_bytes):
            if self._size(root, path) == size_bytes:
                return
            with self._temporary(root, partial(self._copy_bytes, file, size_bytes)) as fresh:
                self._publish(root, folder, fresh, lambda target: self._link_or_rename(fresh, target, name))

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        folder, _, name = checked_path(path).rpartition("/")
        with self._operation("replace", path) as root, self._temporary(root, partial(self._write, pieces)) as fresh:
            self._publish(root, folder, fresh, lambda target: self._overwrite(fresh, target, name))

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        with self._operation("read", path) as root, self._opened_file(root, path) as (file, size_bytes):
            end = size_bytes if length is None else min(size_bytes, offset + length)
            pieces: list[bytes] = []
            while offset < end:
                self._deadline.check(f"read of {path}")
                piece = self._calls.pread(file, min(end - offset, _READ_BYTES), offset)
                if not piece:
                    break
                pieces.append(piece)
                offset += len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def size(self, path: str) -> int | None:
        with self._operation("size", path) as root:
            return self._size(root, path)

    def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
        folder = checked_folder(prefix)
        with self._operation("list", prefix) as root, ExitStack() as opened:
            start = self._walk(opened, root, folder)
            found = [] if start is None else list(self._below(start, f"{folder}/" if folder else "", after))
        return sorted(found, key=lambda listed: listed.path)

    def delete(self, paths: Sequence[str]) -> None:
        """Folders that become empty are removed too."""
        split = sorted(checked_path(path).rpartition("/")[::2] for path in paths)
        with self._operation("delete", ", ".join(paths[:3])) as root:
            for folder, of_folder in groupby(split, key=lambda of: of[0]):
                with ExitStack() as opened:
                    where = self._walk(opened, root, folder)
                    if where is not None:
                        for _, name in of_folder:
                            self._deadline.check(f"delete of {name!r}")
                            with suppress(FileNotFoundError, IsADirectoryError):
                                self._calls.unlink(name, where)
                        self._calls.fsync_folder(where)  # a manifest must not come back after its blobs have gone
                self._prune(root, folder)

    # Names and folders.

    @contextmanager
    def _operation(self, doing: str, path: str) -> Iterator[int]:
        """Open the root for one operation, and raise its `OSError`s as store errors."""
        what = f"{doing} of {path!r} in {self.root}"
        self._deadline.check(what)
        try:
            with ExitStack() as opened:
                try:
                    root = self._enter(opened, self._calls.open_root(os.fspath(self.root)))
                    status = self._calls.status(root)
                except FileNotFoundError as error:
                    raise StoreUnavailable(
                        f"{what}: the root itself does not exist: correct its path, mount its file system, or create it"
                    ) from error
                identity = (status.device, status.inode)
                if identity != (self._identity or identity):
                    raise StoreUnavailable(
                        f"{what}: the root is another directory than before; was it unmounted or replaced?"
                    )
                self._identity = identity
                yield root
        except OSError as error:
            raise as_store_error(error, what) from error

    def _enter(self, opened: ExitStack, file: int) -> int:
        opened.callback(self._calls.close, file)
        return file

    def _walk(self, opened: ExitStack, root: int, folder: str) -> int | None:
        """Open `folder` component by component, following no link; None if it does not exist."""
        where = root
        for name in folder.split("/") if folder else ():
            try:
                where = self._enter(opened, self._calls.open_folder(name, where))
            except FileNotFoundError:
                return None
            except NotADirectoryError:
                if self._calls.status_of(name, where).is_link:
                    raise
                return None  # an object has this name
        return where

    def _make(self, opened: ExitStack, root: int, folder: str) -> int:
        """Open `folder`, creating missing parts; each new name is synced before anything is put into the folder."""
        parent, where, is_old = root, root, True
        for name in folder.split("/") if folder else ():
            try:
                parent, where = where, self._enter(opened, self._calls.open_folder(name, where))
            except FileNotFoundError:
                if is_old:
                    self._settle_name(where, parent)
                is_old = False
                with suppress(FileExistsError):
                    self._calls.mkdir(name, where)
                parent, where = where, self._enter(opened, self._calls.open_folder(name, where))
                self._calls.fsync_folder(parent)
        if is_old:
            self._settle_name(where, parent)
        return where

    def _settle_name(self, folder: int, parent: int) -> None:
        """Sync the name of an empty folder, whose maker may have died before the sync.

        A folder with entries needs no sync: its name, and those above it, were synced before the first entry.
        """
        if folder != parent and self._calls.is_empty(folder):
            self._calls.fsync_folder(parent)

    def _status_at(self, folder: int, name: str) -> FileStatus | None:
        try:
            return self._calls.status_of(name, folder)
        except FileNotFoundError:
            return None

    def _settle(self, folder: int, status: FileStatus) -> None:
        """Sync the folder of an object that has two links, so that the object survives a power cut; refuse a link."""
        if status.is_link:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if status.links > 1:
            self._calls.fsync_folder(folder)

    def _size(self, root: int, path: str) -> int | None:
        folder, _, name = checked_path(path).rpartition("/")
        with ExitStack() as opened:
            where = self._walk(opened, root, folder)
            status = None if where is None else self._status_at(where, name)
            if where is None or status is None or status.is_folder:
                return None
            self._settle(where, status)
            return status.size_bytes

    @contextmanager
    def _opened_file(self, root: int, path: str) -> Iterator[tuple[int, int]]:
        folder, _, name = checked_path(path).rpartition("/")
        with ExitStack() as opened:
            where = self._walk(opened, root, folder)
            try:
                file = None if where is None else self._enter(opened, self._calls.open_file(name, where))
            except FileNotFoundError:
                file = None
            status = None if file is None else self._calls.status(file)
            if where is None or file is None or status is None or status.is_folder:
                raise ObjectNotFound(f"{path}: no such object in {self.root}")
            if not status.is_file:
                raise StoreRefused(f"{path} in {self.root}: expected a plain file, found something else")
            self._settle(where, status)
            yield file, status.size_bytes

    def _below(self, folder: int, prefix: str, after: str) -> Iterator[Listed]:
        """Yield the objects below an open folder, unordered; entries that vanish meanwhile are left out."""
        for name in self._calls.names(folder):
            path = prefix + name
            status = None if path == TEMPORARY else self._status_at(folder, name)
            if status is None:
                continue
            if status.is_file and path > after:
                yield Listed(path, status.size_bytes)
            elif status.is_folder and (f"{path}/" > after or after.startswith(f"{path}/")):
                with ExitStack() as opened, suppress(FileNotFoundError):
                    self._deadline.check(f"list of {path}")
                    inner = self._enter(opened, self._calls.open_folder(name, folder))
                    yield from self._below(inner, f"{path}/", after)

    # Writing a hidden file, and publishing it by a hard link, which never replaces another file.

    @contextmanager
    def _temporary(self, root: int, fill: Callable[[int], None]) -> Iterator[_Temporary]:
        """Let `fill` write a hidden file, and sync it; it is removed once the object is published or was not made."""
        with ExitStack() as opened:
            try:
                folder = self._enter(opened, self._calls.open_folder(TEMPORARY, root))
            except FileNotFoundError:
                with suppress(FileExistsError):
                    self._calls.mkdir(TEMPORARY, root)
                folder = self._enter(opened, self._calls.open_folder(TEMPORARY, root))
            name = uuid.uuid4().hex
            file = self._enter(opened, self._calls.new_file(name, folder))
            try:
                fill(file)
                self._calls.fsync(file)
                status = self._calls.status(file)
                self._sweep(folder, status.modified_ns)
                yield _Temporary(name, folder, status)
            except BaseException:
                # If it was published, keep the second link: it makes the next reader sync.
                if not self._may_be_published(file):
                    self._discard(name, folder)
                raise
            self._discard(name, folder)

    def _write(self, pieces: Iterable[Buffer], file: int) -> None:
        for piece in pieces:
            left = memoryview(piece).cast("B")
            while left:
                self._deadline.check("write")
                left = left[self._calls.write(file, left[:_WRITE_BYTES]) :]

    def _copy_bytes(self, source: int, size_bytes: int, file: int) -> None:
        offset = 0
        while offset < size_bytes:
            self._deadline.check("copy")
            count = self._calls.copy_range(source, file, min(size_bytes - offset, _WRITE_BYTES), offset)
            if not count:
                raise StoreUnavailable(f"copy: expected {size_bytes} bytes, found {offset}; try again")
            offset += count

    def _may_be_published(self, file: int) -> bool:
        try:
            return self._calls.status(file).links > 1
        except OSError:
            return True

    def _publish(self, root: int, folder: str, fresh: _Temporary, into: Callable[[int], None]) -> None:
        """Call `into` with the open folder; create the folder again if a delete pruned it meanwhile."""
        for _ in range(_RACES):
            self._deadline.check(f"publishing in {folder!r}")
            try:
                with ExitStack() as opened:
                    into(self._make(opened, root, folder))
                return
            except FileNotFoundError as error:
                if self._status_at(fresh.folder, fresh.name) is None:
                    gone = f"{fresh.name}: was removed from {TEMPORARY!r} before it was published; try again"
                    raise StoreUnavailable(gone) from error
        raise StoreUnavailable(f"{folder!r} in {self.root}: deleted {_RACES} times during one publish; try again")

    def _link_new(self, fresh: _Temporary, folder: int, name: str, path: str) -> None:
        """Publish `fresh` as `name`, which must not exist.

        Raises:
            AlreadyExists: another file has that name.
            CommitUnknown: the link may have been made, or is made and its folder cannot be synced.
        """
        try:
            self._link(fresh, name, folder)
        except OSError as error:
            if not self._is_linked(fresh, folder, name, error):
                raise AlreadyExists(f"{path}: exists already in {self.root}") from error
        try:
            self._calls.fsync_folder(folder)
        except OSError as error:
            raise CommitUnknown(f"{path} in {self.root}: written, but its folder cannot be synced: {error}") from error

    def _is_linked(self, fresh: _Temporary, folder: int, name: str, error: OSError) -> bool:
        """Return whether a link that raised `error` was made (NFS lost the reply); False if another file is there.

        Raises:
            OSError: the link was not made.
            CommitUnknown: it is not known whether the link was made.
        """
        if error.errno in _NOT_LINKED:
            raise error
        try:
            there = self._status_at(folder, name)
        except OSError as blind:
            raise CommitUnknown(f"{name!r} in {self.root}: {error}, and then {blind}") from error
        if there is None:
            raise CommitUnknown(f"{name!r} in {self.root}: {error}; not there yet") from error
        if there.inode == fresh.status.inode:
            return True
        if there.is_folder:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR)) from error
        self._settle(folder, there)
        return False

    def _link_or_rename(self, fresh: _Temporary, folder: int, name: str) -> None:
        """Publish `fresh` as `name`, replacing a file only if its size differs: another writer or a disk damaged it."""
        try:
            self._link(fresh, name, folder)
        except FileExistsError:
            there = self._status_at(folder, name)
            if there is not None and not there.is_file:
                raise
            if there is None or there.size_bytes != fresh.status.size_bytes:
                self._rename(fresh, folder, name)
        self._calls.fsync_folder(folder)

    def _overwrite(self, fresh: _Temporary, folder: int, name: str) -> None:
        """Publish `fresh` as `name`, replacing the file of that name; refuse a link or anything else but a file."""
        there = self._status_at(folder, name)
        if there is not None and not there.is_file:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._rename(fresh, folder, name)
        self._calls.fsync_folder(folder)

    def _link(self, fresh: _Temporary, name: str, folder: int) -> None:
        try:
            self._calls.link(fresh.name, fresh.folder, name, folder)
        except OSError as error:
            if error.errno in UNSUPPORTED | {errno.EPERM}:
                raise StoreRefused(f"link in {self.root}: {_NO_LINKS} ({error.strerror})") from error
            raise

    def _rename(self, fresh: _Temporary, folder: int, name: str) -> None:
        second = f"{fresh.name}-again"
        self._link(fresh, second, fresh.folder)  # two links until the folder is synced
        try:
            self._calls.rename(second, fresh.folder, name, folder)
        except BaseException:
            self._discard(second, fresh.folder)
            raise

    # Removing.

    def _discard(self, name: str, folder: int) -> None:
        """Remove a hidden name; on an error it stays, and a later sweep removes it."""
        with suppress(OSError):
            self._calls.unlink(name, folder)

    def _prune(self, root: int, folder: str) -> None:
        while folder:
            parent, _, name = folder.rpartition("/")
            with ExitStack() as opened:
                where = self._walk(opened, root, parent)
                try:
                    if where is not None:
                        self._calls.rmdir(name, where)
                except OSError:  # not empty, in use, or not permitted: an empty folder does no harm
                    return
            folder = parent

    def _sweep(self, folder: int, now_ns: int) -> None:
        """Remove, once per store, hidden files that were not written to for a day, by the file system's clock `now_ns`.

        A live writer whose file was removed fails to link it, and publishes nothing.
        """
        if self._has_swept:
            return
        self._has_swept = True
        for name in self._calls.names(folder):
            with suppress(OSError):  # another writer removed it first, or it belongs to another user
                status = self._calls.status_of(name, folder)
                if timedelta(microseconds=(now_ns - status.modified_ns) / 1000) >= _LEFTOVER_AFTER:
                    if status.links > 1:  # published, but perhaps not synced: only the second link shows that
                        self._calls.sync()
                    self._calls.unlink(name, folder)


def make_root(root: Path) -> None:
    """Create and sync the root directory of a store and its missing parents; do nothing if it exists.

    Raises:
        StoreRefused: not permitted, or `root` is not a directory.
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
                raise StoreRefused(  # such as /proc: a file system without files of one's own
                    f"making {folder}: this file system cannot make a folder there ({error.strerror})"
                ) from error
            sync_folder(folder.parent)
        if not root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(root))
    except OSError as error:
        raise as_store_error(error, f"making {root}") from error


def open_folder(root: Path, *, must_exist: bool, deadline: Deadline | None = None) -> PosixStore:
    """Open the folder `root`; create it first unless it `must_exist`. Raises as `make_root`."""
    if not must_exist:
        make_root(root)
    return PosixStore(root, deadline=deadline)


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder`, so that they survive a power cut."""
    opened = os.open(folder, _FOLDER)
    try:
        FileSystemCalls().fsync_folder(opened)
    finally:
        os.close(opened)


def remove_tree(directory: str | Path) -> None:
    """Remove a directory and what a trainable has made below it; leave what cannot be removed."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
    except RecursionError:  # Python calls itself for each level, and keeps a descriptor open
        subprocess.run(["rm", "-rf", "--", str(directory)], stderr=subprocess.DEVNULL, check=False)
