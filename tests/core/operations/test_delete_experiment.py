"""Deleting an experiment leaves no objects, keeps what forks need, and releases its own claims."""

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
from prefect_tune.core.journal.journal import LoadedJournal, load, read, take_over
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.operations.clone import clone, newest_of, settle
from prefect_tune.core.operations.delete_experiment import generation_to_delete, remove
from prefect_tune.core.operations.fork_experiment import Fork, begin_fork, fork, past_of
from prefect_tune.core.storage.generations import current_generation
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp
from tests.core.driver import retried
from tests.core.operations.test_fork_experiment import forked
from tests.core.small_search import SmallSearch, own_state, search_of_three, unreadable
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import WRITES, Crash, DyingStore, Way
from tests.fakes.stores.memory_store import MemoryStore
from tests.long_cases import long_after

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


def cut_at_a_manifest(store: MemoryStore) -> None:
    """A fork dies after it claimed a checkpoint of trial b and before the manifest of its clone."""
    for nth in range(1, 100):
        twin = MemoryStore(store.objects)
        dying = DyingStore(twin, nth, Way.CRASH_BEFORE, only=frozenset({"create"}))
        with suppress(Crash):
            forked(dying)
        if dying.failed_at and "new/1/trials/b/" in dying.failed_at and "manifest" in dying.failed_at:
            store.objects.update(twin.objects)
            return
    raise AssertionError("it was not cut short")


def begun_fork(store: MemoryStore, name: str, origin: str = "old") -> Callable[[], Fork]:
    """Open the experiment `name` as a fork, and return the act that makes it one."""
    past, stamp = past_of(store, first_generation(origin), None, side_by_side=map), Stamp(write_id=name, at="")
    into = begin_fork(store, first_generation(name), past.origin, OWNER, stamp, side_by_side=map)
    return lambda: fork(store, past, into, stamp, side_by_side=map)


def world() -> MemoryStore:
    """A fork, and an origin that has since retired every checkpoint that the fork needs."""
    store = MemoryStore()
    old = search_of_three(store)
    forked(store)
    for _ in range(3):
        old.step("b")
    return store


def test_a_deleted_fork_lets_go_of_the_bytes_in_its_origin() -> None:
    store = world()
    assert len(own_state(store, "old", "b").claims) == 2
    before = load(store, first_generation("old"), side_by_side=map)
    assert removed(store, "new") > 0
    assert below(store, "new") == set()
    assert [own_state(store, "old", trial).claims for trial in ("a", "b")] == [(), ()]
    manifests = [path for path in below(store, "old/1/trials/b/checkpoints") if path.endswith("manifest.json")]
    assert len(manifests) == len(own_state(store, "old", "b").checkpoints) == 2
    assert load(store, first_generation("old"), side_by_side=map) == before
    assert unreadable(store, "old", {"b": own_state(store, "old", "b")}) == []


def test_what_a_fork_needs_is_not_deleted_before_the_fork() -> None:
    store = world()
    before = dict(store.objects)
    with pytest.raises(InvalidInput, match="holds the bytes of 4 checkpoints of 'new': delete these first"):
        removed(store, "old")
    assert store.objects == before
    removed(store, "new")
    removed(store, "old")
    assert left(store) == set()


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


def at_its_mark(method: str, path: str) -> bool:
    """The deletion has looked for claims, and is about to write its mark."""
    return method == "create" and path.startswith("old/1/journal/")


def at_its_first_deletion(method: str, path: str) -> bool:
    del path
    return method == "delete"


def test_a_fork_that_is_faster_keeps_its_bytes_and_its_origin_and_both_go_on() -> None:
    store = MemoryStore()
    search_of_three(store)
    with pytest.raises(InvalidInput, match="holds the bytes of 4 checkpoints of 'new'"):
        removed(Meanwhile(store, at_its_mark, lambda: forked(store)), "old")
    for name in ("old", "new"):
        found = load(store, first_generation(name), side_by_side=map)
        assert (found.is_whole, found.is_removed) == (True, False)
        assert unreadable(store, name, {"b": own_state(store, name, "b")}) == []
        search = SmallSearch(store, name)
        for trial in ("b", "c"):
            search.begin(trial)
            search.step(trial)
            search.absorb(trial)
    third = forked(store, name="third", write_id="third").experiment
    SmallSearch(store, "third").begin("b")
    assert third.trial("b").step == load(store, first_generation("old"), side_by_side=map).trial("b").step
    for name in ("third", "new", "old"):
        removed(store, name, name)
    assert left(store) == set()


def test_a_fork_that_is_slower_says_that_its_origin_was_deleted() -> None:
    store = MemoryStore()
    search_of_three(store)

    def is_first_claim(method: str, path: str) -> bool:
        return method == "create" and path.startswith("old/1/trials/")

    with pytest.raises(Superseded, match="'old': the experiment was deleted at 2026-11-21T09:00:00Z by deleter"):
        forked(Meanwhile(store, is_first_claim, lambda: removed(store, "old")))
    assert below(store, "old") == set()
    removed(store, "new", "n")
    assert left(store) == set()


