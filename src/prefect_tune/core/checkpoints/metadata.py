"""User metadata of a checkpoint, written after its commit as numbered versions, each created only if absent.

The highest number counts. A version is neither rewritten nor deleted while the checkpoint exists: otherwise a
slow writer could create a version with a freed number, and believe that its change counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Literal

from pydantic_core import from_json

from prefect_tune.core.errors import (
    AlreadyExists,
    CheckpointCorrupt,
    CommitUnknown,
    InvalidInput,
    StoreUnavailable,
)
from prefect_tune.core.search.domains import as_dicts
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import number_in, numbered
from prefect_tune.core.storage.object_store import ObjectStore, create_or_recognize

_TRIES = 1000  # each lost race is another writer's success; the store's deadline ends the loop earlier


class _Revision(Document):
    format: Literal["prefect-tune/metadata"] = "prefect-tune/metadata"
    version: Literal[1] = 1
    write_id: str
    metadata: Mapping[str, object]


def plain_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return `metadata` as it will be read back from JSON.

    Raises:
        InvalidInput: JSON cannot represent it (an object, a NaN, a cycle, a lone surrogate).
    """
    if not isinstance(metadata, Mapping):
        raise InvalidInput(f"metadata: expected a dict, found {type(metadata).__name__}")
    try:
        said: dict[str, object] = from_json(json.dumps(as_dicts(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as unsaid:
        raise InvalidInput(f"metadata: not valid JSON: {unsaid}; convert it, or save it as a file") from unsaid
    return said


def newest_metadata(store: ObjectStore, folder: str) -> dict[str, object] | None:
    """Return the newest version in `folder`; None where there is none.

    Raises:
        CheckpointCorrupt: the newest version is altered.
    """
    newest = _newest(store, folder)
    return dict(newest[1].metadata) if newest else None


def revise_metadata(
    store: ObjectStore,
    folder: str,
    change: Callable[[Mapping[str, object]], Mapping[str, object]],
    *,
    before: Mapping[str, object],
    write_id: str,
) -> dict[str, object]:
    """Add a version: `change` of the newest one, or of `before` where there is none; return it.

    When writers race, no change is lost: the second is applied to what the first wrote. `change` may be called
    several times, and must be idempotent.

    Raises:
        CommitUnknown: the target did not say whether it wrote, twice.
        StoreUnavailable: other writers were faster 1000 times.
    """
    unknown: CommitUnknown | None = None
    for _ in range(_TRIES):
        newest = _newest(store, folder)
        if newest and newest[1].write_id == write_id:
            return dict(newest[1].metadata)
        number, current = (newest[0], newest[1].metadata) if newest else (0, before)
        revision = _Revision(write_id=write_id, metadata=plain_metadata(change(current)))
        try:
            create_or_recognize(store, numbered(folder, number + 1), seal(revision))
        except AlreadyExists:
            continue  # another writer was faster: apply the change to what it wrote
        except CommitUnknown as outcome:
            if unknown:
                raise
            unknown = outcome  # write the same number again: both writes hold the same version
        else:
            return dict(revision.metadata)
    raise StoreUnavailable(f"{folder}: {_TRIES} other writers were faster; try again")


def _newest(store: ObjectStore, folder: str) -> tuple[int, _Revision] | None:
    number = max((number_in(folder, listed.path) or 0 for listed in store.list(folder)), default=0)
    newest = read_sealed(store, _Revision, numbered(folder, number), CheckpointCorrupt) if number else None
    # A listing may lag behind its store.
    while later := read_sealed(store, _Revision, numbered(folder, number + 1), CheckpointCorrupt):
        number, newest = number + 1, later
    return (number, newest) if newest else None
