"""Pruning trials that ended in the experiment's journal only, and checkpoints that ended clones kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal_events import Finished
from prefect_tune.core.operations.trial_gc import Collected, collect_from, look_for_garbage, look_for_prunable, prune
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import Buffer, ObjectStore
from tests.core.operations.test_trial_gc import (
    CLONE,
    KEEPS,
    SOURCE,
    Before,
    ended,
    given_up,
    given_up_only_there,
    not_resumed,
    reopened,
    training,
)
from tests.core.protocol.meetings import clones, with_a_clone_that_is_over
from tests.core.protocol.population import newest, promises_broken
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")


@pytest.mark.parametrize("before", [ended, given_up, not_resumed])
def test_a_trial_that_has_ended_in_whichever_journal_is_pruned_and_cleared_as_a_look_says(before: Before) -> None:
    scene = before(SOURCE, CLONE)
    key, known, stamp = scene.members["s"].key, given_up_only_there(scene), scene.chronicle.stamp
    strays = [path for path in scene.store.objects if "0000000009-" in path]
    seen = look_for_prunable(scene.store, key, KEEPS, side_by_side=map, known=known)
    assert len(seen) == 1
    assert prune(scene.store, key, KEEPS, stamp(), side_by_side=map, known=known) == list(seen)
    assert look_for_prunable(scene.store, key, KEEPS, side_by_side=map, known=known) == []
    looked = look_for_garbage(scene.store, key, side_by_side=map, known=known)
    assert (len(looked.checkpoints), looked.undecided_count) == (3, 0)
    assert collect_from(scene.store, key, stamp(), side_by_side=map, known=known) == looked
    assert not [path for path in strays if path in scene.store.objects]
    assert look_for_garbage(scene.store, key, side_by_side=map, known=known) == Collected("s")
    assert [each.step for each in reopened(scene).trial.checkpoints] == [3]
    assert promises_broken(scene.store, scene.chronicle, scene.journals) == []


def test_the_strays_of_a_trial_that_was_given_up_go_without_a_policy_too() -> None:
    scene = given_up(SOURCE, CLONE)
    key, known = scene.members["s"].key, given_up_only_there(scene)
    looked = look_for_garbage(scene.store, key, side_by_side=map, known=known)
    assert (9 in looked.checkpoints, looked.undecided_count) == (True, 0)
    assert collect_from(scene.store, key, scene.chronicle.stamp(), side_by_side=map, known=known) == looked
    assert [each.step for each in reopened(scene).trial.checkpoints] == [2, 3]


@pytest.mark.parametrize("how", ["runs", "was opened", "continues", "was opened meanwhile"])
def test_a_trial_that_somebody_may_have_is_not_pruned_whatever_the_experiment_knows(how: str) -> None:
    scene = (training if how == "runs" else given_up)(SOURCE, CLONE)
    member = scene.members["s"]
    key, known = member.key, given_up_only_there(scene)
    store: ObjectStore = scene.store
    if how == "was opened":
        reopened(scene)
    elif how == "continues":
        known = known.model_copy(update={"phase": Phase.PENDING})
    elif how == "was opened meanwhile":
        store = Hooked(scene.store, lambda: reopened(scene))
    entries = [path for path in scene.store.objects if "/journal/" in path]
    if how != "was opened meanwhile":
        assert look_for_prunable(store, key, KEEPS, side_by_side=map, known=known) == ()
    assert prune(store, key, KEEPS, scene.chronicle.stamp(), side_by_side=map, known=known) in ((), [])
    after = [path for path in scene.store.objects if "/journal/" in path]
    assert len(after) == len(entries) + (how == "was opened meanwhile") * 2
    assert len(scene.members["s"].trial.checkpoints) == (1 if how == "runs" else 2)


class Hooked(MemoryStore):
    """A store that calls a function before the first entry is written."""

    def __init__(self, was: MemoryStore, act: Callable[[], object]) -> None:
        super().__init__()
        self.objects = was.objects
        self._acts = [act]

    def create(self, path: str, data: Buffer) -> None:
        if self._acts:
            self._acts.pop()()
        super().create(path, data)


class DeletedAt(MemoryStore):
    """A store of which everything is deleted before the n-th look for an object."""

    def __init__(self, was: MemoryStore, nth: int) -> None:
        super().__init__(was.objects)
        self.looks_left = nth

    def size(self, path: str) -> int | None:
        self.looks_left -= 1
        if not self.looks_left:
            self.objects.clear()
        return super().size(path)


def test_an_experiment_that_is_deleted_meanwhile_is_not_pruned_and_that_is_no_error() -> None:
    scene = training(SOURCE, CLONE)
    member = scene.members["s"]
    member.retention = Retention()
    clones("d")(scene, scene.store)
    member.save()
    member.append([Finished(trial="s", reason="enough")])
    for nth in range(1, 5):
        store = DeletedAt(scene.store, nth)
        with suppress(StoreUnavailable):  # it cannot know that an entry which it has read is gone for good
            assert prune(store, member.key, KEEPS, scene.chronicle.stamp(), side_by_side=map) == ()


def test_what_was_kept_for_a_clone_that_is_over_is_deleted_as_a_look_says() -> None:
    scene = with_a_clone_that_is_over(SOURCE, CLONE)
    member = scene.members["s"]
    held = member.trial.claims
    assert held
    paths = [CheckpointKey(trial=member.key, step=each.step, sequence=each.sequence).manifest_path for each in held]
    assert [scene.store.size(path) is not None for path in paths] == [True]
    looked = look_for_garbage(scene.store, member.key, side_by_side=map)
    assert {each.step for each in held} <= set(looked.checkpoints)
    assert collect_from(scene.store, member.key, scene.chronicle.stamp(), side_by_side=map) == looked
    assert [scene.store.size(path) for path in paths] == [None]
    assert reopened(scene).trial.claims == ()


def test_what_a_clone_that_is_over_has_claimed_is_pruned_as_a_look_says() -> None:
    scene = training(SOURCE, CLONE)
    member, cloned = scene.members["s"], newest(scene.members["s"])
    member.retention = Retention()
    clones("d")(scene, scene.store)
    member.save()
    member.append([Finished(trial="s", reason="enough")])
    assert look_for_prunable(scene.store, member.key, KEEPS, side_by_side=map) == []
    assert prune(scene.store, member.key, KEEPS, scene.chronicle.stamp(), side_by_side=map) == ()
    reopened(scene, "d").start()
    scene.members["d"].save_only()
    assert look_for_prunable(scene.store, member.key, KEEPS, side_by_side=map) == [cloned.sequence]
    assert prune(scene.store, member.key, KEEPS, scene.chronicle.stamp(), side_by_side=map) == [cloned.sequence]
    assert promises_broken(scene.store, scene.chronicle, scene.journals) == []
