"""A callback's delivery position and its own state, stored as numbered documents: the highest number counts.

Its writer deletes the document before it. A document is created only if absent, so that of two searches that
both believe they own the experiment one stops writing the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from prefect_tune.core.errors import JournalCorrupt, ObjectNotFound
from prefect_tune.core.models import valid_name
from prefect_tune.core.notifications.delivery_cursor import DeliveryPosition
from prefect_tune.core.storage.conditional_create import create_or_recognize
from prefect_tune.core.storage.documents import Document, seal, unseal
from prefect_tune.core.storage.layout import number_in, numbered
from prefect_tune.core.storage.object_store import ObjectStore

__all__ = ["CallbackState", "keep_state", "newest_state"]


class CallbackState(Document):
    """The stored state of one callback of an experiment."""

    format: Literal["prefect-tune/callback"] = "prefect-tune/callback"
    version: Literal[1] = 1
    number: int
    write_id: str
    heard: DeliveryPosition
    state: Mapping[str, object] | None = None
    """The value that its `get_state` returned."""


def newest_state(store: ObjectStore, experiment: str, name: str) -> CallbackState | None:
    """Return the newest state; None where none was written.

    Raises:
        JournalCorrupt: the state is torn or altered.
    """
    folder = _folder(experiment, name)
    while number := max((number_in(folder, each.path) or 0 for each in store.list(folder)), default=0):
        path = _path(experiment, name, number)
        try:
            return unseal(CallbackState, store.read(path), path, JournalCorrupt)
        except ObjectNotFound:
            continue  # deleted since: there is a newer one
    return None


def keep_state(store: ObjectStore, experiment: str, name: str, state: CallbackState) -> None:
    """Write `state` as the newest one, and delete the one before it.

    Raises:
        InvalidInput: it holds a value that JSON cannot represent.
        AlreadyExists: another process has written this number: it keeps the state of this callback now.
        CommitUnknown: the target did not say whether it wrote.
    """
    create_or_recognize(store, _path(experiment, name, state.number), seal(state))
    if state.number > 1:
        store.delete([_path(experiment, name, state.number - 1)])


def _folder(experiment: str, name: str) -> str:
    return f"{valid_name(experiment)}/callbacks/{valid_name(name)}"


def _path(experiment: str, name: str, number: int) -> str:
    return numbered(_folder(experiment, name), number)
