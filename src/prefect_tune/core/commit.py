"""Publish a staged directory as a checkpoint: blobs first, all seen on the target, then the manifest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from typing import Protocol, TypeVar

from prefect_tune.core.chunks import FileStat, Piece, Source, blob_digest, groups, pieces
from prefect_tune.core.errors import AlreadyCommitted, AlreadyExists, StoreUnavailable
from prefect_tune.core.layout import CheckpointKey, TrialKey, blob_sequence
from prefect_tune.core.manifest import (
    About,
    BlobRef,
    ChunkRef,
    FileRef,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from prefect_tune.core.reverification import Reverification, Unverified, due_reads, verify_read
from prefect_tune.core.sealed import as_read_back
from prefect_tune.core.settle import create_or_recognize
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.values import Digest, digest_of

__all__ = ["Committed", "Mapper", "Reusable", "commit", "publish", "reusable"]

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Mapper(Protocol):
    """`map`, or a thread pool's: how independent reads and writes are run side by side."""

    def __call__(self, function: Callable[[_In], _Out], items: Iterable[_In], /) -> Iterable[_Out]: ...


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk lies on the target."""

    path: str
    size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Reusable:
    """Bytes that are on the target already and cannot be collected under this save.

    `chunks` lie in blobs of live checkpoints. `blobs` (digest to path) are whole blobs, of live
    checkpoints or left by a save that was cut short; `sizes` is the listing they were found in.
    """

    chunks: Mapping[Digest, _Place] = field(default_factory=dict)
    blobs: Mapping[Digest, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def without(self, paths: Collection[str]) -> Reusable:
        """Return the same without the blobs at `paths`."""
        chunks = {digest: place for digest, place in self.chunks.items() if place.path not in paths}
        blobs = {digest: path for digest, path in self.blobs.items() if path not in paths}
        return Reusable(chunks, blobs, self.sizes)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit did: the manifest, what it cost to send, and what it found damaged."""

    manifest: Manifest
    sent_blobs: int
    sent_bytes: int
    damaged: Mapping[str, str] = field(default_factory=dict)
    """By path, what is wrong with blobs that were read back; they are not reused, and their bytes were sent again."""


@dataclass(frozen=True, slots=True)
class _Blob:
    """One blob's worth of chunks, safe on the target: every chunk's place, and the blob if it was sent."""

    chunks: tuple[tuple[Piece, Digest, _Place], ...]
    written: tuple[str, int] | None

    def refers_to(self, paths: Collection[str]) -> bool:
        return any(place.path in paths for _, _, place in self.chunks)


def reusable(store: ObjectStore, trial: TrialKey, parent: Manifest | None, collected_up_to: int) -> Reusable:
    """Find what the next save of `trial` need not send again.

    A blob may be reused when a live checkpoint refers to it (`parent`), or when it was first written
    after the last retirement (entry `collected_up_to`): older unreferenced blobs may be about to be
    deleted, by a process that was thought dead too, and are left alone for ever.
    """
    sizes = {listed.path: listed.size_bytes for listed in store.list(trial.blobs)}
    live = parent.blob_paths() if parent else frozenset[str]()
    blobs = {
        Digest(path.rpartition("/")[2].partition("-")[0]): path
        for path in sizes
        if path in live or blob_sequence(path) >= collected_up_to
    }
    return Reusable(_chunks_of(parent, sizes) if parent else {}, blobs, sizes)


def _chunks_of(parent: Manifest, sizes: Mapping[str, int]) -> dict[Digest, _Place]:
    """Only chunks whose blob the listing shows whole: what is damaged is sent again, and so healed.

    A clone's blobs are another trial's, and not in it: they stay for the clone, and for nobody after it.
    """
    places: dict[Digest, _Place] = {}
    for file in parent.files:
        for chunk in file.chunks:
            blob = parent.blobs[chunk.blob]
            path = parent.blob_path(chunk.blob)
            if sizes.get(path) == blob.size_bytes:
                places[Digest(chunk.digest)] = _Place(path, blob.size_bytes, chunk.offset)
    return places


