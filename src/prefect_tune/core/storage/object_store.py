"""The interface of an object store: the few operations that the commit protocol needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


def is_inside(path: str) -> bool:
    """Return whether a relative path stays in its folder and is normalized: no empty part, '.', '..' or NUL."""
    return not any(part in ("", ".", "..") for part in path.split("/")) and "\0" not in path


def is_too_long(path: str) -> bool:
    """Return whether no usual file system holds a relative path: a name has more than 255 bytes, or all of it 4096."""
    if len(path) < 64:  # no character has more than 4 bytes
        return False
    return len(path.encode()) > 4096 or any(len(part.encode()) > 255 for part in path.split("/"))


@dataclass(frozen=True, slots=True)
class Listed:
    """One object in a listing: its path relative to the store's root, and its size."""

    path: str
    size_bytes: int


class ObjectStore(Protocol):
    """Immutable objects under relative, normalized, `/`-separated paths.

    Every method ends within the store's deadline and may raise `StoreUnavailable`
    (transient; one of its subclasses is `DeadlineExceeded`, after which nothing is left running) or
    `StoreRefused` (credentials, permission, bucket: retrying does not help). A store makes no decisions, and retries
    only as its client does within the deadline.
    Methods may be called from several threads at once.
    """

    @property
    def conditional_create(self) -> bool:
        """Whether `create` is atomic between writers; without that, a target supports one runner only."""
        ...

    def create(self, path: str, data: Buffer) -> None:
        """Write `data` at `path` unless an object exists there: whole and durable, or not at all.

        Raises:
            AlreadyExists: an object is at `path`; it may be this same write, whose reply was lost.
            CommitUnknown: the target did not say whether it wrote.
        """
        ...

    def put(self, path: str, data: Buffer) -> None:
        """Write `data` durably at a path that is only ever written with these bytes. Idempotent."""
        ...

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Buffer:
        """Return `length` bytes from `offset` (to the end by default); fewer only past the end.

        Raises:
            ObjectNotFound: the target answered that there is no object at `path`.
        """
        ...

    def size(self, path: str) -> int | None:
        """Return the size in bytes, or None where the target answered that there is no object."""
        ...

    def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
        """Return every object below the folder `prefix`, recursively, sorted by path; only paths after `after`."""
        ...

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the objects; one that does not exist is no error."""
        ...
