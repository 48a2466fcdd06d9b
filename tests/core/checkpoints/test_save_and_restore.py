"""Bytes that a save uploads and a restore returns; damaged, reused and twice published checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_tune.core.checkpoints import manifest
from prefect_tune.core.checkpoints.commit import SaveResult, commit_checkpoint, find_reusable_bytes
from prefect_tune.core.checkpoints.manifest import (
    BLOB_BYTES,
    CHUNK_BYTES,
    CheckpointMetadata,
    FileStat,
    Manifest,
    pack_ranges,
    split_files,
)
from prefect_tune.core.errors import (
    AlreadyCommitted,
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidInput,
    StagedFilesChanged,
    StoreUnavailable,
)
from prefect_tune.core.restore import read_manifest, verify_files
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.values import hash_bytes
from tests.core.driver import KEY
from tests.core.histories import small_blobs
from tests.fakes.stores.memory_files import MemoryFiles, load_files
from tests.fakes.stores.memory_store import MemoryStore

METADATA = CheckpointMetadata(attempt=1, term=1, write_id="w1", created_at="now")
CHUNK = 8  # the sizes of `tiny_blobs`
BLOB = 24

tiny = pytest.mark.usefixtures("tiny_blobs")


def key(step: int = 1, sequence: int = 3) -> CheckpointKey:
    return CheckpointKey(trial=KEY, step=step, sequence=sequence)


def save(
    store: MemoryStore,
    files: Mapping[str, bytes],
    checkpoint_key: CheckpointKey | None = None,
    *,
    parent: Manifest | None = None,
    collected_up_to: int = 0,
    write_id: str = "w1",
    empty: tuple[str, ...] = (),
) -> SaveResult:
    reuse = find_reusable_bytes(store, KEY, parent, collected_up_to)
    metadata = METADATA.model_copy(update={"write_id": write_id})
    return commit_checkpoint(store, checkpoint_key or key(), MemoryFiles(files, empty), metadata, reuse=reuse)


# ---------------------------------------------------------------------------------------------- chunks and blobs


def test_large_files_are_split_and_small_ones_packed() -> None:
    files = [FileStat("big", 10), FileStat("empty", 0), FileStat("one", 1), FileStat("two", 2)]
    ranges = list(split_files(files, 4))

    assert [(piece.file, piece.offset, piece.length) for piece in ranges] == [
        (0, 0, 4),
        (0, 4, 4),
        (0, 8, 2),
        (2, 0, 1),
        (3, 0, 2),
    ]
    assert [sum(piece.length for piece in group) for group in pack_ranges(ranges, 8)] == [8, 5]
    assert list(pack_ranges([], 8)) == []


def test_a_chunk_larger_than_a_blob_is_a_blob() -> None:
    assert [len(group) for group in pack_ranges(split_files([FileStat("a", 10)], 5), 3)] == [1, 1]


def test_two_thousand_small_files_are_sixteen_blobs() -> None:
    files = [FileStat(f"{n:04}", 128 * 1024) for n in range(2000)]
    assert len(list(pack_ranges(split_files(files)))) == 16
    assert (CHUNK_BYTES, BLOB_BYTES) == (4 << 20, 16 << 20)


def test_a_blob_is_named_by_its_chunks_and_where_they_end() -> None:
    digest = hash_bytes(b"x")
    names = {
        manifest.compute_blob_digest([]),
        manifest.compute_blob_digest([(digest, 1)]),
        manifest.compute_blob_digest([(digest, 11)]),
        manifest.compute_blob_digest([(digest, 1), (digest, 1)]),
    }
    assert len(names) == 4


# -------------------------------------------------------------------------------------------- round trips

NAMES = st.text(st.sampled_from("ab/é .-"), min_size=1, max_size=6).filter(
    lambda name: all(part not in ("", ".", "..") for part in name.split("/"))
)
CONTENT = st.one_of(st.binary(max_size=40), st.sampled_from([b"A" * 24, b"A" * 8, b"AB" * 20]))


def is_tree(files: Mapping[str, bytes]) -> bool:
    return not any(other.startswith(f"{name}/") for name in files for other in files)


@settings(max_examples=60)
@given(
    saves=st.lists(st.dictionaries(NAMES, CONTENT, max_size=5).filter(is_tree), min_size=1, max_size=4),
    chunk=st.integers(1, 10),
    blob=st.integers(1, 30),
)
def test_every_directory_comes_back_as_it_was(saves: list[dict[str, bytes]], chunk: int, blob: int) -> None:
    store, parent = MemoryStore(), None
    with small_blobs(chunk, blob):
        for step, files in enumerate(saves, 1):
            parent = save(store, files, key(step, step), parent=parent).manifest
        for step, files in enumerate(saves, 1):
            assert load_files(store, read_manifest(store, key(step, step))) == files


@pytest.mark.parametrize(
    ("files", "empty"),
    [
        pytest.param({}, (), id="an empty directory"),
        pytest.param({}, ("a", "b/c"), id="only empty directories"),
        pytest.param({"a": b"", "b/c": b""}, (), id="only empty files"),
    ],
)
def test_a_checkpoint_without_bytes_is_a_manifest(files: dict[str, bytes], empty: tuple[str, ...]) -> None:
    store = MemoryStore()
    saved = save(store, files, empty=empty)

    assert (saved.sent_bytes, list(store.objects)) == (0, [key().manifest_path])
    assert load_files(store, read_manifest(store, key())) == files
    assert read_manifest(store, key()).empty_directories == empty
    assert saved.manifest.size_bytes == 0


@tiny
def test_chunks_that_are_identical_inside_one_checkpoint_are_kept_apart_and_sent_once_per_blob() -> None:
    store = MemoryStore()
    files = {"a": b"A" * BLOB, "b": b"A" * BLOB, "c": b"A" * 9}
    saved = save(store, files)

    assert load_files(store, saved.manifest) == files
    assert saved.sent_bytes == BLOB + 9  # a and b share a blob

    again = save(store, {**files, "d": b"A" * 8}, key(2, 4), parent=saved.manifest, write_id="w2")
    assert again.sent_bytes == 0
    assert load_files(store, again.manifest) == {**files, "d": b"A" * 8}


@tiny
def test_an_unchanged_directory_sends_nothing_and_a_changed_chunk_only_itself() -> None:
    store = MemoryStore()
    files = {"weights": bytes(range(80))}
    first = save(store, files).manifest
    assert save(store, files, key(2, 4), parent=first, write_id="w2").sent_bytes == 0

    changed = {"weights": bytes(range(40)) + b"x" + bytes(range(41, 80))}
    second = save(store, changed, key(3, 5), parent=first, write_id="w3")
    assert second.sent_bytes == CHUNK
    assert load_files(store, second.manifest) == changed
    assert load_files(store, first) == files


@tiny
def test_a_save_that_was_cut_short_goes_on_where_it_stopped() -> None:
    class Full(MemoryStore):
        remaining = 2

        def put(self, path: str, data: object) -> None:
            self.remaining -= 1
            if self.remaining < 0:
                raise StoreUnavailable("no room")
            super().put(path, data)  # type: ignore[arg-type]  # a buffer

    store = Full()
    files = {"weights": bytes(range(5 * BLOB))}
    with pytest.raises(StoreUnavailable):
        save(store, files)
    store.remaining = 99
    assert save(store, files).sent_bytes == 3 * BLOB


@tiny
def test_a_blob_that_was_sent_in_part_is_sent_again() -> None:
    store = MemoryStore()
    files = {"weights": bytes(range(BLOB))}
    whole = save(store, files).manifest
    (path,) = whole.blob_paths()
    store.delete([key().manifest_path])
    store.objects[path] = store.objects[path][:-1]

    again = save(store, files, key(1, 4), write_id="w2")

    assert again.sent_bytes == BLOB
    assert load_files(store, again.manifest) == files


# ------------------------------------------------------------------------------------------ publishing


@tiny
def test_the_same_save_again_is_the_same_checkpoint() -> None:
    store = MemoryStore()
    files = {"weights": bytes(range(50))}
    once = save(store, files)
    twice = save(store, files)
    assert twice.manifest == once.manifest
    assert twice.sent_bytes == 0


@tiny
def test_a_retry_that_placed_its_bytes_elsewhere_finds_its_first_try() -> None:
    store = MemoryStore()
    files = {"weights": bytes(range(50))}
    parent = save(store, files, key(1, 2)).manifest
    first = save(store, files, key(2, 3), collected_up_to=9, write_id="w2")  # nothing is reused
    retried = save(store, files, key(2, 3), parent=parent, collected_up_to=9, write_id="w2")

    assert first.sent_bytes == 50
    assert retried.manifest == first.manifest
    assert load_files(store, read_manifest(store, key(2, 3))) == files


def test_another_save_of_the_same_name_is_refused_and_changes_nothing() -> None:
    store = MemoryStore()
    save(store, {"a": b"mine"})
    with pytest.raises(AlreadyCommitted, match="another write"):
        save(store, {"a": b"theirs"}, write_id="w2")
    assert load_files(store, read_manifest(store, key())) == {"a": b"mine"}


@pytest.mark.parametrize("metadata", [{"x": math.nan}, {"x": object()}, {"x": "\ud800"}])
def test_what_cannot_be_stored_is_refused_before_a_byte_is_sent(metadata: dict[str, object]) -> None:
    store = MemoryStore()
    unstorable = METADATA.model_copy(update={"user_metadata": metadata})
    reuse = find_reusable_bytes(store, KEY, None, 0)
    with pytest.raises(InvalidInput):
        commit_checkpoint(store, key(), MemoryFiles({"a": b"x"}), unstorable, reuse=reuse)
    assert store.objects == {}


@tiny
@pytest.mark.parametrize("length", [None, 3])
def test_no_manifest_is_written_over_bytes_that_are_not_there(length: int | None) -> None:
    class Lying(MemoryStore):
        def put(self, path: str, data: object) -> None:
            if length is not None:
                super().put(path, bytes(data)[:length])  # type: ignore[call-overload]  # a buffer

    store = Lying()
    size = "nothing" if length is None else "3 bytes"
    with pytest.raises(StoreUnavailable, match=f"the target has {size}; not committed"):
        save(store, {"a": b"four"})
    assert key().manifest_path not in store.objects


def test_a_listing_that_lags_is_not_taken_for_a_missing_blob() -> None:
    class Lagging(MemoryStore):
        def list(self, prefix: str, *, after: str = "") -> list[object]:  # type: ignore[override]  # always empty
            del prefix, after
            return []

    store = Lagging()
    assert save(store, {"a": b"x"}).sent_bytes == 1


def test_files_that_shrink_meanwhile_are_not_committed() -> None:
    class Shrinking(MemoryFiles):
        def read_into(self, piece: object, buffer: memoryview) -> None:
            del piece, buffer
            raise StagedFilesChanged("cut")

    store, source = MemoryStore(), Shrinking({"a": b"x"})
    with pytest.raises(StagedFilesChanged):
        commit_checkpoint(store, key(), source, METADATA, reuse=find_reusable_bytes(store, KEY, None, 0))
    assert store.objects == {}


# --------------------------------------------------------------------------------------- damaged bytes


@tiny
def test_every_flipped_bit_of_every_blob_is_found() -> None:
    store = MemoryStore()
    manifest = save(store, {"a": bytes(range(60)), "b": b"tail"}).manifest
    for path in manifest.blob_paths():
        whole = store.objects[path]
        for index in range(len(whole)):
            for bit in range(8):
                store.objects[path] = whole[:index] + bytes([whole[index] ^ 1 << bit]) + whole[index + 1 :]
                with pytest.raises(CheckpointCorrupt, match="expected blake3"):
                    verify_files(store, manifest)
        store.objects[path] = whole
    verify_files(store, manifest)


@tiny
@pytest.mark.parametrize("length", [None, 0, 1, 23])
def test_a_blob_that_was_cut_or_is_missing_is_named(length: int | None) -> None:
    store = MemoryStore()
    manifest = save(store, {"a": bytes(range(BLOB))}).manifest
    (path,) = manifest.blob_paths()
    whole = store.objects.pop(path)
    if length is not None:
        store.objects[path] = whole[:length]
    message = "24 bytes at 0 are missing: no such blob" if length is None else f"expected 24 bytes at 0, found {length}"
    with pytest.raises(CheckpointCorrupt, match=f"{path}: {message}"):
        verify_files(store, manifest)


def test_a_flaw_of_the_wire_is_not_taken_for_one_of_the_store() -> None:
    class Noisy(MemoryStore):
        noise = 1

        def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
            data = super().read(path, offset=offset, length=length)
            if "/blobs/" in path and self.noise:
                self.noise -= 1
                return b"\0" * len(data)
            return data

    store = Noisy()
    manifest = save(store, {"a": b"signal"}).manifest
    assert load_files(store, manifest) == {"a": b"signal"}


@tiny
def test_a_damaged_parent_is_healed_where_its_size_shows_it() -> None:
    store = MemoryStore()
    files = {"a": bytes(range(BLOB)), "b": bytes(range(100, 100 + BLOB))}
    parent = save(store, files).manifest
    truncated, deleted = sorted(parent.blob_paths())
    store.objects[truncated] = store.objects[truncated][:-1]
    del store.objects[deleted]

    second = save(store, files, key(2, 4), parent=parent, write_id="w2")

    assert second.sent_bytes == 2 * BLOB
    assert load_files(store, second.manifest) == files


@tiny
def test_after_a_quarantine_nothing_of_the_damaged_blob_is_used() -> None:
    """The blob has the right size: only the journal's quarantine keeps the next save from reusing it."""
    store = MemoryStore()
    good = {"a": bytes(range(BLOB))}
    bad = {"a": bytes(range(100, 100 + BLOB))}
    parent = save(store, good, key(1, 3)).manifest
    damaged = save(store, bad, key(2, 4), parent=parent, write_id="w2").manifest
    (path,) = damaged.blob_paths() - parent.blob_paths()
    store.objects[path] = b"\0" * BLOB

    again = save(store, bad, key(2, 6), parent=parent, collected_up_to=5, write_id="w3")

    assert path not in again.manifest.blob_paths()
    assert load_files(store, again.manifest) == bad


