"""Targets without atomic create-if-absent: only the owner writes entries; operations without entries still work."""

from __future__ import annotations

import pytest

from prefect_tune.core.errors import StoreRefused
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.operations.delete_experiment import delete_generation
from prefect_tune.core.operations.scrub import inspect_checkpoints, quarantine_in_journal, reinstate_in_journal
from prefect_tune.core.operations.trial_gc import TrialGarbage, retire_unkept_checkpoints
from prefect_tune.core.values import WriteStamp
from tests.core.operations.test_fork_experiment import make_fork
from tests.core.operations.test_trial_gc import collect_garbage, final_scene, newest_key
from tests.core.protocol.meetings import Act, Scene
from tests.core.protocol.population import SEARCH
from tests.core.small_search import find_unreadable, make_search
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_store import MemoryStore, OneWriterStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")

STAMP = WriteStamp(write_id="guest", at="2026-11-21T09:00:00Z")
OWNER = Owner(name="newcomer", host="here", pid=2)


def _quarantine_newest(scene: Scene) -> None:
    quarantine_in_journal(scene.store, SEARCH, {newest_key(scene): "torn"}, STAMP)


def _reinstate_newest(scene: Scene) -> None:
    reinstate_in_journal(scene.store, SEARCH, [newest_key(scene)], STAMP)


def _prune(scene: Scene) -> None:
    retire_unkept_checkpoints(scene.store, SEARCH, Retention(last=1), STAMP)


NON_OWNER_WRITES = {"puts aside": _quarantine_newest, "releases": _reinstate_newest, "prunes": _prune}


@pytest.mark.parametrize("write", NON_OWNER_WRITES.values(), ids=NON_OWNER_WRITES)
def test_a_guest_is_refused_and_told_why_and_nothing_is_written(write: Act) -> None:
    scene = final_scene()
    if write is _reinstate_newest:
        _quarantine_newest(scene)
    store = OneWriterStore.holding(scene.store.objects)
    with pytest.raises(StoreRefused, match=r"experiment 'e'.*create-if-absent, found one without.*copy its files to"):
        write(scene.with_store(store))
    assert store.objects == scene.store.objects


def test_a_guest_who_has_nothing_to_say_is_not_refused() -> None:
    scene = final_scene()
    assert quarantine_in_journal(OneWriterStore.holding(scene.store.objects), SEARCH, {}, STAMP) == []


def test_a_fork_needs_no_second_writer_of_its_origin() -> None:
    store = OneWriterStore()
    make_search(store)
    before = dict(store.objects)
    fork = make_fork(store).experiment
    assert before.items() <= store.objects.items()
    assert find_unreadable(store, "new", fork.trials) == []


def test_a_search_runs_is_verified_and_deleted_without_any_guest() -> None:
    store = OneWriterStore()
    make_search(store)
    report = inspect_checkpoints(store, load_experiment(store, first_generation("old")))
    assert report.live
    assert (report.corrupt_checkpoints, report.unread_count) == ([], 0)
    delete_generation(store, first_generation("old"), OWNER, STAMP)
    assert list(store.objects) == ["old/generations/0000000002.json"]


def test_garbage_goes_as_far_as_no_entry_is_needed_and_it_is_said_why_the_rest_stays() -> None:
    scene = final_scene()
    store = OneWriterStore.holding(scene.store.objects)
    journals = {path for path in store.objects if "/journal/" in path}
    garbage_found = collect_garbage(store, STAMP, deletes=False)
    assert (garbage_found[0].checkpoints, garbage_found[0].undecided_count) == ((1,), 0)
    assert garbage_found[0].kept_reason
    assert "create-if-absent" in garbage_found[0].kept_reason
    assert collect_garbage(store, STAMP, deletes=True) == garbage_found
    assert len(store.objects) < len(scene.store.objects)
    assert {path for path in store.objects if "/journal/" in path} == journals
    remaining = collect_garbage(store, STAMP, deletes=False)[0]
    assert (remaining.checkpoints, remaining.orphan_count) == ((), 0)
    assert remaining.kept_reason


def test_on_a_copy_that_has_create_if_absent_the_rest_goes() -> None:
    store = OneWriterStore.holding(final_scene().store.objects)
    collect_garbage(store, STAMP, deletes=True)
    copy = MemoryStore(store.objects)
    collect_garbage(copy, STAMP, deletes=True)
    assert len(copy.objects) < len(store.objects)
    assert collect_garbage(copy, STAMP, deletes=False)[0] == TrialGarbage("s")
