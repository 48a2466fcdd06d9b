"""Create an object only if absent, resolve an unknown outcome, and refuse external writers where it is not atomic."""

from __future__ import annotations

from prefect_tune.core.errors import AlreadyExists, CommitUnknown, ObjectNotFound, StoreRefused, StoreUnavailable
from prefect_tune.core.storage.object_store import Buffer, ObjectStore

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
        if _is_there(store, path, data, outcome) != data:
            raise AlreadyExists(f"{path}: another writer has created it with other bytes") from outcome


def _is_there(store: ObjectStore, path: str, data: bytes, outcome: Exception) -> Buffer:
    try:
        return bytes(store.read(path, length=len(data) + 1))
    except ObjectNotFound as absent:
        raise CommitUnknown(f"{path}: {outcome}; there is no object yet, but the write may still arrive") from absent
    except (StoreUnavailable, StoreRefused) as unreadable:
        raise CommitUnknown(f"{path}: {outcome}; and it could not be read back: {unreadable}") from unreadable


def require_conditional_create(store: ObjectStore, where: object) -> None:
    """Return if the target supports several writers at `where`: an owner may be running and writing there.

    Raises:
        StoreRefused: the target supports one writer only. Nothing was written.
    """
    if not store.conditional_create:
        raise StoreRefused(f"{where}: only its owner may write there: {ONE_WRITER}")
