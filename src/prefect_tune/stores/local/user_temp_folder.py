"""The folder of this user below the system's directory for temporary files, which all users of the machine share."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from prefect_tune.core.errors import StoreRefused

_NAMES = 1000
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # of this process or machine, not a fault of the folder


def user_folder() -> Path:
    """Return the folder for temporary files of this user's processes; make it if it is not there.

    The folder belongs to this user, and no other user can write to it. Owner, mode and kind are read from the open
    folder, not from its path. All processes of the user that have the same `TMPDIR` get the same folder. A name that
    is taken by another user's folder, a link, a file, or a folder that others can write to is left alone, and the
    next number is tried: another user who takes the name first does not stop this one.

    Raises:
        StoreRefused: the file system keeps no owners or modes, or a thousand names are taken.
    """
    shared = Path(tempfile.gettempdir())
    name = f"prefect-tune-{os.geteuid()}"
    for number in range(_NAMES):
        folder = shared / (f"{name}.{number}" if number else name)
        if _is_made(folder) or _found(folder) is None:
            return folder
    raise StoreRefused(
        f"{shared}: expected a free name or a folder of user {os.geteuid()} among {name} and {name}.1 to "
        f"{name}.{_NAMES - 1}, found all of them taken by others: remove them, or set TMPDIR to a folder of your own"
    )


def _is_made(folder: Path) -> bool:
    """Make `folder`, readable and writable by this user alone; return False if something has its name.

    Raises:
        StoreRefused: others can write to what was made.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return False
    if (fault := _found(folder)) is not None:
        with suppress(OSError):
            folder.rmdir()
        raise StoreRefused(
            f"{folder}: made for user {os.geteuid()} alone, found {fault}: this file system keeps no owners or no "
            "modes: set TMPDIR to a folder on another one"
        )
    return True


def _found(folder: Path) -> str | None:
    """Return what `folder` is instead of a folder that only this user can write to; None if it is one."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as refused:
        if refused.errno in _SHORTAGES:
            raise
        return f"an entry that cannot be opened as a folder ({refused.strerror})"
    try:
        status = os.fstat(opened)
    finally:
        os.close(opened)
    if status.st_uid != os.geteuid():
        return f"a folder of user {status.st_uid}"
    mode = stat.S_IMODE(status.st_mode)
    return f"a folder of mode {mode:o}" if mode & _WRITABLE_BY_OTHERS else None
