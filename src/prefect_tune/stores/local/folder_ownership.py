"""Check that only this user can have written the files in a local folder."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SEARCH = _FOLDER | getattr(os, "O_PATH", os.O_RDONLY)
"""Opens a folder that may be passed through; on Linux it need not be readable."""
_MOST_LINKS = 40  # as Linux
_MOUNTS = Path("/proc/self/mountinfo")
_OWNERS_MADE_UP = ("fuse", "cifs", "smb3", "smbfs")
"""Types of mounts that report the user who mounted them as owner of every file, such as s3fs, rclone and SMB."""
_OWNERS_TRUE = ("fuse.fuse-overlayfs",)


def why_not_own(root: Path, folders: Sequence[str]) -> str:
    """Return why other users can have written the files in `folders` below `root`; empty if only this user can.

    The administrator (user 0) counts as this user, and so does a group with this user as its only member. A mount
    that makes up owners (FUSE, SMB) does not show who can write to it, so it never counts as this user's own. Checked,
    by open descriptors and without following a link that others could replace, are every folder from `/` to `root`,
    every folder from there to `folders`, and every file in these. A folder that does not exist passes.
    """
    try:
        with ExitStack() as opened:
            place = _OpenFolder(opened)
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
    """Other users can write to a checked path; the message names it."""


def _require_private(found: os.stat_result, where: str | Path, reach: str, *, may_be_sticky: bool = False) -> None:
    """Raise `_Shared` if other users can write there.

    With `may_be_sticky`, a sticky folder (`/tmp`) passes: others can add names to it, but not replace existing ones.

    Args:
        found: its status, read from a descriptor.
        where: its path, for messages.
        reach: its path through a descriptor, for its access list.
        may_be_sticky: let a sticky folder pass.
    """
    if stat.S_ISDIR(found.st_mode) and (kind := _kind_of_mount(found.st_dev)) and _makes_up_owners(kind):
        raise _Shared(f"{where} is on a mount of type {kind}, which does not show which other users can write there")
    if found.st_uid not in {0, os.geteuid()}:
        raise _Shared(f"{where} belongs to user {found.st_uid}, and this is user {os.geteuid()}")
    if _others_write(found, reach) and not (may_be_sticky and found.st_mode & stat.S_ISVTX):
        mode = stat.filemode(found.st_mode)
        raise _Shared(f"{where} can be written by others ({mode}; chmod go-w removes that permission)")


def _makes_up_owners(kind: str) -> bool:
    return kind not in _OWNERS_TRUE and (kind in _OWNERS_MADE_UP or kind.startswith("fuse."))


def _kind_of_mount(device: int) -> str:
    """Return the type of the file system; empty where the system has no `/proc/self/mountinfo`."""
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = (line.partition(" - ")[2].split(" ")[0] for line in mounts if line.split(" ")[2:3] == [number])
    return next(kinds, "")


def _others_write(found: os.stat_result, reach: str) -> bool:
    """Whether other users can write; with an access list, the group bits are the mask of all its entries."""
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not (
        _is_private_group(os.geteuid(), found.st_gid) and not _has_access_list(reach)
    )


@lru_cache(maxsize=8)
def _is_private_group(user: int, group: int) -> bool:
    """Whether `user` is the only member of `group`: many systems make such a group per user, with umask 002."""
    try:
        me, members = pwd.getpwuid(user), grp.getgrgid(group).gr_mem
    except KeyError:
        return False
    if user == 0 or me.pw_gid != group or not set(members) <= {me.pw_name}:
        return False
    return all(each.pw_uid == user for each in pwd.getpwall() if each.pw_gid == group)


def _has_access_list(reach: str) -> bool:
    if not hasattr(os, "listxattr"):
        return True  # unknown on this system: assume one
    try:
        return any(name.endswith("_acl") or "_acl_" in name for name in os.listxattr(reach, follow_symlinks=True))
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return False
        raise


class _OpenFolder:
    """An open folder, reached from `/` through folders in which other users cannot replace a name."""

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
        """Walk an absolute path, or one relative to the current folder."""
        for part in path.parts:
            if part == "/":
                self._way = []
                self._step(part, None)
            elif part == "..":
                self._way = self._way[: max(1, len(self._way) - 1)]
            else:
                self._step(part, self.descriptor)

    def require_private(self) -> None:
        _require_private(os.fstat(self.descriptor), self.path, _reach(self.descriptor))

    def _step(self, name: str, above: int | None) -> None:
        try:
            folder = _open(self._opened, name, _SEARCH, above)
        except OSError as error:
            if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
                raise
            return self._follow(name)
        self._way.append((name, folder))
        return _require_private(os.fstat(folder), self.path, _reach(folder), may_be_sticky=True)

    def _follow(self, link: str) -> None:
        """Follow a symbolic link of the current folder, if it belongs to this user or the administrator."""
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
            _require_private(os.fstat(at), where, _reach(at))
        with os.scandir(at) as files:
            for each in files:
                found = each.stat(follow_symlinks=False)
                _require_private(found, where / each.name, f"{_reach(at)}/{each.name}")


def _reach(descriptor: int) -> str:
    """Return a path to an open descriptor; with `O_PATH` there is no other way to read extended attributes."""
    return f"/proc/self/fd/{descriptor}"


def _open(opened: ExitStack, name: str, flags: int, above: int | None) -> int:
    found = os.open(name, flags, dir_fd=above)
    opened.callback(os.close, found)
    return found
