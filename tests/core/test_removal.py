"""A deleted experiment leaves nothing, takes nothing that others need, and lets go of what it needed."""

from __future__ import annotations

from contextlib import suppress

import pytest

from prefect_tune.core.errors import InvalidInput, JournalCorrupt, Superseded, TuneError
from prefect_tune.core.events import Owner
from prefect_tune.core.fork import begin_fork, past_of
from prefect_tune.core.journal import load
from prefect_tune.core.removal import remove
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.values import Stamp
from tests.core.driver import retried
from tests.core.small_search import SmallSearch, own_state, search_of_three, unreadable
from tests.core.test_fork import forked
from tests.fakes.dying_store import WRITES, Crash, DyingStore, Way
from tests.fakes.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")

OWNER = Owner(name="who deletes", host="here", pid=3)


def removed(store: ObjectStore, experiment: str, write_id: str = "r") -> int:
    stamp = Stamp(write_id=write_id, at="2026-11-21T09:00:00Z")
    return retried(lambda: remove(store, experiment, OWNER, stamp, side_by_side=map))


def below(store: MemoryStore, folder: str) -> set[str]:
    return {path for path in store.objects if path.startswith(f"{folder}/")}


def world() -> MemoryStore:
    """A fork, and an origin that has gone on and retired all that the fork needs of it."""
    store = MemoryStore()
    old = search_of_three(store)
    forked(store)
    for _ in range(3):
        old.step("b")
    return store


def test_a_deleted_fork_lets_go_of_the_bytes_in_its_origin() -> None:
    store = world()
    assert len(own_state(store, "old", "b").claims) == 2
    before = load(store, "old", side_by_side=map)
    assert removed(store, "new") > 0
    assert below(store, "new") == set()
    assert [own_state(store, "old", trial).claims for trial in ("a", "b")] == [(), ()]
    left = [path for path in below(store, "old/trials/b/checkpoints") if path.endswith("manifest.json")]
    assert len(left) == len(own_state(store, "old", "b").checkpoints) == 2
    assert load(store, "old", side_by_side=map) == before
    assert unreadable(store, "old", {"b": own_state(store, "old", "b")}) == []


def test_what_a_fork_needs_is_not_deleted_before_the_fork() -> None:
    store = world()
    before = dict(store.objects)
    with pytest.raises(InvalidInput, match="holds the bytes of 4 checkpoints of 'new': delete these first"):
        removed(store, "old")
    assert store.objects == before
    removed(store, "new")
    removed(store, "old")
    assert store.objects == {}


def test_whoever_runs_it_writes_no_more_and_nobody_forks_it() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    with suppress(Crash):
        removed(DyingStore(store, 2, Way.CRASH_BEFORE, only=WRITES), "old")
    assert load(store, "old", side_by_side=map).is_removed
    with pytest.raises(Superseded):
        old.add("d")
    with pytest.raises(InvalidInput, match="'old' is being deleted: there is nothing to fork"):
        past_of(store, "old", None, side_by_side=map)
    other = SmallSearch(store, "other")
    origin = past_of(store, "other", None, side_by_side=map).origin
    assert other.state.number
    with pytest.raises(InvalidInput, match="'old' is being deleted: take another name"):
        begin_fork(store, "old", origin, OWNER, Stamp(write_id="w", at=""), side_by_side=map)


def test_what_is_not_there_is_deleted_already_and_what_cannot_be_read_stays() -> None:
    store = MemoryStore()
    assert removed(store, "old") == 0
    search_of_three(store)
    del store.objects["old/journal/0000000003.json"]
    before = dict(store.objects)
    with pytest.raises(JournalCorrupt):
        removed(store, "old")
    assert store.objects == before


@pytest.mark.parametrize("way", [Way.CRASH_AFTER, Way.TORN, Way.REPLY_LOST])
def test_a_deletion_that_dies_at_any_write_is_finished_by_the_next_and_nobody_goes_on_in_between(way: Way) -> None:
    begun = world().objects
    counting = DyingStore(world(), 0, only=WRITES)
    removed(counting, "new")
    for nth in range(1, counting.total + 1):
        store = MemoryStore()
        store.objects.update(begun)
        with suppress(Crash):
            removed(DyingStore(store, nth, way, only=WRITES), "new")
        try:
            found = load(store, "new", side_by_side=map)
            assert found.is_removed or not found.number or below(store, "new") == {p for p in begun if p[:4] == "new/"}
        except TuneError:
            pass
        removed(store, "new", "again")
        assert below(store, "new") == set()
        assert own_state(store, "old", "b").claims == ()
        assert unreadable(store, "old", {"b": own_state(store, "old", "b")}) == []
