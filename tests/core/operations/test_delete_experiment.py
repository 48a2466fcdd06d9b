"""Deleting an experiment leaves no objects, and nothing that other experiments need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from prefect_tune.core.errors import (
    InvalidInput,
    JournalCorrupt,
    ResumeFailed,
    StoreUnavailable,
    Superseded,
    TuneError,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import load, take_over
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.operations.delete_experiment import generation_to_delete, remove
from prefect_tune.core.operations.fork_experiment import Fork, begin_fork, fork, past_of
from prefect_tune.core.storage.generations import current_generation
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp
from tests.core.driver import retried
from tests.core.operations.test_fork_experiment import forked
from tests.core.protocol.population import Chronicle, Search
from tests.core.small_search import SmallSearch, own_state, search_of_three, unreadable
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import WRITES, Crash, DyingStore, Way
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")

OWNER = Owner(name="deleter", host="here", pid=3)


def removed(store: ObjectStore, experiment: str, write_id: str = "r") -> int:
    stamp = Stamp(write_id=write_id, at="2026-11-21T09:00:00Z")
    journal = generation_to_delete(store, experiment) or first_generation(experiment)
    return retried(lambda: remove(store, journal, OWNER, stamp, side_by_side=map))


def left(store: MemoryStore) -> set[str]:
    """All objects but the marker of each name's current generation."""
    names = {path.partition("/")[0] for path in store.objects}
    markers = {f"{name}/generations/{current_generation(store, name):010d}.json" for name in names}
    return store.objects.keys() - markers


def below(store: MemoryStore, folder: str) -> set[str]:
    return {path for path in left(store) if path.startswith(f"{folder}/")}


def begun_fork(store: MemoryStore) -> Callable[[], Fork]:
    """Open the experiment `new` as a fork, and return the act that makes it one."""
    past, stamp = past_of(store, first_generation("old"), None, side_by_side=map), Stamp(write_id="new", at="")
    into = begin_fork(store, first_generation("new"), past.origin, OWNER, stamp, side_by_side=map)
    return lambda: fork(store, past, into, stamp, side_by_side=map)


def world() -> MemoryStore:
    """A fork, and an origin that has since retired every checkpoint that the fork has."""
    store = MemoryStore()
    old = search_of_three(store)
    forked(store)
    for _ in range(3):
        old.step("b")
    return store


@pytest.mark.parametrize(("gone", "stays"), [("new", "old"), ("old", "new")])
def test_neither_a_fork_nor_its_origin_needs_the_other(gone: str, stays: str) -> None:
    store = world()
    before = {path: data for path, data in store.objects.items() if path.startswith(f"{stays}/")}
    assert removed(store, gone) > 0
    assert below(store, gone) == set()
    assert {path: data for path, data in store.objects.items() if path.startswith(f"{stays}/")} == before
    search = SmallSearch(store, stays)
    search.begin("b")
    search.step("b")
    assert unreadable(store, stays, search.state.trials) == []


def test_whoever_runs_it_writes_no_more_and_nobody_forks_it() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    with suppress(Crash):
        removed(DyingStore(store, 2, Way.CRASH_BEFORE, only=WRITES), "old")
    assert load(store, first_generation("old"), side_by_side=map).is_removed
    with pytest.raises(Superseded):
        old.add("d")
    with pytest.raises(InvalidInput, match="'old' is being deleted: there is nothing to fork"):
        past_of(store, first_generation("old"), None, side_by_side=map)
    other = SmallSearch(store, "other")
    origin = past_of(store, first_generation("other"), None, side_by_side=map).origin
    assert other.state.number
    with pytest.raises(InvalidInput, match="'old' is being deleted: use another name"):
        begin_fork(store, first_generation("old"), origin, OWNER, Stamp(write_id="w", at=""), side_by_side=map)


def test_what_is_not_there_is_deleted_already_and_what_cannot_be_read_stays() -> None:
    store = MemoryStore()
    assert removed(store, "old") == 0
    search_of_three(store)
    del store.objects["old/1/journal/0000000003.json"]
    before = dict(store.objects)
    with pytest.raises(JournalCorrupt):
        removed(store, "old")
    assert store.objects == before


class Meanwhile:
    """A store that calls `act` once, before the first operation for which `is_it` is true."""

    def __init__(self, inner: ObjectStore, is_it: Callable[[str, str], bool], act: Callable[[], object]) -> None:
        self.inner = inner
        self._is_it = is_it
        self._acts = [act]

    def __getattr__(self, method: str) -> object:
        do = getattr(self.inner, method)

        def call(first: str | Sequence[str], *args: object, **options: object) -> object:
            if self._acts and self._is_it(method, str(first)):
                self._acts.pop()()
            return do(first, *args, **options)

        return call


def at_its_first_deletion(method: str, path: str) -> bool:
    del path
    return method == "delete"


