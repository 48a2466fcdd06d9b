"""Download a checkpoint from a target into a new local directory."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prefect_tune.core.checkpoints.manifest import CHUNK_BYTES, ChunkRef, FileRef, Manifest, newest_metadata
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, ObjectNotFound, StoreUnavailable
from prefect_tune.core.restore import restore
from prefect_tune.core.storage.documents import DOCUMENT_BYTES, read_document
from prefect_tune.core.storage.object_store import Listed, ObjectStore, ParallelMap, is_inside, is_too_long
from prefect_tune.core.values import digest_of
from prefect_tune.stores.local.staging import DirectorySink, fresh_directory, transfer_pool

METADATA_FILE = ".metadata.json"
"""The metadata file of a plain directory; Ray's checkpoints use the same name."""
_READ_BYTES = 16 * 1024 * 1024


def metadata_of_copy(store: ObjectStore, folder: str, manifest: Manifest | None = None) -> bytes | None:
    """Return what a copy has in its `METADATA_FILE`; None for what the checkpoint's own files have there.

    `folder` has the versions that were written later. Metadata that cannot be read is left out, with a warning: the
    files are whole.
    """
    try:
        said = newest_metadata(store, folder)
        if said is None and manifest and manifest.about.metadata:
            said = written_metadata(store, manifest)
    except CheckpointCorrupt as damaged:
        warnings.warn(f"the copy has no metadata that was set after the commit: {damaged}", stacklevel=2)
        return None
    return None if said is None else json.dumps(said).encode()


def manifest_of_copy(manifest: Manifest, metadata: bytes | None) -> Manifest:
    """Return the manifest with `metadata` as its last file, in place of one that was committed; no blob holds it."""
    if metadata is None:
        return manifest
    starts = range(0, len(metadata), CHUNK_BYTES)
    cuts = [(start, metadata[start : start + CHUNK_BYTES]) for start in starts]
    chunks = tuple(ChunkRef(blob=0, offset=start, length=len(cut), digest=digest_of(cut)) for start, cut in cuts)
    last = FileRef(path=METADATA_FILE, size_bytes=len(metadata), chunks=chunks)
    return manifest.model_copy(
        update={"files": (*(each for each in manifest.files if each.path != METADATA_FILE), last)}
    )


def fetch_committed(
    store: ObjectStore, manifest: Manifest, destination: Path, *, metadata: bytes | None = None
) -> None:
    """Download the checkpoint of `manifest` to `destination` with this `METADATA_FILE`, and verify every byte.

    Raises:
        CheckpointCorrupt: bytes are missing or altered; `destination` is not created.
    """
    copy = manifest_of_copy(manifest, metadata)
    with transfer_pool() as transfers, DirectorySink(copy, destination) as sink:
        if metadata is not None:
            sink.write(len(copy.files) - 1, 0, memoryview(metadata))
            copy = copy.model_copy(update={"files": copy.files[:-1]})
        restore(store, copy, sink, side_by_side=transfers)


def written_metadata(store: ObjectStore, manifest: Manifest) -> dict[str, object]:
    """Return the metadata with which a checkpoint was committed."""
    only = tuple(file for file in manifest.files if file.path == METADATA_FILE)
    if not only:
        return dict(manifest.about.metadata)
    if only[0].size_bytes > DOCUMENT_BYTES:
        raise CheckpointCorrupt(f"{METADATA_FILE}: {only[0].size_bytes} bytes are no metadata")
    return {**read_metadata(read_committed(store, manifest, only[0]), METADATA_FILE), **manifest.about.metadata}


def read_committed(store: ObjectStore, manifest: Manifest, file: FileRef, side_by_side: ParallelMap = map) -> bytearray:
    """Return the verified bytes of a file of `manifest`, or of those of its chunks that `file` lists."""
    memory = _Memory(file.size_bytes)
    restore(store, manifest.model_copy(update={"files": (file,)}), memory, side_by_side=side_by_side)
    return memory.data


class _Memory:
    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def write(self, file: int, offset: int, data: memoryview) -> None:  # noqa: ARG002  there is one file
        """Store `data` at `offset`."""
        self.data[offset : offset + len(data)] = data


def read_metadata(data: bytes | bytearray, where: str) -> dict[str, object]:
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
    """Return the whole object, of at most `DOCUMENT_BYTES`; None if there is none."""
    try:
        return bytes(read_document(store, path, CheckpointCorrupt))
    except ObjectNotFound:
        return None


# ----------------------------------------------------------------------------------- directories without a manifest


@dataclass(frozen=True, slots=True)
class PlainTree:
    """Files with their sizes, and folders; all paths are relative to one folder and stay inside it."""

    files: tuple[Listed, ...]
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    path: str
    offset: int
    length: int


def fetch_plain(
    store: ObjectStore, folder: str, destination: Path, *, without: str = "", metadata: bytes | None = None
) -> None:
    """Download every file below `folder`, except those below `without`, to `destination`, with this `METADATA_FILE`.

    There are no digests. Checked are the sizes, and that the listing is the same before and after.

    Raises:
        CheckpointNotFound: there are no files.
        CheckpointCorrupt: a name leads out of the directory, or is both a file and a folder.
        StoreUnavailable: a file was shorter than listed, or the directory changed: fetch again.
    """
    tree = plain_tree(store, folder, without=without)
    with fresh_directory(destination) as building, transfer_pool() as transfers:
        _lay_out(tree, building)
        for _ in transfers(lambda run: _copy_run(store, folder, building, run), _runs(tree)):
            pass
        if plain_tree(store, folder, without=without) != tree:
            raise StoreUnavailable(f"{folder or 'the directory'}: was written to while it was read; read it again")
        if metadata is not None:
            (building / METADATA_FILE).write_bytes(metadata)


def plain_tree(store: ObjectStore, folder: str, *, without: str = "") -> PlainTree:
    """List the files and folders below `folder`, and check that no name leads out of it.

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
        if not is_inside(path) or "\\" in path:
            raise CheckpointCorrupt(f"{each.path!r}: the name leads out of {folder or 'its directory'}")
        if is_too_long(path):
            raise CheckpointCorrupt(f"{path[:40]!r}…: the name is longer than 255 bytes, or the path longer than 4096")
        if path in folders and each.size_bytes:
            raise CheckpointCorrupt(f"{each.path!r}: is both a file of {each.size_bytes} bytes and a folder")
    folders |= {path for path, each in inside.items() if path not in folders and _is_mark(store, each)}
    files = (Listed(path, inside[path].size_bytes) for path in sorted(inside.keys() - folders))
    return PlainTree(tuple(files), tuple(sorted(folders)))


def _is_mark(store: ObjectStore, listed: Listed) -> bool:
    """Whether this is an empty object `folder/`, with which some clients mark a folder.

    Not every client lists the closing slash; without it, an empty file has a size by its name and a mark has none.
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
        raise StoreUnavailable(f"{path}: was deleted after it was listed; read the directory again") from gone
    if len(data) != run.length:
        raise StoreUnavailable(f"{path} at {run.offset}: expected {run.length} bytes, found {len(data)}; read it again")
    file = os.open(directory / run.path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(file, data[done:], run.offset + done)
    finally:
        os.close(file)
