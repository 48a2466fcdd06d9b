"""Create the root directory of a file store."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from prefect_tune.stores.posix.posix_errors import as_store_error
from prefect_tune.stores.posix.syscalls import OsCalls


def make_root(root: Path) -> None:
    """Create and sync the root directory of a store and its missing parents; do nothing if it exists.

    Raises:
        StoreRefused: not permitted, or `root` is not a directory.
        StoreUnavailable: the disk is full or does not answer.
    """
    if root.is_dir():
        return
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            above = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                OsCalls().fsync_folder(above)
            finally:
                os.close(above)
        if not root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(root))
    except OSError as error:
        raise as_store_error(error, f"making {root}") from error
