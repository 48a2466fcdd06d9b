"""What the kernel's error numbers mean to somebody who keeps objects in files.

Sources: the ERRORS sections of link(2), rename(2), open(2), fsync(2), mkdir(2), unlink(2), write(2), read(2), stat(2)
and flock(2) at https://man7.org/linux/man-pages/, and errno(3) for keys and stale handles.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType

from prefect_tune.core.errors import StoreRefused, StoreUnavailable

__all__ = ["NOT_DONE", "UNSUPPORTED", "as_store_error"]

UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY})
"""How a file system says that it has no such operation, or none of this kind."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_INSTEAD = "use a local disk, NFS, or the storage's own target (S3, GCS, Azure) in place of this mount"
_CANNOT: Mapping[str, str] = MappingProxyType(
    {
        "link": f"this file system has no hard links, which create-if-absent needs: {_INSTEAD}",
        "rename": f"this file system cannot rename a file over another: {_INSTEAD}",
        "fsync": f"this file system cannot sync a file, so that nothing in it is safe: {_INSTEAD}",
        "open_root": f"this file system cannot open a folder: {_INSTEAD}",
        "open_folder": f"this file system cannot open a folder without following links: {_INSTEAD}",
        "open_file": f"this file system cannot open a file without following links: {_INSTEAD}",
        "new_file": f"this file system cannot make a file that must be new, or not by this name: {_INSTEAD}",
        "mkdir": f"this file system cannot make folders: {_INSTEAD}",
        "unlink": f"this file system cannot remove files: {_INSTEAD}",
        "names": f"this file system cannot list a folder: {_INSTEAD}",
        "is_empty": f"this file system cannot list a folder: {_INSTEAD}",
        "pread": f"this file system cannot read from the middle of a file: {_INSTEAD}",
        "lock": "this file system has no locks, which a folder of this machine needs: set TMPDIR to a local disk",
        "write": f"this file system cannot write files like these: {_INSTEAD}",
    }
)
_MEANS_UNSUPPORTED = frozenset({(errno.EPERM, "link"), (errno.ENOLCK, "lock")})
_CANNOT_ANYTHING = f"this file system does not do what is asked for: {_INSTEAD}"
_KEYS = "the ticket or key of this mount has expired, or is missing: renew it (kinit)"
_KEY_ERRORS = ("EKEYEXPIRED", "EKEYREVOKED", "EKEYREJECTED", "ENOKEY")  # Linux only
_FORBIDDEN: Mapping[int, str] = MappingProxyType(
    {
        errno.EACCES: "this user has no permission",
        errno.EPERM: "this user has no permission, or the file system forbids it to everybody",
        errno.EROFS: "the file system is mounted read-only",
        **{getattr(errno, name): _KEYS for name in _KEY_ERRORS if hasattr(errno, name)},
    }
)
_IMPOSSIBLE: Mapping[int, str] = MappingProxyType(
    {
        errno.EEXIST: "something else than a plain file is there",
        errno.EFBIG: "the file is too large for this file system or this user's limit",
        errno.EISDIR: "a folder is there",
        errno.ELOOP: "a symbolic link is in the way, and none is followed",
        errno.EMLINK: "too many links or folders for this file system",
        errno.ENAMETOOLONG: "the name is too long for this file system",
        errno.ENOTDIR: "a file or a symbolic link stands where a folder should",
        errno.EXDEV: "a part of the target is another file system; mount it elsewhere",
    }
)
_PASSING: Mapping[int, str] = MappingProxyType(
    {
        errno.ESTALE: "the server has replaced what was mounted; where it does not pass, mount it again",
        errno.ENOTCONN: "the mount's own process has ended: mount it again",
        errno.EIO: "the disk, or what is mounted, fails: look at the kernel's log",
        errno.EMFILE: "this process has too many open files: raise its limit (ulimit -n)",
        errno.ENFILE: "this machine has too many open files",
    }
)

_NEVER_DONE = _FULL | UNSUPPORTED | _FORBIDDEN.keys() | _IMPOSSIBLE.keys() | {errno.ENOENT}
NOT_DONE = frozenset(_NEVER_DONE - {errno.EEXIST})
"""Answers that say for certain that a link was not made."""


def as_store_error(error: OSError, what: str, *, call: str = "") -> StoreRefused | StoreUnavailable:
    """Return `error`, met at `what`, as the store error that says what to do about it.

    Args:
        error: what the system said.
        what: was being done, and where.
        call: the method of `FileSystemCalls` that failed; by default the one that `NamedCalls` noted.
    """
    call = call or _noted(error)
    number = error.errno or 0
    if number in _FULL:
        return StoreUnavailable(f"{what}: the disk is full ({error.strerror}); free some space and try again")
    if number in UNSUPPORTED or (number, call) in _MEANS_UNSUPPORTED:
        return StoreRefused(f"{what}: {_CANNOT.get(call, _CANNOT_ANYTHING)} ({error.strerror})")
    reason = _FORBIDDEN.get(number) or _IMPOSSIBLE.get(number)
    if reason is not None:
        return StoreRefused(f"{what}: {reason} ({error.strerror})")
    reason = _PASSING.get(number)
    return StoreUnavailable(f"{what}: {reason} ({error.strerror})" if reason else f"{what}: {error}")


def _noted(error: OSError) -> str:
    return next((note for note in getattr(error, "__notes__", ()) if note in _CANNOT), "")
