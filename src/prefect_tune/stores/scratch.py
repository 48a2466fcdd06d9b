"""Directories that live as long as their process, and are cleared away after those that were killed."""

from __future__ import annotations

import glob
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.file_lock import FileLock, Share

__all__ = ["ScratchDirectory"]

_LOCK = ".alive"
_Modes: TypeAlias = tuple[tuple[int, int, int], ...]
"""Of a directory and what is in it: what each is, and whose, and who may do what."""


class ScratchDirectory:
    """A new directory below the system's temporary directory, with empty `folders` in it, until it is closed.

    One that is as it was made goes on under another name, as a new one: a file system looks past every inode that was
    freed in the last minutes (ext4), and so takes longer and longer over new files where many were removed.
    """

    def __init__(self, *folders: str) -> None:
        self._made_of = _home  # in a forked child there will be another
        self._folders = folders
        self.path, self._modes = self._made_of.take(folders)

    def close(self) -> None:
        """Remove it and all that is in it, or keep it for the next where nobody can tell it from a new one."""
        self._made_of.take_back(self.path, self._folders, self._modes)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


class _Home:
    """What all scratch directories of this process are in, so that one lock says of all of them that it lives."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._taken_count = 0
        self._undo = ExitStack()
        self._directory = Path()
        self._spare: dict[tuple[str, ...], list[tuple[Path, _Modes]]] = {}

    def take(self, folders: tuple[str, ...]) -> tuple[Path, _Modes]:
        with self._guard:
            if not self._taken_count:
                self._directory = self._undo.enter_context(_locked_directory())
            self._taken_count += 1
            spare = self._spare.get(folders, [])
            while spare:
                directory, modes = spare.pop()
                if _is_there(directory, folders, modes):  # nobody has tidied it away
                    return directory, modes
        try:
            return _made_with(self._directory / uuid4().hex, folders)
        except BaseException:
            self._leave()
            raise

    def take_back(self, directory: Path, folders: tuple[str, ...], modes: _Modes) -> None:
        try:
            other = self._directory / uuid4().hex
            if folders and _is_as_made(directory, folders, modes) and _is_renamed(directory, other):
                with self._guard:
                    self._spare.setdefault(folders, []).append((other, modes))
            else:
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._guard:
            self._taken_count -= 1
            if not self._taken_count:
                self._spare.clear()
                self._undo.close()


def _made_with(directory: Path, folders: tuple[str, ...]) -> tuple[Path, _Modes]:
    directory.mkdir(parents=True)  # who tidies up may have taken what nothing was in
    for name in folders:
        (directory / name).mkdir()
    return directory, _modes(directory, folders)


def _is_as_made(directory: Path, folders: tuple[str, ...], modes: _Modes) -> bool:
    """Whether whoever had it has left nothing, and has locked nobody out."""
    with suppress(OSError):
        is_empty = not any(any((directory / name).iterdir()) for name in folders)
        nothing_more = {each.name for each in directory.iterdir()} == set(folders)
        return is_empty and nothing_more and _is_there(directory, folders, modes)
    return False


def _is_there(directory: Path, folders: tuple[str, ...], modes: _Modes) -> bool:
    with suppress(OSError):
        return _modes(directory, folders) == modes
    return False


def _modes(directory: Path, folders: tuple[str, ...]) -> _Modes:
    found = [each.lstat() for each in (directory, *(directory / name for name in folders))]
    return tuple((each.st_mode, each.st_uid, each.st_gid) for each in found)


def _is_renamed(directory: Path, other: Path) -> bool:
    with suppress(OSError):
        directory.rename(other)
        return True
    return False


_home = _Home()


def _have_a_home_of_ones_own() -> None:
    global _home  # noqa: PLW0603 - a forked child has neither the lock nor a claim to what is locked
    _home = _Home()


os.register_at_fork(after_in_child=_have_a_home_of_ones_own)


@contextmanager
def _locked_directory() -> Iterator[Path]:
    """Yield a new directory that is removed at the end. What killed processes left goes first: the kernel knows."""
    shared = Path(tempfile.gettempdir()) / f"prefect-tune-{os.getuid()}"
    shared.mkdir(mode=0o700, exist_ok=True)
    _clear_away_the_dead(shared)
    directory, alive = _made(shared)
    try:
        yield directory
    finally:
        alive.release()
        shutil.rmtree(directory, ignore_errors=True)


def _made(shared: Path) -> tuple[Path, FileLock]:
    """Whoever clears away at this very moment may take a directory that is not locked yet for a dead one's."""
    while True:
        directory = shared / f"{socket.gethostname()}-{uuid4().hex}"
        directory.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            return directory, FileLock.take(directory / _LOCK, Share.ALONE, Deadline.after(timedelta(seconds=10)))


def _clear_away_the_dead(shared: Path) -> None:
    """Of this machine only: on a shared disk another machine's locks are not always seen."""
    for directory in shared.glob(f"{glob.escape(socket.gethostname())}-*"):
        if not (directory / _LOCK).exists():
            continue  # being made this very moment, or not ours
        with suppress(FileNotFoundError):  # somebody else clears it away too
            if (lock := FileLock.try_take(directory / _LOCK, Share.ALONE)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                lock.release()
