"""Create an object only if absent, and resolve an unknown outcome by reading the object back."""

from __future__ import annotations

from prefect_tune.core.errors import AlreadyExists, CommitUnknown, ObjectNotFound, StoreRefused, StoreUnavailable
from prefect_tune.core.storage.object_store import Buffer, ObjectStore


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
        if _is_there(store, path, outcome) != data:
            raise AlreadyExists(f"{path}: another writer has created it with other bytes") from outcome


def _is_there(store: ObjectStore, path: str, outcome: Exception) -> Buffer:
    try:
        return bytes(store.read(path))
    except ObjectNotFound as absent:
        raise CommitUnknown(f"{path}: {outcome}; there is no object yet, but the write may still arrive") from absent
    except (StoreUnavailable, StoreRefused) as unreadable:
        raise CommitUnknown(f"{path}: {outcome}; and it could not be read back: {unreadable}") from unreadable
