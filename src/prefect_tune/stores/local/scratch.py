"""Temporary directories of this user on this machine: each process's scratch directories, and copies of checkpoints.

A process has one folder for all its scratch directories, and holds a lock next to the folder until the process exits.
Before a process makes its first scratch directory, it removes the folders of killed processes, whose locks are free.

If several processes need a checkpoint, one copies it, and the others wait. `fill_directory` fills a directory that the
caller names. `shared_copy` gives each reader its own directory, with hard links to the files of one copy; the last
reader removes the copy. A copy gets its name only when it is complete. A fetch also removes copies unused for 7 days,
which killed readers left. The names of locks, notes and copies contain the boot id, so an earlier boot's are not used.
"""

from __future__ import annotations

import atexit
import glob
import hashlib
import itertools
import json
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout

from prefect_tune.core.errors import DeadlineExceeded, InvalidInput, StoreRefused
from prefect_tune.linux import read_boot_id, uses_linux_calls
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.staging import METADATA_FILE, compute_stat_digest, replace_file
from prefect_tune.stores.posix_store import remove_tree

_log = logging.getLogger(__name__)


def make_user_folder(base: str | None = None) -> Path:
    """Return the folder for temporary files of this user's processes, below `base`; create it if it is missing.

    The default of `base` is `TMPDIR` and not the user's home, because staged checkpoints are large, and homes may be
    shared by machines, have quotas, or be missing in a container. The folder belongs to this user, and no other user
    can write to it.

    Raises:
        StoreRefused: a file or another user's folder has this name, or the file system stores no owners or modes.
    """
    user = os.geteuid()
    folder = Path(base or tempfile.gettempdir(), f"prefect-tune-{user}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == user and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    raise StoreRefused(
        f"{folder}: expected a folder of user {user} that only this user can write to, found "
        f"{stat.filemode(status.st_mode)} of user {status.st_uid}: remove it, or set TMPDIR to another folder"
    )


def _remove_unlocked_directories(folder: Path, names: str, *, unused_for: timedelta) -> None:
    """Remove each directory in `folder` whose lock file `<name>.lock` is free and has not changed for `unused_for`.

    `names` is a pattern of the directories' names. A lock file whose directory is missing is removed too.
    """
    for lock_file in folder.glob(f"{names}.lock"):
        with suppress(FileNotFoundError, Timeout):  # another process has removed the lock file, or holds the lock
            if time.time() - lock_file.lstat().st_mtime >= unused_for.total_seconds():
                with FileLock(lock_file, blocking=False):
                    remove_tree(lock_file.with_suffix(""))
                    lock_file.unlink()


# The scratch directories of a process.

_LINK_PREFIX = "link-"
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - the folder there is this user's own
_MAX_SOCKET_BYTES = 107 if uses_linux_calls() else 103  # the longest path of a socket
# Below a scratch directory, the path of a socket has two numbers (9 bytes) and then PyTorch's 34 bytes
# ("/torch-shm-dir-XXXXXX/manager.sock") or multiprocessing's 32 bytes.
_MAX_DIRECTORY_BYTES = _MAX_SOCKET_BYTES - len("/9999/999") - 34
_MAX_TMPDIR_CHARACTERS = 80
_directory_numbers = itertools.count(1)


class ScratchDirectory:
    """A new directory with empty subfolders `folders`, below the system's temporary directory; `close` removes it."""

    def __init__(self, *folders: str) -> None:
        self.path = _make_process_folder(os.getpid(), tempfile.gettempdir()) / str(next(_directory_numbers))
        for directory in (self.path, *(self.path / name for name in folders)):
            directory.mkdir(parents=True)  # a cleaner of temporary files may have removed an empty parent

    def close(self) -> None:
        remove_tree(self.path)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


