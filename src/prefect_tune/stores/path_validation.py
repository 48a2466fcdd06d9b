"""Validate the path of an object or a folder before a store uses it."""

from __future__ import annotations

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.storage.object_store import is_inside

TEMPORARY = ".tmp"
"""The folder below a store's root for unpublished files; never listed, and not a valid path."""


def checked_path(path: str) -> str:
    """Return `path` if it names an object: relative, normalized, `/`-separated, outside `TEMPORARY`.

    Raises:
        InvalidInput: the path could lead out of the store, is not normalized, or is in `TEMPORARY`.
    """
    if not is_inside(path):
        raise InvalidInput(f"{path!r}: expected a relative path without empty parts, '.', '..' and NUL")
    if path.partition("/")[0] == TEMPORARY:
        raise InvalidInput(f"{path!r}: {TEMPORARY!r} is reserved for unpublished files; choose another name")
    return path


def checked_folder(prefix: str) -> str:
    """Return `prefix` without its closing slash if it names a folder; empty is the root.

    Raises:
        InvalidInput: see `checked_path`.
    """
    folder = prefix.removesuffix("/")
    return checked_path(folder) if folder else ""