def test_of_what_is_being_deleted_nothing_can_be_cloned() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    make = begun_fork(store, "new")
    with suppress(Crash):
        removed(DyingStore(store, 1, Way.CRASH_BEFORE, only=frozenset({"delete"})), "old")
    with pytest.raises(InvalidInput, match="'old' is being deleted: its checkpoints cannot be cloned"):
        make()
    with pytest.raises(Superseded):
        old.step("b")


def test_what_a_deletion_was_faster_than_is_no_fork() -> None:
    store = MemoryStore()
    search_of_three(store)
    make = begun_fork(store, "new")
    removed(store, "old")
    with pytest.raises(InvalidInput, match="'old' is being deleted: 'new' is no fork of it"):
        make()


def open_again(old: SmallSearch, known: LoadedJournal) -> None:
    take_over(old.store, first_generation("old"), OWNER, Stamp(write_id="retry", at=""), side_by_side=map, known=known)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda old, _: old.step("b"), Superseded, "deleter"),
        (lambda old, _: old.begin("c"), ResumeFailed, "trial 'c' of experiment 'old' is being deleted by deleter"),
        (open_again, ResumeFailed, "experiment 'old' is being deleted by deleter"),
    ],
    ids=["a trial saves", "a trial begins", "a retry that has read it opens it"],
)
def test_an_act_on_it_while_it_is_deleted_is_refused_and_leaves_nothing(
    act: Callable[[SmallSearch, LoadedJournal], None], error: type[TuneError], message: str
) -> None:
    store = MemoryStore()
    old = search_of_three(store)
    known = read(store, first_generation("old"), side_by_side=map)

    def meanwhile() -> None:
        with pytest.raises(error, match=message):
            act(old, known)

    removed(Meanwhile(store, at_its_first_deletion, meanwhile), "old")
    assert left(store) == set()
    assert search_of_three(store).state.trial("b").step == 2


@pytest.mark.parametrize("trial", [None, "b"])
def test_an_entry_that_arrives_when_all_is_deleted_is_deleted_by_the_next(trial: str | None) -> None:
    store = MemoryStore()
    search_of_three(store)
    journal = JournalKey(experiment="old", generation=1, trial=trial)
    late = journal.entry_path(2)
    data = store.objects[late]
    removed(store, "old")
    store.objects[late] = data
    with pytest.raises(Superseded, match="was deleted at 2026-11-21T09:00:00Z by deleter"):
        load(store, journal, side_by_side=map)
    assert removed(store, "old", "again") == 1
    assert left(store) == set()


def test_a_trial_that_cannot_be_read_and_holds_bytes_stays() -> None:
    store = MemoryStore()
    search_of_three(store)
    del store.objects["old/1/trials/b/journal/0000000003.json"]
    before = dict(store.objects)
    with pytest.raises(JournalCorrupt):
        removed(store, "old")
    assert store.objects == before


def test_what_its_own_trials_have_cloned_keeps_nothing_from_being_deleted() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    old.begin("c")
    newest = newest_of(store, old.key("b"), side_by_side=map)
    clone(store, newest, old.trials["c"], "c", Stamp(write_id="c", at=""), side_by_side=map)
    assert own_state(store, "old", "b").claims
    removed(store, "old")
    assert left(store) == set()


def test_a_deletion_that_was_given_up_and_then_damaged_is_not_taken_for_one_that_goes_on() -> None:
    store = MemoryStore()
    search_of_three(store)
    with suppress(InvalidInput):
        removed(Meanwhile(store, at_its_mark, lambda: forked(store)), "old")
    store.objects["old/1/trials/b/journal/0000000003.json"] = b"damaged"
    store.objects[max(below(store, "old/1/trials/a/journal"))] = b"damaged, too"
    before = dict(store.objects)
    for trial in ("a", "b"):
        with pytest.raises(JournalCorrupt):
            own_state(store, "old", trial)
    with pytest.raises(JournalCorrupt):
        removed(store, "old", "again")
    assert store.objects == before


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


def cut_short() -> MemoryStore:
    """A fork that was killed between a claim and its manifest."""
    store = MemoryStore()
    search_of_three(store)
    cut_at_a_manifest(store)
    assert own_state(store, "old", "b").claims
    return store


def test_a_fork_that_was_cut_short_lets_go_of_what_it_has_claimed() -> None:
    store = cut_short()
    with pytest.raises(InvalidInput, match="of 'new': delete these first"):
        removed(store, "old")
    removed(store, "new", "n")
    assert [own_state(store, "old", trial).claims for trial in ("a", "b")] == [(), ()]
    removed(store, "old", "o")
    assert left(store) == set()


