"""Deleting an experiment leaves no objects, and nothing others need, also while they run, open, fork or delete it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Self, TypeVar

import pytest

from prefect_tune.core.errors import InvalidInput, JournalCorrupt, ResumeFailed, StoreUnavailable, Superseded, TuneError
from prefect_tune.core.journal.journal import acquire_ownership, load_experiment
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.operations import fork_experiment as forking
from prefect_tune.core.operations.delete_experiment import delete_generation, find_generation_to_delete
from prefect_tune.core.operations.fork_experiment import ForkResult, begin_fork, complete_fork, load_fork_point
from prefect_tune.core.storage.generations import find_current_generation, find_current_journal
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import WriteStamp
from tests.core.driver import retried
from tests.core.operations.test_fork_experiment import forked
from tests.core.protocol.exploring import Act, Explored, IsPoint, Verdicts, everywhere, explore, meet, meet_at_random
from tests.core.protocol.mutate import Mutant
from tests.core.protocol.population import Chronicle, Search
from tests.core.small_search import SmallSearch, own_state, search_of_three, unreadable
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import WRITES, Crash, DyingStore, Failure
from tests.fakes.stores.memory_store import MemoryStore, StoreWrapper
from tests.long_cases import deep_count, long_after

pytestmark = pytest.mark.usefixtures("tiny_blobs", "decoded_once")

OWNER = Owner(name="deleter", host="here", pid=3)
_T = TypeVar("_T")


def removed(store: ObjectStore, experiment: str, write_id: str = "r") -> int:
    stamp = WriteStamp(write_id=write_id, at="2026-11-21T09:00:00Z")
    journal = find_generation_to_delete(store, experiment) or first_generation(experiment)
    return retried(lambda: delete_generation(store, journal, OWNER, stamp))


def left(store: MemoryStore) -> set[str]:
    """All objects but the marker of each name's current generation."""
    names = {path.partition("/")[0] for path in store.objects}
    markers = {f"{name}/generations/{find_current_generation(store, name):010d}.json" for name in names}
    return store.objects.keys() - markers


def below(store: MemoryStore, folder: str) -> set[str]:
    return {path for path in left(store) if path.startswith(f"{folder}/")}


def begun_fork(store: MemoryStore) -> Callable[[], ForkResult]:
    """Open the experiment `new` as a fork, and return the act that makes it one."""
    past, stamp = load_fork_point(store, first_generation("old"), None), WriteStamp(write_id="new", at="")
    into = begin_fork(store, first_generation("new"), past.origin, OWNER, stamp)
    return lambda: complete_fork(store, past, into, stamp)


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
        removed(DyingStore(store, 2, Failure.CRASH_BEFORE, only=WRITES), "old")
    assert load_experiment(store, first_generation("old")).is_being_deleted
    with pytest.raises(Superseded):
        old.add("d")
    with pytest.raises(InvalidInput, match="'old' is being deleted: there is nothing to fork"):
        load_fork_point(store, first_generation("old"), None)
    other = SmallSearch(store, "other")
    origin = load_fork_point(store, first_generation("other"), None).origin
    assert other.state.entry_count
    with pytest.raises(InvalidInput, match="'old' is being deleted: use another name"):
        begin_fork(store, first_generation("old"), origin, OWNER, WriteStamp(write_id="w", at=""))


def test_what_is_not_there_is_deleted_already_and_what_cannot_be_read_stays() -> None:
    store = MemoryStore()
    assert removed(store, "old") == 0
    search_of_three(store)
    del store.objects["old/1/journal/0000000003.json"]
    before = dict(store.objects)
    with pytest.raises(JournalCorrupt):
        removed(store, "old")
    assert store.objects == before


class Meanwhile(StoreWrapper):
    """A store that calls `act` once, before the first operation for which `is_it` is true."""

    def __init__(self, inner: ObjectStore, is_it: Callable[[str, str], bool], act: Callable[[], object]) -> None:
        super().__init__(inner)
        self._is_it = is_it
        self._acts = [act]

    def intercept(self, method: str, path: str, operation: Callable[[], _T]) -> _T:
        if self._acts and self._is_it(method, path):
            self._acts.pop()()
        return operation()


def at_its_first_deletion(method: str, path: str) -> bool:
    del path
    return method == "delete"


def test_a_fork_of_what_is_deleted_meanwhile_says_so_and_is_not_made() -> None:
    def is_a_copy(method: str, path: str) -> bool:
        del path
        return method == "copy"

    store = MemoryStore()
    search_of_three(store)
    with pytest.raises(InvalidInput, match="'old' is being deleted: the fork 'new' cannot be completed; delete it"):
        forked(Meanwhile(store, is_a_copy, lambda: removed(store, "old")))
    assert not load_experiment(store, first_generation("new")).is_complete
    removed(store, "new", "n")
    assert left(store) == set()


