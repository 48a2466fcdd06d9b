"""Collecting retired checkpoints, finding orphans, and adopting saves of an earlier owner."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from prefect_tune.core.errors import (
    AlreadyExists,
    CheckpointCorrupt,
    CommitUnknown,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TuneError,
    UnknownVersion,
)
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.journal import journal
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointQuarantined,
    CheckpointRef,
    CheckpointsAdopted,
    StepReported,
)
from prefect_tune.core.messages.target_messages import LastKnownReports
from prefect_tune.core.operations.trial_gc import delete_retired_objects, find_leftover_manifests, find_orphan_blobs
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.restore import make_adoption_events
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import create_idempotently
from prefect_tune.core.values import StepReport
from tests.core.driver import KEY, Session, Witness, find_violations
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")


def train_session(steps: int, retention: Retention | None = None) -> Session:
    """Return an owner after `steps` steps, each saved and none deleted."""
    session = Session(MemoryStore(), Witness(), retention=retention or Retention())
    session.open()
    session.start()
    for _ in range(steps):
        session.train()
        session.to_delete = session.acknowledge(session.publish())
    return session


# --------------------------------------------------------------------------------------------- collect


def test_what_live_checkpoints_share_with_a_retired_one_stays() -> None:
    session = train_session(3, Retention(last=2))
    (retired,) = session.to_delete
    before = set(session.objects)

    deleted = delete_retired_objects(session.store, KEY, session.trial, session.to_delete)

    removed = before - set(session.objects)
    assert retired.manifest_path in removed
    assert len(removed) == deleted == 3  # the blobs of cycle and head, and the manifest; the backbone stays
    session.open()
    assert len(session.trial.checkpoints) == 2


def test_deleting_twice_is_deleting_once() -> None:
    session = train_session(3, Retention(last=1))
    delete_retired_objects(session.store, KEY, session.trial, session.to_delete)
    remaining = dict(session.objects)
    assert delete_retired_objects(session.store, KEY, session.trial, session.to_delete) == 0
    assert session.objects == remaining


def test_a_live_checkpoint_is_never_deleted_whoever_asks() -> None:
    session = train_session(2)
    before = dict(session.objects)
    assert delete_retired_objects(session.store, KEY, session.trial, session.live_keys()) == 0
    assert session.objects == before


def test_nothing_is_deleted_that_no_retirement_protects_from_being_reused() -> None:
    session = train_session(1)
    session.train()
    session.publish()  # and never journaled
    stray = CheckpointKey(trial=KEY, step=2, sequence=session.trial.next_sequence)
    before = dict(session.objects)

    assert delete_retired_objects(session.store, KEY, session.trial, [stray]) == 0
    assert session.objects == before


@pytest.mark.parametrize("damage", [None, b"", b"{}"])
def test_with_a_live_manifest_unreadable_nothing_is_deleted_on_a_guess(damage: bytes | None) -> None:
    session = train_session(3, Retention(last=2))
    path = session.live_keys()[0].manifest_path
    if damage is None:
        del session.objects[path]
    else:
        session.objects[path] = damage
    before = dict(session.objects)

    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json"):
        delete_retired_objects(session.store, KEY, session.trial, session.to_delete)
    assert session.objects == before


def test_a_retired_manifest_that_is_damaged_goes_and_its_blobs_are_found_as_orphans() -> None:
    session = train_session(3, Retention(last=2))
    (retired,) = session.to_delete
    session.objects[retired.manifest_path] = b"torn"

    assert delete_retired_objects(session.store, KEY, session.trial, session.to_delete) == 1

    orphans = find_orphan_blobs(session.store, KEY, session.trial)
    assert len(orphans) == 2
    session.store.delete([blob.path for blob in orphans])
    assert find_orphan_blobs(session.store, KEY, session.trial) == []
    assert find_violations(session.store, session.witness, session.experiment) == []


def test_foreign_files_among_the_blobs_are_left_alone() -> None:
    session = train_session(3, Retention(last=2))
    session.objects[f"{KEY.blobs_folder}/README"] = b"mine"
    session.delete_checkpoints(session.to_delete)
    assert find_orphan_blobs(session.store, KEY, session.trial) == []
    assert session.objects[f"{KEY.blobs_folder}/README"] == b"mine"


def test_a_save_under_way_is_no_leftover_and_a_quarantined_checkpoint_is_kept_to_be_looked_at() -> None:
    session = train_session(2)
    session.append(
        [CheckpointQuarantined(trial=KEY.trial, sequence=session.trial.checkpoints[-1].sequence, reason="bad")]
    )
    session.train()
    session.publish()
    session.objects[f"{KEY.checkpoints_folder}/notes.txt"] = b"mine"

    assert find_leftover_manifests(session.store, KEY, session.trial) == []
    session.open()
    assert find_leftover_manifests(session.store, KEY, session.trial) == []


# ----------------------------------------------------------------------------------------------- adopt


def open_by_new_owner(session: Session) -> Session:
    """Return a new owner that has acquired the experiment but not adopted any save yet."""
    new = Session(session.store, session.witness, owner="new")
    stamp = new.witness.stamp()
    new.experiment = journal.acquire_ownership(session.store, first_generation("e"), new.make_owner(), stamp)
    return new


def test_a_manifest_without_an_entry_is_adopted_with_the_reports_it_carries() -> None:
    session = train_session(1)
    for _ in range(3):
        session.train()
    reports = list(session.pending)
    manifest = session.publish()
    new = open_by_new_owner(session)

    adopted, *rest = make_adoption_events(new.store, new.experiment)

    metadata = manifest.metadata
    assert adopted == CheckpointsAdopted(
        checkpoints={
            "t": (
                CheckpointRef(
                    step=4,
                    sequence=manifest.sequence,
                    metrics=metadata.metrics,
                    trained_seconds=metadata.trained_seconds,
                    size_bytes=manifest.size_bytes,
                ),
            )
        },
        last_known_steps={"t": 0},
    )
    assert rest[:-1] == [StepReported(trial="t", report=report) for report in reports]
    assert rest[-1] == AttemptEnded(trial="t", cause=Cause.MACHINE, reason=make_reason("owner-vanished"))


def test_reports_that_the_journal_has_are_not_told_again() -> None:
    session = train_session(1)
    session.train()
    session.train()
    session.append([StepReported(trial="t", report=session.pending[0])])
    session.publish()
    new = open_by_new_owner(session)
    reported = [
        event.report.step
        for event in make_adoption_events(new.store, new.experiment)
        if isinstance(event, StepReported)
    ]
    assert reported == [3]


def test_a_trial_that_is_not_running_is_not_even_looked_at() -> None:
    session = train_session(1)
    session.append([AttemptEnded(trial="t", cause=Cause.PREEMPTED, reason="")])
    new = open_by_new_owner(session)
    assert isinstance(new.store, MemoryStore)
    new.store.operations.clear()
    assert make_adoption_events(new.store, new.experiment) == [CheckpointsAdopted()]
    assert new.store.operations.total() == 0


@pytest.mark.parametrize("steps", [0, 2])
def test_without_anything_to_adopt_the_attempt_still_ends(steps: int) -> None:
    new = open_by_new_owner(train_session(steps))
    adopted, ended = make_adoption_events(
        new.store, new.experiment, last=LastKnownReports({"t": StepReport(step=7, metrics={})}, at="now")
    )
    assert adopted == CheckpointsAdopted(last_known_steps={"t": 7}, trained_seconds={"t": 0.0}, last_seen_at="now")
    assert isinstance(ended, AttemptEnded)


@pytest.mark.parametrize("data", [b"", b"torn", b"{}"])
def test_a_damaged_manifest_is_quarantined_and_the_one_before_it_adopted(data: bytes) -> None:
    session = train_session(1)
    session.train()
    good = session.publish()
    for step in (3, 4):  # the same sequence twice counts once
        damaged = CheckpointKey(trial=KEY, step=step, sequence=good.sequence + 1)
        session.objects[damaged.manifest_path] = data
    session.append([StepReported(trial="t", report=session.pending[0])])
    session.append([])
    new = open_by_new_owner(session)

    adopted, quarantined, ended = make_adoption_events(new.store, new.experiment)

    assert isinstance(adopted, CheckpointsAdopted)
    assert [ref.step for ref in adopted.checkpoints["t"]] == [2]
    assert isinstance(quarantined, CheckpointQuarantined)
    assert quarantined.sequence == good.sequence + 1
    assert isinstance(ended, AttemptEnded)
    new.append([adopted, quarantined, ended])
    assert [ref.step for ref in new.trial.checkpoints] == [1, 2]


def test_a_manifest_of_a_newer_version_stops_the_opening() -> None:
    session = train_session(0)
    session.train()
    session.publish()
    (path,) = (path for path in session.objects if path.endswith("manifest.json"))
    session.objects[path] = session.objects[path].replace(b'"version":3', b'"version":4')
    new = open_by_new_owner(session)
    with pytest.raises(UnknownVersion, match="upgrade"):
        make_adoption_events(new.store, new.experiment)


@pytest.mark.parametrize("error", [ObjectNotFound, StoreUnavailable])
def test_a_manifest_that_vanishes_is_not_there_and_one_that_cannot_be_read_stops_the_opening(
    error: type[Exception],
) -> None:
    session = train_session(0)
    session.train()
    session.publish()

    class Failing(MemoryStore):
        def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
            if path.endswith("manifest.json"):
                raise error(path)
            return super().read(path, offset=offset, length=length)

    new = open_by_new_owner(session)
    store = Failing()
    store.objects = session.objects
    if error is ObjectNotFound:
        assert [type(event) for event in make_adoption_events(store, new.experiment)] == [
            CheckpointsAdopted,
            AttemptEnded,
        ]
    else:
        with pytest.raises(StoreUnavailable):
            make_adoption_events(store, new.experiment)


# ---------------------------------------------------------------------------------------------- settle


@pytest.mark.parametrize("stored", [b"mine", b"yours", None])
def test_a_refused_create_is_ours_if_our_bytes_are_there(stored: bytes | None) -> None:
    class Refusing(MemoryStore):
        def create(self, path: str, data: object) -> None:
            del data
            raise AlreadyExists(path)

    store = Refusing()
    if stored is not None:
        store.objects["a"] = stored
    outcomes: Mapping[bytes | None, type[Exception]] = {b"yours": AlreadyExists, None: CommitUnknown}
    if expected := outcomes.get(stored):
        with pytest.raises(expected):
            create_idempotently(store, "a", b"mine")
    else:
        create_idempotently(store, "a", b"mine")


@pytest.mark.parametrize("error", [StoreUnavailable("503"), StoreRefused("ExpiredToken")])
def test_an_outcome_that_cannot_be_asked_for_stays_unknown(error: TuneError) -> None:
    class Gone(MemoryStore):
        def create(self, path: str, data: object) -> None:
            del data
            raise CommitUnknown(path)

        def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
            del path, offset, length
            raise error

    with pytest.raises(CommitUnknown, match="could not be read back"):
        create_idempotently(Gone(), "a", b"mine")
