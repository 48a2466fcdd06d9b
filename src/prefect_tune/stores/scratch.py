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
from uuid import uuid4

from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.file_lock import FileLock, Share

__all__ = ["clear_away", "scratch_directory"]

_LOCK = ".alive"


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a new directory below the system's temporary directory, and remove it at the end."""
    with _home.entered() as home:
        directory = home / uuid4().hex
        directory.mkdir(parents=True)  # who tidies up may have taken what nothing was in
        try:
            yield directory
        finally:
            clear_away(directory)


def clear_away(directory: Path) -> None:
    """Remove a directory and what is in it, as far as that can be: cheaply where that is empty directories."""
    with suppress(OSError):
        for each in directory.iterdir():
            each.rmdir()
        directory.rmdir()
        return
    shutil.rmtree(directory, ignore_errors=True)


class _Home:
    """What all scratch directories of this process are in, so that one lock says of all of them that it lives."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._entered_count = 0
        self._undo = ExitStack()
        self._directory = Path()

    @contextmanager
    def entered(self) -> Iterator[Path]:
        with self._guard:
            if not self._entered_count:
                self._directory = self._undo.enter_context(_locked_directory())
            self._entered_count += 1
        try:
            yield self._directory
        finally:
            with self._guard:
                self._entered_count -= 1
                if not self._entered_count:
                    self._undo.close()


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
