"""Directories that live as long as their process, and are cleared away after those that were killed."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.file_lock import FileLock, Share
from prefect_tune.stores.user_folder import user_folder

__all__ = ["ScratchDirectory"]

_LOCK = ".alive"


class ScratchDirectory:
    """A new directory below the system's temporary directory, with empty `folders` in it, until it is closed.

    One that is as it was made goes on under another name, as a new one: a file system looks past every inode that was
    freed in the last minutes (ext4), and so takes longer and longer over new files where many were removed.
    """

    def __init__(self, *folders: str) -> None:
        self._made_of = _home  # in a forked child there will be another
        self._tree = self._made_of.take(folders)
        self.path = self._tree.path

    def close(self) -> None:
        """Remove it and all that is in it, or keep it for the next where nobody can tell it from a new one."""
        self._made_of.take_back(self._tree)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Tree:
    """A directory, the folders in it, and as what they were made: what each is, whose, and who may do what."""

    path: Path
    folders: tuple[str, ...]
    modes: tuple[tuple[int, int, int], ...]

    @staticmethod
    def made(path: Path, folders: tuple[str, ...]) -> _Tree:
        path.mkdir(parents=True)  # who tidies up may have taken what nothing was in
        for name in folders:
            (path / name).mkdir()
        return _Tree(path, folders, _modes(path, folders))

    def is_there(self) -> bool:
        """Whether nobody has tidied it away, or locked anybody out."""
        with suppress(OSError):
            return _modes(self.path, self.folders) == self.modes
        return False

    def renamed(self, path: Path) -> _Tree | None:
        """Return it under another name, where whoever had it has left nothing."""
        with suppress(OSError):
            is_empty = not any(any((self.path / name).iterdir()) for name in self.folders)
            nothing_more = {each.name for each in self.path.iterdir()} == set(self.folders)
            if is_empty and nothing_more and self.is_there():
                return replace(self, path=self.path.rename(path))
        return None


def _modes(path: Path, folders: tuple[str, ...]) -> tuple[tuple[int, int, int], ...]:
    found = [each.lstat() for each in (path, *(path / name for name in folders))]
    return tuple((each.st_mode, each.st_uid, each.st_gid) for each in found)


class _Home:
    """What all scratch directories of this process are in, so that one lock says of all of them that it lives."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._taken_count = 0
        self._undo = ExitStack()
        self._directory = Path()
        self._names = itertools.count(1)
        self._spare: dict[tuple[str, ...], list[_Tree]] = {}

    def take(self, folders: tuple[str, ...]) -> _Tree:
        with self._guard:
            if not self._taken_count:
                self._directory = self._undo.enter_context(_locked_directory())
            self._taken_count += 1
            spare = self._spare.get(folders, [])
            while spare:
                if (tree := spare.pop()).is_there():
                    return tree
        try:
            return _Tree.made(self._new_path(), folders)
        except BaseException:
            self._leave()
            raise

    def take_back(self, tree: _Tree) -> None:
        try:
            if tree.folders and (other := tree.renamed(self._new_path())) is not None:
                with self._guard:
                    self._spare.setdefault(tree.folders, []).append(other)
            else:
                shutil.rmtree(tree.path, ignore_errors=True)
        finally:
            self._leave()

    def _new_path(self) -> Path:
        """Short: a socket in a trial's temporary directory has 107 bytes for its path (multiprocessing, PyTorch)."""
        return self._directory / str(next(self._names))

    def _leave(self) -> None:
        with self._guard:
            self._taken_count -= 1
            if not self._taken_count:
                self._spare.clear()
                self._undo.close()


_home = _Home()


def _have_a_home_of_ones_own() -> None:
    global _home  # noqa: PLW0603 - a forked child has neither the lock nor a claim to what is locked
    _home = _Home()


os.register_at_fork(after_in_child=_have_a_home_of_ones_own)


@contextmanager
def _locked_directory() -> Iterator[Path]:
    """Yield a new directory that is removed at the end. What killed processes left goes first: the kernel knows."""
    shared = user_folder()
    _clear_away_the_dead(shared)
    directory, alive = _made(shared)
    try:
        yield directory
    finally:
        alive.release()
        shutil.rmtree(directory, ignore_errors=True)


def _this_machine() -> str:
    """Eight characters in place of a name that may have 64."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _made(shared: Path) -> tuple[Path, FileLock]:
    """Whoever clears away at this very moment may take a directory that is not locked yet for a dead one's."""
    while True:
        directory = shared / f"{_this_machine()}-{uuid4().hex[:8]}"
        directory.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            return directory, FileLock.take(directory / _LOCK, Share.ALONE, Deadline.after(timedelta(seconds=10)))


def _clear_away_the_dead(shared: Path) -> None:
    """Of this machine only: on a shared disk another machine's locks are not always seen."""
    for directory in shared.glob(f"{_this_machine()}-*"):
        if directory.is_symlink() or not (directory / _LOCK).exists():
            continue  # being made this very moment, or not ours
        with suppress(FileNotFoundError):  # somebody else clears it away too
            if (lock := FileLock.try_take(directory / _LOCK, Share.ALONE)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                lock.release()
