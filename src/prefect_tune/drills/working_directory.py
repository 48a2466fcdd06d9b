"""A working directory for each attempt of a drill: files that one attempt leaves there are not there for the next one.

On another machine they would not be there either, so a training that reads them must not pass as exact.

    /home/me/project          the working directory of the drill; its attempts do not write there
    FOLDER/home/me/project    its copy, in which an attempt trains
    FOLDER/home/me/data       a link, so that `../data` is found

Small files are copied. Links take the place of hidden directories, and of what is too much to copy for each attempt:
what is written below those is shared by all attempts.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from contextlib import suppress
from pathlib import Path

_MAX_COPIED_BYTES = 1 << 26
_MAX_COPIED_ENTRIES = 5_000


def enter_copied_directory(folder: Path) -> None:
    """Make a copy of the working directory below `folder`, unless another rank has made it, and go there."""
    original = Path.cwd().resolve()
    copied = Path(folder, *original.parts[1:])
    if not folder.exists():
        own = folder.with_name(f"{folder.name}-{os.getpid()}")
        _link_surroundings(original, own)
        _copy_directory(original, Path(own, *original.parts[1:]), without=folder.parent.resolve())
        with suppress(OSError):  # another rank was faster
            own.rename(folder)
    os.chdir(copied)
    os.environ["PWD"] = str(copied)


def _link_surroundings(original: Path, folder: Path) -> None:
    """Make the directories above the copy, in which all other entries are links."""
    for depth, part in enumerate(original.parts[1:], 1):
        above, copied = Path(*original.parts[:depth]), Path(folder, *original.parts[1:depth])
        copied.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):  # of a directory that can be entered and not read
            for entry in os.scandir(above):
                if entry.name != part:
                    (copied / entry.name).symlink_to(above / entry.name)


def _copy_directory(original: Path, copied: Path, without: Path) -> None:
    """Copy a directory level by level as long as it is cheap; what is left is linked."""
    left_bytes, left_entries = _MAX_COPIED_BYTES, _MAX_COPIED_ENTRIES
    copied.mkdir(parents=True)
    directories = deque([(original, copied)])
    while directories:
        source, place = directories.popleft()
        with os.scandir(source) as found:
            entries = sorted(found, key=lambda entry: entry.is_dir(follow_symlinks=False))  # files first
        for entry in entries:
            path, target = Path(entry.path), place / entry.name
            left_entries -= 1
            with suppress(OSError):  # it was removed meanwhile, or its path is too long
                size = entry.stat(follow_symlinks=False).st_size
                is_readable = left_entries > 0 and os.access(path, os.R_OK)
                if is_readable and entry.is_file(follow_symlinks=False) and size <= left_bytes:
                    shutil.copy2(path, target)
                    left_bytes -= size
                elif (
                    is_readable
                    and entry.is_dir(follow_symlinks=False)
                    and os.access(path, os.X_OK)
                    and not entry.name.startswith(".")
                    and not without.is_relative_to(path)
                ):
                    target.mkdir()
                    directories.append((path, target))
                else:
                    target.symlink_to(path)
