"""Directories that live as long as their process, and are cleared away after those that were killed."""

from __future__ import annotations

import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.file_lock import FileLock, Share

__all__ = ["scratch_directory"]

_LOCK = ".alive"


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a new directory of this process's own, below the system's temporary directory.

    It is removed at the end. What killed processes left is removed first: the kernel says who still lives.
    """
    home = Path(tempfile.gettempdir()) / f"prefect-tune-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    _clear_away_the_dead(home)
    directory, alive = _made(home)
    try:
        yield directory
    finally:
        alive.release()
        shutil.rmtree(directory, ignore_errors=True)


def _made(home: Path) -> tuple[Path, FileLock]:
    """Whoever clears away at this very moment may take a directory that is not locked yet for a dead one's."""
    while True:
        directory = home / f"{socket.gethostname()}-{uuid4().hex}"
        directory.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            return directory, FileLock.take(directory / _LOCK, Share.ALONE, Deadline.after(timedelta(seconds=10)))


def _clear_away_the_dead(home: Path) -> None:
    """Of this machine only: on a shared disk another machine's locks are not always seen."""
    for directory in home.glob(f"{glob.escape(socket.gethostname())}-*"):
        if not (directory / _LOCK).exists():
            continue  # being made this very moment, or not ours
        with suppress(FileNotFoundError):  # somebody else clears it away too
            if (lock := FileLock.try_take(directory / _LOCK, Share.ALONE)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                lock.release()
