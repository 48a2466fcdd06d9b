"""A directory that a trial hands over as a checkpoint: which it is, and what is in it now."""

from __future__ import annotations

import os
import shutil
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path

from prefect_tune.core.errors import InvalidInput

__all__ = ["local_directory", "require_written", "snapshot"]


def local_directory(checkpoint: object) -> Path:
    """Return the real, absolute path of a checkpoint's directory: links and a later `chdir` do not change it.

    Raises:
        InvalidInput: it is not a directory of this machine.
    """
    path = getattr(checkpoint, "path", None)  # or somebody gives the path itself
    if path is None or _kind_of(checkpoint) != "local" or not Path(str(path)).is_dir():
        raise InvalidInput(
            f"pt.report(checkpoint={checkpoint!r}): expected a local directory{_seen_from(path)}, as in "
            "pt.Checkpoint.from_directory(path); what is on a target already need not be reported"
        )
    return Path(os.path.realpath(str(path)))


def _kind_of(checkpoint: object) -> object:
    """Return the kind of file system that its path is on; one that names none is taken for local."""
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
    """Refuse a state that is returned, as Ray takes it: nothing of it would be stored. Who has none writes nothing."""
    is_empty = not any(directory.iterdir())
    if isinstance(returned, Mapping) or (is_empty and returned is not None and str(returned) != str(directory)):
        found = f"a {type(returned).__name__}"
        raise InvalidInput(f"step {step}: save_checkpoint returned {found}; write files into checkpoint_dir instead")
    if is_empty:
        said = "save_checkpoint wrote nothing into checkpoint_dir: who goes on from there has no trained state"
        warnings.warn(said, stacklevel=2)  # the same words at each step: Python shows them once


def snapshot(source: Path, destination: Path) -> Path:
    """Copy a directory that may be changed or removed as soon as this returns; return the copy.

    Raises:
        InvalidInput: a file of it was cut meanwhile, or something in it is neither a file nor a directory.
    """
    shutil.copytree(source, destination, dirs_exist_ok=True, copy_function=_copy_file)
    return destination


def _copy_file(source: str, destination: str) -> str:
    """Clone where the file system can share the bytes until one side writes; copy inside the kernel elsewhere."""
    if not stat.S_ISREG(Path(source).stat().st_mode):  # to open a named pipe is to wait for who writes to it
        raise InvalidInput(f"{source}: neither a file nor a directory, so it cannot be saved")
    with Path(source).open("rb") as reading, Path(destination).open("wb") as writing:
        size = os.fstat(reading.fileno()).st_size
        done = 0
        while done < size and (sent := os.sendfile(writing.fileno(), reading.fileno(), done, size - done)):
            done += sent
    if done != size:
        raise InvalidInput(f"{source}: expected {size} bytes, found {done}: it was cut while it was being copied")
    shutil.copymode(source, destination)
    return destination
