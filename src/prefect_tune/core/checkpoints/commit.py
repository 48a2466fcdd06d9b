"""Publish a staged directory as a checkpoint: blobs first, then a check that all are stored, then the manifest.

The idea: a checkpoint exists when its manifest exists, and a manifest is created once, under a name that must be free.
Everything before that creation only prepares. So a process may die, and a request may be repeated or lose its reply, at
any point, and the answer is one of two: no checkpoint, or the whole one.

    files ─▶ pieces ─▶ groups ─▶ blobs        put, in parallel; named by their content and by this save's sequence
                                 read back    some reused blobs, each in its turn (`Reverification`)
                                 listed       every blob that was sent, with its full size
                                 manifest     created only if absent: the commit
    then, elsewhere              entry        the journal names the checkpoint: only then do readers use it
                                              (`attempt/commit_worker.py`)
    after it                     acknowledged to the trial: from now on the checkpoint is never lost

If the owner dies between manifest and entry, the next owner adopts the checkpoint (`core/restore.py`). A manifest that
an owner creates after it was superseded is never used.

Why it is safe:
- A blob's name holds the digest of its bytes, so writing it twice writes the same bytes. It also holds the sequence of
  the save that sent it, so that a save never relies on a blob that a garbage collection of an earlier state may still
  delete: see `reusable`.
- The directory must not change between the first byte read and the manifest: `require_unchanged` looks at the end.
- A reply that was lost is settled by reading: `publish` recognizes its own manifest by the write id.

Never: a manifest before all its blobs were seen on the target; a second manifest under the same name; a blob replaced.

Where several nodes train a checkpoint, each sends its own files, and one manifest names them all.

    node 1   blobs ──► part  (a document, created if absent) ──┐
    node 2   blobs ──► part                                    ├──► node 0: all verified ──► manifest: the commit
    node 0   blobs ────────────────────────────────────────────┘    within the deadline

A part is no checkpoint: readers do not know it, and it is deleted with its attempt. A part has the attempt, the owner's
term, the step and the sequence of the save that it is for. Node 0 names these when it asks for the parts, after the
commit before: no garbage collection deletes a blob of that sequence before the next retirement, which is node 0's own.

Never: a manifest before the last part; a part of another attempt, owner or save; a part whose blobs were not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from typing import Any, Literal

from pydantic import ValidationError

from prefect_tune.core.checkpoints.manifest import (
    About,
    BlobRef,
    ChunkRef,
    Contents,
    FileRef,
    Manifest,
    NoSink,
    Piece,
    Read,
    Source,
    blob_digest,
    fetch,
    groups,
    pieces,
    reads,
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
from prefect_tune.core.storage.object_store import ObjectStore, create_or_recognize
from prefect_tune.core.values import Digest, digest_of


@dataclass(frozen=True, slots=True)
class _ChunkLocation:
    """The blob that holds a chunk on the target, and the chunk's offset in it."""

    path: str
    size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Reusable:
    """Bytes that are on the target already and cannot be garbage-collected during this save.

    `chunks` are stored in blobs of live checkpoints. `blobs` (digest to path) are whole blobs, of live
    checkpoints or of an interrupted save; `sizes` is the listing they were found in.
    """

    chunks: Mapping[Digest, _ChunkLocation] = field(default_factory=dict)
    blobs: Mapping[Digest, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Save:
    """A saved checkpoint: the manifest says what was reported and where the bytes lie; the rest is what saving cost."""

    manifest: Manifest
    sent_bytes: int
    damaged: Mapping[str, str] = field(default_factory=dict)
    """By path, the damage of blobs that were read back; they are not reused, and their bytes were sent again."""


@dataclass(frozen=True, slots=True)
class _Blob:
    """The chunks of one group, stored on the target: every chunk's place, and the path and size of a blob sent now."""

    chunks: tuple[tuple[Piece, Digest, _ChunkLocation], ...]
    written: tuple[str, int] | None


def reusable(store: ObjectStore, trial: TrialKey, parent: Manifest | None, collected_up_to: int) -> Reusable:
    """Find the bytes that the next save of `trial` need not send again.

    A blob may be reused when a live checkpoint refers to it (`parent`), or when it was first written
    after the last retirement (sequence `collected_up_to`): older unreferenced blobs may be deleted at any
    time, even by a process that was believed dead, and are never reused.

    A chunk is reused only if its blob has its full size in the listing; a truncated one is sent again. The blobs of a
    clone belong to another trial, and are not in this trial's listing: later saves do not reuse them.
    """
    sizes = {listed.path: listed.size_bytes for listed in store.list(trial.blobs)}
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
    return Reusable(chunks, blobs, sizes)


def commit(
    store: ObjectStore,
    key: CheckpointKey,
    source: Source,
    about: About,
    *,
    reuse: Reusable,
    reverification: Reverification | None = None,
    complete: Callable[[Manifest], Manifest] | None = None,
) -> Save:
    """Publish `source` as the checkpoint `key`.

    A crash before the last write leaves unreachable blobs and no checkpoint. Committing the same
    bytes twice is the same as committing them once.

    `reverification` says which reused blobs are read back first; the bytes of a blob that fails are sent again, to a
    new path. Without `reverification`, reused blobs are trusted. `complete` adds what other nodes have sent.

    Raises:
        InvalidInput: `about` holds a value that JSON cannot represent; nothing was sent.
        AlreadyCommitted: the key holds a checkpoint of another write.
        CommitUnknown: the target did not say whether it wrote the manifest, and reading it back did not tell.
        StoreUnavailable: not committed; the next try reuses the blobs that were sent.
        StagedFilesChanged: the directory was written to during the commit.
    """
    _, about = seal_and_read_back(about)
    work = list(groups(pieces(source.files)))
    blobs = list(store.map(lambda group: _place(store, key, source, group, reuse), work))
    written = _written(blobs)
    manifest = Manifest(**_contents(key, source, blobs), about=about)
    unverified: dict[str, Unverified] = {}
    if reverification is not None:
        due = _due_reads(manifest, reuse, reverification)
        looked = store.map(lambda read: verify_read(store, manifest, read), due)
        unverified = {each.path: each for each in looked if each is not None}
    if unverified:
        # No whole blob is reused either: none of those was read back.
        good = Reusable({digest: at for digest, at in reuse.chunks.items() if at.path not in unverified})
        again = [any(at.path in unverified for _, _, at in blob.chunks) for blob in blobs]
        redone = store.map(lambda group: _place(store, key, source, group, good), compress(work, again))
        blobs = [*compress(blobs, map(not_, again)), *redone]
        written |= _written(blobs)
        manifest = Manifest(**_contents(key, source, blobs), about=about)
    source.require_unchanged()
    require_stored(store, key.trial.blobs, written)
    published = publish(store, key, complete(manifest) if complete else manifest)
    damaged = {each.path: each.why for each in unverified.values() if each.is_damaged}
    return Save(published, sum(written.values()), damaged)


def _place(store: ObjectStore, key: CheckpointKey, source: Source, group: Sequence[Piece], reuse: Reusable) -> _Blob:
    """Hash a group's chunks and send those that are not on the target, as one blob."""
    buffer = memoryview(bytearray(sum(piece.length for piece in group)))
    chunks: list[tuple[Piece, Digest, _ChunkLocation]] = []
    fresh: list[tuple[Piece, Digest, int]] = []
    end = 0
    for piece in group:
        chunk = buffer[end : end + piece.length]
        source.read_into(piece, chunk)
        digest = digest_of(chunk)
        if place := reuse.chunks.get(digest):
            chunks.append((piece, digest, place))  # the next chunk overwrites it in the buffer
        else:
            fresh.append((piece, digest, end))
            end += piece.length
    if not fresh:
        return _Blob(tuple(chunks), None)
    digest = blob_digest((digest, piece.length) for piece, digest, _ in fresh)
    path = reuse.blobs.get(digest)
    written = None
    if path is None or reuse.sizes[path] != end:
        path = key.trial.blob_path(digest, key.sequence)
        store.put(path, buffer[:end])
        written = (path, end)
    chunks += [(piece, digest, _ChunkLocation(path, end, offset)) for piece, digest, offset in fresh]
    return _Blob(tuple(chunks), written)


def _written(blobs: Iterable[_Blob]) -> dict[str, int]:
    return dict(blob.written for blob in blobs if blob.written)


def require_stored(store: ObjectStore, folder: str, written: Mapping[str, int]) -> None:
    """Require every sent blob in `folder` at its full size before the manifest: the client's reply is no proof.

    Raises:
        StoreUnavailable: one is missing, or is not whole.
    """
    if not written:
        return
    seen = {listed.path: listed.size_bytes for listed in store.list(folder)}
    for path, size_bytes in written.items():
        # A listing may be stale: ask for the object itself before calling it missing.
        found = seen.get(path)
        if found != size_bytes and (found := store.size(path)) != size_bytes:
            raise StoreUnavailable(
                f"{path}: {size_bytes} bytes were sent or copied and the client reported success, but the target has "
                f"{'nothing' if found is None else f'{found} bytes'}; not committed"
            )


def _contents(key: CheckpointKey, source: Source, placed: Iterable[_Blob]) -> dict[str, Any]:
    """Return the fields of `Contents`."""
    blobs: dict[str, int] = {}
    refs: list[BlobRef] = []
    of_file: dict[int, list[tuple[int, ChunkRef]]] = {}
    for piece, digest, place in (chunk for each in placed for chunk in each.chunks):
        if place.path not in blobs:
            blobs[place.path] = len(refs)
            path = place.path.removeprefix(f"{key.trial.of_experiment.folder}/")
            refs.append(BlobRef(path=path, size_bytes=place.size_bytes))
        chunk = ChunkRef(blob=blobs[place.path], offset=place.offset, length=piece.length, digest=digest)
        of_file.setdefault(piece.file, []).append((piece.offset, chunk))
    files = []
    for index, file in enumerate(source.files):
        chunks = tuple(chunk for _, chunk in sorted(of_file.get(index, []), key=lambda at: at[0]))
        files.append(FileRef(path=file.path, size_bytes=file.size_bytes, mode=file.mode, chunks=chunks))
    empty = tuple(source.empty_directories)
    return {**names_of(key), "blobs": tuple(refs), "files": tuple(files), "empty_directories": empty}


def names_of(key: CheckpointKey) -> dict[str, Any]:
    """Return the fields of `Contents` that name the checkpoint."""
    return {**key.trial.model_dump(), "step": key.step, "sequence": key.sequence}


def publish(store: ObjectStore, key: CheckpointKey, manifest: Manifest) -> Manifest:
    """Create the manifest of `key`, which is the commit, and return the manifest that is stored.

    Raises:
        AlreadyCommitted: the key holds a checkpoint of another write.
        CommitUnknown: the target did not say whether it wrote, and reading back did not tell.
    """
    try:
        create_or_recognize(store, key.manifest_path, seal(manifest))
    except AlreadyExists as exists:
        there = read_sealed(store, Manifest, key.manifest_path, CheckpointCorrupt)
        if there is None or there.about.write_id != manifest.about.write_id:
            raise AlreadyCommitted(f"{key.manifest_path}: holds a checkpoint of another write") from exists
        return there  # an earlier try of this same save, which found other blobs to reuse
    return manifest


# Read reused blobs back, each once in a fixed number of commits, so that none is reused for ever on its size alone.
#
# A listing shows a blob's existence and size, not its bytes: a blob damaged on the target would spoil every later
# checkpoint that reuses it. An attempt begins with a restore, which verifies every byte of the checkpoint before its
# first commit. After that each commit verifies, of the blobs that it shares with the checkpoint before it, those whose
# turn it is, and all other blobs that it reuses: an interrupted save left these, or older content has come back.

_HASH_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Reverification:
    """Which reused blobs a commit reads back: each blob once in `every` consecutive commits."""

    turn: int
    """The number of commits that the attempt has made before this one."""
    every: int
    """At least 1; with 1 every commit reads back all reused blobs."""

    def is_due(self, path: str) -> bool:
        """Return whether it is the turn of the blob at `path`."""
        place = int(digest_of(path.encode())[:_HASH_DIGITS], 16)
        return place % self.every == self.turn % self.every


@dataclass(frozen=True, slots=True)
class Unverified:
    """A blob that failed verification, and must not be reused."""

    path: str
    why: str
    is_damaged: bool
    """Whether its bytes are missing or altered; otherwise they could not be read."""


def _due_reads(manifest: Manifest, reuse: Reusable, reverification: Reverification) -> Sequence[Read]:
    """Return the reads of the reused blobs that are due; this save, or an earlier try of it, has sent the others."""
    shared = frozenset(place.path for place in reuse.chunks.values())
    due = {
        index
        for index in range(len(manifest.blobs))
        if blob_sequence(path := manifest.blob_path(index)) < manifest.sequence
        and (path not in shared or reverification.is_due(path))
    }
    return [read for read in reads(manifest) if read.blob in due]


def verify_read(store: ObjectStore, manifest: Manifest, read: Read) -> Unverified | None:
    """Read the chunks of one request back; return None if all match their digests.

    A blob that cannot be read is not reused either: its bytes are sent again, with the same writes that any commit
    needs.

    Raises:
        DeadlineExceeded: no time is left to send the bytes again.
    """
    try:
        fetch(store, manifest, read, NoSink())
    except DeadlineExceeded:
        raise
    except (CheckpointCorrupt, StoreUnavailable, StoreRefused) as error:
        return Unverified(manifest.blob_path(read.blob), str(error), is_damaged=isinstance(error, CheckpointCorrupt))
    return None


# The parts of a checkpoint that several nodes train.


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


def send_files(store: ObjectStore, key: CheckpointKey, source: Source, *, reuse: Reusable) -> dict[str, Any]:
    """Send a node's files of the checkpoint `key`; return the fields of its `Contents`. Commits nothing.

    Raises:
        StoreUnavailable: not all bytes are on the target.
        StagedFilesChanged: the directory was written to meanwhile.
    """
    work = groups(pieces(source.files))
    blobs = list(store.map(lambda group: _place(store, key, source, group, reuse), work))
    source.require_unchanged()
    require_stored(store, key.trial.blobs, _written(blobs))
    return _contents(key, source, blobs)


def send_part(
    store: ObjectStore, key: CheckpointKey, source: Source, *, of: tuple[NodesKey, int, int], reuse: Reusable
) -> None:
    """Send a node's files of the checkpoint `key`, then its part; `of` are its attempt, its number and the term.

    Raises:
        StoreUnavailable, CommitUnknown: the next try reuses what was sent.
        StagedFilesChanged: the directory was written to meanwhile.
    """
    _create_part(store, key, of, send_files(store, key, source, reuse=reuse))


def refuse_part(store: ObjectStore, key: CheckpointKey, of: tuple[NodesKey, int, int], why: str) -> None:
    """Tell node 0 why a node cannot add its part. Raises as `send_part`."""
    _create_part(store, key, of, {**names_of(key), "blobs": (), "files": (), "failed": why})


def _create_part(
    store: ObjectStore, key: CheckpointKey, of: tuple[NodesKey, int, int], fields: Mapping[str, Any]
) -> None:
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
    parts: dict[int, StoredPart] = {}
    wait = wanted.waits()
    while missing := [each for each in wanted.of_nodes if each not in parts]:
        for node in missing:
            if (part := _read_part(store, manifest.key, wanted, node)) is not None:
                parts[node] = part
        still = [each for each in missing if each not in parts]
        if gone := {each: why for each, why in wanted.lost().items() if each in still}:
            raise PartMissing("; ".join(f"node {each} {why}" for each, why in gone.items()))
        if still and not wait():
            raise PartMissing(f"node {', '.join(map(str, still))} did not add its part in time")
    sizes = {part.blob_path(index): blob.size_bytes for part in parts.values() for index, blob in enumerate(part.blobs)}
    require_stored(store, manifest.key.trial.blobs, sizes)
    return _join(manifest, [parts[each] for each in sorted(parts)])


def _read_part(store: ObjectStore, key: CheckpointKey, wanted: PartsOfSave, node: int) -> StoredPart | None:
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


def _join(manifest: Manifest, parts: Sequence[StoredPart]) -> Manifest:
    blobs: dict[BlobRef, int] = {blob: index for index, blob in enumerate(manifest.blobs)}
    files = {file.path: (0, file) for file in manifest.files}
    empty = set(manifest.empty_directories)
    for part in parts:
        empty.update(part.empty_directories)
        for file in part.files:
            if file.path not in files:
                places = [blobs.setdefault(part.blobs[chunk.blob], len(blobs)) for chunk in file.chunks]
                chunks = (chunk.model_copy(update={"blob": at}) for chunk, at in zip(file.chunks, places, strict=True))
                files[file.path] = part.node, file.model_copy(update={"chunks": tuple(chunks)})
                continue
            node, other = files[file.path]
            if _bytes_of(other) != _bytes_of(file):
                raise InvalidInput(
                    f"{file.path}: nodes {node} and {part.node} saved different files of this name: save it on one "
                    "rank, or put pt.get_trial().rank into the name"
                )
    whole = dict(manifest) | {  # without a copy of all that is in it
        "blobs": tuple(blobs),
        "files": tuple(files[path][1] for path in sorted(files)),
        "empty_directories": tuple(
            sorted(each for each in empty if not any(path.startswith(f"{each}/") for path in files))
        ),
    }
    try:
        return Manifest.model_validate(whole)
    except ValidationError as impossible:
        why = impossible.errors(include_url=False, include_input=False, include_context=False)[0]["msg"]
        raise InvalidInput(f"the files of the nodes make no directory: {why}") from None


def _bytes_of(file: FileRef) -> Sequence[tuple[int, str]]:
    return [(chunk.length, chunk.digest) for chunk in file.chunks]
