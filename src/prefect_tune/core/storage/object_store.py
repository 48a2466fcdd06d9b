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


def is_normalized_path(path: str) -> bool:
    """Return whether a relative path stays in its folder and is normalized (no empty part, '.', '..' or NUL)."""
    return not any(part in ("", ".", "..") for part in path.split("/")) and "\0" not in path


def is_path_too_long(path: str) -> bool:
    """Return whether a relative path is too long for file systems: over 255 bytes in a name, or over 4096 in all."""
    if len(path) < 64:  # then the path has at most 252 bytes, since no character has more than 4
        return False
    return len(path.encode()) > 4096 or any(len(part.encode()) > 255 for part in path.split("/"))


TEMPORARY_FOLDER = ".tmp"
"""The folder below a store's root for unpublished files. It is never listed, and no object can be in it."""


def validate_path(path: str) -> str:
    """Return `path` if it is a relative, normalized, `/`-separated path outside `TEMPORARY_FOLDER`.

    Raises:
        InvalidInput: the path could lead out of the store, is not normalized, or is in `TEMPORARY_FOLDER`.
    """
    if not is_normalized_path(path):
        raise InvalidInput(f"{path!r}: expected a relative path without empty parts, '.', '..' or NUL")
    if path.partition("/")[0] == TEMPORARY_FOLDER:
        raise InvalidInput(f"{path!r}: {TEMPORARY_FOLDER!r} is reserved for unpublished files; choose another name")
    return path


def validate_folder(prefix: str) -> str:
    """Return `prefix` without its trailing slash; "" is the root folder. Raises like `validate_path`."""
    folder = prefix.removesuffix("/")
    return validate_path(folder) if folder else ""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object in a listing: its path relative to the store's root, and its size."""

    path: str
    size_bytes: int


class ObjectStore(Protocol):
    """Objects at relative, normalized, `/`-separated paths; only `replace` and `delete` change an existing object.

    Every method returns within the store's timeout, or raises `StoreUnavailable` (a retry may help) or `StoreRefused`
    (credentials, permission, bucket: no retry helps). `DeadlineExceeded`, a kind of `StoreUnavailable`, says that no
    request is running any more. A store makes no decisions, but it may repeat a failed request within the timeout.
    Methods may be called from several threads at once.
    """

    @property
    def has_conditional_create(self) -> bool:
        """Whether `create` is atomic if several writers call it; if not, the target supports only one writer."""

    def create(self, path: str, data: Buffer) -> None:
        """Write `data` at `path` if no object exists there: completely and durably, or not at all.

        Raises:
            AlreadyExists: an object exists at `path`. If a reply was lost, this same call may have created the object.
            CommitUnknown: the target did not say whether it had written the object.
        """

    def put(self, path: str, data: Buffer) -> None:
        """Write `data` durably at `path`. Idempotent. Callers never write other bytes to the same path."""

    def copy(self, source: str, path: str) -> None:
        """Copy the object at `source` to `path`, durably. Idempotent.

        Callers never write other bytes to `path`. If the target can copy, no bytes pass through this machine.

        Raises:
            ObjectNotFound: the target answered that there is no object at `source`.
        """

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        """Write the joined `pieces` to `path`, durably, and replace an existing object. Idempotent.

        Until the write ends, readers see the previous object, or possibly none if `has_conditional_create` is False.
        A retry iterates over `pieces` again. Only a few pieces are in memory at a time.
        """

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Buffer:
        """Return `length` bytes from `offset` (to the end by default); fewer only at the end of the object.

        Raises:
            ObjectNotFound: the target answered that there is no object at `path`.
        """

    def size(self, path: str) -> int | None:
        """Return the size in bytes; None if the target answered that there is no object."""

    def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
        """Return the objects below the folder `prefix`, recursively, sorted by path; omit paths up to `after`."""

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the objects; a missing object is not an error."""

    def map(self, function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
        """Call `function`, which uses this store, with each item; yield the results in the order of the items.

        Calls run in parallel if that is faster. The first error cancels the calls that have not begun.
        """


# Create an object only if absent, resolve an unknown outcome, and reject non-owners on targets without atomic creates.

SINGLE_WRITER_MESSAGE = (
    "expected a target with atomic create-if-absent, found one without: on it, two writers can overwrite each other, "
    "and nothing shows whether an owner is running. Stop every run on this target, copy its files to a target with "
    "create-if-absent (`prefect-tune blocks check TARGET` tests it), and repeat the command there"
)


def create_idempotently(store: ObjectStore, path: str, data: bytes) -> None:
    """Create `path`; an existing object that equals `data` counts as created.

    `data` contains a write id, so an object with equal bytes is from this same write: the reply was lost, or the client
    retried and found the object of its first request.

    Raises:
        AlreadyExists: the object holds the bytes of another writer.
        CommitUnknown: the target did not say whether it wrote, and the object does not exist or cannot be read; the
            write may still arrive.
    """
    try:
        store.create(path, data)
    except (AlreadyExists, CommitUnknown) as outcome:
        try:
            stored = bytes(store.read(path, length=len(data) + 1))
        except ObjectNotFound as absent:
            raise CommitUnknown(f"{path}: {outcome}; there is no object, but the write may still arrive") from absent
        except (StoreUnavailable, StoreRefused) as unreadable:
            raise CommitUnknown(f"{path}: {outcome}; and it could not be read back: {unreadable}") from unreadable
        if stored != data:
            raise AlreadyExists(f"{path}: another writer has created it with other bytes") from outcome


def require_conditional_create(store: ObjectStore, where: object) -> None:
    """Raise `StoreRefused` if the target supports only one writer, because an owner may be active there."""
    if not store.has_conditional_create:
        raise StoreRefused(f"{where}: only its owner may write there: {SINGLE_WRITER_MESSAGE}")
