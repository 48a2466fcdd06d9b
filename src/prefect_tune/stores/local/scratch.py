"""Temporary directories of this user on this machine: those of one process, and copies that processes share.

A process has one folder for all its scratch directories and holds a lock beside it until the process ends. A process
that makes its first scratch directory removes the folders whose lock no process holds: those of killed processes.

A copy of a checkpoint is made by one process, and the others wait. `fill_directory` fills a directory that the caller
names. `shared_copy` gives each reader a directory of its own, with hard links to the files of one copy; the last reader
removes the copy. A copy gets its name only when it is complete. What killed readers left is removed when it was not
used for seven days. Locks, notes and copies bear the name of this boot, so that copies from before a power cut are
never used.
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
from prefect_tune.linux import boot_id, is_linux
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.staging import METADATA_FILE, replace_file, seal_of
from prefect_tune.stores.posix_store import remove_tree

_log = logging.getLogger(__name__)


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


def _remove_unlocked(folder: Path, names: str, *, unused_for: timedelta) -> None:
    """Remove the directories in `folder` that have a lock file `<name>.lock`, unchanged for `unused_for` and not held.

    `names` is a pattern of the directories' names. A lock file whose directory is missing is removed, too.
    """
    for lock_file in folder.glob(f"{names}.lock"):
        with suppress(FileNotFoundError, Timeout):  # another process removed it, or holds it
            if time.time() - lock_file.lstat().st_mtime >= unused_for.total_seconds():
                with FileLock(lock_file, blocking=False):
                    remove_tree(lock_file.with_suffix(""))
                    lock_file.unlink()


# The scratch directories of a process.

_LINK = "link-"
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - the folder there is this user's own
_MAX_SOCKET_BYTES = 107 if is_linux() else 103  # of a socket's path
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
    _remove_unlocked(shared, f"{_this_machine()}-*", unused_for=timedelta(0))
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
    if len(os.fsencode(folder)) <= _MAX_DIRECTORY_BYTES:
        return folder
    link = _make_link(folder)
    if link is None or len(base) > _MAX_TMPDIR_CHARACTERS:
        _log.warning(
            "the directory for temporary files, %s, has %d characters. Below it a program cannot open sockets, whose "
            "paths have at most %d bytes: multiprocessing.Manager fails, and a DataLoader may hang. Set TMPDIR to a "
            "shorter path",
            base,
            len(base),
            _MAX_SOCKET_BYTES,
        )
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


def _this_machine() -> str:
    """Return eight characters for this machine, whose name may have 64."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


# Copies that processes share.

_UNUSED_FOR = timedelta(days=7)
_REMOVAL_TIMEOUT = timedelta(seconds=10)
_LOCK_POLL_INTERVAL_SECONDS = 0.01


@contextmanager
def locked_folder(name: str, deadline: Deadline) -> Iterator[Path]:
    """Hold the lock `name` among this user's threads and processes on this machine; yield the path of a folder for it.

    The kernel releases the lock of a dead process. The folder may be missing.

    Raises:
        DeadlineExceeded: another process or thread held the lock at the deadline.
        StoreRefused: there is no folder that only this user can write to.
    """
    node = user_folder() / "node"
    node.mkdir(mode=0o700, exist_ok=True)
    named = f"{socket.gethostname()}.{boot_id()} {name}"  # machines may share their temporary folder
    folder = node / hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(deadline.remaining_seconds, poll_interval=_LOCK_POLL_INTERVAL_SECONDS)
    except Timeout as timeout:
        raise deadline.exceeded(f"waiting for {name}, which another process or thread uses") from timeout
    try:
        os.utime(lock.lock_file)  # the time of its last use
        yield folder
    finally:
        lock.release()


