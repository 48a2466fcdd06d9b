"""Suggest the target that a user may have meant, where one does not exist or has no experiments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_tune.core.did_you_mean import did_you_mean
from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.core.storage.layout import JournalKey, below
from prefect_tune.stores.locations.local_folder import LocalFolder

if TYPE_CHECKING:
    from prefect_tune.blocks import StorageTarget

_FIRST_ENTRY = JournalKey(experiment="e").entry_path(1).removeprefix("e")
_LOOK = timedelta(seconds=5)
_MOST = 5


def require_folder(place: StorageTarget | LocalFolder) -> None:
    """Require that the folder of a local target exists; a folder that this user may not look up passes.

    Raises:
        InvalidInput: it does not exist. The message names a similar folder beside it, or some that exist there.
    """
    if isinstance(place, LocalFolder):
        return
    from prefect_tune.blocks import LocalTarget

    if isinstance(place, LocalTarget) and not place.may_hang and _is_missing(folder := Path(place.path)):
        raise InvalidInput(f"{folder}: there is no such folder; {_beside(folder)}")


def _is_missing(folder: Path) -> bool:
    try:
        return not folder.exists()
    except OSError:  # such as a folder above it that this user may not read: the first read says so
        return False


def experiments_nearby(place: StorageTarget | LocalFolder, paths: Iterable[str]) -> str:
    """Return where there are experiments, for a target without any: below it, or in a place of a similar name.

    Args:
        place: the target.
        paths: of its objects.
    """
    if folders := sorted({each for each in _folders(paths) if each}):
        return f"; there are some at {', '.join(below(place.uri, each) for each in folders[:_MOST])}"
    if isinstance(place, LocalFolder):
        return ""
    with suppress(TuneError):
        return _similar_prefix(place)
    return ""


def _beside(folder: Path) -> str:
    parent = folder.parent
    try:
        names = sorted(each.name for each in parent.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError:
        return f"{parent} cannot be read either"
    if hint := did_you_mean(folder.name, names):
        return hint.removeprefix("; ")
    more = ", ..." if len(names) > _MOST else ""
    return f"{parent} has {', '.join(names[:_MOST]) + more or 'no folders'}"


def _folders(paths: Iterable[str]) -> Iterator[str]:
    """Yield the folders that hold experiments, relative to the target."""
    for each in paths:
        if each.endswith(_FIRST_ENTRY):
            yield each.removesuffix(_FIRST_ENTRY).rpartition("/")[0]


def _similar_prefix(place: StorageTarget) -> str:
    """Return a folder of a bucket that has experiments, and is named like the one of `place`."""
    from prefect_tune.blocks.targets.object_target import ObjectTarget

    if not isinstance(place, ObjectTarget) or not place.prefix:
        return ""
    above, _, name = place.prefix.rpartition("/")
    parent = place.model_copy(update={"prefix": above})
    with parent.open(timeout=_LOOK) as store:
        folders = _folders(each.path for each in store.list(""))
        return did_you_mean(name, {each.partition("/")[0] for each in folders} - {""})
