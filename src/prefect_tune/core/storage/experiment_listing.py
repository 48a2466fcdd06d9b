"""List the experiments on a target."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore


def experiment_names(store: ObjectStore) -> Sequence[str]:
    """Return the names of the experiments on `store`, sorted: the folders that hold a journal's first entry."""
    listed = {each.path for each in store.list("")}
    names = []
    for name in sorted({path.partition("/")[0] for path in listed if "/" in path}):
        with suppress(InvalidInput):  # a foreign folder: its name is no valid experiment name
            if JournalKey(experiment=name).entry_path(1) in listed:
                names.append(name)
    return names