def commit(  # noqa: PLR0913 - what, where, from where, and how: none can be had from another
    store: ObjectStore,
    key: CheckpointKey,
    source: Source,
    about: About,
    *,
    reuse: Reusable,
    side_by_side: Mapper,
    reverification: Reverification | None = None,
) -> Committed:
    """Publish `source` as the checkpoint `key`.

    A crash before the last write leaves unreachable blobs and no checkpoint. Committing the same
    bytes twice is the same as committing them once.

    Of what is reused, `reverification` says what is read back before; where that fails, its bytes are sent again, to a
    new path. Without it what is reused is trusted.

    Raises:
        InvalidInput: `about` holds what JSON cannot say; nothing was sent.
        AlreadyCommitted: the key holds another write.
        CommitUnknown: the target did not say, and could not be asked.
        StoreUnavailable: not committed; what was sent is found again by the next try.
        StagedFilesChanged: the directory was written to meanwhile.
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
    _see(store, key.trial, written)
    published = publish(store, key, manifest)
    damaged = {each.path: each.why for each in unverified.values() if each.is_damaged}
    return Committed(published, len(written), sum(written.values()), damaged)


def _written(blobs: Iterable[_Blob]) -> dict[str, int]:
    return dict(blob.written for blob in blobs if blob.written)


def _unverified(
    store: ObjectStore,
    manifest: Manifest,
    reuse: Reusable,
    reverification: Reverification,
    side_by_side: Mapper,
) -> dict[str, Unverified]:
    """By path, the blobs that were due to be verified and are not to be reused."""
    shared = frozenset(place.path for place in reuse.chunks.values())
    found = side_by_side(lambda read: verify_read(store, manifest, read), due_reads(manifest, shared, reverification))
    return {each.path: each for each in found if each is not None}


def _place(store: ObjectStore, key: CheckpointKey, source: Source, group: Sequence[Piece], reuse: Reusable) -> _Blob:
    """Hash a group's chunks and send those that are not on the target, as one blob."""
    buffer = memoryview(bytearray(sum(piece.length for piece in group)))
    known: list[tuple[Piece, Digest, _Place]] = []
    fresh: list[tuple[Piece, Digest]] = []
    end = 0
    for piece in group:
        chunk = buffer[end : end + piece.length]
        source.read_into(piece, chunk)
        digest = digest_of(chunk)
        if place := reuse.chunks.get(digest):
            known.append((piece, digest, place))  # its room in the buffer goes to the next chunk
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
) -> Iterator[tuple[Piece, Digest, _Place]]:
    offset = 0
    for piece, digest in fresh:
        yield piece, digest, _Place(path, size_bytes, offset)
        offset += piece.length


def _see(store: ObjectStore, trial: TrialKey, written: Mapping[str, int]) -> None:
    """Believe no client: every blob that was sent must be on the target, whole, before the manifest is."""
    if not written:
        return
    seen = {listed.path: listed.size_bytes for listed in store.list(trial.blobs)}
    for path, size_bytes in written.items():
        # A listing may lag behind its store; the object itself is asked before it is called missing.
        found = seen.get(path)
        if found != size_bytes and (found := store.size(path)) != size_bytes:
            raise StoreUnavailable(
                f"{path}: sent {size_bytes} bytes and the client reported success, but the target has "
                f"{'nothing' if found is None else f'{found} bytes'}; not committed"
            )


def _manifest(key: CheckpointKey, source: Source, about: About, placed: Iterable[_Blob]) -> Manifest:
    blobs: dict[str, int] = {}
    refs: list[BlobRef] = []
    of_file: dict[int, list[tuple[int, ChunkRef]]] = {}
    for piece, digest, place in (chunk for each in placed for chunk in each.chunks):
        if place.path not in blobs:
            blobs[place.path] = len(refs)
            path = place.path.partition("/")[2]
            refs.append(BlobRef(path=path, size_bytes=place.size_bytes))
        chunk = ChunkRef(blob=blobs[place.path], offset=place.offset, length=piece.length, digest=digest)
        of_file.setdefault(piece.file, []).append((piece.offset, chunk))
    return Manifest(
        experiment=key.trial.experiment,
        trial=key.trial.trial,
        step=key.step,
        sequence=key.sequence,
        about=about,
        blobs=tuple(refs),
        files=tuple(_file(file, of_file.get(index, [])) for index, file in enumerate(source.files)),
        empty_directories=tuple(source.empty_directories),
    )


def _file(file: FileStat, chunks: Iterable[tuple[int, ChunkRef]]) -> FileRef:
    in_order = tuple(chunk for _, chunk in sorted(chunks, key=lambda at: at[0]))
    return FileRef(path=file.path, size_bytes=file.size_bytes, mode=file.mode, chunks=in_order)


def publish(store: ObjectStore, key: CheckpointKey, manifest: Manifest) -> Manifest:
    """Create the manifest of `key`, which is the commit, and return it as it is there.

    Raises:
        AlreadyCommitted: the key holds another write.
        CommitUnknown: the target did not say, and could not be asked.
    """
    try:
        create_or_recognize(store, key.manifest_path, encode_manifest(manifest))
    except AlreadyExists as exists:
        there = decode_manifest(store.read(key.manifest_path), key.manifest_path)
        if there.about.write_id != manifest.about.write_id:
            raise AlreadyCommitted(f"{key.manifest_path}: holds a checkpoint of another write") from exists
        return there  # an earlier try of this very save, which found other bytes to reuse
    return manifest
