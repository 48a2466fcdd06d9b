"""What the kernel's error numbers mean to somebody who keeps objects in files."""

from __future__ import annotations

import errno

from prefect_tune.core.errors import StoreRefused, StoreUnavailable

__all__ = ["NOT_DONE", "as_store_error"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN = {
    errno.EACCES: "this user has no permission",
    errno.EPERM: "no permission, or no hard links on this file system, which create-if-absent needs",
    errno.EROFS: "the file system is mounted read-only",
}
_IMPOSSIBLE = {
    errno.EEXIST: "something else than a plain file is there",
    errno.EISDIR: "a folder is there",
    errno.ELOOP: "a symbolic link is in the way, and none is followed",
    errno.EMLINK: "too many links or folders for this file system",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.ENOTDIR: "a file or a symbolic link stands where a folder should",
    errno.ENOTSUP: "this file system has no hard links, which create-if-absent needs; use another target",
    errno.EXDEV: "a part of the target is another file system; mount it elsewhere",
}

NOT_DONE = _FULL | frozenset(_FORBIDDEN) | frozenset(_IMPOSSIBLE) - {errno.EEXIST} | {errno.ENOENT}
"""Answers that say for certain that a link was not made."""


def as_store_error(error: OSError, what: str) -> StoreRefused | StoreUnavailable:
    """Return `error`, met at `what`, as the store error that says what to do about it."""
    if error.errno in _FULL:
        return StoreUnavailable(f"{what}: the disk is full ({error.strerror}); free some space and try again")
    reason = (_FORBIDDEN | _IMPOSSIBLE).get(error.errno or 0)
    if reason is not None:
        return StoreRefused(f"{what}: {reason} ({error.strerror})")
    return StoreUnavailable(f"{what}: {error}")