# ------------------------------------------------------------------------------------- reading manifests


def test_a_checkpoint_that_is_not_there_is_said_to_be() -> None:
    with pytest.raises(CheckpointNotFound, match="no such checkpoint"):
        read_manifest(MemoryStore(), key())


def test_the_manifest_of_another_checkpoint_is_not_taken_for_this_one() -> None:
    store = MemoryStore()
    save(store, {"a": b"x"})
    store.objects[key(2, 4).manifest_path] = store.objects[key().manifest_path]
    with pytest.raises(CheckpointCorrupt, match="another checkpoint"):
        read_manifest(store, key(2, 4))


@tiny
def test_a_save_after_a_clone_refers_to_no_bytes_of_the_other_trial() -> None:
    """The origin keeps its blobs for the clone, and only while that is live."""
    store = MemoryStore()
    files = {"a": bytes(range(BLOB)), "b": b"tail"}
    origin = save(store, files).manifest
    other = TrialKey(experiment=origin.experiment, generation=1, trial="other")
    new = CheckpointKey(trial=other, step=1, sequence=1)

    reuse = find_reusable_bytes(store, other, origin, 0)
    saved = commit_checkpoint(store, new, MemoryFiles({**files, "c": b"new"}), METADATA, reuse=reuse)
    assert saved.sent_bytes == sum(map(len, files.values())) + 3
    store.delete(sorted(origin.blob_paths()))
    assert load_files(store, read_manifest(store, new)) == {**files, "c": b"new"}
