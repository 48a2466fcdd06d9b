"""Publish a staged directory as a checkpoint: blobs first, then a check that all are stored, then the manifest.

The idea: a checkpoint exists when its manifest exists, and a manifest is created once, under a name that must be free.
Everything before that creation only prepares. So a process may die, and a request may be repeated or lose its reply, at
any point, and the answer is one of two: no checkpoint, or the whole one.

    files ─▶ pieces ─▶ groups ─▶ blobs        put, in parallel; named by their content and by this save's sequence
                                 read back    some reused blobs, each in its turn (`reverification`)
                                 listed       every blob that was sent, with its full size
                                 manifest     created only if absent: the commit
    then, elsewhere              entry        the journal names the checkpoint: only then do readers use it
                                              (`attempt/commit_worker.py`)
    after it                     acknowledged to the trial: from now on the checkpoint is never lost

If the owner dies between manifest and entry, the next owner adopts the checkpoint (`core/adoption.py`). A manifest that
an owner creates after it was superseded is never used.

Why it is safe:
- A blob's name holds the digest of its bytes, so writing it twice writes the same bytes. It also holds the sequence of
  the save that sent it, so that a save never relies on a blob that a
  garbage collection of an earlier state may still delete: see `reusable`.
- The directory must not change between the first byte read and the manifest: `require_unchanged` looks at the end.
- A reply that was lost is settled by reading: `publish` recognizes its own manifest by the write id.

Never: a manifest before all its blobs were seen on the target; a second manifest under the same name; a blob replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from typing import Any

from prefect_tune.core.checkpoints.manifest import (
    About,
    BlobRef,
    ChunkRef,
    FileRef,
    FileStat,
    Manifest,
    Piece,
    Source,
    blob_digest,
    decode_manifest,
    encode_manifest,
    groups,
    pieces,
)
from prefect_tune.core.checkpoints.verified_reads import NoSink, Read, fetch, reads
from prefect_tune.core.errors import (
    AlreadyCommitted,
    AlreadyExists,
    CheckpointCorrupt,
    DeadlineExceeded,
    StoreRefused,
    StoreUnavailable,
)
from prefect_tune.core.storage.documents import as_read_back, read_document
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap, create_or_recognize
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

    def without(self, paths: Collection[str]) -> Reusable:
        """Return the chunks of blobs that are not at `paths`, and no whole blob: none of those was read back."""
        return Reusable({digest: place for digest, place in self.chunks.items() if place.path not in paths})


@dataclass(frozen=True, slots=True)
class Save:
    """A saved checkpoint: the manifest says what was reported and where the bytes lie; the rest is what saving cost."""

    manifest: Manifest
    sent_blobs: int
    sent_bytes: int
    damaged: Mapping[str, str] = field(default_factory=dict)
    """By path, the damage of blobs that were read back; they are not reused, and their bytes were sent again."""


@dataclass(frozen=True, slots=True)
class _Blob:
    """The chunks of one group, stored on the target: every chunk's place, and the path and size of a blob sent now."""

    chunks: tuple[tuple[Piece, Digest, _ChunkLocation], ...]
    written: tuple[str, int] | None

    def refers_to(self, paths: Collection[str]) -> bool:
        return any(place.path in paths for _, _, place in self.chunks)


def reusable(store: ObjectStore, trial: TrialKey, parent: Manifest | None, collected_up_to: int) -> Reusable:
    """Find the bytes that the next save of `trial` need not send again.

    A blob may be reused when a live checkpoint refers to it (`parent`), or when it was first written
    after the last retirement (sequence `collected_up_to`): older unreferenced blobs may be deleted at any
    time, even by a process that was believed dead, and are never reused.
    """
    sizes = {listed.path: listed.size_bytes for listed in store.list(trial.blobs)}
    live = parent.blob_paths() if parent else frozenset[str]()
    blobs = {
        Digest(path.rpartition("/")[2].partition("-")[0]): path
        for path in sizes
        if path in live or blob_sequence(path) >= collected_up_to
    }
    return Reusable(_chunks_of(parent, sizes) if parent else {}, blobs, sizes)


def _chunks_of(parent: Manifest, sizes: Mapping[str, int]) -> dict[Digest, _ChunkLocation]:
    """Return the chunks whose blob has its full size in the listing; a truncated blob is sent again.

    A clone's blobs belong to another trial and are not in this trial's listing: later saves do not reuse them.
    """
    places: dict[Digest, _ChunkLocation] = {}
    for file in parent.files:
        for chunk in file.chunks:
            blob = parent.blobs[chunk.blob]
            path = parent.blob_path(chunk.blob)
            if sizes.get(path) == blob.size_bytes:
                places[Digest(chunk.digest)] = _ChunkLocation(path, blob.size_bytes, chunk.offset)
    return places


def alone(manifest: Manifest) -> Manifest:
    """Return the manifest: no other node adds to the checkpoint."""
    return manifest


