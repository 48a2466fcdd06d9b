"""Temporary directories of this process, in a folder that only its user can write to.

A process has one folder for all its scratch directories and holds a lock beside it until the process ends. A process
that makes its first scratch directory removes the folders whose lock no process holds: those of killed processes.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import logging
import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from prefect_tune.core.errors import StoreRefused
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


def remove_unlocked(folder: Path, names: str, *, unused_for: timedelta) -> None:
    """Remove the directories in `folder` that have a lock file `<name>.lock`, unchanged for `unused_for` and not held.

    `names` is a pattern of the directories' names. A lock file whose directory is missing is removed, too.
    """
    for lock_file in folder.glob(f"{names}.lock"):
        with suppress(FileNotFoundError, Timeout):  # another process removed it, or holds it
            if time.time() - lock_file.lstat().st_mtime >= unused_for.total_seconds():
                with FileLock(lock_file, blocking=False):
                    remove_tree(lock_file.with_suffix(""))
                    lock_file.unlink()


_LINK = "link-"
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - the folder there is this user's own
_MAX_SOCKET_BYTES = 107  # of a socket's path on Linux
# Below a scratch directory: two numbers, then what PyTorch appends ("/torch-shm-dir-XXXXXX/manager.sock"); 32 bytes
# in multiprocessing.
_MAX_DIRECTORY_BYTES = _MAX_SOCKET_BYTES - len("/9999/999") - 34
_MAX_TMPDIR_CHARACTERS = 80
_numbers = itertools.count(1)


class ScratchDirectory:
    """A new directory below the system's temporary directory, with empty `folders` in it, removed by `close`."""

    def __init__(self, *folders: str) -> None:
        self.path = _process_folder(os.getpid(), tempfile.gettempdir()) / str(next(_numbers))
        for directory in (self.path, *(self.path / name for name in folders)):
            directory.mkdir(parents=True)  # a cleaner of temporary files may have removed an empty parent

    def close(self) -> None:
        """Remove it with its content."""
        remove_tree(self.path)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


@lru_cache
def _process_folder(process: int, base: str) -> Path:
    """Make and lock the parent of this process's scratch directories below `base`; first remove those of dead ones.

    A forked child has a folder of its own. The path is short enough for sockets, if a link can make it so.
    """
    shared = user_folder(base)
    remove_unlocked(shared, f"{_this_machine()}-*", unused_for=timedelta(0))
    folder = shared / f"{_this_machine()}-{uuid4().hex[:8]}"
    lock = FileLock(f"{folder}.lock", thread_local=False)
    lock.acquire()
    folder.mkdir(mode=0o700)
    short = _short_path(folder, base)

    def remove() -> None:
        if os.getpid() == process:
            if short != folder:
                short.unlink(missing_ok=True)
            remove_tree(folder)
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()

    atexit.register(remove)
    return short


def _short_path(folder: Path, base: str) -> Path:
    """Return a path to `folder` below which sockets can be made: itself, or a link to it if it is too long."""
    is_too_long = len(os.fsencode(folder)) > _MAX_DIRECTORY_BYTES
    link = _make_link(folder) if is_too_long else None
    if len(base) > _MAX_TMPDIR_CHARACTERS:
        _warn_of_length(base, "" if link is None else f". Trials use links to it in {link.parent}")
    elif is_too_long and link is None:
        _warn_of_length(base, f", and no link to it can be made in {' or '.join(_SHORT_FOLDERS)}")
    return link or folder


def _make_link(folder: Path) -> Path | None:
    for base in _SHORT_FOLDERS:
        with suppress(OSError, StoreRefused):
            links = user_folder(base)
            for link in links.glob(f"{_LINK}{_this_machine()}-*"):
                if not link.exists():  # what it led to was removed
                    link.unlink(missing_ok=True)
            (link := links / f"{_LINK}{folder.name}").symlink_to(folder)
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
