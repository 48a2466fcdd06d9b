"""Giving whole, synced bytes their name: by a hard link, which no other writer's can replace."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass

from prefect_tune.core.errors import AlreadyExists, CommitUnknown
from prefect_tune.stores.posix_calls import FileStatus, FileSystemCalls
from prefect_tune.stores.posix_errors import NOT_DONE, as_store_error

__all__ = ["Publisher", "Temporary", "discard", "settle", "status_at"]


@dataclass(frozen=True, slots=True)
class Temporary:
    """Whole, synced, unpublished bytes."""

    name: str
    folder: int
    status: FileStatus


class Publisher:
    """Links objects in the folders of one store, whose `root` is named in messages."""

    def __init__(self, calls: FileSystemCalls, root: os.PathLike[str]) -> None:
        self._calls = calls
        self._root = root

    def link(self, fresh: Temporary, folder: int, name: str, path: str) -> None:
        """Publish `fresh` as `name`, where nothing may be."""
        try:
            self._calls.link(fresh.name, fresh.folder, name, folder)
        except OSError as error:
            if not self._is_linked(fresh, folder, name, error):
                raise AlreadyExists(f"{path}: there already in {self._root}") from error
        try:
            self._calls.fsync_folder(folder)
        except OSError as error:
            raise CommitUnknown(f"{path} in {self._root}: written, but its folder cannot be synced: {error}") from error

    def replace(self, fresh: Temporary, folder: int, name: str) -> None:
        """Publish `fresh` as `name`, over one whose size is wrong: spoilt by another writer, or by a disk."""
        try:
            self._calls.link(fresh.name, fresh.folder, name, folder)
        except FileExistsError:
            there = status_at(self._calls, folder, name)
            if there is not None and not there.is_file:
                raise
            if there is None or there.size_bytes != fresh.status.size_bytes:
                self._rename(fresh, folder, name)
        except OSError as error:
            self._require_links(fresh, error)
            raise
        self._calls.fsync_folder(folder)

    def _rename(self, fresh: Temporary, folder: int, name: str) -> None:
        second = f"{fresh.name}-again"
        self._calls.link(fresh.name, fresh.folder, second, fresh.folder)  # two links until the folder is synced
        try:
            self._calls.rename(second, fresh.folder, name, folder)
        except BaseException:
            discard(self._calls, second, fresh.folder)
            raise

    def _is_linked(self, fresh: Temporary, folder: int, name: str, error: OSError) -> bool:
        """Say whether a link that failed is there all the same (a lost reply of NFS), or another file.

        Raises:
            OSError: it was not made.
            StoreRefused: this file system makes no links.
            CommitUnknown: it cannot be said.
        """
        if error.errno in NOT_DONE:
            raise error
        try:
            there = status_at(self._calls, folder, name)
        except OSError as blind:
            raise CommitUnknown(f"{name!r} in {self._root}: {error}, and then {blind}") from error
        if there is None:
            self._require_links(fresh, error)
            raise CommitUnknown(f"{name!r} in {self._root}: {error}; not there yet") from error
        if there.inode == fresh.status.inode:
            return True
        if there.is_folder:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR)) from error
        settle(self._calls, folder, there)
        return False

    def _require_links(self, fresh: Temporary, error: OSError) -> None:
        """Find out what an input/output error means: some FUSE file systems say so that they have no hard links.

        The bytes were written and synced a moment before, so that a disk which fails would have failed then.

        Raises:
            StoreRefused: a link beside the bytes themselves fails alike.
        """
        if error.errno != errno.EIO:
            return
        second = f"{fresh.name}-again"
        try:
            self._calls.link(fresh.name, fresh.folder, second, fresh.folder)
        except OSError as again:
            if again.errno == errno.EIO:
                unsupported = OSError(errno.ENOTSUP, f"link fails twice: {os.strerror(errno.EIO)}")
                raise as_store_error(unsupported, f"link in {self._root}", call="link") from error
        else:
            discard(self._calls, second, fresh.folder)


def status_at(calls: FileSystemCalls, folder: int, name: str) -> FileStatus | None:
    """Return what is at `name`; None where nothing is."""
    try:
        return calls.status_of(name, folder)
    except FileNotFoundError:
        return None


def settle(calls: FileSystemCalls, folder: int, status: FileStatus) -> None:
    """Make sure that an object which is believed in is also there after a power cut."""
    if status.is_link:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if status.links > 1:
        calls.fsync_folder(folder)


def discard(calls: FileSystemCalls, name: str, folder: int) -> None:
    """Remove a hidden name. The outcome stands whether that succeeds or not: what stays is swept later."""
    with suppress(OSError):
        calls.unlink(name, folder)
