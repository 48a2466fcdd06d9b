"""The block of a folder on this machine, or on a file system that all machines mount."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, HttpUrl, field_validator

from prefect_tune.blocks.storage_target import FILES_LOGO, StorageTarget
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.open_location import Client, Location
from prefect_tune.stores.posix_store import Sweeps, open_folder
from prefect_tune.stores.subprocess_store import IsolatedStore

_sweeps = Sweeps()


class LocalTarget(StorageTarget):
    """A folder of this machine, or of a file system that every machine mounts at the same path.

    It is created when it is first used. Its file system must support hard links, for atomic create-if-absent.

    Example:
        ```python
        from prefect_tune.blocks import LocalTarget

        target = LocalTarget.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str | None] = "Local Target"
    _block_type_slug: ClassVar[str | None] = "local-target"
    _logo_url: ClassVar[HttpUrl | None] = FILES_LOGO
    _client: ClassVar[Client | None] = Client.FILES

    path: str = Field(description="The folder's path: absolute, or starting with '~'.")

    must_exist: bool = Field(
        default=False,
        description="Whether a missing folder is an error, instead of being created: for mounts, where a missing "
        "folder means that nothing is mounted.",
    )

    may_hang: bool = Field(
        default=False,
        description="Whether it is a network mount that may hang: all operations then run in child processes "
        "that are killed at the deadline, which costs an additional copy of the bytes.",
    )

    @field_validator("path", mode="before")
    @classmethod
    def _absolute(cls, path: object) -> object:
        if not isinstance(path, str | os.PathLike):
            return path
        text = os.fspath(path)
        if not isinstance(text, str) or "\0" in text:
            raise ValueError("expected text without NUL characters")
        expanded = _expanded(text)
        if not expanded.is_absolute():
            raise ValueError(
                f"expected an absolute path or one that starts with '~', found {text!r}: "
                "a relative path would be another folder in each process"
            )
        return os.path.normpath(expanded)

    @classmethod
    def _at(cls, uri: str, location: Location) -> Self:  # noqa: ARG003  of use to others
        return cls(path=location.path)

    @property
    def uri(self) -> str:
        return Path(self.path).as_uri()

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        deadline = Deadline.after(timeout)
        if self.may_hang:
            factory = partial(open_folder, Path(self.path), must_exist=self.must_exist)
            with IsolatedStore(factory, deadline=deadline) as store:
                yield store
        else:
            yield open_folder(Path(self.path), must_exist=self.must_exist, deadline=deadline, sweeps=_sweeps)


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path!r}: this user has no home folder") from error
