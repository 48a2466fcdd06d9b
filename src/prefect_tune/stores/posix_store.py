"""An object store in files: on a local disk, NFS, or any other mounted file system."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path

from prefect_tune.core.errors import (
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
)
from prefect_tune.core.storage.object_store import TEMPORARY, Buffer, Listed, checked_folder, checked_path
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.posix_files import (
    FileSystemCalls,
    Publisher,
    Temporary,
    as_store_error,
    discard,
    settle,
    status_at,
    sync_folder,
)

_LEFTOVER_AFTER = timedelta(days=1)
_SWEEP_INTERVAL = timedelta(minutes=1)


class Sweeps:
    """When each root was last swept, so that stores opened in quick succession do not all sweep."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}

    def is_due(self, root: str) -> bool:
        """Return True at most about once a minute per root; a race only makes two sweeps."""
        now = time.monotonic()
        if now < self._next.get(root, 0.0):
            return False
        self._next[root] = now + _SWEEP_INTERVAL.total_seconds()
        return True


_WRITE_BYTES = 16 << 20  # per write; the deadline is checked before each
_READ_BYTES = 64 << 20
_RACES = 100  # tries to publish, while deletes prune the folder


class PosixStore:
    """Objects as files below `root`, which must exist (`make_root`).

    An object is written under a hidden name, synced, and hard-linked to its own name: atomic between writers on
    all machines that mount the directory, and complete after a power cut. The file has two links until its own
    name is synced; a reader that finds two links syncs the folder before it uses the object. Hidden files of
    killed writers are removed by a later writer, after a day.

    The deadline is checked between system calls. A call that hangs (a dead NFS server) can only be ended by
    `IsolatedStore`, from outside. Symbolic links below the root are refused.
    """

    def __init__(
        self,
        root: Path,
        *,
        deadline: Deadline | None = None,
        calls: FileSystemCalls | None = None,
        sweeps: Sweeps | None = None,
    ) -> None:
        self.root = root
        self._deadline = deadline or Deadline.never()
        self._calls = calls or FileSystemCalls()
        self._publisher = Publisher(self._calls, root)
        self._sweeps = sweeps or Sweeps()
        self._identity: tuple[int, int] | None = None

    @property
    def conditional_create(self) -> bool:
        return True

    def create(self, path: str, data: Buffer) -> None:
        folder, _, name = checked_path(path).rpartition("/")
        with self._operation("create", path) as root, self._temporary(root, partial(self._write, (data,))) as fresh:
            self._publish(root, folder, fresh, lambda target: self._publisher.link(fresh, target, name, path))

    def put(self, path: str, data: Buffer) -> None:
        """An existing object of the same size is not written again."""
        folder, _, name = checked_path(path).rpartition("/")
        with self._operation("put", path) as root:
            if self._size(root, path) == memoryview(data).nbytes:
                return
            with self._temporary(root, partial(self._write, (data,))) as fresh:
                self._publish(root, folder, fresh, lambda target: self._publisher.replace(fresh, target, name))

    def copy(self, source: str, path: str) -> None:
        """An existing object of the same size is not written again."""
        folder, _, name = checked_path(path).rpartition("/")
        with self._operation("copy", path) as root, self._opened_file(root, source) as (file, size_bytes):
            if self._size(root, path) == size_bytes:
                return
            with self._temporary(root, partial(self._copy_bytes, file, size_bytes)) as fresh:
                self._publish(root, folder, fresh, lambda target: self._publisher.replace(fresh, target, name))

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        folder, _, name = checked_path(path).rpartition("/")
        with self._operation("replace", path) as root, self._temporary(root, partial(self._write, pieces)) as fresh:
            self._publish(root, folder, fresh, lambda target: self._publisher.overwrite(fresh, target, name))

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
                        self._unlink(where, [name for _, name in of_folder])
                self._prune(root, folder)

    # ------------------------------------------------------------------------------------ names and folders

    @contextmanager
    def _operation(self, doing: str, path: str) -> Iterator[int]:
        """Open the root for one operation, and raise its `OSError`s as store errors."""
        what = f"{doing} of {path!r} in {self.root}"
        self._deadline.check(what)
        try:
            with ExitStack() as opened:
                yield self._open_root(opened, what)
        except OSError as error:
            raise as_store_error(error, what) from error

    def _open_root(self, opened: ExitStack, what: str) -> int:
        try:
            root = self._enter(opened, self._calls.open_root(os.fspath(self.root)))
            status = self._calls.status(root)
        except FileNotFoundError as error:
            raise StoreUnavailable(
                f"{what}: the root itself does not exist: correct its path, mount its file system, or create it"
            ) from error
        identity = (status.device, status.inode)
        if identity != (self._identity or identity):
            raise StoreUnavailable(f"{what}: the root is another directory than before; was it unmounted or replaced?")
        self._identity = identity
        return root

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
                parent, where = where, self._made(opened, name, where)
        if is_old:
            self._settle_name(where, parent)
        return where

    def _made(self, opened: ExitStack, name: str, parent: int) -> int:
        with suppress(FileExistsError):
            self._calls.mkdir(name, parent)
        made = self._enter(opened, self._calls.open_folder(name, parent))
        self._calls.fsync_folder(parent)
        return made

    def _settle_name(self, folder: int, parent: int) -> None:
        """Sync the name of an empty folder, whose maker may have died before the sync.

        A folder with entries needs no sync: its name, and those above it, were synced before the first entry.
        """
        if folder != parent and self._calls.is_empty(folder):
            self._calls.fsync_folder(parent)

    def _size(self, root: int, path: str) -> int | None:
        folder, _, name = checked_path(path).rpartition("/")
        with ExitStack() as opened:
            where = self._walk(opened, root, folder)
            status = None if where is None else status_at(self._calls, where, name)
            if where is None or status is None or status.is_folder:
                return None
            settle(self._calls, where, status)
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
            settle(self._calls, where, status)
            yield file, status.size_bytes

    def _below(self, folder: int, prefix: str, after: str) -> Iterator[Listed]:
        """Yield the objects below an open folder, unordered; entries that vanish meanwhile are left out."""
        for name in self._calls.names(folder):
            path = prefix + name
            status = None if path == TEMPORARY else status_at(self._calls, folder, name)
            if status is None:
                continue
            if status.is_file and path > after:
                yield Listed(path, status.size_bytes)
            elif status.is_folder and (f"{path}/" > after or after.startswith(f"{path}/")):
                with ExitStack() as opened, suppress(FileNotFoundError):
                    self._deadline.check(f"list of {path}")
                    inner = self._enter(opened, self._calls.open_folder(name, folder))
                    yield from self._below(inner, f"{path}/", after)

    # ---------------------------------------------------------------------------------------------- writing

    @contextmanager
    def _temporary(self, root: int, fill: Callable[[int], None]) -> Iterator[Temporary]:
        """Let `fill` write a hidden file, and sync it; it is removed once the object is published or was not made."""
        with ExitStack() as opened:
            folder = self._open_temporary(opened, root)
            name = uuid.uuid4().hex
            file = self._enter(opened, self._calls.new_file(name, folder))
            try:
                fill(file)
                self._calls.fsync(file)
                status = self._calls.status(file)
                self._sweep(folder, status.modified_ns)
                yield Temporary(name, folder, status)
            except BaseException:
                # If it was published, keep the second link: it makes the next reader sync.
                if not self._may_be_published(file):
                    discard(self._calls, name, folder)
                raise
            discard(self._calls, name, folder)

    def _open_temporary(self, opened: ExitStack, root: int) -> int:
        try:
            return self._enter(opened, self._calls.open_folder(TEMPORARY, root))
        except FileNotFoundError:
            with suppress(FileExistsError):
                self._calls.mkdir(TEMPORARY, root)
            return self._enter(opened, self._calls.open_folder(TEMPORARY, root))

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

    def _publish(self, root: int, folder: str, fresh: Temporary, into: Callable[[int], None]) -> None:
        """Call `into` with the open folder; create the folder again if a delete pruned it meanwhile."""
        for _ in range(_RACES):
            self._deadline.check(f"publishing in {folder!r}")
            try:
                with ExitStack() as opened:
                    into(self._make(opened, root, folder))
                return
            except FileNotFoundError as error:
                if status_at(self._calls, fresh.folder, fresh.name) is None:
                    gone = f"{fresh.name}: was removed from {TEMPORARY!r} before it was published; try again"
                    raise StoreUnavailable(gone) from error
        raise StoreUnavailable(f"{folder!r} in {self.root}: deleted {_RACES} times during one publish; try again")

    # --------------------------------------------------------------------------------------------- removing

    def _unlink(self, folder: int, names: Sequence[str]) -> None:
        for name in names:
            self._deadline.check(f"delete of {name!r}")
            with suppress(FileNotFoundError, IsADirectoryError):
                self._calls.unlink(name, folder)
        self._calls.fsync_folder(folder)  # a manifest must not come back after its blobs have gone

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
        """Remove hidden files that nothing was written to for a day; `now_ns` is by the file system's own clock.

        A live writer whose file was removed fails to link it, and publishes nothing.
        """
        if not self._sweeps.is_due(os.fspath(self.root)):
            return
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
            _make(folder)
            sync_folder(folder.parent)
        if not root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(root))
    except OSError as error:
        raise as_store_error(error, f"making {root}") from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        if not folder.parent.is_dir():
            raise
        # Such as /proc: a file system without files of one's own.
        raise StoreRefused(
            f"making {folder}: this file system cannot make a folder there ({error.strerror})"
        ) from error


def open_folder(
    root: Path, *, must_exist: bool, deadline: Deadline | None = None, sweeps: Sweeps | None = None
) -> PosixStore:
    """Open the folder `root`; create it first unless it `must_exist`. Raises as `make_root`."""
    if not must_exist:
        make_root(root)
    return PosixStore(root, deadline=deadline, sweeps=sweeps)
