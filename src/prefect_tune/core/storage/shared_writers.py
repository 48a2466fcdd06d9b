"""Refuse external writers on a target without conditional create, where only a journal's owner may write."""

from __future__ import annotations

from prefect_tune.core.errors import StoreRefused
from prefect_tune.core.storage.object_store import ObjectStore

ONE_WRITER = (
    "expected a target with atomic create-if-absent, found one without: there one of two writers overwrites the "
    "other, and the target cannot show whether an owner is running. Stop every run on it, copy it to a target with "
    "create-if-absent (`prefect-tune blocks check TARGET` tests it), and repeat this there"
)


def require_conditional_create(store: ObjectStore, where: object) -> None:
    """Return if the target supports several writers at `where`: an owner may be running and writing there.

    Raises:
        StoreRefused: the target supports one writer only. Nothing was written.
    """
    if not store.conditional_create:
        raise StoreRefused(f"{where}: only its owner may write there: {ONE_WRITER}")
