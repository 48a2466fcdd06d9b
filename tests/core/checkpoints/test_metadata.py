"""Numbered versions of metadata: no failed, late or concurrent write loses an acknowledged version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from prefect_tune.core.checkpoints import manifest
from prefect_tune.core.checkpoints.manifest import normalize_metadata, read_newest_metadata, update_metadata
from prefect_tune.core.errors import CommitUnknown, InvalidInput, StoreUnavailable
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.operations.trial_gc import delete_retired_objects
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.object_store import Buffer, ListedObject, ObjectStore
from tests.core.driver import KEY, Session, Witness
from tests.fakes.stores.dying_store import Crash, DyingStore, Failure
from tests.fakes.stores.memory_store import MemoryStore

FOLDER = "e/1/trials/t/checkpoints/1-1/metadata"


def add_key(
    store: ObjectStore, key: str, initial: Mapping[str, object] = {}, folder: str = FOLDER
) -> dict[str, object]:
    return update_metadata(store, folder, lambda metadata: {**metadata, key: 1}, initial=initial, write_id=key)


@pytest.mark.parametrize("failure", Failure)
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5, 6])
def test_an_update_that_dies_at_any_operation_is_there_or_not_and_the_next_one_loses_nothing(
    nth: int, failure: Failure
) -> None:
    store = MemoryStore()
    add_key(store, "first", {"zeroth": 1})
    acknowledged: dict[str, object] = {"zeroth": 1, "first": 1}
    try:
        acknowledged = add_key(DyingStore(store, nth, failure), "second")
    except (Crash, CommitUnknown, StoreUnavailable):
        assert read_newest_metadata(store, FOLDER) in (acknowledged, {**acknowledged, "second": 1})
    else:
        assert read_newest_metadata(store, FOLDER) == acknowledged == {"zeroth": 1, "first": 1, "second": 1}
    assert add_key(store, "third").items() >= {**acknowledged, "third": 1}.items()


def test_who_comes_second_changes_what_the_first_one_wrote() -> None:
    store = MemoryStore()
    other_writers = ["first", "second"]

    def change(metadata: Mapping[str, object]) -> Mapping[str, object]:
        if other_writers:
            add_key(store, other_writers.pop())
        return {**metadata, "mine": 1}

    update_metadata(store, FOLDER, change, initial={}, write_id="mine")
    assert read_newest_metadata(store, FOLDER) == {"first": 1, "second": 1, "mine": 1}


class _FirstCreateUnknown(MemoryStore):
    """A store whose first create has an unknown outcome, and arrives late or never."""

    def __init__(self, *, arrives: bool) -> None:
        super().__init__()
        self.arrives = arrives
        self.pending: dict[str, bytes] | None = None

    def create(self, path: str, data: Buffer) -> None:
        if self.pending is None:
            self.pending = {path: bytes(data)}
            raise CommitUnknown(path)
        super().create(path, data)

    def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
        if self.arrives and self.pending:
            self.objects |= self.pending
        return super().list(prefix, after=after)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_write_whose_outcome_was_unknown_is_made_once_whether_it_arrives_or_not(arrives: bool) -> None:
    store = _FirstCreateUnknown(arrives=arrives)
    assert add_key(store, "a") == {"a": 1}
    assert read_newest_metadata(store, FOLDER) == {"a": 1}
    assert len(store.objects) == 1


class _LaggingList(MemoryStore):
    """A store whose listing omits the newest object."""

    def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
        return super().list(prefix, after=after)[:-1]


def test_a_listing_that_lags_hides_no_version() -> None:
    store = _LaggingList()
    for name in ("a", "b", "c"):
        add_key(store, name)
    assert read_newest_metadata(store, FOLDER) == {"a": 1, "b": 1, "c": 1}


def test_nothing_said_is_none_and_not_an_empty_dict() -> None:
    assert read_newest_metadata(MemoryStore(), FOLDER) is None


def test_metadata_are_what_json_gives_back() -> None:
    assert normalize_metadata({"a": (1, 2), "b": {3: None}}) == {"a": [1, 2], "b": {"3": None}}
    loop: dict[str, object] = {}
    loop["loop"] = loop
    for unsaid in ({"a": float("inf")}, {"a": {1}}, loop, [("a", 1)]):
        with pytest.raises(InvalidInput, match="metadata"):
            normalize_metadata(unsaid)  # type: ignore[arg-type]  # invalid on purpose


@pytest.mark.usefixtures("tiny_blobs")
def test_what_was_said_of_a_retired_checkpoint_goes_with_it_and_of_a_live_one_stays() -> None:
    session = Session(MemoryStore(), Witness(), retention=Retention(last=2))
    session.open()
    session.start()
    for _ in range(3):
        session.train()
        session.to_delete = session.acknowledge(session.publish())
    (retired,) = session.to_delete
    live = [KEY.checkpoint_key(checkpoint) for checkpoint in session.trial.checkpoints]
    for key in (retired, *live):
        for name in ("a", "b"):
            add_key(session.store, name, folder=key.metadata_folder)
    delete_retired_objects(session.store, KEY, session.trial, session.to_delete)
    assert session.store.list(retired.folder) == []
    assert all(read_newest_metadata(session.store, key.metadata_folder) == {"a": 1, "b": 1} for key in live)


class NeverAnswers(MemoryStore):
    """A store whose creates have an unknown outcome and write nothing."""

    def create(self, path: str, data: Buffer) -> None:
        del data
        raise CommitUnknown(f"{path}: no answer")


def test_a_target_that_never_answers_is_said_not_to() -> None:
    with pytest.raises(CommitUnknown):
        update_metadata(NeverAnswers(), FOLDER, dict, initial={}, write_id="w")


class AlwaysTaken(MemoryStore):
    """A store on which another writer is always first."""

    def create(self, path: str, data: Buffer) -> None:
        if path not in self.objects:
            super().create(path, seal(manifest._MetadataVersion(write_id=f"theirs {path}", metadata={})))
        super().create(path, data)


def test_a_change_that_always_comes_second_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_MAX_TRIES", 5)
    with pytest.raises(StoreUnavailable, match="5 other writers were faster"):
        update_metadata(AlwaysTaken(), FOLDER, dict, initial={}, write_id="w")