def test_a_fork_of_what_is_deleted_meanwhile_says_so_and_is_not_made() -> None:
    def is_a_copy(method: str, path: str) -> bool:
        del path
        return method == "copy"

    store = MemoryStore()
    search_of_three(store)
    with pytest.raises(InvalidInput, match="'old' is being deleted: 'new' is no fork of it; delete 'new', too"):
        forked(Meanwhile(store, is_a_copy, lambda: removed(store, "old")))
    assert not load(store, first_generation("new"), side_by_side=map).is_whole
    removed(store, "new", "n")
    assert left(store) == set()


@pytest.mark.parametrize("cut", [True, False])
def test_what_a_deletion_was_faster_than_is_no_fork(cut: bool) -> None:
    store = MemoryStore()
    search_of_three(store)
    make = begun_fork(store)
    with suppress(Crash):
        removed(DyingStore(store, 1 if cut else 0, Way.CRASH_BEFORE, only=frozenset({"delete"})), "old")
    with pytest.raises(InvalidInput, match="'old' is being deleted: 'new' is no fork of it"):
        make()


def test_a_fork_that_has_copied_all_is_made_though_its_origin_is_deleted_by_then() -> None:
    def is_last_entry(method: str, path: str) -> bool:
        return (method, path) == ("create", first_generation("new").entry_path(2))

    store = MemoryStore()
    search_of_three(store)
    made = forked(Meanwhile(store, is_last_entry, lambda: removed(store, "old")))
    assert below(store, "old") == set()
    assert made.lost == {}
    assert unreadable(store, "new", made.experiment.trials) == []


def open_again(old: SmallSearch, known: Experiment) -> None:
    take_over(old.store, first_generation("old"), OWNER, Stamp(write_id="retry", at=""), side_by_side=map, known=known)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda old, _: old.step("b"), Superseded, "deleter"),
        (lambda old, _: old.begin("c"), Superseded, "deleter"),
        (open_again, ResumeFailed, "experiment 'old' is being deleted by deleter"),
    ],
    ids=["a trial saves", "a trial begins", "a retry that has read it opens it"],
)
def test_an_act_on_it_while_it_is_deleted_is_refused_and_leaves_nothing(
    act: Callable[[SmallSearch, Experiment], None], error: type[TuneError], message: str
) -> None:
    store = MemoryStore()
    old = search_of_three(store)
    known = load(store, first_generation("old"), side_by_side=map)

    def meanwhile() -> None:
        with pytest.raises(error, match=message):
            act(old, known)

    removed(Meanwhile(store, at_its_first_deletion, meanwhile), "old")
    assert left(store) == set()
    assert search_of_three(store).state.trial("b").step == 3


def test_an_attempt_elsewhere_learns_of_the_deletion_at_its_next_post_and_leaves_none() -> None:
    store = MemoryStore()
    search = Search(store, Chronicle())
    search.open()
    search.add("s")
    attempt = search.launch("s")
    attempt.begin_there()
    removed(store, "e")
    with pytest.raises(Superseded, match="was deleted at 2026-11-21T09:00:00Z by deleter"):
        attempt.save_there()
    assert [path for path in left(store) if "/outbox/" in path] == []
    removed(store, "e", "again")
    assert left(store) == set()


def test_an_entry_that_arrives_when_all_is_deleted_is_deleted_by_the_next() -> None:
    store = MemoryStore()
    search_of_three(store)
    journal = first_generation("old")
    late = journal.entry_path(2)
    data = store.objects[late]
    removed(store, "old")
    store.objects[late] = data
    with pytest.raises(Superseded, match="was deleted at 2026-11-21T09:00:00Z by deleter"):
        load(store, journal, side_by_side=map)
    assert removed(store, "old", "again") == 1
    assert left(store) == set()


def test_a_name_that_is_taken_again_while_the_last_of_it_is_deleted_is_left_to_whoever_has_it() -> None:
    store = MemoryStore()
    search_of_three(store)
    removed(Meanwhile(store, at_its_first_deletion, lambda: search_of_three(store)), "old")
    assert unreadable(store, "old", {"b": own_state(store, "old", "b")}) == []
    assert {path.split("/")[1] for path in below(store, "old")} == {"2"}


def test_what_is_written_again_and_again_is_not_deleted_for_ever() -> None:
    class Haunted(MemoryStore):
        def delete(self, paths: Sequence[str]) -> None:
            super().delete(paths)
            self.objects["old/1/trials/b/blobs/late"] = b"late"

    store = Haunted()
    search_of_three(store)
    with pytest.raises(StoreUnavailable, match="new objects appeared"):
        removed(store, "old")


@pytest.mark.parametrize("way", [Way.CRASH_AFTER, Way.TORN, Way.REPLY_LOST])
def test_a_deletion_of_a_search_that_dies_at_any_write_is_finished_by_the_next(way: Way) -> None:
    for nth in range(1, 100):
        store = MemoryStore()
        search_of_three(store)
        dying = DyingStore(store, nth, way, only=WRITES)
        with suppress(Crash):
            removed(dying, "old")
        removed(store, "old", "again")
        assert left(store) == set()
        if dying.failed_at is None:
            assert nth > 4
            return