@pytest.mark.parametrize("cut", [True, False])
def test_what_a_deletion_was_faster_than_is_no_fork(cut: bool) -> None:
    store = MemoryStore()
    search_of_three(store)
    make = begun_fork(store)
    with suppress(Crash):
        removed(DyingStore(store, 1 if cut else 0, Failure.CRASH_BEFORE, only=frozenset({"delete"})), "old")
    with pytest.raises(InvalidInput, match="'old' is being deleted: the fork 'new' cannot be completed"):
        make()


def test_a_fork_that_has_copied_all_is_made_though_its_origin_is_deleted_by_then() -> None:
    def is_last_entry(method: str, path: str) -> bool:
        return (method, path) == ("create", first_generation("new").entry_path(2))

    store = MemoryStore()
    search_of_three(store)
    made = forked(Meanwhile(store, is_last_entry, lambda: removed(store, "old")))
    assert below(store, "old") == set()
    assert made.lost_checkpoints == {}
    assert unreadable(store, "new", made.experiment.trials) == []


def test_a_retry_that_has_read_it_does_not_open_it_while_it_is_deleted() -> None:
    store = MemoryStore()
    known = search_of_three(store).state

    def meanwhile() -> None:
        stamp = WriteStamp(write_id="retry", at="")
        with pytest.raises(ResumeFailed, match="experiment 'old' is being deleted by deleter"):
            acquire_ownership(store, known.key, OWNER, stamp, loaded=known)

    removed(Meanwhile(store, at_its_first_deletion, meanwhile), "old")
    assert left(store) == set()


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
        load_experiment(store, journal)
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


# Others that run, open, fork or delete it meanwhile: every order, with crashes.

Record = Callable[[str, object], None]


@dataclass
class Scene:
    """A search, optionally a fork of it, and the names of the acts that succeeded."""

    store: MemoryStore
    old: SmallSearch
    new: SmallSearch | None = None
    done: list[str] = field(default_factory=list)
    leaves_no_trace: bool = False
    """Whether no act creates a journal where the experiment is gone."""

    def again(self) -> Self:
        """Return a copy on a separate store."""
        return replace(self.on(MemoryStore(self.store.objects)), done=[])

    def on(self, store: ObjectStore) -> Self:
        twins = [search and search.on(store, search.chronicle) for search in (self.old, self.new)]
        return replace(self, store=store, old=twins[0], new=twins[1])  # type: ignore[arg-type]  # one before its store

    def broken(self, *, tidy: bool = True) -> list[str]:
        """Every existing experiment is undamaged, and each can be deleted, the fork first."""
        broken = [each for name in ("old", "new") for each in _of_experiment(self.store, name)]
        for name in ("old", "new") if self.leaves_no_trace else ():
            if f"removes {name}" in self.done:
                broken += [f"there is still {path}" for path in below(self.store, name) if "/journal/" in path]
        for name in ("new", "old"):
            try:
                removed(self.store, name, f"the last of {name}")
            except TuneError as error:
                broken.append(f"{name} cannot be deleted: {type(error).__name__}: {error}")
        return [*broken, *(f"left behind: {path}" for path in left(self.store) if tidy)]

    def outcome(self) -> Hashable:
        return frozenset(self.store.objects.items()), tuple(self.done), self.leaves_no_trace


def _of_experiment(store: MemoryStore, name: str) -> list[str]:
    """Check an experiment, unless it is missing, incomplete or being deleted."""
    try:
        found = load_experiment(store, find_current_journal(store, name))
    except TuneError:
        return []
    if not found.entry_count or found.is_being_deleted or not found.is_complete:
        return []
    return unreadable(store, name, found.trials)


# ---------------------------------------------------------------------------------------------- concurrent acts


def a_search() -> Scene:
    store = MemoryStore()
    return Scene(store, search_of_three(store))


def a_fork() -> Scene:
    """A fork whose origin has since retired every checkpoint that the fork has."""
    scene = a_search()
    forked(scene.store)
    for _ in range(3):
        scene.old.step("b")
    scene.new = SmallSearch(scene.store, "new")
    scene.new.begin("b")
    return scene


def a_fork_that_was_cut_short() -> Scene:
    """A fork that was killed when half of its manifests were published."""
    scene = a_search()
    with suppress(Crash):
        forked(DyingStore(scene.store, 4, Failure.CRASH_BEFORE, only=frozenset({"create"})))
    return scene


def acts(what: Callable[[Scene], object], name: str) -> Act[Scene]:
    """An act of one process; refusals and takeovers end it without an error."""

    def act(scene: Scene) -> None:
        with suppress(TuneError):
            what(scene)
            scene.done.append(name)

    return act


def opens_what_was_read(scene: Scene) -> None:
    """Read the journal, then open it with that knowledge, like a retry."""
    known = load_experiment(scene.store, first_generation("old"))
    owner, stamp = Owner(name="retry", host="here", pid=9), WriteStamp(write_id="retry", at="")
    acquire_ownership(scene.store, first_generation("old"), owner, stamp, loaded=known)


def forks(scene: Scene) -> None:
    assert forked(scene.store).lost_checkpoints == {}


