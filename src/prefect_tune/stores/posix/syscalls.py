"""The system calls of the file store, which tests replace by those of a simulated disk."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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

    def try_lock(self, file: int) -> bool:
        with suppress(OSError):  # held by a live writer, or a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder`, so that they survive a power cut."""
    opened = os.open(folder, _FOLDER)
    try:
        FileSystemCalls().fsync_folder(opened)
    finally:
        os.close(opened)


def named(calls: FileSystemCalls) -> FileSystemCalls:
    """Return `calls` whose every error carries the name of the method that raised it as a note."""
    return cast("FileSystemCalls", _Named(calls))


class _Named:
    def __init__(self, calls: FileSystemCalls) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        act = getattr(self._calls, name)

        def call(*arguments: object) -> object:
            try:
                return act(*arguments)
            except OSError as error:
                error.add_note(name)
                raise

        setattr(self, name, call)  # wrap each method once
        return call


def _status(found: os.stat_result) -> FileStatus:
    return FileStatus(found.st_mode, found.st_dev, found.st_ino, found.st_nlink, found.st_size, found.st_mtime_ns)
