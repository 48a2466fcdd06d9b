"""One local copy of a checkpoint per machine: the first reader fetches it, and the last reader removes it.

A reader holds a shared lock; a process that fetches or removes a copy holds an exclusive one; the locks end with
their process. A copy gets its name only when it is complete. Copies are stored in a folder of this user and this
boot, so that copies from before a power cut are never used.
"""

from __future__ import annotations

import glob
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.directories import Seal, seal_of
from prefect_tune.stores.local.file_lock import FileLock, Share, tries
from prefect_tune.stores.local.user_temp_folder import user_folder

Fetch = Callable[[Path], None]
"""Makes the directory at the given path, which must not exist; on an error there is no directory."""

_LOCK = ".lock"
_BUILDING = ".building"
_SEAL = ".seal"
_TRASH = "trash-"


def node_folder() -> Path:
    """Return the folder that this user's processes share on this machine until the next boot.

    Raises:
        StoreRefused: there is no folder that only this user can write to.
    """
    folder = user_folder()
    boot = folder / _boot()
    with suppress(FileExistsError):
        boot.mkdir(mode=0o700)
        _remove_earlier_boots(folder, boot)
    return boot


def _boot() -> str:
    """Return a name of this machine and boot, because machines may share their temporary folder."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = "any"
    return f"{socket.gethostname()}.{boot}"


def _remove_earlier_boots(folder: Path, boot: Path) -> None:
    for earlier in folder.glob(f"{glob.escape(socket.gethostname())}.*"):
        if earlier != boot:
            shutil.rmtree(earlier, ignore_errors=True)


class NodeCopies:
    """The copies below `folder`, by key: a key stands for the same bytes for ever."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def reading(self, key: str, fetch: Fetch, deadline: Deadline) -> Iterator[Path]:
        """Yield the copy of `key`, fetching it if it is missing; it is kept while any process reads it.

        If several processes ask at once, one fetches and the others wait; if it fails or dies, another fetches.

        Raises:
            DeadlineExceeded: another process was still fetching at the deadline.
            Exception: `fetch` raised it, in the process that called `fetch`.
        """
        name, lock = self._share(key, fetch, deadline)
        try:
            yield self.folder / name
        finally:
            self._leave(name, lock)

    def sweep(self) -> None:
        """Remove the copies and unfinished downloads of dead processes."""
        for lock in self.folder.glob(f"*{_LOCK}"):
            self._remove_if_unread(lock.name.removesuffix(_LOCK))
        for trash in self.folder.glob(f"{_TRASH}*"):
            shutil.rmtree(trash, ignore_errors=True)

    # ---------------------------------------------------------------------------------------------- sharing

    def _share(self, key: str, fetch: Fetch, deadline: Deadline) -> tuple[str, FileLock]:
        """Return an unchanged copy and a shared lock on it; a copy that a reader changed is not given out again."""
        for generation in count():
            name = f"{key}-{generation}"
            lock = self._share_one(name, fetch, deadline)
            if self._is_as_fetched(name):
                return name, lock
            self._leave(name, lock)
        raise AssertionError

    def _share_one(self, name: str, fetch: Fetch, deadline: Deadline) -> FileLock:
        """Return a shared lock on the copy. Never waits for the exclusive lock: a reader may read for hours."""
        copy, path = self.folder / name, self._beside(name, _LOCK)
        for _ in tries(path, deadline):
            if not copy.is_dir():
                self._fetch_if_alone(name, fetch)
            if lock := FileLock.try_take(path, Share.WITH_READERS):
                if copy.is_dir():
                    return lock
                lock.release()
        raise AssertionError

    def _fetch_if_alone(self, name: str, fetch: Fetch) -> None:
        if alone := FileLock.try_take(self._beside(name, _LOCK), Share.ALONE):
            with alone:
                if not (self.folder / name).is_dir():
                    self._fetch(name, fetch)

    def _fetch(self, name: str, fetch: Fetch) -> None:
        self.sweep()
        building = self._beside(name, _BUILDING)
        shutil.rmtree(building, ignore_errors=True)  # left by a killed process: this process has the exclusive lock
        building.mkdir()
        try:
            fetch(building / "copy")
            self._beside(name, _SEAL).write_text(seal_of(building / "copy"), encoding="ascii")
            (building / "copy").rename(self.folder / name)
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _is_as_fetched(self, name: str) -> bool:
        try:
            return seal_of(self.folder / name) == Seal(self._beside(name, _SEAL).read_text(encoding="ascii"))
        except FileNotFoundError:
            return False

    # ---------------------------------------------------------------------------------------------- leaving

    def _leave(self, name: str, lock: FileLock) -> None:
        lock.release()
        self._remove_if_unread(name)

    def _remove_if_unread(self, name: str) -> None:
        lock = FileLock.try_take(self._beside(name, _LOCK), Share.ALONE)
        if lock is None:
            return  # the last of its readers removes it
        trash = [self.folder / f"{_TRASH}{uuid.uuid4().hex}" for _ in range(2)]
        with lock:
            for part, rubbish in zip((name, f"{name}{_BUILDING}"), trash, strict=True):
                with suppress(FileNotFoundError):
                    (self.folder / part).rename(rubbish)
            self._beside(name, _SEAL).unlink(missing_ok=True)
            lock.remove()
        for rubbish in trash:
            shutil.rmtree(rubbish, ignore_errors=True)  # the next sweep removes the rest

    def _beside(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}{suffix}"