def saves_in_the_fork(scene: Scene) -> None:
    assert scene.new is not None
    scene.new.step("b")


removes_old = acts(lambda scene: removed(scene.store, "old"), "removes old")
removes_new = acts(lambda scene: removed(scene.store, "new", "n"), "removes new")
old_saves = acts(lambda scene: scene.old.step("b"), "saves")
MEETINGS: Mapping[str, tuple[Callable[[], Scene], Act[Scene], Act[Scene]]] = {
    "its trial saves": (a_search, removes_old, old_saves),
    "its trial is begun": (a_search, removes_old, acts(lambda scene: scene.old.begin("c"), "begins")),
    "its trial is resumed": (a_search, removes_old, acts(lambda scene: scene.old.begin("b"), "resumes")),
    "it gets another trial": (a_search, removes_old, acts(lambda scene: scene.old.add("d"), "adds")),
    "it is opened": (a_search, removes_old, acts(opens_what_was_read, "opens")),
    "it is forked": (a_search, removes_old, acts(forks, "forks")),
    "it is deleted twice": (a_search, removes_old, acts(lambda scene: removed(scene.store, "old", "2"), "too")),
    "its fork is deleted": (a_fork, removes_old, removes_new),
    "its fork saves": (a_fork, removes_new, acts(saves_in_the_fork, "saves")),
    "its fork is made whole": (a_fork_that_was_cut_short, removes_new, acts(forks, "forks")),
    "its origin saves": (a_fork, removes_new, old_saves),
}
"""What happens to an experiment while it is deleted."""
WITHOUT_TRACE = {"its trial saves", "it gets another trial", "its fork saves"}
"""The acts that continue an existing journal, and so create none where the experiment is gone."""


@cache
def begun(before: Callable[[], Scene]) -> Scene:
    return before()


# ------------------------------------------------------------------------------------------------- interleavings


def at_writes(method: str, path: str) -> bool:
    del path
    return method in {"create", "put", "copy", "delete"}


def at_looks(method: str, path: str) -> bool:
    """Switch processes also between an owner's entry and its look for a deletion."""
    return method == "delete" or (method == "size" and "/journal/" in path)


def one_within_the_other(name: str, is_point: IsPoint, *, every: int = 1, enough: int | None = None) -> Explored:
    """Run each of the two completely before each point (or each `every`-th point) of the other, and after its end."""
    before, *both = MEETINGS[name]
    last_choice, verdicts = [0], Verdicts()

    def attempt(first: int, turns: int) -> list[str]:
        taken = last_choice[0] = 0

        def choose(running: Sequence[int], _state: object) -> int:
            nonlocal taken
            taken += 1
            last_choice[0] += len(running) > 1
            wanted = first if taken <= turns else 1 - first
            return wanted if wanted in running else running[0]

        scene = replace(begun(before).again(), leaves_no_trace=is_point is at_looks and name in WITHOUT_TRACE)
        return meet(scene, both, choose, is_point, verdicts)

    def tries() -> Iterator[tuple[str, Callable[[], list[str]]]]:
        for first in (0, 1):
            for turns in range(0, 10_000, every):
                yield f"{turns} of process {first}, then the other", partial(attempt, first, turns)
                if last_choice[0] <= turns:
                    break

    return explore(tries(), enough)


@pytest.mark.parametrize("name", long_after(4, MEETINGS))
def test_whatever_is_done_within_a_deletion_or_around_it_breaks_no_promise(name: str, record_property: Record) -> None:
    explored = one_within_the_other(name, at_writes, every=3)
    explored.require_kept(record_property, "orders of deletions and others")


@pytest.mark.parametrize("name", sorted(WITHOUT_TRACE))
def test_whoever_goes_on_after_something_leaves_nothing_where_it_was_deleted(
    name: str, record_property: Record
) -> None:
    one_within_the_other(name, at_looks).require_kept(record_property, "orders of deletions and others")


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MEETINGS)
def test_in_many_orders_they_break_no_promise(name: str, record_property: Record) -> None:
    before, *both = MEETINGS[name]
    explored = one_within_the_other(name, everywhere)
    explored.add(meet_at_random(begun(before), both, range(1000, 1000 + deep_count(300))))
    explored.require_kept(record_property, "orders of deletions and others")


# --------------------------------------------------------------------------------------------- mutants


def a_fork_is_harmed() -> Sequence[str]:
    return one_within_the_other("it is forked", at_writes, enough=1).broken


MUTANTS: Mapping[str, Mutant] = {
    "a fork does not ask whether its origin is deleted": Mutant(
        a_fork_is_harmed, {forking._load_origin: {"raise InvalidInput(": "return point.experiment; raise("}}
    ),
    "a blob that is gone counts as copied": Mutant(
        a_fork_is_harmed,
        {
            forking._copy_checkpoints: {
                "return path  # meanwhile its checkpoint was retired and deleted": "return None",
                "require_stored(store, folder, required)": "pass",
            }
        },
    ),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(name: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    MUTANTS[name].require_noticed(monkeypatch, record_property)
