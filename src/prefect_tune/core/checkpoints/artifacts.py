"""Patterns for files of a trial's directory that are not uploaded.

A pattern is a shell pattern (`*`, `?`, `[...]`; `*` matches slashes too) for a file or folder; everything below
an excluded folder is excluded too:

- a pattern with a slash is matched with the path from the top of the directory (`logs/*.tmp`);
  a leading `./` means the same: `./rank_*` matches at the top only;
- a pattern without a slash is matched with names at any depth (`*.tmp`, `__pycache__`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

NEVER_ARTIFACTS = (
    "./checkpoint_-00001*",
    "./checkpoint_tmp*",
    "./save_to_object*",
    "./rank_*",
    "./.lazy_checkpoint_marker",
)
"""Files that trainables of older APIs leave at the top of their directory, and that were never artifacts."""


def is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Return whether the file at `path` (relative, with slashes) matches one of the patterns."""
    return any(_matches(part, name, pattern) for part, name in _with_parents(path) for pattern in patterns)


def _matches(path: str, name: str, pattern: str) -> bool:
    bare = pattern.removesuffix("/")
    return fnmatchcase(path, bare.removeprefix("./")) if "/" in bare else fnmatchcase(name, bare)


def _with_parents(path: str) -> Iterator[tuple[str, str]]:
    while path:
        above, _, name = path.rpartition("/")
        yield path, name
        path = above
