"""A folder of this machine as a target for reading, without a block: importing Prefect takes a second."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.posix.posix_store import open_folder

BLOCK_SLUG = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)/([^/\s]+)")
"""The 'block-type/name' of a saved block."""


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """An existing folder; `path` is absolute."""

    path: Path

    @property
    def uri(self) -> str:
        return self.path.as_uri()

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        yield open_folder(self.path, must_exist=True, deadline=Deadline.after(timeout))


def local_folder(target: str) -> LocalFolder | None:
    """Return the folder whose path is `target`; None if it is a URI or a saved block, or if there is no such folder."""
    if "://" in target or BLOCK_SLUG.fullmatch(target) or not target.strip():
        return None
    try:
        path = Path(os.path.normpath(Path.cwd() / Path(target).expanduser()))
        return LocalFolder(path) if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # the block says what is wrong with it
        return None
