"""List the experiments on a target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from prefect_tune.core.did_you_mean import did_you_mean
from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore


def experiment_names(store: ObjectStore) -> Sequence[str]:
    """Return the names of the experiments on `store`, sorted."""
    return names_among(each.path for each in store.list(""))


def names_among(paths: Iterable[str]) -> Sequence[str]:
    """Return the names of the experiments of a target with these objects: the folders with a journal's first entry."""
    listed = set(paths)
    names = []
    for name in sorted({path.partition("/")[0] for path in listed if "/" in path}):
        with suppress(InvalidInput):  # a foreign folder: its name is no valid experiment name
            if JournalKey(experiment=name).entry_path(1) in listed:
                names.append(name)
    return names


def no_experiment(store: ObjectStore, name: str, uri: str) -> str:
    """Return the message that `store`, at `uri`, has no experiment `name`, with a similar name if there is one."""
    hint = ""
    with suppress(TuneError):  # the listing only helps
        hint = did_you_mean(name, experiment_names(store))
    return f"there is no experiment {name!r} at {uri}{hint}"