def commit(
    store: ObjectStore,
    key: CheckpointKey,
    source: Source,
    about: About,
    *,
    reuse: Reusable,
    side_by_side: ParallelMap,
    reverification: Reverification | None = None,
    complete: Callable[[Manifest], Manifest] = alone,
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
    about = as_read_back(about)
    work = list(groups(pieces(source.files)))
    blobs = list(side_by_side(lambda group: _place(store, key, source, group, reuse), work))
    written = _written(blobs)
    manifest = _manifest(key, source, about, blobs)
    unverified = _unverified(store, manifest, reuse, reverification, side_by_side) if reverification else {}
    if unverified:
        good = reuse.without(unverified)
        again = [blob.refers_to(unverified) for blob in blobs]
        redone = side_by_side(lambda group: _place(store, key, source, group, good), compress(work, again))
        blobs = [*compress(blobs, map(not_, again)), *redone]
        written |= _written(blobs)
        manifest = _manifest(key, source, about, blobs)
    source.require_unchanged()
    require_stored(store, key.trial.blobs, written)
    published = publish(store, key, complete(manifest))
    damaged = {each.path: each.why for each in unverified.values() if each.is_damaged}
    return Save(published, len(written), sum(written.values()), damaged)


def _written(blobs: Iterable[_Blob]) -> dict[str, int]:
    return dict(blob.written for blob in blobs if blob.written)


def _unverified(
    store: ObjectStore,
    manifest: Manifest,
    reuse: Reusable,
    reverification: Reverification,
    side_by_side: ParallelMap,
) -> dict[str, Unverified]:
    """Return by path the blobs that were due for verification and must not be reused."""
    shared = frozenset(place.path for place in reuse.chunks.values())
    found = side_by_side(lambda read: verify_read(store, manifest, read), due_reads(manifest, shared, reverification))
    return {each.path: each for each in found if each is not None}


def sent(
    store: ObjectStore, key: CheckpointKey, source: Source, reuse: Reusable, side_by_side: ParallelMap
) -> dict[str, Any]:
    """Send the bytes of a node's part of the checkpoint `key`; return the fields of its `Contents`. Commits nothing.

    Raises:
        StoreUnavailable: not all bytes are on the target.
        StagedFilesChanged: the directory was written to meanwhile.
    """
    work = groups(pieces(source.files))
    blobs = list(side_by_side(lambda group: _place(store, key, source, group, reuse), work))
    source.require_unchanged()
    require_stored(store, key.trial.blobs, _written(blobs))
    return _contents(key, source, blobs)


def _place(store: ObjectStore, key: CheckpointKey, source: Source, group: Sequence[Piece], reuse: Reusable) -> _Blob:
    """Hash a group's chunks and send those that are not on the target, as one blob."""
    buffer = memoryview(bytearray(sum(piece.length for piece in group)))
    known: list[tuple[Piece, Digest, _ChunkLocation]] = []
    fresh: list[tuple[Piece, Digest]] = []
    end = 0
    for piece in group:
        chunk = buffer[end : end + piece.length]
        source.read_into(piece, chunk)
        digest = digest_of(chunk)
        if place := reuse.chunks.get(digest):
            known.append((piece, digest, place))  # the next chunk overwrites it in the buffer
        else:
            fresh.append((piece, digest))
            end += piece.length
    if not fresh:
        return _Blob(tuple(known), None)
    digest = blob_digest((digest, piece.length) for piece, digest in fresh)
    path = reuse.blobs.get(digest)
    written = None
    if path is None or reuse.sizes[path] != end:
        path = key.trial.blob_path(digest, key.sequence)
        store.put(path, buffer[:end])
        written = (path, end)
    return _Blob((*known, *_placed(fresh, path, end)), written)


def _placed(
    fresh: Sequence[tuple[Piece, Digest]], path: str, size_bytes: int
) -> Iterator[tuple[Piece, Digest, _ChunkLocation]]:
    offset = 0
    for piece, digest in fresh:
        yield piece, digest, _ChunkLocation(path, size_bytes, offset)
        offset += piece.length


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


def _manifest(key: CheckpointKey, source: Source, about: About, placed: Iterable[_Blob]) -> Manifest:
    return Manifest(**_contents(key, source, placed), about=about)


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
    files = tuple(_file(file, of_file.get(index, [])) for index, file in enumerate(source.files))
    return {
        **names_of(key),
        "blobs": tuple(refs),
        "files": files,
        "empty_directories": tuple(source.empty_directories),
    }


def names_of(key: CheckpointKey) -> dict[str, Any]:
    """Return the fields of `Contents` that name the checkpoint."""
    return {**key.trial.model_dump(), "step": key.step, "sequence": key.sequence}


def _file(file: FileStat, chunks: Iterable[tuple[int, ChunkRef]]) -> FileRef:
    in_order = tuple(chunk for _, chunk in sorted(chunks, key=lambda at: at[0]))
    return FileRef(path=file.path, size_bytes=file.size_bytes, mode=file.mode, chunks=in_order)


def publish(store: ObjectStore, key: CheckpointKey, manifest: Manifest) -> Manifest:
    """Create the manifest of `key`, which is the commit, and return the manifest that is stored.

    Raises:
        AlreadyCommitted: the key holds a checkpoint of another write.
        CommitUnknown: the target did not say whether it wrote, and reading back did not tell.
    """
    try:
        create_or_recognize(store, key.manifest_path, encode_manifest(manifest))
    except AlreadyExists as exists:
        there = decode_manifest(read_document(store, key.manifest_path, CheckpointCorrupt), key.manifest_path)
        if there.about.write_id != manifest.about.write_id:
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


def due_reads(manifest: Manifest, shared: Collection[str], reverification: Reverification) -> Sequence[Read]:
    """Return the reads that verify the reused blobs of `manifest` that are due.

    `shared` are the blobs of the checkpoint before it. A blob with the save's own sequence is not verified: this
    save, or an earlier try of it, has sent it.
    """
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
