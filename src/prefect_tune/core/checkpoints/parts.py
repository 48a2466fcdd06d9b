"""The parts of a checkpoint that several nodes train: each sends its own files, and one manifest names them all.

    node 1   blobs ──► part  (a document, created if absent) ──┐
    node 2   blobs ──► part                                    ├──► node 0: all verified ──► manifest: the commit
    node 0   blobs ────────────────────────────────────────────┘    within the deadline

A part is no checkpoint: readers do not know it, and it is deleted with its attempt. A part has the attempt, the owner's
term, the step and the sequence of the save that it is for. Node 0 names these when it asks for the parts, after the
commit before: no garbage collection deletes a blob of that sequence before the next retirement, which is node 0's own.

Never: a manifest before the last part; a part of another attempt, owner or save; a part whose blobs were not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from prefect_tune.core.checkpoints.commit import Reusable, names_of, require_stored, sent
from prefect_tune.core.checkpoints.manifest import BlobRef, ChunkRef, Contents, FileRef, Manifest, Source
from prefect_tune.core.errors import CheckpointCorrupt, InvalidInput, PartMissing
from prefect_tune.core.reasons import Reason
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import CheckpointKey, NodesKey
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap, create_or_recognize


class StoredPart(Contents, Document):
    """What one node adds to a checkpoint."""

    format: Literal["prefect-tune/part"] = "prefect-tune/part"
    version: Literal[1] = 1
    term: int
    attempt: int
    node: int
    failed: str = ""
    """Why the node cannot add it; then it has no files."""


@dataclass(frozen=True, slots=True)
class PartsOfSave:
    """The parts that the other nodes add to a checkpoint."""

    nodes: NodesKey
    term: int
    """The owner's, in which it is saved."""
    of_nodes: tuple[int, ...]
    """The nodes that add one."""
    waits: Callable[[], Callable[[], bool]]
    """Called when the files of node 0 are sent; returns a function that waits a moment, or returns False: too late."""
    lost: Callable[[], Mapping[int, Reason]]
    """Returns the nodes that are gone, with the reason."""


def send_part(
    store: ObjectStore,
    key: CheckpointKey,
    source: Source,
    *,
    of: tuple[NodesKey, int, int],
    reuse: Reusable,
    side_by_side: ParallelMap,
) -> None:
    """Send a node's files of the checkpoint `key`, then its part; `of` are its attempt, its number and the term.

    Raises:
        StoreUnavailable, CommitUnknown: the next try reuses what was sent.
        StagedFilesChanged: the directory was written to meanwhile.
    """
    _create(store, key, of, sent(store, key, source, reuse, side_by_side))


def refuse_part(store: ObjectStore, key: CheckpointKey, of: tuple[NodesKey, int, int], why: str) -> None:
    """Tell node 0 why a node cannot add its part. Raises as `send_part`."""
    _create(store, key, of, {**names_of(key), "blobs": (), "files": (), "failed": why})


def _create(store: ObjectStore, key: CheckpointKey, of: tuple[NodesKey, int, int], fields: Mapping[str, Any]) -> None:
    nodes, node, term = of
    part = StoredPart(**fields, term=term, attempt=nodes.attempt, node=node)
    create_or_recognize(store, nodes.part_path(key, node), seal(part))


def with_parts(store: ObjectStore, wanted: PartsOfSave, manifest: Manifest) -> Manifest:
    """Wait for the parts, verify them, and return the manifest of the whole checkpoint; `manifest` is that of node 0.

    Raises:
        PartMissing: a node did not add its part in time, cannot, or is gone; nothing was committed.
        InvalidInput: two nodes have files of one name with different bytes.
        StoreUnavailable: a blob of a part is missing.
        CheckpointCorrupt: a part is damaged, or is not of this save.
    """
    found: dict[int, StoredPart] = {}
    wait = wanted.waits()
    while missing := [each for each in wanted.of_nodes if each not in found]:
        for node in missing:
            if (part := _part(store, manifest.key, wanted, node)) is not None:
                found[node] = part
        still = [each for each in missing if each not in found]
        if gone := {each: why for each, why in wanted.lost().items() if each in still}:
            raise PartMissing("; ".join(f"node {each} {why}" for each, why in gone.items()))
        if still and not wait():
            raise PartMissing(f"node {', '.join(map(str, still))} did not add its part in time")
    sizes = {part.blob_path(index): blob.size_bytes for part in found.values() for index, blob in enumerate(part.blobs)}
    require_stored(store, manifest.key.trial.blobs, sizes)
    return _joined(manifest, [found[each] for each in sorted(found)])


def _part(store: ObjectStore, key: CheckpointKey, wanted: PartsOfSave, node: int) -> StoredPart | None:
    """Return the part of a node; None while there is none."""
    path = wanted.nodes.part_path(key, node)
    if (part := read_sealed(store, StoredPart, path, CheckpointCorrupt)) is None:
        return None
    found = part.key, part.attempt, part.term, part.node
    expected = key, wanted.nodes.attempt, wanted.term, node
    if found != expected:
        raise CheckpointCorrupt(f"{path}: expected the part of {expected}, found that of {found}")
    if part.failed:
        raise PartMissing(f"node {node} cannot add its part: {part.failed}")
    return part


def _joined(manifest: Manifest, parts: Sequence[StoredPart]) -> Manifest:
    blobs: dict[BlobRef, int] = {blob: index for index, blob in enumerate(manifest.blobs)}
    files = {each.path: (0, each) for each in manifest.files}
    empty = set(manifest.empty_directories)
    for part in parts:
        empty.update(part.empty_directories)
        for file in part.files:
            if file.path not in files:
                files[file.path] = part.node, _placed(file, part, blobs)
                continue
            node, known = files[file.path]
            if _bytes_of(known) != _bytes_of(file):
                raise InvalidInput(
                    f"{file.path}: nodes {node} and {part.node} saved different files of this name: save it on one "
                    "rank, or put pt.get_trial().rank into the name"
                )
    try:
        whole = dict(manifest) | {  # without a copy of all that is in it
            "blobs": tuple(blobs),
            "files": tuple(files[path][1] for path in sorted(files)),
            "empty_directories": tuple(
                sorted(each for each in empty if not any(path.startswith(f"{each}/") for path in files))
            ),
        }
        return Manifest.model_validate(whole)
    except ValidationError as impossible:
        why = impossible.errors(include_url=False, include_input=False, include_context=False)[0]["msg"]
        raise InvalidInput(f"the files of the nodes make no directory: {why}") from None


def _placed(file: FileRef, part: StoredPart, blobs: dict[BlobRef, int]) -> FileRef:
    """Return the file with its blobs among `blobs`, to which those that are new are added."""
    chunks = tuple(
        ChunkRef(
            blob=blobs.setdefault(part.blobs[chunk.blob], len(blobs)),
            offset=chunk.offset,
            length=chunk.length,
            digest=chunk.digest,
        )
        for chunk in file.chunks
    )
    return file.model_copy(update={"chunks": chunks})


def _bytes_of(file: FileRef) -> Sequence[tuple[int, str]]:
    return [(chunk.length, chunk.digest) for chunk in file.chunks]
