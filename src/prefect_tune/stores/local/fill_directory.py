"""Fill a directory that the caller names, once, even if many processes request it at the same time."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from prefect_tune.core.errors import InvalidInput
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.directories import replace_file, seal_of
from prefect_tune.stores.local.download import METADATA_FILE
from prefect_tune.stores.local.file_lock import FileLock, Share
from prefect_tune.stores.local.node_cache import Fetch, node_folder


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