@lru_cache
def _make_process_folder(process: int, base: str) -> Path:
    """Make and lock the parent of this process's scratch directories below `base`; remove folders of dead processes.

    A forked child has its own folder. If the path is too long for sockets, return a shorter path, a link to the folder.
    """
    user_directory = make_user_folder(base)
    _remove_unlocked_directories(user_directory, f"{_machine_digest()}-*", unused_for=timedelta(0))
    folder = user_directory / f"{_machine_digest()}-{uuid4().hex[:8]}"
    lock = FileLock(f"{folder}.lock", thread_local=False)
    lock.acquire()
    folder.mkdir(mode=0o700)
    short_path = _make_short_path(folder, base)

    def remove_folder() -> None:
        if os.getpid() == process:
            if short_path != folder:
                short_path.unlink(missing_ok=True)
            remove_tree(folder)
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()

    atexit.register(remove_folder)
    return short_path


def _make_short_path(folder: Path, base: str) -> Path:
    """Return a path to `folder` that is short enough for sockets: `folder` itself, or a new link to it."""
    if len(os.fsencode(folder)) <= _MAX_DIRECTORY_BYTES:
        return folder
    link = _make_short_link(folder)
    if link is None or len(base) > _MAX_TMPDIR_CHARACTERS:
        message = (
            "the path of the temporary directory, %s, has %d characters: too long for sockets below it, whose paths "
            "have at most %d bytes. multiprocessing.Manager fails, and a DataLoader may hang. Set TMPDIR to a "
            "shorter path"
        )
        _log.warning(message, base, len(base), _MAX_SOCKET_BYTES)
    return link or folder


def _make_short_link(folder: Path) -> Path | None:
    for base in _SHORT_FOLDERS:
        with suppress(OSError, StoreRefused):
            links = make_user_folder(base)
            for link in links.glob(f"{_LINK_PREFIX}{_machine_digest()}-*"):
                if not link.exists():  # its folder was removed
                    link.unlink(missing_ok=True)
            (link := links / f"{_LINK_PREFIX}{folder.name}").symlink_to(folder)
            return link
    return None