@dataclass(frozen=True, slots=True)
class DirectoryContent:
    """The content wanted in a directory.

    `bytes_named` names fixed bytes. `source_named` names a source that may change: what another process
    fetched from it is used only if that fetch ended after this request began.
    """

    bytes_named: str
    source_named: str
    fetch: Callable[[Path, bytes | None], None]
    """Makes the directory at the given path, which must not exist, with this metadata; on an error there is none."""
    verifies: Callable[[Path], bool]
    """Whether a directory holds exactly these bytes, and `metadata`."""
    metadata: bytes | None = None
    """The bytes of the file with the checkpoint's metadata, which may change; None for those that are named."""


@contextmanager
def shared_copy(content: DirectoryContent, deadline: Deadline) -> Iterator[Path]:
    """Yield a directory with `content`; fetch it only if no other reader on this machine has an unchanged copy.

    If several readers ask at once, one fetches and the others wait; if it fails or dies, another fetches.

    Raises:
        DeadlineExceeded: another process was still fetching at the deadline.
        Exception: `content.fetch` raised it.
    """
    name = f"the copy {content.bytes_named}"
    with ScratchDirectory() as scratch:
        directory = scratch / "files"
        with locked_folder(name, deadline) as folder:
            copy, seal = folder / "copy", folder / "seal"
            if not (copy.is_dir() and seal.exists() and seal.read_text(encoding="ascii") == seal_of(copy)):
                _remove_unlocked(folder.parent, "*", unused_for=_UNUSED_FOR)
                remove_tree(folder)  # changed by a reader, or left unfinished by a killed process
                content.fetch(copy, None)
                seal.write_text(seal_of(copy), encoding="ascii")
            shutil.copytree(copy, directory, copy_function=_link_or_copy)
        if content.metadata is not None:
            (directory / METADATA_FILE).unlink(missing_ok=True)  # other readers may have other metadata
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
    """The directory has other content: remove it, or choose another directory."""


def fill_directory(destination: Path, content: DirectoryContent, deadline: Deadline) -> None:
    """Put `content` into `destination` by one rename; fetch nothing if it has that content already.

    Raises:
        DestinationInUse: `destination` has other content, which is not changed.
        InvalidInput: `destination` cannot be replaced by a rename.
        DeadlineExceeded: another process was still filling it at the deadline.
    """
    requested_at_seconds = time.monotonic()
    if destination.exists() and not destination.is_dir():
        raise InvalidInput(f"{destination}: expected a directory, found a file")
    if destination.is_mount():
        raise InvalidInput(f"{destination}: a mount point cannot be replaced by a rename: choose a folder below it")
    with locked_folder(str(destination), deadline) as folder:
        folder.mkdir(mode=0o700, exist_ok=True)
        note = _read_note(folder / "note")
        if "unfinished" in note:  # a killed process has left it; only the holder of the lock makes one
            for path in destination.parent.glob(f".{glob.escape(destination.name)}.{'[0-9a-f]' * 32}"):
                shutil.rmtree(path, ignore_errors=True)
        if destination.exists() and any(destination.iterdir()):
            is_unchanged = note.get("seal") == seal_of(destination)
            is_newer = note.get("source") == content.source_named and note["done_at_seconds"] >= requested_at_seconds
            has_content = is_unchanged and (note["bytes"] == content.bytes_named or is_newer)
            if not has_content and not content.verifies(destination):
                raise DestinationInUse(
                    f"{destination}: not empty, and not this checkpoint: remove it, or choose another"
                )
            metadata = destination / METADATA_FILE
            if content.metadata is not None and not (metadata.is_file() and metadata.read_bytes() == content.metadata):
                replace_file(metadata, content.metadata)  # set anew since the directory was filled
        else:
            destination.parent.mkdir(parents=True, exist_ok=True)
            (folder / "note").write_text(json.dumps({"unfinished": True}))
            content.fetch(destination, content.metadata)
        note = {"bytes": content.bytes_named, "source": content.source_named, "seal": seal_of(destination)}
        (folder / "note").write_text(json.dumps({**note, "done_at_seconds": time.monotonic()}))


def _read_note(path: Path) -> dict[str, Any]:
    """Return what the last process noted of a destination; nothing if it was killed while it wrote."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError):
        return {}
