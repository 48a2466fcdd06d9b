"""Deleting an experiment while others run, open, fork or delete it: every order, with crashes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Self

import pytest

from prefect_tune.core.errors import TuneError
from prefect_tune.core.journal.journal import load, take_over
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.operations import fork_experiment as forking
from prefect_tune.core.storage.generations import current_journal
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp
from tests.core.operations.test_delete_experiment import below, left, removed
from tests.core.operations.test_fork_experiment import forked
from tests.core.protocol.exploring import Act, Explored, IsPoint, everywhere, explore, meet, meet_at_random
from tests.core.protocol.mutate import Mutant
from tests.core.small_search import SmallSearch, search_of_three, unreadable
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import Crash, DyingStore, Way
from tests.fakes.stores.memory_store import MemoryStore
from tests.long_cases import long_after

pytestmark = pytest.mark.usefixtures("tiny_blobs")

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
        twins = [search and self._on(search, store) for search in (self.old, self.new)]
        return replace(self, store=store, old=twins[0], new=twins[1])  # type: ignore[arg-type]  # one before its store

    def _on(self, search: SmallSearch, store: ObjectStore) -> SmallSearch:
        twin = copy.copy(search)
        twin.store = store
        return twin

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


def _of_experiment(store: MemoryStore, name: str) -> list[str]:
    """Check an experiment, unless it is missing, incomplete or being deleted."""
    try:
        found = load(store, current_journal(store, name), side_by_side=map)
    except TuneError:
        return []
    if not found.number or found.is_removed or not found.is_whole:
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
        forked(DyingStore(scene.store, 4, Way.CRASH_BEFORE, only=frozenset({"create"})))
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
    known = load(scene.store, first_generation("old"), side_by_side=map)
    owner, stamp = Owner(name="retry", host="here", pid=9), Stamp(write_id="retry", at="")
    take_over(scene.store, first_generation("old"), owner, stamp, side_by_side=map, known=known)


def forks(scene: Scene) -> None:
    assert forked(scene.store).lost == {}


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
    last_choice = [0]

    def attempt(first: int, turns: int) -> list[str]:
        taken = last_choice[0] = 0

        def choose(running: Sequence[int], _state: object) -> int:
            nonlocal taken
            taken += 1
            last_choice[0] += len(running) > 1
            wanted = first if taken <= turns else 1 - first
            return wanted if wanted in running else running[0]

        scene = replace(begun(before).again(), leaves_no_trace=is_point is at_looks and name in WITHOUT_TRACE)
        return meet(scene, both, choose, is_point)

    def tries() -> Iterator[tuple[str, Callable[[], list[str]]]]:
        for first in (0, 1):
            for turns in range(0, 10_000, every):
                yield f"{turns} of process {first}, then the other", partial(attempt, first, turns)
                if last_choice[0] <= turns:
                    break

    return explore(tries(), enough)


def in_drawn_orders(name: str, seeds: Iterable[int]) -> Explored:
    before, *both = MEETINGS[name]
    return meet_at_random(begun(before), both, seeds)


@pytest.mark.parametrize("name", long_after(4, MEETINGS))
def test_whatever_is_done_within_a_deletion_or_around_it_breaks_no_promise(name: str, record_property: Record) -> None:
    explored = one_within_the_other(name, at_writes, every=3)
    explored.record(record_property, "orders of deletions and others")
    assert explored.broken == []


@pytest.mark.long
@pytest.mark.parametrize("name", MEETINGS)
def test_in_drawn_orders_of_everything_they_break_no_promise(name: str, record_property: Record) -> None:
    explored = in_drawn_orders(name, range(8))
    explored.record(record_property, "orders of deletions and others")
    assert explored.broken == []


@pytest.mark.parametrize("name", sorted(WITHOUT_TRACE))
def test_whoever_goes_on_after_something_leaves_nothing_where_it_was_deleted(
    name: str, record_property: Record
) -> None:
    explored = one_within_the_other(name, at_looks)
    explored.record(record_property, "orders of deletions and others")
    assert explored.broken == []


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MEETINGS)
def test_in_many_orders_they_break_no_promise(name: str, record_property: Record) -> None:
    explored = one_within_the_other(name, everywhere)
    explored.add(in_drawn_orders(name, range(1000, 1300)))
    explored.record(record_property, "orders of deletions and others")
    assert explored.broken == []


# --------------------------------------------------------------------------------------------- mutants


def a_fork_is_harmed() -> Sequence[str]:
    return one_within_the_other("it is forked", at_writes, enough=1).broken


MUTANTS: Mapping[str, Mutant] = {
    "a fork does not ask whether its origin is deleted": Mutant(
        a_fork_is_harmed, {forking._load_origin: {"raise InvalidInput(": "return past.experiment; raise InvalidInput("}}
    ),
    "a blob that is gone counts as copied": Mutant(
        a_fork_is_harmed,
        {
            forking._copy_checkpoints: {
                "return path  # its checkpoint was retired and deleted meanwhile": "return None",
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
