"""Publish a complete, synced file under its object's name by a hard link, which never replaces another file."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass

from prefect_tune.core.errors import AlreadyExists, CommitUnknown
from prefect_tune.stores.posix.posix_errors import NOT_DONE, as_store_error
from prefect_tune.stores.posix.syscalls import FileStatus, FileSystemCalls


@dataclass(frozen=True, slots=True)
class Temporary:
    """A complete, synced file that is not published yet."""

    name: str
    folder: int
    status: FileStatus


class Publisher:
    """Publishes files in the folders of one store; messages name its `root`."""

    def __init__(self, calls: FileSystemCalls, root: os.PathLike[str]) -> None:
        self._calls = calls
        self._root = root

    def link(self, fresh: Temporary, folder: int, name: str, path: str) -> None:
        """Publish `fresh` as `name`, which must not exist.

        Raises:
            AlreadyExists: another file has that name.
            CommitUnknown: the link may have been made, or is made and its folder cannot be synced.
        """
        try:
            self._calls.link(fresh.name, fresh.folder, name, folder)
        except OSError as error:
            if not self._is_linked(fresh, folder, name, error):
                raise AlreadyExists(f"{path}: exists already in {self._root}") from error
        try:
            self._calls.fsync_folder(folder)
        except OSError as error:
            raise CommitUnknown(f"{path} in {self._root}: written, but its folder cannot be synced: {error}") from error

    def replace(self, fresh: Temporary, folder: int, name: str) -> None:
        """Publish `fresh` as `name`, replacing a file only if its size differs: another writer or a disk damaged it."""
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
        """Return whether a link that raised `error` was made (NFS lost the reply); False if another file is there.

        Raises:
            OSError: the link was not made.
            StoreRefused: this file system supports no hard links.
            CommitUnknown: it is not known whether the link was made.
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
        """After EIO, test whether the file system supports hard links: some FUSE file systems return EIO if not.

        A failing disk is unlikely: it has just written and synced the file.

        Raises:
            StoreRefused: a second link beside the file fails with EIO too.
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
    """Return the status of `name`; None if it does not exist."""
    try:
        return calls.status_of(name, folder)
    except FileNotFoundError:
        return None


def settle(calls: FileSystemCalls, folder: int, status: FileStatus) -> None:
    """Sync the folder of an object that has two links, so that the object survives a power cut; refuse a link."""
    if status.is_link:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if status.links > 1:
        calls.fsync_folder(folder)


def discard(calls: FileSystemCalls, name: str, folder: int) -> None:
    """Remove a hidden name; on an error it stays, and a later sweep removes it."""
    with suppress(OSError):
        calls.unlink(name, folder)
