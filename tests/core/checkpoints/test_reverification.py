"""A rotten blob that later saves reuse damages a bounded number of checkpoints, also when operations fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from prefect_tune.core.checkpoints.commit import Reverification
from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.errors import CheckpointCorrupt, DeadlineExceeded, StoreRefused, StoreUnavailable
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import newest_checkpoint_key
from prefect_tune.core.journal.journal import read_entries
from prefect_tune.core.journal_events import CheckpointQuarantined
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import blob_sequence
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.posix_store import PosixStore
from tests.core.driver import KEY, NAME, Session, Witness
from tests.core.protocol.mutate import break_lines
from tests.fakes.checkpoints import first_generation
from tests.fakes.servers.s3_sink import S3Sink
from tests.fakes.stores.dying_store import Crash, DyingStore, Failure
from tests.fakes.stores.memory_files import load_files
from tests.fakes.stores.memory_store import MemoryStore
from tests.fakes.stores.object_stores import object_store

pytestmark = pytest.mark.usefixtures("tiny_blobs")

EVERY = 4


@pytest.fixture(params=["memory", "files", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryStore()
    elif request.param == "files":
        yield PosixStore(tmp_path)
    else:
        with S3Sink() as sink:
            opened = object_store(sink.endpoint)
            yield opened
            opened.close()


def training(store: ObjectStore, every: int = EVERY, retention: Retention | None = None) -> Session:
    """An attempt with one checkpoint."""
    session = Session(store, Witness(), retention=retention or Retention(), reverify_every=every)
    session.open()
    session.start()
    saves(session)
    return session


def saves(session: Session, times: int = 1) -> None:
    for _ in range(times):
        session.train()
        session.save()


def newest(session: Session) -> Manifest:
    key = newest_checkpoint_key(KEY, session.trial)
    assert key
    return read_manifest(session.store, key)


def is_whole(session: Session) -> bool:
    """Whether the newest checkpoint restores to the saved files."""
    manifest = newest(session)
    try:
        found = load_files(session.store, manifest)
    except CheckpointCorrupt:
        return False
    assert found in session.witness.saved[manifest.step, manifest.sequence]
    return True


def blobs_of(name: str, manifest: Manifest) -> Sequence[str]:
    (file,) = (each for each in manifest.files if each.path == name)
    return sorted({manifest.blob_path(chunk.blob) for chunk in file.chunks})


def shared_blobs(manifest: Manifest) -> Sequence[str]:
    """The blobs of the file that never changes."""
    return blobs_of("backbone", manifest)


def rot(store: ObjectStore, path: str) -> None:
    """Alter every byte in place."""
    altered = bytes(byte ^ 1 for byte in bytes(store.read(path)))
    store.delete([path])  # a file store does not rewrite an existing file of the same size
    store.put(path, altered)


def put_aside(session: Session) -> list[int]:
    entries = read_entries(session.store, first_generation(NAME))
    return [event.sequence for entry in entries for event in entry.events if isinstance(event, CheckpointQuarantined)]


def test_each_blob_has_one_turn_in_so_many_and_each_turn_its_share() -> None:
    paths = [KEY.blob_path(f"{number:064x}", 7) for number in range(1600)]
    due = [[path for path in paths if Reverification(turn, 16).is_blob_due(path)] for turn in range(5, 21)]
    assert sorted(path for turn in due for path in turn) == sorted(paths)
    assert all(60 < len(turn) < 150 for turn in due)
    assert all(Reverification(turn, 1).is_blob_due(path) for path in paths[:9] for turn in range(3))


def test_a_reused_blob_that_rots_spoils_no_more_checkpoints_than_the_bound(store: ObjectStore) -> None:
    session = training(store)
    rotten = shared_blobs(newest(session))
    for path in rotten:
        rot(store, path)
    first = session.trial.checkpoints
    whole = []
    for _ in range(EVERY):
        saves(session)
        whole.append(is_whole(session))
    assert whole[-1]
    assert not set(rotten) & newest(session).blob_paths()
    saves(session, EVERY)
    assert is_whole(session)
    assert {each.sequence for each in first} <= set(put_aside(session))
    assert all(load_files(store, read_manifest(store, KEY.checkpoint_key(each))) for each in session.trial.checkpoints)


def test_a_reused_blob_that_rots_spoils_every_later_checkpoint_where_none_is_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_lines(monkeypatch, Reverification.is_blob_due, {"return hashed": "return False and hashed"})
    session = training(MemoryStore())
    rot(session.store, shared_blobs(newest(session))[0])
    for _ in range(3 * EVERY):
        saves(session)
        assert not is_whole(session)


def test_whichever_blob_rots_and_whenever_the_newest_checkpoint_is_whole_in_time() -> None:
    for before in range(1, EVERY + 1):
        whole = training(MemoryStore())
        saves(whole, before)
        for path in newest(whole).blob_paths():
            session = training(MemoryStore())
            saves(session, before)
            rot(session.store, path)
            saves(session, EVERY)
            assert is_whole(session), (before, path)


def test_damage_is_sent_again_to_a_new_path_and_nothing_that_was_published_is_rewritten(store: ObjectStore) -> None:
    session = training(store, every=1)
    rotten = shared_blobs(newest(session))[0]
    rot(store, rotten)
    before = {each.path: bytes(store.read(each.path)) for each in store.list(KEY.folder)}
    begun = session.trial.next_sequence
    saves(session)
    assert {path: bytes(store.read(path)) for path in before} == before
    sent_again = newest(session).blob_paths() - before.keys()
    assert {blob_sequence(path) for path in sent_again} == {begun}
    assert is_whole(session)
    assert put_aside(session) == [begun - 1]


def test_only_checkpoints_that_share_what_is_damaged_are_put_aside() -> None:
    session = training(MemoryStore(), every=1)
    first = session.trial.checkpoints[-1]
    saves(session)
    second = session.trial.checkpoints[-1]
    rot(session.store, blobs_of("cycle", newest(session))[0])  # steps 2 and 3 share it
    saves(session)
    assert is_whole(session)
    assert put_aside(session) == [second.sequence]
    assert session.trial.checkpoints[0] == first


class Unreadable(MemoryStore):
    """A store whose reads of blobs fail."""

    error: type[Exception] | None = None

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if self.error is not None and "/blobs/" in path:
            raise self.error(f"{path}: not now")
        return super().read(path, offset=offset, length=length)


@pytest.mark.parametrize("error", [StoreUnavailable, StoreRefused])
def test_what_cannot_be_read_back_is_sent_again_and_nothing_is_put_aside(error: type[Exception]) -> None:
    store = Unreadable()
    session = training(store, every=1)
    reused = set(shared_blobs(newest(session)))
    store.error = error
    saves(session)
    store.error = None
    assert not reused & newest(session).blob_paths()
    assert is_whole(session)
    assert put_aside(session) == []


def test_where_there_is_no_time_to_read_back_the_save_fails_as_any_that_is_late() -> None:
    store = Unreadable()
    session = training(store, every=1)
    store.error = DeadlineExceeded
    session.train()
    with pytest.raises(DeadlineExceeded):
        session.save()


def test_a_blob_of_an_earlier_try_of_the_same_save_is_reused_without_being_read() -> None:
    store = Unreadable()
    session = training(store, every=1)
    session.train()
    blobs = {each.path for each in store.list(KEY.blobs_folder)}
    with suppress(Crash):
        session.store = DyingStore(store, 1, Failure.CRASH_BEFORE, only=frozenset({"create"}))
        session.publish()
    left = {each.path for each in store.list(KEY.blobs_folder)} - blobs
    assert left
    session.store, store.bytes_in = store, 0
    session.save()
    assert left <= newest(session).blob_paths()
    assert {each.path for each in store.list(KEY.blobs_folder)} == blobs | left


def test_the_bytes_of_a_damaged_blob_are_not_taken_from_another_blob_that_was_not_read_back() -> None:
    store = MemoryStore()
    session = training(store, every=1)
    saves(session)
    damaged = shared_blobs(newest(session))[0]
    rot(store, damaged)
    digest = damaged.rpartition("/")[2].partition("-")[0]
    left_by_an_interrupted_save = KEY.blob_path(digest, session.experiment.entry_count - 1)
    store.put(left_by_an_interrupted_save, bytes(store.read(damaged)))
    saves(session)
    assert left_by_an_interrupted_save not in newest(session).blob_paths()
    assert is_whole(session)


# ----------------------------------------------------------------------------------------- failing operations


def rotten_training() -> Session:
    session = training(MemoryStore(), every=1, retention=Retention(last=2))
    saves(session, 2)
    rot(session.store, shared_blobs(newest(session))[0])
    session.train()
    return session


def left_by(nth: int, way: Failure) -> tuple[Session, DyingStore]:
    """The owner and its store after a save that finds damage and fails at its operation `nth`."""
    session = rotten_training()
    dying = DyingStore(session.store, nth, way)
    healthy, session.store = session.store, dying
    with suppress(Crash):
        session.save()
    session.store = healthy
    return session, dying


@pytest.mark.parametrize("way", list(Failure))
def test_a_save_that_finds_damage_may_fail_at_any_operation_in_any_way(
    way: Failure, record_property: Callable[[str, object], None]
) -> None:
    _, whole = left_by(0, way)
    for nth in range(1, whole.total + 1):
        session, _ = left_by(nth, way)
        acknowledged = session.witness.acknowledged[-1]
        after = Session(session.store, session.witness, owner="next", retention=Retention(last=2), reverify_every=1)
        after.open()
        after.start()
        found = newest_checkpoint_key(KEY, after.trial)
        assert found is None or is_whole(after), (nth, way)
        if acknowledged[0] == 4:  # the new checkpoint, which is undamaged
            assert found
            assert (found.step, found.sequence) == acknowledged
        saves(after, 2)
        assert is_whole(after), (nth, way)
    record_property(f"figure: points of a save that finds damage, {way.name.lower()}", whole.total)
