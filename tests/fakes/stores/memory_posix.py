"""A disk in memory with a page cache: unsynced writes may vanish or be torn at a power loss.

The store above it is the real `PosixStore`, which reaches it through `FileSystemCalls`.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from prefect_tune.stores.posix_store import FileStatus, PosixStore
from tests.fakes.stores.dying_store import Crash, Failure

_In = TypeVar("_In")
_T = TypeVar("_T")


def posix_store(disk: MemoryPosix | DyingCalls) -> PosixStore:
    """Open a `PosixStore` on `disk`, as one process would."""
    return _SequentialStore(Path("/"), calls=disk)


class _SequentialStore(PosixStore):
    def map(self, function: Callable[[_In], _T], items: Iterable[_In]) -> Iterator[_T]:
        """Call `function` with one item after the other, so that the nth system call is the same in each run."""
        return map(function, items)


@dataclass(eq=False, slots=True)
class _File:
    inode: int
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    modified_ns: int = 0


@dataclass(eq=False, slots=True)
class _Folder:
    inode: int
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    is_removed: bool = False


class MemoryPosix:
    """The disk and its cache. A process that dies leaves both; `lose_power` leaves what was synced.

    With `fsync_works=False`, fsync does nothing: like a drive without a flush, or a store that forgot to sync.
    `clock_ns` is the file system's clock, which a test may set.
    """

    def __init__(self, *, fsync_works: bool = True) -> None:
        self.clock_ns = 0
        self._fsync_works = fsync_works
        self._inodes = 1
        self._root = _Folder(1)
        self._open: dict[int, _File | _Folder] = {}
        self._files = 2
        self._lock = threading.RLock()

    def lose_power(self, seed: int | None = None) -> None:
        """Drop the cache: all unsynced data, or with a seed a random part of it: names, halves of files, zeros."""
        rng = None if seed is None else random.Random(seed)
        with self._lock:
            self._open.clear()
            files: set[_File] = set()
            for folder in self._folders(self._root, both=True):
                _forget_names(folder, rng)
                files |= {entry for entry in folder.names.values() if isinstance(entry, _File)}
            for file in sorted(files, key=lambda file: file.inode):
                _forget_data(file, rng)

    def tree(self) -> dict[str, bytes]:
        """Return every file's bytes by its path, hidden ones included."""
        return dict(_iter_files(self._root, ""))

    def die_with_process(self) -> None:
        """Close everything, as the kernel does for a process that has died."""
        with self._lock:
            self._open.clear()

    def open_root(self, path: str) -> int:
        del path
        return self._open_entry(self._root)

    def open_folder(self, name: str, folder: int) -> int:
        with self._lock:
            entry = self._entry(name, folder)
            if not isinstance(entry, _Folder):
                raise _error(errno.ENOTDIR)
            return self._open_entry(entry)

    def open_file(self, name: str, folder: int) -> int:
        with self._lock:
            return self._open_entry(self._entry(name, folder))

    def create_file(self, name: str, folder: int) -> int:
        with self._lock_free_name(name, folder) as parent:
            parent.names[name] = _File(self._new_inode(), modified_ns=self.clock_ns)
            return self._open_entry(parent.names[name])

    def close(self, file: int) -> None:
        with self._lock:
            self._open.pop(file, None)  # gone already after a power cut

    def write(self, file: int, data: memoryview) -> int:
        with self._lock:
            target = self._file(file)
            target.data += data
            target.modified_ns = self.clock_ns
            return len(data)

    def pread(self, file: int, length: int, offset: int) -> bytes:
        with self._lock:
            return bytes(self._file(file).data[offset : offset + length])

    def copy_range(self, source: int, file: int, length: int, offset: int) -> int:
        return self.write(file, memoryview(self.pread(source, length, offset)))

    def fsync(self, file: int) -> None:
        with self._lock:
            if self._fsync_works:
                target = self._file(file)
                target.synced = bytes(target.data)

    def fsync_folder(self, folder: int) -> None:
        with self._lock:
            if self._fsync_works:
                parent = self._folder(folder)
                parent.synced = dict(parent.names)

    def sync(self) -> None:
        with self._lock:
            for folder in self._folders(self._root, both=False) if self._fsync_works else ():
                folder.synced = dict(folder.names)
                for entry in folder.names.values():
                    if isinstance(entry, _File):
                        entry.synced = bytes(entry.data)

    def link(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        with self._lock_free_name(new_name, new_folder) as parent:
            parent.names[new_name] = self._entry(name, folder)

    def rename(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        with self._lock:
            moved = self._entry(name, folder)
            target = self._folder(new_folder).names
            if isinstance(target.get(new_name), _Folder):
                raise _error(errno.EISDIR)
            if target.get(new_name) is not moved:
                target[new_name] = moved
                del self._folder(folder).names[name]

    def unlink(self, name: str, folder: int) -> None:
        with self._lock:
            if isinstance(self._entry(name, folder), _Folder):
                raise _error(errno.EISDIR)
            del self._folder(folder).names[name]

    def mkdir(self, name: str, folder: int) -> None:
        with self._lock_free_name(name, folder) as parent:
            parent.names[name] = _Folder(self._new_inode())

    def rmdir(self, name: str, folder: int) -> None:
        with self._lock:
            entry = self._entry(name, folder)
            if not isinstance(entry, _Folder):
                raise _error(errno.ENOTDIR)
            if entry.names:
                raise _error(errno.ENOTEMPTY)
            entry.is_removed = True
            del self._folder(folder).names[name]

    def fstat(self, file: int) -> FileStatus:
        with self._lock:
            return self._status(self._open[file])

    def stat(self, name: str, folder: int) -> FileStatus:
        with self._lock:
            return self._status(self._entry(name, folder))

    def listdir(self, folder: int) -> list[str]:
        with self._lock:
            return list(self._folder(folder).names)

    def is_empty_folder(self, folder: int) -> bool:
        with self._lock:
            return not self._folder(folder).names

    def _open_entry(self, entry: _File | _Folder) -> int:
        with self._lock:
            self._files += 1
            self._open[self._files] = entry
            return self._files

    def _new_inode(self) -> int:
        self._inodes += 1
        return self._inodes

    def _entry(self, name: str, folder: int) -> _File | _Folder:
        entry = self._folder(folder).names.get(name)
        if entry is None:
            raise _error(errno.ENOENT)
        return entry

    @contextmanager
    def _lock_free_name(self, name: str, folder: int) -> Iterator[_Folder]:
        """Hold the disk's lock while the folder exists and has no such name."""
        with self._lock:
            parent = self._folder(folder)
            if parent.is_removed:
                raise _error(errno.ENOENT)
            if name in parent.names:
                raise _error(errno.EEXIST)
            yield parent

    def _folder(self, file: int) -> _Folder:
        entry = self._open[file]
        if not isinstance(entry, _Folder):
            raise _error(errno.ENOTDIR)
        return entry

    def _file(self, file: int) -> _File:
        entry = self._open[file]
        if not isinstance(entry, _File):
            raise _error(errno.EISDIR)
        return entry

    def _status(self, entry: _File | _Folder) -> FileStatus:
        if isinstance(entry, _Folder):
            return FileStatus(stat.S_IFDIR | 0o755, 1, entry.inode, 2, 0, 0)
        links = sum(link is entry for folder in self._folders(self._root, both=False) for link in folder.names.values())
        return FileStatus(stat.S_IFREG | 0o644, 1, entry.inode, links, len(entry.data), entry.modified_ns)

    def _folders(self, folder: _Folder, *, both: bool) -> Iterator[_Folder]:
        yield folder
        inner = {**folder.names, **folder.synced} if both else dict(folder.names)
        for entry in inner.values():
            if isinstance(entry, _Folder):
                yield from self._folders(entry, both=both)


def _forget_names(folder: _Folder, rng: random.Random | None) -> None:
    if rng is None:
        folder.names = dict(folder.synced)
    else:
        for name in sorted(folder.names | folder.synced):
            if folder.names.get(name) is folder.synced.get(name):
                continue
            if rng.random() < 0.5 and name in folder.synced:
                folder.names[name] = folder.synced[name]
            elif rng.random() < 0.5 and name not in folder.synced:
                del folder.names[name]
    folder.synced = dict(folder.names)
    folder.is_removed = False


def _forget_data(file: _File, rng: random.Random | None) -> None:
    if rng is not None and bytes(file.data) != file.synced:
        whole = bytes(file.data)
        file.synced = rng.choice([file.synced, whole, whole[: len(whole) // 2], bytes(len(whole))])
    file.data = bytearray(file.synced)


def _iter_files(folder: _Folder, prefix: str) -> Iterator[tuple[str, bytes]]:
    for name, entry in sorted(folder.names.items()):
        if isinstance(entry, _Folder):
            yield from _iter_files(entry, f"{prefix}{name}/")
        else:
            yield prefix + name, bytes(entry.data)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class DyingCalls:
    """One process on a disk, which fails once: at the nth call that changes the disk (from 1).

    `TORN` writes half of the bytes; `REPLY_LOST` and `UNAVAILABLE` raise EIO after and before the call. After a crash
    every call crashes. `total` is the number of changing calls so far, `failed_at` the call that failed.
    """

    def __init__(self, disk: MemoryPosix, nth: int, way: Failure = Failure.CRASH_BEFORE) -> None:
        self.disk = disk
        self.total = 0
        self.failed_at: str | None = None
        self.dead = False
        self._nth = nth
        self._way = way
        self._lock = threading.Lock()

    def _change(self, name: str, call: Callable[[], _T], torn: Callable[[], object] = lambda: None) -> _T:
        with self._lock:
            self._require_alive()
            self.total += 1
            if self.total != self._nth:
                return call()
            self.failed_at = name
            if self._way is Failure.TORN:
                torn()
            if self._way in (Failure.CRASH_AFTER, Failure.REPLY_LOST):
                call()
            if self._way in (Failure.REPLY_LOST, Failure.UNAVAILABLE):
                raise _error(errno.EIO)
            self.dead = True
            raise Crash(f"at {name}: {self._way.value}")

    def _require_alive(self) -> None:
        if self.dead:
            raise Crash("the process is dead")

    def _read(self, call: Callable[[], _T]) -> _T:
        self._require_alive()
        return call()

    def open_root(self, path: str) -> int:
        return self._read(lambda: self.disk.open_root(path))

    def open_folder(self, name: str, folder: int) -> int:
        return self._read(lambda: self.disk.open_folder(name, folder))

    def open_file(self, name: str, folder: int) -> int:
        return self._read(lambda: self.disk.open_file(name, folder))

    def create_file(self, name: str, folder: int) -> int:
        return self._change("create_file", lambda: self.disk.create_file(name, folder))

    def close(self, file: int) -> None:
        self.disk.close(file)

    def write(self, file: int, data: memoryview) -> int:
        half = data[: len(data) // 2]
        return self._change("write", lambda: self.disk.write(file, data), lambda: self.disk.write(file, half))

    def pread(self, file: int, length: int, offset: int) -> bytes:
        return self._read(lambda: self.disk.pread(file, length, offset))

    def copy_range(self, source: int, file: int, length: int, offset: int) -> int:
        def copy(length: int) -> int:
            return self.disk.copy_range(source, file, length, offset)

        return self._change("copy_range", lambda: copy(length), lambda: copy(length // 2))

    def fsync(self, file: int) -> None:
        self._change("fsync", lambda: self.disk.fsync(file))

    def fsync_folder(self, folder: int) -> None:
        self._change("fsync_folder", lambda: self.disk.fsync_folder(folder))

    def sync(self) -> None:
        self._change("sync", self.disk.sync)

    def link(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        self._change("link", lambda: self.disk.link(name, folder, new_name, new_folder))

    def rename(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        self._change("rename", lambda: self.disk.rename(name, folder, new_name, new_folder))

    def unlink(self, name: str, folder: int) -> None:
        self._change("unlink", lambda: self.disk.unlink(name, folder))

    def mkdir(self, name: str, folder: int) -> None:
        self._change("mkdir", lambda: self.disk.mkdir(name, folder))

    def rmdir(self, name: str, folder: int) -> None:
        self._change("rmdir", lambda: self.disk.rmdir(name, folder))

    def fstat(self, file: int) -> FileStatus:
        return self._read(lambda: self.disk.fstat(file))

    def stat(self, name: str, folder: int) -> FileStatus:
        return self._read(lambda: self.disk.stat(name, folder))

    def listdir(self, folder: int) -> list[str]:
        return self._read(lambda: self.disk.listdir(folder))

    def is_empty_folder(self, folder: int) -> bool:
        return self._read(lambda: self.disk.is_empty_folder(folder))
