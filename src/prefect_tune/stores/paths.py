"""What a path within a store may look like; everything else is refused before it reaches a file system."""

from __future__ import annotations

from prefect_tune.core.errors import InvalidInput

__all__ = ["TEMPORARY", "checked_folder", "checked_path"]

TEMPORARY = ".tmp"
"""The folder below a root where unpublished bytes lie; never listed, never addressed."""


def checked_path(path: str) -> str:
    """Return `path` if it names an object: relative, normalized, `/`-separated, outside `TEMPORARY`.

    Raises:
        InvalidInput: it could lead out of the store, or has several spellings.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise InvalidInput(f"{path!r}: expected a relative path without empty parts, '.', '..' and NUL")
    if parts[0] == TEMPORARY:
        raise InvalidInput(f"{path!r}: {TEMPORARY!r} is where stores keep what is not published; choose another name")
    return path


def checked_folder(prefix: str) -> str:
    """Return `prefix` without its closing slash if it names a folder; the empty one is the root.

    Raises:
        InvalidInput: see `checked_path`.
    """
    folder = prefix.removesuffix("/")
    return checked_path(folder) if folder else ""
