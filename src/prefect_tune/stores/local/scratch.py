"""Temporary directories that end with their process; those of killed processes are removed by later ones."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

from prefect_tune.core.errors import StoreRefused
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.file_lock import FileLock, Share
from prefect_tune.stores.posix_files import remove_tree

_log = logging.getLogger(__name__)

# The folder of this user below the system's directory for temporary files, which all users of the machine share.


def user_folder(base: str | None = None) -> Path:
    """Return the folder for temporary files of this user's processes, below `base`; make it if it is not there.

    By default it is below `TMPDIR`, and not in the user's home: staged checkpoints are large, and homes may be shared
    by machines, have quotas, or be missing in a container. The folder belongs to this user, and no other user can
    write to it.

    Raises:
        StoreRefused: something else has the name, or the file system keeps no owners or modes.
    """
    user = os.geteuid()
    folder = Path(base or tempfile.gettempdir(), f"prefect-tune-{user}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    raise StoreRefused(
        f"{folder}: expected a folder of user {user} that only this user can write to, found "
        f"{stat.filemode(found.st_mode)} of user {found.st_uid}: remove it, or set TMPDIR to a folder of your own"
    )


_LOCK = ".alive"
_LINK = "link-"
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - the folder there is this user's own
_MAX_SOCKET_BYTES = 107  # of a socket's path on Linux
# Below a scratch directory: two numbers, then what PyTorch appends ("/torch-shm-dir-XXXXXX/manager.sock"); 32 bytes
# in multiprocessing.
_MAX_DIRECTORY_BYTES = _MAX_SOCKET_BYTES - len("/9999/999") - 34
_MAX_TMPDIR_CHARACTERS = 80


class ScratchDirectory:
    """A new directory below the system's temporary directory, with empty `folders` in it, removed by `close`."""

    def __init__(self, *folders: str) -> None:
        self._made_in = _home  # a forked child gets its own
        self.path = self._made_in.make(folders)

    def close(self) -> None:
        """Remove it with its content."""
        self._made_in.remove(self.path)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


class _Home:
    """The parent of all scratch directories of this process; one lock on it shows that the process is alive."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._count = 0
        self._undo = ExitStack()
        self._directory = self._shown = Path()
        self._names = itertools.count(1)

    def make(self, folders: tuple[str, ...]) -> Path:
        with self._guard:
            if not self._count:
                self._directory = self._undo.enter_context(_locked_directory())
                self._shown = self._undo.enter_context(_short_path(self._directory))
            self._count += 1
            name = str(next(self._names))
            path, shown = self._directory / name, self._shown / name
        try:
            for each in (path, *(path / folder for folder in folders)):
                each.mkdir(parents=True)  # a cleaner of temporary files may have removed an empty parent
        except BaseException:
            self._leave()
            raise
        return shown

    def remove(self, path: Path) -> None:
        try:
            remove_tree(path)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._guard:
            self._count -= 1
            if not self._count:
                self._undo.close()


_home = _Home()


def _replace_home() -> None:
    global _home  # noqa: PLW0603 - a forked child does not hold its parent's lock
    _home = _Home()


os.register_at_fork(after_in_child=_replace_home)


@contextmanager
def _locked_directory() -> Iterator[Path]:
    """Yield a new locked directory and remove it at the end; first remove those of killed processes."""
    shared = user_folder()
    for left in shared.glob(f"{_this_machine()}-*"):
        _remove_if_dead(left)
    directory, alive = _made(shared)
    try:
        yield directory
    finally:
        alive.release()
        remove_tree(directory)


@contextmanager
def _short_path(directory: Path) -> Iterator[Path]:
    """Yield a path to `directory` below which sockets can be made: itself, or a link to it if it is too long."""
    base = tempfile.gettempdir()
    link = None if len(os.fsencode(directory)) <= _MAX_DIRECTORY_BYTES else _new_link(directory)
    if len(base) > _MAX_TMPDIR_CHARACTERS:
        _warn_of_length(base, "" if link is None else f". Trials use links to it in {link.parent}")
    elif link is None and len(os.fsencode(directory)) > _MAX_DIRECTORY_BYTES:
        _warn_of_length(base, f", and no link to it can be made in {' or '.join(_SHORT_FOLDERS)}")
    try:
        yield link or directory
    finally:
        if link is not None:
            link.unlink(missing_ok=True)


def _new_link(directory: Path) -> Path | None:
    for base in _SHORT_FOLDERS:
        with suppress(OSError, StoreRefused):
            folder = user_folder(base)
            for left in folder.glob(f"{_LINK}{_this_machine()}-*"):
                if not (left / _LOCK).exists():  # what it led to was removed
                    left.unlink(missing_ok=True)
            (link := folder / f"{_LINK}{directory.name}").symlink_to(directory)
            return link
    return None


@lru_cache
def _warn_of_length(base: str, effect: str) -> None:
    """Log it once in a process."""
    _log.warning(
        "the directory for temporary files, %s, has %d characters. Below it a program cannot open sockets, whose paths "
        "have at most %d bytes: multiprocessing.Manager fails, and a DataLoader may hang%s. Set TMPDIR to a path of at "
        "most %d characters",
        *(base, len(base), _MAX_SOCKET_BYTES, effect, _MAX_TMPDIR_CHARACTERS),
    )


def _this_machine() -> str:
    """Return eight characters for this machine, whose name may have 64."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _made(shared: Path) -> tuple[Path, FileLock]:
    """Make and lock a directory; try again if another process removed it before it was locked."""
    while True:
        directory = shared / f"{_this_machine()}-{uuid4().hex[:8]}"
        directory.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            return directory, FileLock.take(directory / _LOCK, Share.ALONE, Deadline.after(timedelta(seconds=10)))


def _remove_if_dead(directory: Path) -> None:
    """Remove the directory of a dead process; a shared disk may not show other machines' locks."""
    if directory.is_symlink() or not (directory / _LOCK).exists():
        return  # not locked yet by its maker, or not a scratch directory
    with suppress(FileNotFoundError):  # another process removed it first
        if (lock := FileLock.try_take(directory / _LOCK, Share.ALONE)) is not None:
            remove_tree(directory)
            lock.release()
