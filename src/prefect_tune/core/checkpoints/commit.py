"""Publish a staged directory as a checkpoint: blobs first, then a check that all are stored, then the manifest.

The idea: a checkpoint exists when its manifest exists, and a manifest is created only if its name is free. All earlier
steps only prepare the manifest. So whenever a process dies, a request is repeated, or a reply is lost, the result is
either no checkpoint or a complete one.

    files ─▶ pieces ─▶ groups ─▶ blobs        put in parallel; the name holds the content's digest and the sequence
                                 read back    some reused blobs, in rotation (`Reverification`)
                                 listed       every blob that was sent, with its full size
                                 manifest     created only if absent: the commit
    then, elsewhere              entry        the journal names the checkpoint: only then do readers use it
                                              (`attempt/commit_worker.py`)
    after the entry              the trial is told; from now on, the checkpoint is never lost

If the owner dies between manifest and entry, the next owner adopts the checkpoint (`core/restore.py`). A manifest that
a superseded owner creates is never used.

Why it is safe:
- A blob's name holds the digest of its bytes, so writing it twice writes the same bytes. The name also holds the
  sequence of the save that sent the blob. By this sequence, `find_reusable_bytes` excludes every blob that a garbage
  collection could delete, even if the collection works with an older state of the trial.
- The directory must not change until all its files are read: `require_unchanged` checks this before the commit.
- If the target's reply is lost, `publish_manifest` reads the manifest back, and compares the write ids.

Never: create a manifest before all its blobs were seen on the target; create a manifest twice; replace a blob.

If several nodes train a trial, each node sends its own files, and one manifest names them all.

    node 1   blobs ──► part  (a document, created if absent) ──┐
    node 2   blobs ──► part                                    ├──► node 0: all verified ──► manifest: the commit
    node 0   blobs ────────────────────────────────────────────┘    within the deadline

A part is not a checkpoint: readers ignore it, and node 0 deletes it after the save. A part names the attempt, the
owner's term, the step and the sequence of the save. Node 0 requests the parts only after the previous commit. Until
node 0 writes the next retirement, no garbage collection deletes a blob that this save has sent.

Never: create a manifest before all parts are verified, or from a part of another attempt, owner or save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from prefect_tune.core.checkpoints.manifest import (
    BlobRef,
    CheckpointMetadata,
    ChunkRef,
    FileLayout,
    FileRange,
    FileRef,
    Manifest,
    NullSink,
    RangeRead,
    StagedDirectory,
    compute_blob_digest,
    fetch_chunks,
    pack_ranges,
    plan_reads,
    split_files,
)
from prefect_tune.core.errors import (
    AlreadyCommitted,
    AlreadyExists,
    CheckpointCorrupt,
    DeadlineExceeded,
    InvalidInput,
    PartMissing,
    StoreRefused,
    StoreUnavailable,
)
from prefect_tune.core.reasons import Reason
from prefect_tune.core.storage.documents import Document, read_sealed, seal, seal_and_read_back
from prefect_tune.core.storage.layout import CheckpointKey, NodesKey, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import ObjectStore, create_idempotently
from prefect_tune.core.values import Digest, hash_bytes


@dataclass(frozen=True, slots=True)
class _ChunkLocation:
    """The blob that holds a chunk on the target, and the chunk's offset in it."""

    path: str
    size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class ReusableBytes:
    """Bytes that are already on the target and cannot be garbage-collected during this save.

    `chunks` maps digests to chunks in blobs of the newest live checkpoint. `blobs` maps digests to paths of whole
    blobs of that checkpoint or of saves after the last retirement. `sizes` maps each blob path to its listed size.
    """

    chunks: Mapping[Digest, _ChunkLocation] = field(default_factory=dict)
    blobs: Mapping[Digest, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A saved checkpoint: its manifest, the number of uploaded bytes, and the damage that was found."""

    manifest: Manifest
    sent_bytes: int
    damaged_blobs: Mapping[str, str] = field(default_factory=dict)
    """Maps the path of each damaged blob to the damage. These blobs are not reused; their bytes were sent again."""


@dataclass(frozen=True, slots=True)
class _StoredGroup:
    """The chunks of one group, with their locations. `uploaded` has the path and size of the blob, if one was sent."""

    chunks: tuple[tuple[FileRange, Digest, _ChunkLocation], ...]
    uploaded: tuple[str, int] | None


def find_reusable_bytes(
    store: ObjectStore, trial: TrialKey, parent: Manifest | None, collected_up_to: int
) -> ReusableBytes:
    """Return the bytes that the next save of `trial` need not send again.

    A blob is reused only if the newest live checkpoint (`parent`) refers to it, or if its sequence is at least
    `collected_up_to`: then it was first written after the last retirement. Other blobs are not reused, because those
    that no checkpoint needs can be deleted at any time, even by a process that is thought to be dead.

    A chunk is reused only if the listing shows its blob at full size; otherwise the chunk is sent again. The blobs of a
    cloned checkpoint are in another trial's folder, so this trial's listing does not show them: they are not reused.
    """
    sizes = {listed.path: listed.size_bytes for listed in store.list(trial.blobs_folder)}
    live = parent.blob_paths() if parent else frozenset[str]()
    blobs = {
        Digest(path.rpartition("/")[2].partition("-")[0]): path
        for path in sizes
        if path in live or blob_sequence(path) >= collected_up_to
    }
    chunks: dict[Digest, _ChunkLocation] = {}
    if parent:
        for chunk in (chunk for file in parent.files for chunk in file.chunks):
            size_bytes, path = parent.blobs[chunk.blob].size_bytes, parent.blob_path(chunk.blob)
            if sizes.get(path) == size_bytes:
                chunks[Digest(chunk.digest)] = _ChunkLocation(path, size_bytes, chunk.offset)
    return ReusableBytes(chunks, blobs, sizes)


def commit_checkpoint(
    store: ObjectStore,
    key: CheckpointKey,
    source: StagedDirectory,
    metadata: CheckpointMetadata,
    *,
    reuse: ReusableBytes,
    reverification: Reverification | None = None,
    finalize_manifest: Callable[[Manifest], Manifest] | None = None,
) -> SaveResult:
    """Publish `source` as the checkpoint `key`.

    A crash before the last write leaves unreachable blobs and no checkpoint. Tries with the same write id (in
    `metadata`) count as one save, and create at most one checkpoint.

    `reverification` selects the reused blobs that are read back before the commit. If the bytes of a blob differ or
    cannot be read, they are sent again, to a new path. Without `reverification`, no reused blob is read back.
    `finalize_manifest` adds the parts of other nodes to the manifest.

    Raises:
        InvalidInput: `metadata` holds a value that JSON cannot represent; nothing was sent.
        AlreadyCommitted: another save has committed a checkpoint with this key.
        CommitUnknown: the target did not say whether it wrote the manifest, and the manifest could not be read back.
        StoreUnavailable: the checkpoint is not committed; the next try reuses the blobs that were sent.
        StagedFilesChanged: the directory was written to during the commit.
    """
    _, metadata = seal_and_read_back(metadata)
    batches = list(pack_ranges(split_files(source.files)))
    groups = list(store.map(lambda group: _store_group(store, key, source, group, reuse), batches))
    uploaded = _collect_sent_sizes(groups)
    manifest = Manifest(**_make_layout_fields(key, source, groups), metadata=metadata)
    unverified: dict[str, FailedBlob] = {}
    if reverification is not None:
        due_reads = _select_due_reads(manifest, reuse, reverification)
        verified_reads = store.map(lambda read: verify_range(store, manifest, read), due_reads)
        unverified = {failed.path: failed for failed in verified_reads if failed is not None}
    if unverified:
        # Reuse no whole blobs now: `reuse.blobs` may name a failed blob, or one that this commit has not read back.
        valid = ReusableBytes({digest: chunk for digest, chunk in reuse.chunks.items() if chunk.path not in unverified})
        affected = [any(location.path in unverified for _, _, location in group.chunks) for group in groups]
        replaced = store.map(lambda group: _store_group(store, key, source, group, valid), compress(batches, affected))
        groups = [*compress(groups, map(not_, affected)), *replaced]
        uploaded |= _collect_sent_sizes(groups)
        manifest = Manifest(**_make_layout_fields(key, source, groups), metadata=metadata)
    source.require_unchanged()
    require_blobs_stored(store, key.trial.blobs_folder, uploaded)
    stored = publish_manifest(store, key, finalize_manifest(manifest) if finalize_manifest else manifest)
    damaged = {failed.path: failed.reason for failed in unverified.values() if failed.is_damaged}
    return SaveResult(stored, sum(uploaded.values()), damaged)


def _store_group(
    store: ObjectStore, key: CheckpointKey, source: StagedDirectory, group: Sequence[FileRange], reuse: ReusableBytes
) -> _StoredGroup:
    """Hash the chunks of a group, and send those that are not yet on the target, together in one blob."""
    buffer = memoryview(bytearray(sum(piece.length for piece in group)))
    chunks: list[tuple[FileRange, Digest, _ChunkLocation]] = []
    new_chunks: list[tuple[FileRange, Digest, int]] = []
    end = 0
    for piece in group:
        chunk = buffer[end : end + piece.length]
        source.read_into(piece, chunk)
        digest = hash_bytes(chunk)
        if location := reuse.chunks.get(digest):
            chunks.append((piece, digest, location))  # `end` stays: the next chunk overwrites this one
        else:
            new_chunks.append((piece, digest, end))
            end += piece.length
    if not new_chunks:
        return _StoredGroup(tuple(chunks), None)
    digest = compute_blob_digest((digest, piece.length) for piece, digest, _ in new_chunks)
    path = reuse.blobs.get(digest)
    uploaded = None
    if path is None or reuse.sizes[path] != end:
        path = key.trial.blob_path(digest, key.sequence)
        store.put(path, buffer[:end])
        uploaded = (path, end)
    chunks += [(piece, digest, _ChunkLocation(path, end, offset)) for piece, digest, offset in new_chunks]
    return _StoredGroup(tuple(chunks), uploaded)


def _collect_sent_sizes(groups: Iterable[_StoredGroup]) -> dict[str, int]:
    return dict(group.uploaded for group in groups if group.uploaded)


def require_blobs_stored(store: ObjectStore, folder: str, uploaded: Mapping[str, int]) -> None:
    """Require that every uploaded blob in `folder` has its full size, since a client's report of success is no proof.

    Raises:
        StoreUnavailable: a blob is missing or truncated.
    """
    if not uploaded:
        return
    listed_sizes = {listed.path: listed.size_bytes for listed in store.list(folder)}
    for path, size_bytes in uploaded.items():
        # A listing may be stale, so check the blob itself before reporting it as missing.
        stored = listed_sizes.get(path)
        if stored != size_bytes and (stored := store.size(path)) != size_bytes:
            raise StoreUnavailable(
                f"{path}: {size_bytes} bytes were sent or copied and the client reported success, but the target has "
                f"{'nothing' if stored is None else f'{stored} bytes'}; not committed"
            )


def _make_layout_fields(key: CheckpointKey, source: StagedDirectory, groups: Iterable[_StoredGroup]) -> dict[str, Any]:
    """Return the fields of the `FileLayout`: the checkpoint's key, the blobs, and the files with their chunks."""
    blob_index: dict[str, int] = {}
    refs: list[BlobRef] = []
    chunks_of_file: dict[int, list[tuple[int, ChunkRef]]] = {}
    for piece, digest, location in (chunk for group in groups for chunk in group.chunks):
        if location.path not in blob_index:
            blob_index[location.path] = len(refs)
            path = location.path.removeprefix(f"{key.trial.journal_key.folder}/")
            refs.append(BlobRef(path=path, size_bytes=location.size_bytes))
        chunk = ChunkRef(blob=blob_index[location.path], offset=location.offset, length=piece.length, digest=digest)
        chunks_of_file.setdefault(piece.file, []).append((piece.offset, chunk))
    files = []
    for index, file in enumerate(source.files):
        chunks = tuple(chunk for _, chunk in sorted(chunks_of_file.get(index, []), key=lambda entry: entry[0]))
        files.append(FileRef(path=file.path, size_bytes=file.size_bytes, mode=file.mode, chunks=chunks))
    empty = tuple(source.empty_directories)
    return {**make_key_fields(key), "blobs": tuple(refs), "files": tuple(files), "empty_directories": empty}


def make_key_fields(key: CheckpointKey) -> dict[str, Any]:
    """Return the fields of `FileLayout` that name the checkpoint."""
    return {**key.trial.model_dump(), "step": key.step, "sequence": key.sequence}


def publish_manifest(store: ObjectStore, key: CheckpointKey, manifest: Manifest) -> Manifest:
    """Commit: create the manifest of `key`, and return the stored manifest, which may be from an earlier try.

    Raises:
        AlreadyCommitted: another save has committed a checkpoint with this key.
        CommitUnknown: the target did not say whether it wrote the manifest, and the manifest could not be read back.
    """
    try:
        create_idempotently(store, key.manifest_path, seal(manifest))
    except AlreadyExists as exists:
        stored = read_sealed(store, Manifest, key.manifest_path, CheckpointCorrupt)
        if stored is None or stored.metadata.write_id != manifest.metadata.write_id:
            raise AlreadyCommitted(f"{key.manifest_path}: holds a checkpoint of another write") from exists
        return stored  # an earlier try of this save created it, perhaps with other reused blobs
    return manifest


# Read each reused blob back once in a fixed number of commits, since a blob of the right size may be damaged.
#
# A listing shows a blob's existence and size, not its bytes, so damage to a blob on the target would spread to every
# later checkpoint that reuses the blob. An attempt begins with a restore, which verifies every byte of the checkpoint.
# After that, each commit verifies a rotating subset of the blobs that it shares with the previous checkpoint, and every
# other reused blob: such a blob comes from an interrupted save, or from an older checkpoint with the same content.

_HASH_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Reverification:
    """Selects the reused blobs that a commit reads back: each blob once in `period` consecutive commits."""

    commit_count: int
    """The number of earlier commits of the attempt."""
    period: int
    """At least 1; with 1, every commit reads back all reused blobs."""

    def is_blob_due(self, path: str) -> bool:
        """Return whether this commit reads back the blob at `path`."""
        hashed = int(hash_bytes(path.encode())[:_HASH_DIGITS], 16)
        return hashed % self.period == self.commit_count % self.period


@dataclass(frozen=True, slots=True)
class FailedBlob:
    """A blob that failed verification, and must not be reused."""

    path: str
    reason: str
    is_damaged: bool
    """Whether its bytes are missing or altered; False if they could not be read."""


def _select_due_reads(manifest: Manifest, reuse: ReusableBytes, reverification: Reverification) -> Sequence[RangeRead]:
    """Return the requests that read back the reused blobs that are due; blobs that this save has sent are not read."""
    shared = frozenset(location.path for location in reuse.chunks.values())
    due = {
        index
        for index in range(len(manifest.blobs))
        if blob_sequence(path := manifest.blob_path(index)) < manifest.sequence
        and (path not in shared or reverification.is_blob_due(path))
    }
    return [read for read in plan_reads(manifest) if read.blob in due]


def verify_range(store: ObjectStore, manifest: Manifest, read: RangeRead) -> FailedBlob | None:
    """Read back the chunks of one request; return None if all match their digests, otherwise the failed blob.

    A blob that cannot be read has failed, too, so the commit sends its bytes again.

    Raises:
        DeadlineExceeded: no time is left to send the bytes again.
    """
    try:
        fetch_chunks(store, manifest, read, NullSink())
    except DeadlineExceeded:
        raise
    except (CheckpointCorrupt, StoreUnavailable, StoreRefused) as error:
        return FailedBlob(manifest.blob_path(read.blob), str(error), is_damaged=isinstance(error, CheckpointCorrupt))
    return None


# Trials on several nodes: each node sends its part of a checkpoint, and node 0 merges the parts into the manifest.


class StoredPart(FileLayout, Document):
    """The files that one node adds to a checkpoint."""

    format: Literal["prefect-tune/part"] = "prefect-tune/part"
    version: Literal[1] = 1
    term: int
    attempt: int
    node: int
    failed: str = ""
    """Why the node cannot add its files; empty if it adds them."""


@dataclass(frozen=True, slots=True)
class ExpectedParts:
    """The parts that the other nodes add to a checkpoint."""

    nodes: NodesKey
    term: int
    """The owner's term during the save."""
    node_numbers: tuple[int, ...]
    """The nodes that add a part."""
    start_wait: Callable[[], Callable[[], bool]]
    """Called when node 0 has sent its files. Returns a function that waits briefly and returns whether time is left."""
    get_lost_nodes: Callable[[], Mapping[int, Reason]]
    """Returns the lost nodes, each with the reason."""


PartSender: TypeAlias = tuple[NodesKey, int, int]
"""The attempt, the number of the node that sends a part, and the owner's term."""


def send_files(store: ObjectStore, key: CheckpointKey, source: StagedDirectory, reuse: ReusableBytes) -> dict[str, Any]:
    """Send a node's files of the checkpoint `key`; return the fields of their `FileLayout`. Commit nothing.

    Raises:
        StoreUnavailable: not all bytes are on the target.
        StagedFilesChanged: the directory was written to while its files were sent.
    """
    batches = pack_ranges(split_files(source.files))
    groups = list(store.map(lambda group: _store_group(store, key, source, group, reuse), batches))
    source.require_unchanged()
    require_blobs_stored(store, key.trial.blobs_folder, _collect_sent_sizes(groups))
    return _make_layout_fields(key, source, groups)


def send_part(
    store: ObjectStore, key: CheckpointKey, source: StagedDirectory, *, sender: PartSender, reuse: ReusableBytes
) -> None:
    """Send a node's files of the checkpoint `key`, and then its part.

    Raises:
        StoreUnavailable, CommitUnknown: the next try reuses the blobs that were sent.
        StagedFilesChanged: the directory was written to while its files were sent.
    """
    _create_part(store, key, sender, send_files(store, key, source, reuse))


def send_part_failure(store: ObjectStore, key: CheckpointKey, sender: PartSender, reason: str) -> None:
    """Tell node 0 why a node cannot add its part. Raises like `send_part`."""
    _create_part(store, key, sender, {**make_key_fields(key), "blobs": (), "files": (), "failed": reason})


def _create_part(store: ObjectStore, key: CheckpointKey, sender: PartSender, fields: Mapping[str, Any]) -> None:
    nodes, node, term = sender
    part = StoredPart(**fields, term=term, attempt=nodes.attempt, node=node)
    create_idempotently(store, nodes.part_path(key, node), seal(part))


def merge_parts(store: ObjectStore, wanted: ExpectedParts, manifest: Manifest) -> Manifest:
    """Wait for the parts, verify them, and merge them with `manifest`, which has the files of node 0.

    Raises:
        PartMissing: a node did not add its part in time, cannot add it, or was lost; nothing was committed.
        InvalidInput: two nodes have different files of the same name, or one has a file where another has a directory.
        StoreUnavailable: a blob of a part is missing.
        CheckpointCorrupt: a part is damaged, or belongs to another save.
    """
    parts: dict[int, StoredPart] = {}
    wait = wanted.start_wait()
    while missing := [node for node in wanted.node_numbers if node not in parts]:
        for node in missing:
            if (part := _read_part(store, manifest.key, wanted, node)) is not None:
                parts[node] = part
        pending = [node for node in missing if node not in parts]
        if lost := {node: reason for node, reason in wanted.get_lost_nodes().items() if node in pending}:
            raise PartMissing("; ".join(f"node {node} {reason}" for node, reason in lost.items()))
        if pending and not wait():
            raise PartMissing(f"node {', '.join(map(str, pending))} did not add its part in time")
    sizes = {part.blob_path(index): blob.size_bytes for part in parts.values() for index, blob in enumerate(part.blobs)}
    require_blobs_stored(store, manifest.key.trial.blobs_folder, sizes)
    return _add_parts_to_manifest(manifest, [parts[node] for node in sorted(parts)])


def _read_part(store: ObjectStore, key: CheckpointKey, wanted: ExpectedParts, node: int) -> StoredPart | None:
    path = wanted.nodes.part_path(key, node)
    if (part := read_sealed(store, StoredPart, path, CheckpointCorrupt)) is None:
        return None
    actual = part.key, part.attempt, part.term, part.node
    expected = key, wanted.nodes.attempt, wanted.term, node
    if actual != expected:
        raise CheckpointCorrupt(f"{path}: expected the part of {expected}, found the part of {actual}")
    if part.failed:
        raise PartMissing(f"node {node} cannot add its part: {part.failed}")
    return part


def _add_parts_to_manifest(manifest: Manifest, parts: Sequence[StoredPart]) -> Manifest:
    blobs: dict[BlobRef, int] = {blob: index for index, blob in enumerate(manifest.blobs)}
    files = {file.path: (0, file) for file in manifest.files}
    empty = set(manifest.empty_directories)
    for part in parts:
        empty.update(part.empty_directories)
        for file in part.files:
            if file.path not in files:
                indexes = [blobs.setdefault(part.blobs[chunk.blob], len(blobs)) for chunk in file.chunks]
                chunks = (chunk.model_copy(update={"blob": n}) for chunk, n in zip(file.chunks, indexes, strict=True))
                files[file.path] = part.node, file.model_copy(update={"chunks": tuple(chunks)})
                continue
            node, other = files[file.path]
            if _list_chunk_digests(other) != _list_chunk_digests(file):
                raise InvalidInput(
                    f"{file.path}: nodes {node} and {part.node} saved different files of this name: save the file on "
                    "one rank only, or put pt.get_trial().rank into the name"
                )
    merged = dict(manifest) | {  # a shallow copy
        "blobs": tuple(blobs),
        "files": tuple(files[path][1] for path in sorted(files)),
        "empty_directories": tuple(
            sorted(directory for directory in empty if not any(path.startswith(f"{directory}/") for path in files))
        ),
    }
    try:
        return Manifest.model_validate(merged)
    except ValidationError as invalid:
        problem = invalid.errors(include_url=False, include_input=False, include_context=False)[0]["msg"]
        raise InvalidInput(f"the files of the nodes do not form one directory: {problem}") from None


def _list_chunk_digests(file: FileRef) -> Sequence[tuple[int, str]]:
    return [(chunk.length, chunk.digest) for chunk in file.chunks]
