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

INTERVAL = 4


@pytest.fixture(params=["memory", "files", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryStore()
    elif request.param == "files":
        yield PosixStore(tmp_path)
    else:
        with S3Sink() as sink:
            remote = object_store(sink.endpoint)
            yield remote
            remote.close()


def start_session(store: ObjectStore, every: int = INTERVAL, retention: Retention | None = None) -> Session:
    """Start an attempt, and save one checkpoint."""
    session = Session(store, Witness(), retention=retention or Retention(), reverify_every=every)
    session.open()
    session.start()
    save_steps(session)
    return session


def save_steps(session: Session, times: int = 1) -> None:
    for _ in range(times):
        session.train()
        session.save()


def newest_manifest(session: Session) -> Manifest:
    key = newest_checkpoint_key(KEY, session.trial)
    assert key
    return read_manifest(session.store, key)


def is_newest_intact(session: Session) -> bool:
    """Return whether the newest checkpoint restores to the saved files."""
    manifest = newest_manifest(session)
    try:
        files = load_files(session.store, manifest)
    except CheckpointCorrupt:
        return False
    assert files in session.witness.saved[manifest.step, manifest.sequence]
    return True


def blob_paths_of(name: str, manifest: Manifest) -> Sequence[str]:
    (file,) = (file for file in manifest.files if file.path == name)
    return sorted({manifest.blob_path(chunk.blob) for chunk in file.chunks})


def backbone_blobs(manifest: Manifest) -> Sequence[str]:
    """Return the blobs of the file that never changes."""
    return blob_paths_of("backbone", manifest)


def corrupt(store: ObjectStore, path: str) -> None:
    """Alter every byte in place."""
    altered = bytes(byte ^ 1 for byte in bytes(store.read(path)))
    store.delete([path])  # a file store does not rewrite an existing file of the same size
    store.put(path, altered)


def list_quarantined(session: Session) -> list[int]:
    entries = read_entries(session.store, first_generation(NAME))
    return [event.sequence for entry in entries for event in entry.events if isinstance(event, CheckpointQuarantined)]


def test_each_blob_has_one_turn_in_so_many_and_each_turn_its_share() -> None:
    paths = [KEY.blob_path(f"{number:064x}", 7) for number in range(1600)]
    due = [[path for path in paths if Reverification(turn, 16).is_blob_due(path)] for turn in range(5, 21)]
    assert sorted(path for turn in due for path in turn) == sorted(paths)
    assert all(60 < len(turn) < 150 for turn in due)
    assert all(Reverification(turn, 1).is_blob_due(path) for path in paths[:9] for turn in range(3))


def test_a_reused_blob_that_rots_spoils_no_more_checkpoints_than_the_bound(store: ObjectStore) -> None:
    session = start_session(store)
    rotten = backbone_blobs(newest_manifest(session))
    for path in rotten:
        corrupt(store, path)
    first = session.trial.checkpoints
    whole = []
    for _ in range(INTERVAL):
        save_steps(session)
        whole.append(is_newest_intact(session))
    assert whole[-1]
    assert not set(rotten) & newest_manifest(session).blob_paths()
    save_steps(session, INTERVAL)
    assert is_newest_intact(session)
    assert {checkpoint.sequence for checkpoint in first} <= set(list_quarantined(session))
    assert all(load_files(store, read_manifest(store, KEY.checkpoint_key(ref))) for ref in session.trial.checkpoints)


def test_a_reused_blob_that_rots_spoils_every_later_checkpoint_where_none_is_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_lines(monkeypatch, Reverification.is_blob_due, {"return hashed": "return False and hashed"})
    session = start_session(MemoryStore())
    corrupt(session.store, backbone_blobs(newest_manifest(session))[0])
    for _ in range(3 * INTERVAL):
        save_steps(session)
        assert not is_newest_intact(session)


def test_whichever_blob_rots_and_whenever_the_newest_checkpoint_is_whole_in_time() -> None:
    for before in range(1, INTERVAL + 1):
        whole = start_session(MemoryStore())
        save_steps(whole, before)
        for path in newest_manifest(whole).blob_paths():
            session = start_session(MemoryStore())
            save_steps(session, before)
            corrupt(session.store, path)
            save_steps(session, INTERVAL)
            assert is_newest_intact(session), (before, path)


def test_damage_is_sent_again_to_a_new_path_and_nothing_that_was_published_is_rewritten(store: ObjectStore) -> None:
    session = start_session(store, every=1)
    rotten = backbone_blobs(newest_manifest(session))[0]
    corrupt(store, rotten)
    before = {listed.path: bytes(store.read(listed.path)) for listed in store.list(KEY.folder)}
    sequence = session.trial.next_sequence
    save_steps(session)
    assert {path: bytes(store.read(path)) for path in before} == before
    sent_again = newest_manifest(session).blob_paths() - before.keys()
    assert {blob_sequence(path) for path in sent_again} == {sequence}
    assert is_newest_intact(session)
    assert list_quarantined(session) == [sequence - 1]


def test_only_checkpoints_that_share_what_is_damaged_are_put_aside() -> None:
    session = start_session(MemoryStore(), every=1)
    first = session.trial.checkpoints[-1]
    save_steps(session)
    second = session.trial.checkpoints[-1]
    corrupt(session.store, blob_paths_of("cycle", newest_manifest(session))[0])  # steps 2 and 3 share it
    save_steps(session)
    assert is_newest_intact(session)
    assert list_quarantined(session) == [second.sequence]
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
    session = start_session(store, every=1)
    reused = set(backbone_blobs(newest_manifest(session)))
    store.error = error
    save_steps(session)
    store.error = None
    assert not reused & newest_manifest(session).blob_paths()
    assert is_newest_intact(session)
    assert list_quarantined(session) == []


def test_where_there_is_no_time_to_read_back_the_save_fails_as_any_that_is_late() -> None:
    store = Unreadable()
    session = start_session(store, every=1)
    store.error = DeadlineExceeded
    session.train()
    with pytest.raises(DeadlineExceeded):
        session.save()


def test_a_blob_of_an_earlier_try_of_the_same_save_is_reused_without_being_read() -> None:
    store = Unreadable()
    session = start_session(store, every=1)
    session.train()
    blobs = {listed.path for listed in store.list(KEY.blobs_folder)}
    with suppress(Crash):
        session.store = DyingStore(store, 1, Failure.CRASH_BEFORE, only=frozenset({"create"}))
        session.publish()
    sent = {listed.path for listed in store.list(KEY.blobs_folder)} - blobs
    assert sent
    session.store, store.bytes_in = store, 0
    session.save()
    assert sent <= newest_manifest(session).blob_paths()
    assert {listed.path for listed in store.list(KEY.blobs_folder)} == blobs | sent


def test_the_bytes_of_a_damaged_blob_are_not_taken_from_another_blob_that_was_not_read_back() -> None:
    store = MemoryStore()
    session = start_session(store, every=1)
    save_steps(session)
    damaged = backbone_blobs(newest_manifest(session))[0]
    corrupt(store, damaged)
    digest = damaged.rpartition("/")[2].partition("-")[0]
    leftover = KEY.blob_path(digest, session.experiment.entry_count - 1)
    store.put(leftover, bytes(store.read(damaged)))
    save_steps(session)
    assert leftover not in newest_manifest(session).blob_paths()
    assert is_newest_intact(session)


# ----------------------------------------------------------------------------------------- failing operations


def start_corrupted_session() -> Session:
    session = start_session(MemoryStore(), every=1, retention=Retention(last=2))
    save_steps(session, 2)
    corrupt(session.store, backbone_blobs(newest_manifest(session))[0])
    session.train()
    return session


def fail_save_at(nth: int, failure: Failure) -> tuple[Session, DyingStore]:
    """Return the owner and its store after a save that finds damage and fails at operation `nth`."""
    session = start_corrupted_session()
    dying = DyingStore(session.store, nth, failure)
    healthy, session.store = session.store, dying
    with suppress(Crash):
        session.save()
    session.store = healthy
    return session, dying


@pytest.mark.parametrize("failure", list(Failure))
def test_a_save_that_finds_damage_may_fail_at_any_operation_in_any_way(
    failure: Failure, record_property: Callable[[str, object], None]
) -> None:
    total = fail_save_at(0, failure)[1].total
    for nth in range(1, total + 1):
        session, _ = fail_save_at(nth, failure)
        acknowledged = session.witness.acknowledged[-1]
        after = Session(session.store, session.witness, owner="next", retention=Retention(last=2), reverify_every=1)
        after.open()
        after.start()
        key = newest_checkpoint_key(KEY, after.trial)
        assert key is None or is_newest_intact(after), (nth, failure)
        if acknowledged[0] == 4:  # the new checkpoint, which is undamaged
            assert key
            assert (key.step, key.sequence) == acknowledged
        save_steps(after, 2)
        assert is_newest_intact(after), (nth, failure)
    record_property(f"figure: points of a save that finds damage, {failure.name.lower()}", total)
