"""The interface of an object store: the few operations that the commit protocol needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    InvalidInput,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
)

_In = TypeVar("_In")
_Out = TypeVar("_Out")
Buffer: TypeAlias = bytes | bytearray | memoryview


def is_inside(path: str) -> bool:
    """Return whether a relative path stays in its folder and is normalized: no empty part, '.', '..' or NUL."""
    return not any(part in ("", ".", "..") for part in path.split("/")) and "\0" not in path


def is_too_long(path: str) -> bool:
    """Return whether no usual file system holds a relative path: a name has more than 255 bytes, or all of it 4096."""
    if len(path) < 64:  # no character has more than 4 bytes
        return False
    return len(path.encode()) > 4096 or any(len(part.encode()) > 255 for part in path.split("/"))


TEMPORARY = ".tmp"
"""The folder below a store's root for unpublished files; never listed, and not a valid path."""


def checked_path(path: str) -> str:
    """Return `path` if it names an object: relative, normalized, `/`-separated, outside `TEMPORARY`.

    Raises:
        InvalidInput: the path could lead out of the store, is not normalized, or is in `TEMPORARY`.
    """
    if not is_inside(path):
        raise InvalidInput(f"{path!r}: expected a relative path without empty parts, '.', '..' and NUL")
    if path.partition("/")[0] == TEMPORARY:
        raise InvalidInput(f"{path!r}: {TEMPORARY!r} is reserved for unpublished files; choose another name")
    return path


def checked_folder(prefix: str) -> str:
    """Return `prefix` without its closing slash if it names a folder; empty is the root.

    Raises:
        InvalidInput: see `checked_path`.
    """
    folder = prefix.removesuffix("/")
    return checked_path(folder) if folder else ""


@dataclass(frozen=True, slots=True)
class Listed:
    """One object in a listing: its path relative to the store's root, and its size."""

    path: str
    size_bytes: int


class ObjectStore(Protocol):
    """Objects under relative, normalized, `/`-separated paths; only `replace` and `delete` change one that exists.

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

    def copy(self, source: str, path: str) -> None:
        """Make the object at `path` hold the bytes of the one at `source`, durably. Idempotent.

        `path` is only ever written with these bytes. The target copies them itself where it can.

        Raises:
            ObjectNotFound: the target answered that there is no object at `source`.
        """
        ...

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        """Make the object at `path` hold the joined `pieces`, durably, whatever it held before. Idempotent.

        Until it is done, readers see the former object; on a store without `conditional_create` perhaps none. `pieces`
        is iterated again for a retry, and only a few of them are in memory at a time.
        """
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

    def map(self, function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
        """Call `function`, which uses this store, with each item, and yield the results in the order of the items.

        Several calls are made at once where that is faster. The first error cancels those that have not begun.
        """
        ...


# Create an object only if absent, resolve an unknown outcome, and refuse guests where it is not atomic.

ONE_WRITER = (
    "expected a target with atomic create-if-absent, found one without: there one of two writers overwrites the "
    "other, and the target cannot show whether an owner is running. Stop every run on it, copy it to a target with "
    "create-if-absent (`prefect-tune blocks check TARGET` tests it), and repeat this there"
)


def create_or_recognize(store: ObjectStore, path: str, data: bytes) -> None:
    """Create `path`; if the object exists already and reads back as `data`, that is success.

    `data` carries a write id, so equal bytes mean this same write: its reply was lost, or the client retried
    and found the object of its first request.

    Raises:
        AlreadyExists: the object holds another writer's bytes.
        CommitUnknown: the target did not say whether it wrote, and the object does not exist yet or cannot be
            read; the write may still arrive.
    """
    try:
        store.create(path, data)
    except (AlreadyExists, CommitUnknown) as outcome:
        try:
            found = bytes(store.read(path, length=len(data) + 1))
        except ObjectNotFound as absent:
            raise CommitUnknown(f"{path}: {outcome}; there is no object, but the write may still arrive") from absent
        except (StoreUnavailable, StoreRefused) as unreadable:
            raise CommitUnknown(f"{path}: {outcome}; and it could not be read back: {unreadable}") from unreadable
        if found != data:
            raise AlreadyExists(f"{path}: another writer has created it with other bytes") from outcome


def require_conditional_create(store: ObjectStore, where: object) -> None:
    """Return if the target supports several writers at `where`: an owner may be running and writing there.

    Raises:
        StoreRefused: the target supports one writer only. Nothing was written.
    """
    if not store.conditional_create:
        raise StoreRefused(f"{where}: only its owner may write there: {ONE_WRITER}")
