"""The folder of this user below the system's directory for temporary files, which all users of the machine share."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from prefect_tune.core.errors import StoreRefused


def user_folder() -> Path:
    """Return the folder for temporary files of this user's processes; make it if it is not there.

    It is below `TMPDIR`, and not in the user's home: staged checkpoints are large, and homes may be shared by machines,
    have quotas, or be missing in a container. The folder belongs to this user, and no other user can write to it.

    Raises:
        StoreRefused: something else has the name, or the file system keeps no owners or modes.
    """
    user = os.geteuid()
    folder = Path(tempfile.gettempdir(), f"prefect-tune-{user}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    raise StoreRefused(
        f"{folder}: expected a folder of user {user} that only this user can write to, found "
        f"{stat.filemode(found.st_mode)} of user {found.st_uid}: remove it, or set TMPDIR to a folder of your own"
    )
