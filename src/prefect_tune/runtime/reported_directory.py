"""Validate the directory that a trial reports as a checkpoint, and copy it for an asynchronous upload."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path

from prefect_tune.core.errors import InvalidInput, StagedFilesChanged

_CANNOT_COPY_RANGES = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def local_directory(checkpoint: object) -> Path:
    """Return the absolute path of a checkpoint's directory, links resolved, so that a later `chdir` does not matter.

    Raises:
        InvalidInput: it is not a directory of this machine.
    """
    path = getattr(checkpoint, "path", None)  # None if the caller passed a path instead of a checkpoint
    if path is None or _kind_of(checkpoint) != "local" or not Path(str(path)).is_dir():
        raise InvalidInput(
            f"pt.report(checkpoint={checkpoint!r}): expected a local directory{_seen_from(path)}, as in "
            "pt.Checkpoint.from_directory(path); a checkpoint that is on a target already need not be reported"
        )
    return Path(os.path.realpath(str(path)))


def _kind_of(checkpoint: object) -> object:
    """Return the kind of file system of its path; "local" if it names none."""
    place = getattr(checkpoint, "_place", None)
    if place is not None:
        return place.kind  # of `pt.Checkpoint`, without importing pyarrow
    return getattr(getattr(checkpoint, "filesystem", None), "type_name", "local")


def _seen_from(path: object) -> str:
    if path is None or Path(str(path)).is_absolute():
        return ""
    try:
        return f" in the working directory {Path.cwd()}"
    except FileNotFoundError:
        return " in the working directory, which has been removed"


def require_written(returned: object, directory: Path, step: int) -> None:
    """Refuse a state that is returned instead of written, as Ray allows: it would not be stored.

    An empty directory is allowed, for a trainable without state, and warned of.

    Raises:
        InvalidInput: `save_checkpoint` returned a mapping, or wrote nothing and returned something else.
    """
    is_empty = not any(directory.iterdir())
    if isinstance(returned, Mapping) or (is_empty and returned is not None and str(returned) != str(directory)):
        found = f"a {type(returned).__name__}"
        raise InvalidInput(f"step {step}: save_checkpoint returned {found}; write files into checkpoint_dir instead")
    if is_empty:
        said = "save_checkpoint wrote nothing into checkpoint_dir: a resume from there has no trained state"
        warnings.warn(said, stacklevel=2)  # the same text at each step: Python shows it once


def require_no_path(returned: object, directory: Path, step: int) -> None:
    """Refuse a path that a class returns for its `load_checkpoint`: early releases of Ray took it, Ray 2 refuses it.

    Raises:
        InvalidInput: it is a path other than `directory`, which is what `load_checkpoint` receives.
    """
    if not isinstance(returned, str | os.PathLike):
        return
    path, root = os.path.realpath(os.fsdecode(returned)), os.path.realpath(directory)
    if path != root:
        name = os.path.relpath(path, root) if path.startswith(f"{root}/") else Path(path).name
        raise InvalidInput(
            f"step {step}: save_checkpoint returned {os.fsdecode(returned)!r}, but load_checkpoint receives the "
            f"directory: return nothing, and load os.path.join(checkpoint_dir, {name!r}) there"
        )


def snapshot(source: Path, destination: Path) -> Path:
    """Copy a directory to `destination` and return that; the source may change after this returns.

    Raises:
        InvalidInput: an entry is neither a file nor a directory, or a link is not to a file.
        StagedFilesChanged: a file was truncated or deleted during the copy.
        OSError: such as a full disk; `shutil.copytree` would raise one without its number.
    """
    destination.mkdir(exist_ok=True)
    for each in source.iterdir():
        if each.is_symlink() and not each.is_file():  # a link to a folder may lead to one that it lies in
            raise InvalidInput(f"{each}: a link to a directory, or to nothing, cannot be saved; copy what it points to")
        try:
            if each.is_dir():
                snapshot(each, destination / each.name)
            else:
                _copy_file(each, destination / each.name)
        except FileNotFoundError as gone:
            raise StagedFilesChanged(f"{each}: was deleted while it was being saved") from gone
    return destination


def _copy_file(source: Path, destination: Path) -> None:
    """Copy a file inside the kernel; on XFS and Btrfs the copy shares the bytes, and takes milliseconds."""
    if not stat.S_ISREG(source.stat().st_mode):  # opening a named pipe would block until it has a writer
        raise InvalidInput(f"{source}: neither a file nor a directory, so it cannot be saved")
    with source.open("rb") as reading, destination.open("wb") as writing:
        size = os.fstat(reading.fileno()).st_size
        done = 0
        while done < size and (sent := _copy_range(reading.fileno(), writing.fileno(), done, size - done)):
            done += sent
    if done != size:
        raise StagedFilesChanged(f"{source}: expected {size} bytes, found {done}: it was truncated during the copy")
    shutil.copymode(source, destination)


def _copy_range(source: int, destination: int, offset: int, count: int) -> int:
    """Append bytes of `source` to `destination`; return how many. Not every file system can share them."""
    try:
        if copied := os.copy_file_range(source, destination, count, offset):
            return copied
    except OSError as error:
        if error.errno not in _CANNOT_COPY_RANGES:
            raise
    return os.sendfile(destination, source, offset, count)
