"""Objects that others deleted during a read are never reported as damage; damaged objects are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import pytest

from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, StoreRefused, Superseded
from prefect_tune.core.experiment.trial_transitions import newest_checkpoint_key
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.operations.delete_experiment import delete_generation
from prefect_tune.core.operations.scrub import inspect_live_checkpoint
from prefect_tune.core.operations.trial_gc import TrialGarbage, collect_trial_garbage
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.generations import end_generation
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import WriteStamp
from tests.core.documents.write_golden import golden_run
from tests.core.driver import KEY, NAME, Session, find_violations
from tests.core.operations.test_trial_gc import newest_key
from tests.core.protocol.exploring import Choice, everywhere, run_in_turns
from tests.core.protocol.meetings import Scene, plain_scene, save_act
from tests.core.protocol.owners import make_old_owner
from tests.core.protocol.population import SEARCH
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import WRITES, Crash, DyingStore, Failure
from tests.fakes.stores.memory_files import load_files
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")

STAMP = WriteStamp(write_id="removal", at="2026-11-23T08:00:00Z")
OPERATIONS = 40
"""More operations than the reader of any test here does."""


def switch_after(operations: int) -> Choice:
    """Run `operations` operations of the first process, then the whole second one, then the rest of the first."""
    remaining = [operations]

    def choose(running: Sequence[int], _state: object) -> int:
        remaining[0] -= 1
        return 0 if 0 in running and (remaining[0] >= 0 or 1 not in running) else 1

    return choose


def delete_until(
    store: MemoryStore, experiment: str, nth: int, failure: Failure, last: Sequence[CheckpointKey] = ()
) -> bool:
    """Delete the experiment, `last` at the end, and crash at write `nth`; return whether it crashed."""
    last_objects = {key.manifest_path: store.objects[key.manifest_path] for key in last}
    dying = DyingStore(store, nth, failure, only=WRITES)
    with suppress(Crash):
        delete_generation(dying, first_generation(experiment), Owner(name="remover", host="here", pid=1), STAMP)
    store.objects.update(last_objects)
    return dying.dead


def iter_interrupted_deletions(scene: Scene) -> Iterator[Scene]:
    """Yield the scene after each write at which the deletion of its experiment may crash."""
    for nth in itertools.count(1):
        for failure in (Failure.CRASH_AFTER, Failure.TORN):
            twin = scene.copy()
            if not delete_until(twin.store, SEARCH.experiment, nth, failure, twin.to_delete):
                return
            yield twin


def make_superseded_owner() -> Session:
    """Return an owner with a retired checkpoint to delete, whose other checkpoints a successor has deleted."""
    old = make_old_owner(3)
    successor = Session(old.store, old.witness, owner="successor", cleanup="none")
    successor.open()
    successor.start()
    for _ in range(3):
        successor.train()
        successor.save()
    return old


# ------------------------------------------------------------------------------------------------- owners


def test_an_owner_that_was_superseded_deletes_late_without_calling_what_its_successor_deleted_damaged() -> None:
    old = make_superseded_owner()
    old.delete_checkpoints(old.to_delete)
    last = Session(old.store, old.witness, owner="last")
    last.open()
    assert find_violations(old.store, old.witness, last.experiment) == []


def test_a_manifest_that_the_journal_needs_and_that_is_missing_is_damage_for_a_superseded_owner_too() -> None:
    old = make_superseded_owner()
    last = Session(old.store, old.witness, owner="last", cleanup="none")
    last.open()
    needed = newest_checkpoint_key(KEY, last.trial)
    assert needed
    del old.objects[needed.manifest_path]
    with pytest.raises(CheckpointCorrupt, match=needed.name):
        old.delete_checkpoints(old.to_delete)


def test_an_owner_whose_experiment_is_being_deleted_is_superseded_wherever_the_deletion_has_come_to() -> None:
    superseded = 0
    for nth in range(1, 12):
        old = make_old_owner(3)
        assert isinstance(old.store, MemoryStore)
        delete_until(old.store, NAME, nth, Failure.TORN, old.to_delete)
        try:
            old.delete_checkpoints(old.to_delete)
        except Superseded:
            superseded += 1
    assert superseded


def test_an_owner_whose_search_is_being_deleted_is_superseded_wherever_the_deletion_has_come_to() -> None:
    superseded = 0
    for scene in iter_interrupted_deletions(plain_scene()):
        try:
            scene.search.delete_checkpoints(scene.to_delete)
        except Superseded:
            superseded += 1
    assert superseded


# ------------------------------------------------------------------------------------------------- readers


def retire_at_each_operation(read: Callable[[Scene, ObjectStore], None]) -> Iterator[list[str]]:
    """Retire and delete all checkpoints of a trial between any two operations of a reader."""
    scene_before = plain_scene()
    for operations in range(OPERATIONS):
        scene = scene_before.copy()

        def owner(store: ObjectStore, scene: Scene = scene) -> None:
            save_act("s", times=3)(scene.with_store(store))

        yield run_in_turns(scene.store, [partial(read, scene), owner], switch_after(operations), everywhere)


@pytest.mark.parametrize("changes", [False, True], ids=["a look", "a collection"])
def test_what_an_owner_retires_while_its_garbage_is_looked_for_is_no_damage(*, changes: bool) -> None:
    garbage: list[TrialGarbage] = []

    def inspect(scene: Scene, store: ObjectStore) -> None:
        key, trial = scene.search.key("s"), load_experiment(store, SEARCH).trial("s")
        garbage.append(collect_trial_garbage(store, key, trial, dry_run=not changes))

    assert [errors for errors in retire_at_each_operation(inspect) if errors] == []
    assert {trial_garbage.damage for trial_garbage in garbage} == {None}


def test_a_checkpoint_that_is_retired_while_it_is_restored_is_whole_or_not_found() -> None:
    outcomes = set()

    def read(scene: Scene, store: ObjectStore) -> None:
        key = newest_key(scene)
        try:
            outcomes.add(load_files(store, read_manifest(store, key)) == scene.chronicle.saved[key.folder])
        except CheckpointNotFound:
            outcomes.add("not found")

    assert [errors for errors in retire_at_each_operation(read) if errors] == []
    assert outcomes == {True, "not found"}


def test_a_checkpoint_that_is_deleted_with_its_experiment_while_it_is_restored_is_not_found() -> None:
    scene_before = plain_scene()
    manifest = read_manifest(scene_before.store, newest_key(scene_before))
    for scene in iter_interrupted_deletions(scene_before):
        with suppress(CheckpointNotFound):
            load_files(scene.store, manifest)


def test_a_checkpoint_whose_blobs_a_deletion_has_deleted_before_its_manifest_is_not_found() -> None:
    store = golden_run()  # of a single training: the experiment's journal is the only one
    experiment = first_generation(NAME)
    trial = load_experiment(store, experiment).trial(KEY.trial)
    manifest = read_manifest(store, KEY.checkpoint_key(trial.checkpoints[-1]))
    end_generation(store, experiment, at="", by="remover")
    store.delete([item.path for folder in (experiment.entries_folder, KEY.blobs_folder) for item in store.list(folder)])
    with pytest.raises(CheckpointNotFound, match="its experiment is being deleted"):
        load_files(store, manifest)


def test_a_checkpoint_that_is_retired_while_it_is_inspected_is_not_damaged() -> None:
    damage: list[str | None] = []

    def inspect(scene: Scene, store: ObjectStore) -> None:
        damage.extend(inspection.damage for inspection in inspect_live_checkpoint(store, newest_key(scene)))

    assert [errors for errors in retire_at_each_operation(inspect) if errors] == []
    assert set(damage) == {None}


def test_an_altered_blob_of_a_live_checkpoint_is_damage() -> None:
    scene = plain_scene()
    manifest = read_manifest(scene.store, newest_key(scene))
    path = manifest.blob_path(0)
    scene.store.objects[path] = bytes(len(scene.store.objects[path]))
    with pytest.raises(CheckpointCorrupt, match="expected blake3"):
        load_files(scene.store, manifest)


def test_who_may_read_a_checkpoint_and_not_its_journal_is_told_what_is_wrong_with_it() -> None:
    class WithoutJournals(MemoryStore):
        def size(self, path: str) -> int | None:
            if "/journal/" in path:
                raise StoreRefused("AccessDenied")
            return super().size(path)

    scene = plain_scene()
    manifest = read_manifest(scene.store, newest_key(scene))
    store = WithoutJournals()
    store.objects = dict(scene.store.objects)
    del store.objects[manifest.blob_path(0)]
    with pytest.raises(CheckpointCorrupt, match="no such blob"):
        load_files(store, manifest)
