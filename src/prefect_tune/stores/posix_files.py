"""Files as a store needs them: system calls that tests replace, their errors as store errors, atomic publication."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from prefect_tune.core.errors import AlreadyExists, CommitUnknown, StoreRefused, StoreUnavailable

UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY})
"""Error numbers by which a file system says that it does not support an operation."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_INSTEAD = "use a local disk, NFS, or the storage's own target (S3, GCS, Azure) in place of this mount"
_CANNOT = f"this file system does not support an operation that a store needs: {_INSTEAD}"
_NO_LINKS = f"this file system has no hard links, which create-if-absent needs: {_INSTEAD}"
_KEYS = "the ticket or key of this mount has expired, or is missing: renew it (kinit)"
_KEY_ERRORS = ("EKEYEXPIRED", "EKEYREVOKED", "EKEYREJECTED", "ENOKEY")  # Linux only
_FORBIDDEN: Mapping[int, str] = MappingProxyType(
    {
        errno.EACCES: "this user has no permission",
        errno.EPERM: "this user has no permission, or the file system forbids it to all users",
        errno.EROFS: "the file system is mounted read-only",
        **{getattr(errno, name): _KEYS for name in _KEY_ERRORS if hasattr(errno, name)},
    }
)
_IMPOSSIBLE: Mapping[int, str] = MappingProxyType(
    {
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

_NEVER_DONE = _FULL | UNSUPPORTED | _FORBIDDEN.keys() | _IMPOSSIBLE.keys() | {errno.ENOENT}
NOT_DONE = frozenset(_NEVER_DONE - {errno.EEXIST})
"""Error numbers after which a link was certainly not made."""


def as_store_error(error: OSError, what: str) -> StoreRefused | StoreUnavailable:
    """Return the store error for `error`, with advice; `what` is the operation and its path."""
    number = error.errno or 0
    if number in _FULL:
        return StoreUnavailable(f"{what}: the disk is full ({error.strerror}); free some space and try again")
    if number in UNSUPPORTED:
        return StoreRefused(f"{what}: {_CANNOT} ({error.strerror})")
    reason = _FORBIDDEN.get(number) or _IMPOSSIBLE.get(number)
    if reason is not None:
        return StoreRefused(f"{what}: {reason} ({error.strerror})")
    reason = _PASSING.get(number)
    return StoreUnavailable(f"{what}: {reason} ({error.strerror})" if reason else f"{what}: {error}")


# The system calls of the file store, which tests replace by those of a simulated disk.

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
        """Append bytes of an open file to another: in the kernel or on the file server, where that is supported."""
        with suppress(AttributeError):  # macOS
            try:
                return os.copy_file_range(source, file, length, offset)
            except OSError as error:
                if error.errno not in UNSUPPORTED | {errno.EXDEV, errno.EPERM}:
                    raise
        return self.write(file, memoryview(self.pread(source, length, offset)))

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


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder`, so that they survive a power cut."""
    opened = os.open(folder, _FOLDER)
    try:
        FileSystemCalls().fsync_folder(opened)
    finally:
        os.close(opened)


def _status(found: os.stat_result) -> FileStatus:
    return FileStatus(found.st_mode, found.st_dev, found.st_ino, found.st_nlink, found.st_size, found.st_mtime_ns)


# Publish a complete, synced file under its object's name by a hard link, which never replaces another file.


@dataclass(frozen=True, slots=True)
class Temporary:
    """A complete, synced file that is not published yet."""

    name: str
    folder: int
    status: FileStatus


class Publisher:
    """Publishes files in the folders of one store; messages name its `root`."""

    def __init__(self, calls: FileSystemCalls, root: os.PathLike[str]) -> None:
        self._calls = calls
        self._root = root

    def link(self, fresh: Temporary, folder: int, name: str, path: str) -> None:
        """Publish `fresh` as `name`, which must not exist.

        Raises:
            AlreadyExists: another file has that name.
            CommitUnknown: the link may have been made, or is made and its folder cannot be synced.
        """
        try:
            self._link(fresh, name, folder)
        except OSError as error:
            if not self._is_linked(fresh, folder, name, error):
                raise AlreadyExists(f"{path}: exists already in {self._root}") from error
        try:
            self._calls.fsync_folder(folder)
        except OSError as error:
            raise CommitUnknown(f"{path} in {self._root}: written, but its folder cannot be synced: {error}") from error

    def replace(self, fresh: Temporary, folder: int, name: str) -> None:
        """Publish `fresh` as `name`, replacing a file only if its size differs: another writer or a disk damaged it."""
        try:
            self._link(fresh, name, folder)
        except FileExistsError:
            there = status_at(self._calls, folder, name)
            if there is not None and not there.is_file:
                raise
            if there is None or there.size_bytes != fresh.status.size_bytes:
                self._rename(fresh, folder, name)
        self._calls.fsync_folder(folder)

    def overwrite(self, fresh: Temporary, folder: int, name: str) -> None:
        """Publish `fresh` as `name`, replacing the file of that name; refuse a link or anything else but a file."""
        there = status_at(self._calls, folder, name)
        if there is not None and not there.is_file:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._rename(fresh, folder, name)
        self._calls.fsync_folder(folder)

    def _link(self, fresh: Temporary, name: str, folder: int) -> None:
        try:
            self._calls.link(fresh.name, fresh.folder, name, folder)
        except OSError as error:
            if error.errno in UNSUPPORTED | {errno.EPERM}:
                raise StoreRefused(f"link in {self._root}: {_NO_LINKS} ({error.strerror})") from error
            raise

    def _rename(self, fresh: Temporary, folder: int, name: str) -> None:
        second = f"{fresh.name}-again"
        self._link(fresh, second, fresh.folder)  # two links until the folder is synced
        try:
            self._calls.rename(second, fresh.folder, name, folder)
        except BaseException:
            discard(self._calls, second, fresh.folder)
            raise

    def _is_linked(self, fresh: Temporary, folder: int, name: str, error: OSError) -> bool:
        """Return whether a link that raised `error` was made (NFS lost the reply); False if another file is there.

        Raises:
            OSError: the link was not made.
            CommitUnknown: it is not known whether the link was made.
        """
        if error.errno in NOT_DONE:
            raise error
        try:
            there = status_at(self._calls, folder, name)
        except OSError as blind:
            raise CommitUnknown(f"{name!r} in {self._root}: {error}, and then {blind}") from error
        if there is None:
            raise CommitUnknown(f"{name!r} in {self._root}: {error}; not there yet") from error
        if there.inode == fresh.status.inode:
            return True
        if there.is_folder:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR)) from error
        settle(self._calls, folder, there)
        return False


def status_at(calls: FileSystemCalls, folder: int, name: str) -> FileStatus | None:
    """Return the status of `name`; None if it does not exist."""
    try:
        return calls.status_of(name, folder)
    except FileNotFoundError:
        return None


def settle(calls: FileSystemCalls, folder: int, status: FileStatus) -> None:
    """Sync the folder of an object that has two links, so that the object survives a power cut; refuse a link."""
    if status.is_link:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if status.links > 1:
        calls.fsync_folder(folder)


def discard(calls: FileSystemCalls, name: str, folder: int) -> None:
    """Remove a hidden name; on an error it stays, and a later sweep removes it."""
    with suppress(OSError):
        calls.unlink(name, folder)


def remove_tree(directory: str | Path) -> None:
    """Remove a directory and what a trainable has made below it; leave what cannot be removed."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
    except RecursionError:  # Python calls itself for each level, and keeps a descriptor open
        subprocess.run(["rm", "-rf", "--", str(directory)], stderr=subprocess.DEVNULL, check=False)
