"""Map the kernel's error numbers to store errors.

Sources: the ERRORS sections of link(2), rename(2), open(2), fsync(2), mkdir(2), unlink(2), write(2), read(2), stat(2)
and flock(2) at https://man7.org/linux/man-pages/, and errno(3) for keys and stale handles.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType

from prefect_tune.core.errors import StoreRefused, StoreUnavailable

UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY})
"""Error numbers by which a file system says that it does not support an operation."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_INSTEAD = "use a local disk, NFS, or the storage's own target (S3, GCS, Azure) in place of this mount"
_CANNOT: Mapping[str, str] = MappingProxyType(
    {
        "link": f"this file system has no hard links, which create-if-absent needs: {_INSTEAD}",
        "rename": f"this file system cannot rename a file over another: {_INSTEAD}",
        "fsync": f"this file system cannot sync a file, so a power cut can lose it: {_INSTEAD}",
        "open_root": f"this file system cannot open a folder: {_INSTEAD}",
        "open_folder": f"this file system cannot open a folder without following links: {_INSTEAD}",
        "open_file": f"this file system cannot open a file without following links: {_INSTEAD}",
        "new_file": f"this file system cannot create a file exclusively, or not with this name: {_INSTEAD}",
        "mkdir": f"this file system cannot make folders: {_INSTEAD}",
        "unlink": f"this file system cannot remove files: {_INSTEAD}",
        "names": f"this file system cannot list a folder: {_INSTEAD}",
        "is_empty": f"this file system cannot list a folder: {_INSTEAD}",
        "pread": f"this file system cannot read from the middle of a file: {_INSTEAD}",
        "lock": "this file system has no locks, which temporary folders need: set TMPDIR to a local disk",
        "write": f"this file system cannot write this file: {_INSTEAD}",
    }
)
_MEANS_UNSUPPORTED = frozenset({(errno.EPERM, "link"), (errno.ENOLCK, "lock")})
_CANNOT_ANYTHING = f"this file system does not support the operation: {_INSTEAD}"
_KEYS = "the ticket or key of this mount has expired, or is missing: renew it (kinit)"
_KEY_ERRORS = ("EKEYEXPIRED", "EKEYREVOKED", "EKEYREJECTED", "ENOKEY")  # Linux only
_FORBIDDEN: Mapping[int, str] = MappingProxyType(
    {
        errno.EACCES: "this user has no permission",
        errno.EPERM: "this user has no permission, or the file system forbids it to all users",
        errno.EROFS: "the file system is mounted read-only",
        **{getattr(errno, name): _KEYS for name in _KEY_ERRORS if hasattr(errno, name)},
    }
)
_IMPOSSIBLE: Mapping[int, str] = MappingProxyType(
    {
        errno.EEXIST: "a name exists that is not a plain file",
        errno.EFBIG: "the file is too large for this file system or this user's limit",
        errno.EISDIR: "a folder has this name",
        errno.ELOOP: "a symbolic link is in the path, and links are not followed",
        errno.EMLINK: "too many links or folders for this file system",
        errno.ENAMETOOLONG: "the name is too long for this file system",
        errno.ENOTDIR: "expected a folder, found a file or a symbolic link",
        errno.EXDEV: "a part of the target is another file system; mount it elsewhere",
    }
)
_PASSING: Mapping[int, str] = MappingProxyType(
    {
        errno.ESTALE: "the server has replaced the mounted directory; if retries do not help, mount it again",
        errno.ENOTCONN: "the process that serves this mount has ended: mount it again",
        errno.EIO: "the disk or the mount fails: look at the kernel's log",
        errno.EMFILE: "this process has too many open files: raise its limit (ulimit -n)",
        errno.ENFILE: "this machine has too many open files",
    }
)

_NEVER_DONE = _FULL | UNSUPPORTED | _FORBIDDEN.keys() | _IMPOSSIBLE.keys() | {errno.ENOENT}
NOT_DONE = frozenset(_NEVER_DONE - {errno.EEXIST})
"""Error numbers after which a link was certainly not made."""


def as_store_error(error: OSError, what: str, *, call: str = "") -> StoreRefused | StoreUnavailable:
    """Return the store error for `error`, with advice.

    Args:
        error: the system's error.
        what: the operation and its path, for the message.
        call: the method of `FileSystemCalls` that failed; by default the one in the note that `named` adds.
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
