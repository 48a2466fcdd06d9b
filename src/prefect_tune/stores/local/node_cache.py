"""Copies of checkpoints that the processes of this user on this machine share: one downloads, the others wait.

`fill_directory` fills a directory that the caller names. `shared_copy` gives each reader a directory of its own, with
hard links to the files of one copy; the last reader removes the copy. A copy gets its name only when it is complete.
What killed readers left is removed when it was not used for seven days. Locks, notes and copies bear the name of this
boot, so that copies from before a power cut are never used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from prefect_tune.core.errors import DeadlineExceeded, InvalidInput
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.download import METADATA_FILE
from prefect_tune.stores.local.scratch import ScratchDirectory, remove_unlocked, user_folder
from prefect_tune.stores.local.staging import replace_file, seal_of
from prefect_tune.stores.posix_files import remove_tree

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
    folder = node / hashlib.blake2b(f"{_this_boot()} {name}".encode(), digest_size=16).hexdigest()
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


def _this_boot() -> str:
    """Return a name of this machine and boot, because machines may share their temporary folder."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = "any"
    return f"{socket.gethostname()}.{boot}"


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
                remove_unlocked(folder.parent, "*", unused_for=_UNUSED_FOR)
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
        if "unfinished" in note:
            _remove_unfinished(destination)
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


def _remove_unfinished(destination: Path) -> None:
    """Remove the unfinished directory of a killed process; only the holder of the lock makes one."""
    prefix = f".{destination.name}."
    for path in destination.parent.glob(f".*.{'[0-9a-f]' * 32}"):
        if path.name.startswith(prefix) and len(path.name) == len(prefix) + 32:
            shutil.rmtree(path, ignore_errors=True)