def test_a_fork_with_a_damaged_manifest_lets_go_of_it_too() -> None:
    store = world()
    manifests = [path for path in below(store, "new") if path.endswith("manifest.json")]
    store.objects.update(dict.fromkeys(manifests, b"damaged"))
    removed(store, "new")
    manifests = [path for path in below(store, "old/1/trials/b/checkpoints") if path.endswith("manifest.json")]
    assert len(manifests) == len(own_state(store, "old", "b").checkpoints)
    removed(store, "old", "o")
    assert left(store) == set()


def test_a_fork_of_a_fork_lets_go_where_the_bytes_are() -> None:
    store = world()
    begun_fork(store, "third", origin="new")()
    for path in [path for path in below(store, "third") if path.endswith("manifest.json")]:
        del store.objects[path]
    removed(store, "third", "t")
    claims = [claim for trial in ("a", "b") for claim in own_state(store, "old", trial).claims]
    assert {claim.clone.trial.experiment for claim in claims} == {"new"}


def test_a_fork_of_what_cannot_be_read_is_deleted() -> None:
    store = world()
    del store.objects["old/1/journal/0000000002.json"]
    removed(store, "new")
    assert below(store, "new") == set()
    assert own_state(store, "old", "b").claims == ()


def test_damage_in_its_origin_keeps_no_fork_from_being_deleted() -> None:
    store = world()
    live = own_state(store, "old", "b").checkpoints[-1]
    key = CheckpointKey(
        trial=TrialKey(experiment="old", generation=1, trial="b"), step=live.step, sequence=live.sequence
    )
    store.objects[key.manifest_path] = b"damaged"
    removed(store, "new")
    assert below(store, "new") == set()
    assert own_state(store, "old", "b").claims == ()


def test_whoever_clears_away_in_a_trial_that_was_deleted_is_told_to_stop() -> None:
    store = world()
    new = SmallSearch(store, "new")
    new.begin("b")
    known = new.trials["b"].trial("b").checkpoints
    removed(store, "new")
    key = new.key("b")
    with pytest.raises(Superseded, match="has been deleted"):
        settle(
            store,
            key,
            (CheckpointKey(trial=key, step=each.step, sequence=each.sequence) for each in known),
            Stamp(write_id="s", at=""),
            side_by_side=map,
        )


def test_a_fork_whose_folder_somebody_deleted_by_hand_keeps_nothing_from_being_deleted() -> None:
    store = world()
    for path in below(store, "new"):
        del store.objects[path]
    assert own_state(store, "old", "b").claims
    removed(store, "old")
    assert left(store) == set()


def test_a_deletion_that_was_given_up_is_done_by_the_same_call_when_nobody_needs_it_any_more() -> None:
    """The first call died while it gave up the deletion, and the task retries."""
    store = MemoryStore()
    search_of_three(store)
    with suppress(InvalidInput):
        removed(Meanwhile(store, at_its_mark, lambda: forked(store)), "old")
    last = max(path for path in below(store, "old/1/journal"))
    del store.objects[last]  # the entry that gives up the deletion is missing
    removed(store, "new", "n")
    removed(store, "old")
    assert left(store) == set()


@pytest.mark.parametrize("way", long_after(1, [Way.CRASH_AFTER, Way.TORN, Way.REPLY_LOST]))
def test_a_deletion_that_dies_at_any_write_is_finished_by_the_next_and_nobody_goes_on_in_between(way: Way) -> None:
    begun = world().objects
    counting = DyingStore(world(), 0, only=WRITES)
    removed(counting, "new")
    for nth in range(1, counting.total + 1):
        store = MemoryStore(begun)
        with suppress(Crash):
            removed(DyingStore(store, nth, way, only=WRITES), "new")
        try:
            found = load(store, first_generation("new"), side_by_side=map)
            assert found.is_removed or not found.number or below(store, "new") == {p for p in begun if p[:4] == "new/"}
        except TuneError:
            pass
        removed(store, "new", "again")
        assert below(store, "new") == set()
        assert own_state(store, "old", "b").claims == ()
        assert unreadable(store, "old", {"b": own_state(store, "old", "b")}) == []


@pytest.mark.parametrize("way", long_after(1, [Way.CRASH_AFTER, Way.REPLY_LOST]))
def test_a_deletion_that_dies_while_it_is_given_up_is_given_up_by_the_next(way: Way) -> None:
    """A fork claimed a checkpoint between the deletion's look for claims and its mark."""
    for nth in range(1, 100):
        store = MemoryStore()
        old = search_of_three(store)
        dying = DyingStore(store, nth, way, only=WRITES)
        with suppress(Crash, InvalidInput):
            removed(Meanwhile(dying, at_its_mark, lambda store=store: forked(store)), "old")
        with pytest.raises(InvalidInput, match="of 'new': delete these first"):
            removed(store, "old", "again")
        assert unreadable(store, "new", load(store, first_generation("new"), side_by_side=map).trials) == []
        assert not load(store, first_generation("old"), side_by_side=map).is_removed
        old = SmallSearch(store, "old")
        old.begin("b")
        old.step("b")
        old.absorb("b")
        if dying.failed_at is None:
            assert nth > 5
            return


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
            assert nth > 5
            return
