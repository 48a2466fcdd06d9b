"""One local copy of a checkpoint per machine: the first reader fetches it, and the last reader removes it.

A reader holds a shared lock; a process that fetches or removes a copy holds an exclusive one; the locks end with
their process. A copy gets its name only when it is complete. Copies are stored in a folder of this user and this
boot, so that copies from before a power cut are never used.
"""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from pydantic import BaseModel, ValidationError

from prefect_tune.core.errors import InvalidInput
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.download import METADATA_FILE
from prefect_tune.stores.local.file_lock import FileLock, Share, tries
from prefect_tune.stores.local.scratch import user_folder
from prefect_tune.stores.local.staging import Seal, replace_file, seal_of

# Fill a directory that the caller names, once, even if many processes request it at the same time.


@dataclass(frozen=True, slots=True)
class DirectoryCopy:
    """The content wanted in a directory.

    `bytes_named` names fixed bytes. `source_named` names a source that may change: what another process
    fetched from it is used only if that fetch ended after this request began.
    """

    bytes_named: str
    source_named: str
    fetch: Fetch
    verifies: Callable[[Path], bool]
    """Whether a directory holds exactly these bytes, and `metadata`."""
    metadata: bytes | None = None
    """The bytes of the file with the checkpoint's metadata, which may change; None for those that are named."""


class DestinationInUse(InvalidInput):
    """The directory has other content: remove it, or choose another directory."""


class _Note(BaseModel):
    """What the last holder of the lock wrote into the lock file."""

    bytes_named: str = ""
    source_named: str = ""
    seal: str = ""
    done_at_seconds: float = 0.0
    building: str = ""


def fill(destination: Path, filling: DirectoryCopy, deadline: Deadline) -> None:
    """Put `filling` into `destination` by one rename; fetch nothing if it has that content already.

    Raises:
        DestinationInUse: `destination` has other content, which is not changed.
        InvalidInput: `destination` cannot be replaced by a rename.
        DeadlineExceeded: another process was still filling it at the deadline.
    """
    requested_at_seconds = time.monotonic()
    _require_fillable(destination)
    notes = node_folder() / "destinations"
    notes.mkdir(mode=0o700, exist_ok=True)
    name = hashlib.blake2b(str(destination).encode(), digest_size=16).hexdigest()
    with FileLock.take(notes / f"{name}.lock", Share.ALONE, deadline) as lock:
        note = _read(lock.path)
        _remove_rubbish(destination, note)
        if _is_taken(destination):
            if not _is_as_wanted(destination, filling, note, requested_at_seconds):
                raise DestinationInUse(
                    f"{destination}: not empty, and not this checkpoint: remove it, or choose another"
                )
            _refresh(destination / METADATA_FILE, filling.metadata)
        else:
            destination.parent.mkdir(parents=True, exist_ok=True)
            _write(lock.path, _Note(building=f".{destination.name}."))
            filling.fetch(destination)
        filled = _Note(bytes_named=filling.bytes_named, source_named=filling.source_named, seal=seal_of(destination))
        filled.done_at_seconds = time.monotonic()
        _write(lock.path, filled)


def _refresh(file: Path, metadata: bytes | None) -> None:
    """Replace metadata that was set anew since the directory was filled."""
    if metadata is not None and not (file.is_file() and file.read_bytes() == metadata):
        replace_file(file, metadata)


def _is_taken(destination: Path) -> bool:
    """Whether `destination` is a file or a directory that is not empty."""
    try:
        return next(destination.iterdir(), None) is not None
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True


def _require_fillable(destination: Path) -> None:
    if destination.exists() and not destination.is_dir():
        raise InvalidInput(f"{destination}: expected a directory, found a file")
    if destination.is_mount():
        raise InvalidInput(f"{destination}: a mount point cannot be replaced by a rename: choose a folder below it")


def _is_as_wanted(destination: Path, filling: DirectoryCopy, note: _Note, requested_at_seconds: float) -> bool:
    if note.seal == seal_of(destination):
        if note.bytes_named == filling.bytes_named:
            return True
        if note.source_named == filling.source_named and note.done_at_seconds >= requested_at_seconds:
            return True
    return filling.verifies(destination)


def _remove_rubbish(destination: Path, note: _Note) -> None:
    """Remove the unfinished directory of a killed process; only the holder of the lock builds one."""
    if not note.building:
        return
    hidden = f".{destination.name}."
    for beside in destination.parent.glob(f".*.{'[0-9a-f]' * 32}"):
        if beside.name.startswith(hidden) and len(beside.name) == len(hidden) + 32:
            shutil.rmtree(beside, ignore_errors=True)


def _read(path: Path) -> _Note:
    try:
        return _Note.model_validate(json.loads(path.read_bytes() or b"{}"))
    except (ValueError, ValidationError):
        return _Note()  # its writer was killed: check the directory's content instead


def _write(path: Path, note: _Note) -> None:
    path.write_bytes(note.model_dump_json().encode())


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