def _machine_digest() -> str:
    """Return eight characters that identify this machine; its host name may be too long for a socket's path."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


# Copies of checkpoints that processes share.

_MAX_UNUSED_AGE = timedelta(days=7)
_REMOVAL_TIMEOUT = timedelta(seconds=10)
_LOCK_POLL_INTERVAL_SECONDS = 0.01


@contextmanager
def locked_folder(name: str, deadline: Deadline) -> Iterator[Path]:
    """Hold the lock `name`, which this user's threads and processes on this machine share; yield the lock's folder.

    The kernel releases the lock of a dead process. The folder may be missing.

    Raises:
        DeadlineExceeded: another process or thread held the lock at the deadline.
        StoreRefused: there is no folder that only this user can write to.
    """
    locks = make_user_folder() / "node"
    locks.mkdir(mode=0o700, exist_ok=True)
    lock_name = f"{socket.gethostname()}.{read_boot_id()} {name}"  # since machines may share a temporary folder
    folder = locks / hashlib.blake2b(lock_name.encode(), digest_size=16).hexdigest()
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(deadline.remaining_seconds, poll_interval=_LOCK_POLL_INTERVAL_SECONDS)
    except Timeout as timeout:
        raise deadline.exceeded_error(f"waiting for {name}, which another process or thread uses") from timeout
    try:
        os.utime(lock.lock_file)  # record the time of the last use
        yield folder
    finally:
        lock.release()


@dataclass(frozen=True, slots=True)
class DirectoryContent:
    """The content that a directory should have.

    `content_id` identifies fixed bytes. `source_id` identifies a source that may change. If a directory has other bytes
    that were fetched from this source, they are used only if that fetch ended after this request began.
    """

    content_id: str
    source_id: str
    fetch: Callable[[Path, bytes | None], None]
    """Creates a directory with the given metadata at a path that is missing or empty; creates nothing on an error."""
    matches: Callable[[Path], bool]
    """Returns whether a directory has exactly these bytes and this `metadata`."""
    metadata: bytes | None = None
    """The bytes of the metadata file, if they may change while `content_id` stays equal; None if it identifies them."""


@contextmanager
def shared_copy(content: DirectoryContent, deadline: Deadline) -> Iterator[Path]:
    """Yield a directory with `content`; fetch only if no other reader on this machine has an unchanged copy.

    One of several concurrent readers fetches, and the others wait. If that reader fails or is killed, another fetches.

    Raises:
        DeadlineExceeded: another process was still fetching at the deadline.
        Exception: `content.fetch` raised it.
    """
    name = f"the copy {content.content_id}"
    with ScratchDirectory() as scratch:
        directory = scratch / "files"
        with locked_folder(name, deadline) as folder:
            copy, digest_file = folder / "copy", folder / "seal"
            has_digest = copy.is_dir() and digest_file.exists()
            if not (has_digest and digest_file.read_text(encoding="ascii") == compute_stat_digest(copy)):
                _remove_unlocked_directories(folder.parent, "*", unused_for=_MAX_UNUSED_AGE)
                remove_tree(folder)  # a reader has changed the copy, or a killed process did not finish it
                content.fetch(copy, None)
                digest_file.write_text(compute_stat_digest(copy), encoding="ascii")
            shutil.copytree(copy, directory, copy_function=_link_or_copy)
        if content.metadata is not None:
            (directory / METADATA_FILE).unlink(missing_ok=True)  # make a new file, since other readers link to this one
            (directory / METADATA_FILE).write_bytes(content.metadata)
        try:
            yield directory
        finally:
            remove_tree(directory)
            with suppress(DeadlineExceeded), locked_folder(name, Deadline.after(_REMOVAL_TIMEOUT)) as folder:
                if all(file.stat().st_nlink == 1 for file in (folder / "copy").rglob("*") if file.is_file()):
                    remove_tree(folder)
                    folder.with_suffix(".lock").unlink()


def _link_or_copy(file: str, destination: str) -> None:
    try:
        os.link(file, destination)
    except OSError:  # the file system has no hard links
        shutil.copy2(file, destination)


class DestinationInUse(InvalidInput):
    """The destination has other content: remove this content, or choose another directory."""


def fill_directory(destination: Path, content: DirectoryContent, deadline: Deadline) -> None:
    """Put `content` into `destination` by one rename; fetch nothing if `destination` already has this content.

    Raises:
        DestinationInUse: `destination` has other content; nothing was changed.
        InvalidInput: `destination` cannot be replaced by a rename.
        DeadlineExceeded: another process was still filling `destination` at the deadline.
    """
    requested_at_seconds = time.monotonic()
    if destination.exists() and not destination.is_dir():
        raise InvalidInput(f"{destination}: expected a directory, found a file")
    if destination.is_mount():
        raise InvalidInput(f"{destination}: a mount point cannot be replaced by a rename: choose a folder below it")
    with locked_folder(str(destination), deadline) as folder:
        folder.mkdir(mode=0o700, exist_ok=True)
        note: dict[str, Any] = {}
        with suppress(FileNotFoundError, ValueError):  # there is no note yet, or its writer was killed
            note = dict(json.loads((folder / "note").read_bytes()))
        if "unfinished" in note:  # left by a killed process, since only the lock's holder writes notes
            for path in destination.parent.glob(f".{glob.escape(destination.name)}.{'[0-9a-f]' * 32}"):
                shutil.rmtree(path, ignore_errors=True)
        if destination.exists() and any(destination.iterdir()):
            is_unchanged = note.get("seal") == compute_stat_digest(destination)
            is_newer = note.get("source") == content.source_id and note["done_at_seconds"] >= requested_at_seconds
            has_content = is_unchanged and (note["bytes"] == content.content_id or is_newer)
            if not has_content and not content.matches(destination):
                raise DestinationInUse(f"{destination}: not empty and not this checkpoint: remove it or choose another")
            metadata = destination / METADATA_FILE
            if content.metadata is not None and not (metadata.is_file() and metadata.read_bytes() == content.metadata):
                replace_file(metadata, content.metadata)  # the metadata has changed since the directory was filled
        else:
            destination.parent.mkdir(parents=True, exist_ok=True)
            (folder / "note").write_text(json.dumps({"unfinished": True}))
            content.fetch(destination, content.metadata)
        note = {"bytes": content.content_id, "source": content.source_id, "seal": compute_stat_digest(destination)}
        (folder / "note").write_text(json.dumps({**note, "done_at_seconds": time.monotonic()}))
