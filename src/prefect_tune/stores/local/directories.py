"""Local directories: detect changes, copy a directory, replace a directory or a file atomically."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NewType

from prefect_tune.core.errors import InvalidInput, StagedFilesChanged
from prefect_tune.stores.posix_files import sync_folder

Seal = NewType("Seal", str)
"""A digest of a directory's names, sizes, modification times and inodes. Any write to it changes the seal."""


def seal_of(directory: Path) -> Seal:
    """Return the seal of `directory`, without reading its files.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    seen = hashlib.blake2b(digest_size=16)
    for path, status in sorted(_below(directory, "")):
        kind, times = stat.S_IFMT(status.st_mode), (status.st_mtime_ns, status.st_ino)
        about = (path, kind, *(() if stat.S_ISDIR(kind) else (status.st_size, *times)))
        seen.update(repr(about).encode())
    return Seal(seen.hexdigest())


def _below(directory: Path, below: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            path = f"{below}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                yield from _below(directory / entry.name, f"{path}/")


def copy_directory(source: Path, destination: Path) -> None:
    """Make the new directory `destination` a copy of `source`, whole or not at all.

    A link to a file inside becomes that file.

    Raises:
        InvalidInput: `source` has a link that leads out of it or to a directory, or cannot be saved (`StagedFiles`).
        StagedFilesChanged: `source` was written to during the copy.
    """
    from prefect_tune.stores.local.staging import StagedFiles

    before = seal_of(source)
    staged = StagedFiles(source)
    with fresh_directory(destination) as copy:
        copy.mkdir()
        for folder in staged.empty_directories:
            (copy / folder).mkdir(parents=True)
        for file in staged.files:
            _require_inside(source, file.path)
            (copy / file.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file.path, copy / file.path)
        if seal_of(source) != before:
            raise StagedFilesChanged(f"{source}: was written to while it was copied")


def _require_inside(directory: Path, path: str) -> None:
    meant = (directory / path).resolve()
    if not meant.is_relative_to(directory.resolve()):
        raise InvalidInput(f"{directory / path}: a link that leads out of its directory, to {meant}")


@contextmanager
def fresh_directory(destination: Path) -> Iterator[Path]:
    """Yield a path at which to make a directory; rename it to `destination` if nothing was raised.

    `destination` must be missing or empty.
    """
    building = destination.with_name(f".{destination.name}.{uuid.uuid4().hex}")
    building.mkdir(parents=True)
    try:
        yield building / "whole"
        (building / "whole").rename(destination)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: readers see the old file or the new one, also after a power cut."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with fresh.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
