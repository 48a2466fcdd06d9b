"""Whether a local folder is this user's own: whether anybody else can have written what lies in it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

__all__ = ["why_not_own"]

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SEARCH = _FOLDER | getattr(os, "O_PATH", os.O_RDONLY)
"""Opens a folder that may be passed through; on Linux it need not be readable."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as Linux


def why_not_own(root: Path, folders: Sequence[str]) -> str:
    """Return why others can have written the files in `folders` below `root`; empty where only this user can.

    The system's administrator (user 0) counts as this user. Looked at are, by descriptors and without following a
    link that others could replace: every folder from `/` to `root`, every folder from there to `folders`, and
    every file in these. A folder that does not exist holds nothing that others wrote.
    """
    try:
        with ExitStack() as opened:
            place = _Place(opened)
            place.enter(root)
            place.require_private()
            for folder in folders:
                _look_into(place.descriptor, folder, root)
    except _Shared as shared:
        return str(shared)
    except OSError as error:
        return f"{root}: {error.strerror}"
    return ""


class _Shared(Exception):
    """Others can write there."""


def _require_private(status: os.stat_result, where: str | Path, *, may_be_sticky: bool = False) -> None:
    """A sticky folder (`/tmp`) lets others add names, and not replace those that are there."""
    if status.st_uid not in {0, os.geteuid()}:
        raise _Shared(f"{where} belongs to user {status.st_uid}, and this is user {os.geteuid()}")
    if status.st_mode & _OTHERS_WRITE and not (may_be_sticky and status.st_mode & stat.S_ISVTX):
        mode = stat.filemode(status.st_mode)
        raise _Shared(f"{where} can be written by others ({mode}; chmod go-w takes that from them)")


class _Place:
    """A folder that was reached from `/` through folders in which others cannot replace a name."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._way: list[tuple[str, int]] = []
        self._links = 0

    @property
    def descriptor(self) -> int:
        return self._way[-1][1]

    @property
    def path(self) -> str:
        return "/" + "/".join(name for name, _ in self._way[1:])

    def enter(self, path: Path) -> None:
        """Go along an absolute path, or one that starts here."""
        for part in path.parts:
            if part == "/":
                self._way = []
                self._step(part, None)
            elif part == "..":
                self._way = self._way[: max(1, len(self._way) - 1)]
            else:
                self._step(part, self.descriptor)

    def require_private(self) -> None:
        _require_private(os.fstat(self.descriptor), self.path)

    def _step(self, name: str, above: int | None) -> None:
        try:
            folder = _open(self._opened, name, _SEARCH, above)
        except OSError as error:
            if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
                raise
            return self._follow(name)
        self._way.append((name, folder))
        return _require_private(os.fstat(folder), self.path, may_be_sticky=True)

    def _follow(self, link: str) -> None:
        """Go where a link leads that lies here; it can be trusted as what it lies beside."""
        self._links += 1
        if self._links > _MOST_LINKS:
            raise _Shared(f"{self.path}: too many links")
        status = os.stat(link, dir_fd=self.descriptor, follow_symlinks=False)
        if status.st_uid not in {0, os.geteuid()}:
            raise _Shared(f"{self.path}/{link} is a link that belongs to user {status.st_uid}")
        self.enter(Path(os.readlink(link, dir_fd=self.descriptor)))


def _look_into(root: int, folder: str, where: Path) -> None:
    with ExitStack() as opened:
        at = root
        for name in folder.split("/"):
            where /= name
            try:
                at = _open(opened, name, _FOLDER | os.O_RDONLY, at)
            except FileNotFoundError:
                return
            _require_private(os.fstat(at), where)
        with os.scandir(at) as files:
            for each in files:
                _require_private(each.stat(follow_symlinks=False), where / each.name)


def _open(opened: ExitStack, name: str, flags: int, above: int | None) -> int:
    found = os.open(name, flags, dir_fd=above)
    opened.callback(os.close, found)
    return found
