"""Targets without atomic create-if-absent: only the owner writes entries; operations without entries still work."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefect_tune.core.errors import StoreRefused
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.journal.journal import load
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.operations.clone import clone
from prefect_tune.core.operations.delete_experiment import remove
from prefect_tune.core.operations.fork_experiment import begin_fork, past_of
from prefect_tune.core.operations.scrub import EVERYTHING, ScrubLimits, inspect, quarantine, reinstate
from prefect_tune.core.operations.trial_gc import Collected, collect_from, look_for_garbage, prune
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp
from tests.core.operations.test_trial_gc import CLONE, SOURCE, ended
from tests.core.protocol.meetings import Scene
from tests.core.protocol.population import newest
from tests.core.small_search import search_of_three
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_store import MemoryStore, OneWriterStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")

STAMP = Stamp(write_id="guest", at="2026-11-21T09:00:00Z")
OWNER = Owner(name="newcomer", host="here", pid=2)


def _puts_aside(scene: Scene, store: ObjectStore) -> None:
    member = scene.members["s"]
    quarantine(store, member.key, {newest(member): "torn"}, STAMP, side_by_side=map)


def _releases(scene: Scene, store: ObjectStore) -> None:
    member = scene.members["s"]
    reinstate(store, member.key, [newest(member)], STAMP, side_by_side=map)


def _prunes(scene: Scene, store: ObjectStore) -> None:
    prune(store, scene.members["s"].key, Retention(last=1), STAMP, side_by_side=map)


def _clones(scene: Scene, store: ObjectStore) -> None:
    clone(store, newest(scene.members["s"]), scene.members["c"].experiment, "c", STAMP, side_by_side=map)


GUESTS = {"puts aside": _puts_aside, "releases": _releases, "prunes": _prunes, "clones": _clones}


@pytest.mark.parametrize("guest", GUESTS.values(), ids=GUESTS)
def test_a_guest_is_refused_and_told_why_and_nothing_is_written(guest: Callable[[Scene, ObjectStore], None]) -> None:
    scene = ended(SOURCE, CLONE)
    if guest is _releases:
        _puts_aside(scene, scene.store)
    store = OneWriterStore.holding(scene.store.objects)
    with pytest.raises(StoreRefused, match=r"'s' of experiment 'e'.*create-if-absent, found one without.*copy it to"):
        guest(scene, store)
    assert store.objects == scene.store.objects


def test_a_guest_who_has_nothing_to_say_is_not_refused() -> None:
    scene = ended(SOURCE, CLONE)
    member, store = scene.members["s"], OneWriterStore.holding(scene.store.objects)
    assert quarantine(store, member.key, {}, STAMP, side_by_side=map) == []


def test_a_fork_is_refused_before_anything_of_it_is_there() -> None:
    store = OneWriterStore()
    search_of_three(store)
    before = dict(store.objects)
    past = past_of(store, first_generation("old"), None, side_by_side=map)
    with pytest.raises(StoreRefused, match="'old'"):
        begin_fork(store, first_generation("new"), past.origin, OWNER, STAMP, side_by_side=map)
    assert store.objects == before


def test_a_search_runs_is_verified_and_deleted_without_any_guest() -> None:
    store = OneWriterStore()
    search_of_three(store)
    found = inspect(
        store, load(store, first_generation("old"), side_by_side=map), EVERYTHING, ScrubLimits(), side_by_side=map
    )
    assert found.live
    assert (found.damaged, found.unread_count) == ([], 0)
    remove(store, first_generation("old"), OWNER, STAMP, side_by_side=map)
    assert list(store.objects) == ["old/generations/0000000002.json"]


def test_garbage_goes_as_far_as_no_entry_is_needed_and_it_is_said_why_the_rest_stays() -> None:
    scene = ended(SOURCE, CLONE)
    key = scene.members["s"].key
    store = OneWriterStore.holding(scene.store.objects)
    journals = {path for path in store.objects if "/journal/" in path}
    seen = look_for_garbage(store, key, side_by_side=map)
    assert (seen.checkpoints, seen.undecided_count) == ((1,), 0)
    assert seen.kept
    assert "create-if-absent" in seen.kept
    assert collect_from(store, key, STAMP, side_by_side=map) == seen
    assert len(store.objects) < len(scene.store.objects)
    assert {path for path in store.objects if "/journal/" in path} == journals
    left = look_for_garbage(store, key, side_by_side=map)
    assert (left.checkpoints, left.orphan_count) == ((), 0)
    assert left.kept


def test_on_a_copy_that_has_create_if_absent_the_rest_goes() -> None:
    scene = ended(SOURCE, CLONE)
    key = scene.members["s"].key
    store = OneWriterStore.holding(scene.store.objects)
    collect_from(store, key, STAMP, side_by_side=map)
    copy = MemoryStore()
    copy.objects.update(store.objects)
    collect_from(copy, key, STAMP, side_by_side=map)
    assert len(copy.objects) < len(store.objects)
    assert look_for_garbage(copy, key, side_by_side=map) == Collected("s")
