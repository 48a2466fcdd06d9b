"""A trial's artifacts on a target: files that may change, each version published as a whole by a numbered index.

    <folder>/files/<digest>-<number>/<name of the file>
    <folder>/index/<number>.json

An index names the files and the objects that hold their bytes; its creation, only if absent, is the commit,
and the highest number counts. Objects are named by their bytes and by the index they were first sent for,
so a name never gets other bytes, and is never reused after its deletion. An attempt writes no index
after that of a later attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from prefect_tune.core.checkpoints.manifest import BLOB_BYTES
from prefect_tune.core.errors import AlreadyExists, CheckpointCorrupt
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import PortablePath, in_digits, number_in, numbered
from prefect_tune.core.storage.object_store import ObjectStore, create_or_recognize
from prefect_tune.core.values import Digest, Value

_INDEXES_KEPT = 8
_Count = Annotated[int, Field(ge=0)]


class ArtifactPart(Value):
    """A run of a file's bytes: the object that holds it, below the artifacts' folder."""

    object: PortablePath
    size_bytes: Annotated[int, Field(ge=0, le=BLOB_BYTES)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ArtifactFile(Value):
    """One file: its path in the trial's directory, its permission bits, and its parts in order."""

    path: PortablePath
    mode: Annotated[int, Field(ge=0, le=0o777)] = 0o644
    parts: tuple[ArtifactPart, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return sum(part.size_bytes for part in self.parts)


class ArtifactIndex(Document):
    """All artifacts of a trial as of one sync."""

    format: Literal["prefect-tune/artifacts"] = "prefect-tune/artifacts"
    version: Literal[1] = 1
    number: int
    write_id: str
    attempt: _Count = 0
    """The attempt of the trial that has these files; 0 for none."""
    files: tuple[ArtifactFile, ...]

    def parts(self) -> Iterable[ArtifactPart]:
        """Return the parts of all files."""
        return (part for file in self.files for part in file.parts)


def files_folder(folder: str) -> str:
    """Return the folder of the objects that hold the files' bytes."""
    return joined(folder, "files")


def part_path(digest: Digest, number: int, name: str) -> str:
    """Return the name of the object, below the artifacts' folder, for bytes first sent for index `number`."""
    return f"files/{digest}-{in_digits(number)}/{name}"


def newest_index(store: ObjectStore, folder: str, known: ArtifactIndex | None = None) -> ArtifactIndex | None:
    """Return the newest index; None where there is none. With an earlier one as `known`, nothing is listed.

    Raises:
        CheckpointCorrupt: the index is torn or altered.
    """
    is_there = known is not None and store.size(_path(folder, known.number)) is not None
    newest = known if is_there else _newest_listed(store, folder)  # `known` may be deleted by now
    while later := _read(store, folder, (newest.number if newest else 0) + 1):
        newest = later
    return newest


def publish_index(store: ObjectStore, folder: str, index: ArtifactIndex) -> None:
    """Write `index` as the newest one, and delete all but the newest 8.

    Raises:
        AlreadyExists: another writer's index has this number, or a higher one.
        CommitUnknown: the target did not say whether it wrote.
    """
    create_or_recognize(store, _path(folder, index.number), seal(index))
    numbers = _numbers(store, folder)
    if max(numbers, default=0) > index.number:
        raise AlreadyExists(f"{_path(folder, index.number)}: another writer has written index {max(numbers)} already")
    store.delete([_path(folder, number) for number in sorted(numbers) if 0 < number <= index.number - _INDEXES_KEPT])


def beyond_use(listed: Iterable[str], folder: str, index: ArtifactIndex) -> Sequence[str]:
    """Return the objects in `listed` that no index refers to once `index` is the newest.

    Objects sent for a higher number are another writer's, whose index may follow: they are not returned.
    """
    used = {joined(folder, part.object) for part in index.parts()}
    return [path for path in listed if path not in used and _number_of(path) <= index.number]


def _number_of(path: str) -> int:
    number = path.rpartition("/")[0].rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _newest_listed(store: ObjectStore, folder: str) -> ArtifactIndex | None:
    for _ in range(2):  # an index is deleted between listing and reading only if many newer ones were written
        numbers = _numbers(store, folder)
        if not (number := max(numbers, default=0)):
            return None
        if found := _read(store, folder, number):
            return found
    return None


def _numbers(store: ObjectStore, folder: str) -> list[int]:
    indexes = joined(folder, "index")
    return [number_in(indexes, each.path) or 0 for each in store.list(indexes)]


def _read(store: ObjectStore, folder: str, number: int) -> ArtifactIndex | None:
    path = _path(folder, number)
    index = read_sealed(store, ArtifactIndex, path, CheckpointCorrupt)
    if index is not None and index.number != number:
        raise CheckpointCorrupt(f"{path}: holds the index of another number: {index.number}")
    return index


def _path(folder: str, number: int) -> str:
    return numbered(joined(folder, "index"), number)


def joined(folder: str, name: str) -> str:
    """Return the path of `name` in the artifacts' folder, which may be the root of the target."""
    return f"{folder}/{name}" if folder else name


# Patterns for files of a trial's directory that are not uploaded.
#
# A pattern is a shell pattern (`*`, `?`, `[...]`; `*` matches slashes too) for a file or folder; everything below
# an excluded folder is excluded too:
#
# - a pattern with a slash is matched with the path from the top of the directory (`logs/*.tmp`);
#   a leading `./` means the same: `./rank_*` matches at the top only;
# - a pattern without a slash is matched with names at any depth (`*.tmp`, `__pycache__`).

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
