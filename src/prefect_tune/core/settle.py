"""Three outcomes of a write: done, not done, not known; the third is never taken for one of the others."""

from __future__ import annotations

from prefect_tune.core.errors import AlreadyExists, CommitUnknown, ObjectNotFound, StoreRefused, StoreUnavailable
from prefect_tune.core.store import Buffer, ObjectStore

__all__ = ["create_or_recognize"]


def create_or_recognize(store: ObjectStore, path: str, data: bytes) -> None:
    """Create `path`, taking for success what reads back as these very bytes.

    `data` carries a write id, so equal bytes mean this write: a lost reply, or a client's own retry
    that found its first try.

    Raises:
        AlreadyExists: somebody else's bytes are there.
        CommitUnknown: the target did not say, and nothing is there yet; it may still arrive.
    """
    try:
        store.create(path, data)
    except (AlreadyExists, CommitUnknown) as outcome:
        if _is_there(store, path, outcome) != data:
            raise AlreadyExists(f"{path}: holds another writer's bytes; read it, and decide") from outcome


def _is_there(store: ObjectStore, path: str, outcome: Exception) -> Buffer:
    try:
        return bytes(store.read(path))
    except ObjectNotFound as absent:
        raise CommitUnknown(f"{path}: {outcome}; nothing is there yet, but the write may still arrive") from absent
    except (StoreUnavailable, StoreRefused) as unreadable:
        raise CommitUnknown(f"{path}: {outcome}; and it could not be read back: {unreadable}") from unreadable
