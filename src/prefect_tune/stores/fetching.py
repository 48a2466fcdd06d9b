"""Bring a checkpoint's bytes from a target into a fresh local directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, ObjectNotFound, StoreUnavailable
from prefect_tune.core.manifest import FileRef, Manifest
from prefect_tune.core.restore import restore
from prefect_tune.core.store import Listed, ObjectStore
from prefect_tune.stores.directories import fresh_directory
from prefect_tune.stores.staging import DirectorySink, side_by_side

__all__ = [
    "METADATA_FILE",
    "fetch_committed",
    "fetch_plain",
    "read_committed",
    "read_file",
    "read_metadata",
    "written_metadata",
]

METADATA_FILE = ".metadata.json"
"""Where a plain directory keeps its metadata, as Ray's checkpoints do."""
_READ_BYTES = 16 * 1024 * 1024


def fetch_committed(store: ObjectStore, manifest: Manifest, destination: Path) -> None:
    """Make `destination` the checkpoint of `manifest`, every byte verified.

    Raises:
        CheckpointCorrupt: bytes are missing or altered; nothing is at `destination`.
    """
    with side_by_side() as transfers, DirectorySink(manifest, destination) as sink:
        restore(store, manifest, sink, side_by_side=transfers)


def written_metadata(store: ObjectStore, manifest: Manifest) -> dict[str, object]:
    """Return the metadata that a checkpoint was committed with."""
    only = tuple(file for file in manifest.files if file.path == METADATA_FILE)
    if not only:
        return dict(manifest.about.metadata)
    return {**read_metadata(read_committed(store, manifest, only[0]), METADATA_FILE), **manifest.about.metadata}


def read_committed(store: ObjectStore, manifest: Manifest, file: FileRef) -> bytes:
    """Return a file of `manifest`, or the part of one that `file` tells of, verified."""
    memory = _Memory(file.size_bytes)
    restore(store, manifest.model_copy(update={"files": (file,)}), memory, side_by_side=map)
    return bytes(memory.data)


class _Memory:
    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def write(self, file: int, offset: int, data: memoryview) -> None:  # noqa: ARG002  there is one file
        """Put the bytes where they belong."""
        self.data[offset : offset + len(data)] = data


def read_metadata(data: bytes, where: str) -> dict[str, object]:
    """Return the metadata in the bytes of a `.metadata.json`.

    Raises:
        CheckpointCorrupt: they are not a JSON object.
    """
    try:
        found = json.loads(data)
    except ValueError as unreadable:
        raise CheckpointCorrupt(f"{where}: not JSON ({len(data)} bytes): {unreadable}") from unreadable
    if not isinstance(found, dict):
        raise CheckpointCorrupt(f"{where}: expected a JSON object, found {type(found).__name__}")
    return found


def read_file(store: ObjectStore, path: str) -> bytes | None:
    """Return the whole object; None where there is none."""
    try:
        return bytes(store.read(path))
    except ObjectNotFound:
        return None


# ------------------------------------------------------------------------------------ somebody else's directory


@dataclass(frozen=True, slots=True)
class PlainTree:
    """Files with their sizes, and folders, by path relative to a folder that none of them leaves."""

    files: tuple[Listed, ...]
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    path: str
    offset: int
    length: int


def fetch_plain(store: ObjectStore, folder: str, destination: Path, *, without: str = "") -> None:
    """Make `destination` what lies below `folder`, whoever wrote it; what lies below `without` is left out.

    There are no digests: what is checked are the sizes, and that nothing was written there meanwhile.

    Raises:
        CheckpointNotFound: nothing lies there.
        CheckpointCorrupt: a name leads out of the directory, or cannot be one.
        StoreUnavailable: a file was shorter than listed, or the directory changed: fetch again.
    """
    tree = plain_tree(store, folder, without=without)
    with fresh_directory(destination) as building, side_by_side() as transfers:
        _lay_out(tree, building)
        for _ in transfers(lambda run: _copy_run(store, folder, building, run), _runs(tree)):
            pass
        if plain_tree(store, folder, without=without) != tree:
            raise StoreUnavailable(f"{folder or 'the directory'}: was written to while it was read; read it again")


def plain_tree(store: ObjectStore, folder: str, *, without: str = "") -> PlainTree:
    """Return what lies below `folder`, once it is known to stay inside.

    Raises:
        CheckpointNotFound, CheckpointCorrupt: as `fetch_plain`.
    """
    start = f"{folder}/" if folder else ""
    found = [each for each in store.list(folder) if each.path.rstrip("/") != folder]
    listed = [each for each in found if not (without and each.path.startswith(f"{without}/"))]
    if not listed:
        raise CheckpointNotFound(f"{folder or 'the root of the target'}: there are no files")
    inside = {each.path.removeprefix(start).rstrip("/"): each for each in listed}
    folders = {parent for path in inside for parent in _parents(path)}
    for path, each in inside.items():
        if any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path or "\\" in path:
            raise CheckpointCorrupt(f"{each.path!r}: the name leads out of {folder or 'its directory'}")
        if path in folders and each.size_bytes:
            raise CheckpointCorrupt(f"{each.path!r}: is both a file of {each.size_bytes} bytes and a folder")
    folders |= {path for path, each in inside.items() if path not in folders and _is_mark(store, each)}
    files = (Listed(path, inside[path].size_bytes) for path in sorted(inside.keys() - folders))
    return PlainTree(tuple(files), tuple(sorted(folders)))


def _is_mark(store: ObjectStore, listed: Listed) -> bool:
    """Whether it is an empty object `folder/`, which some clients leave where a folder is.

    Clients differ in whether they show the slash; an empty file can be looked up by its name.
    """
    return not listed.size_bytes and (listed.path.endswith("/") or store.size(listed.path) is None)


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _lay_out(tree: PlainTree, directory: Path) -> None:
    directory.mkdir()
    for folder in tree.folders:
        (directory / folder).mkdir(parents=True, exist_ok=True)
    for file in tree.files:
        (directory / file.path).touch()


def _runs(tree: PlainTree) -> Iterator[_Run]:
    for file in tree.files:
        for offset in range(0, file.size_bytes, _READ_BYTES):
            yield _Run(file.path, offset, min(_READ_BYTES, file.size_bytes - offset))


def _copy_run(store: ObjectStore, folder: str, directory: Path, run: _Run) -> None:
    path = f"{folder}/{run.path}" if folder else run.path
    try:
        data = memoryview(store.read(path, offset=run.offset, length=run.length))
    except ObjectNotFound as gone:
        raise StoreUnavailable(f"{path}: was listed, and is gone; read it again") from gone
    if len(data) != run.length:
        raise StoreUnavailable(f"{path} at {run.offset}: expected {run.length} bytes, found {len(data)}; read it again")
    file = os.open(directory / run.path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(file, data[done:], run.offset + done)
    finally:
        os.close(file)
