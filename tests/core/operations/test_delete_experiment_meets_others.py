"""Deleting an experiment while others run, open, fork or delete it: every order, with crashes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

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
from tests.core.protocol.matrix import Explored
from tests.core.protocol.mutate import Mutant
from tests.core.protocol.turns import Choice, IsPoint, drawn, everywhere, in_turns
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

    def again(self) -> Scene:
        """Return a copy on a separate store."""
        store = MemoryStore(self.store.objects)
        return Scene(store, on(self.old, store), self.new and on(self.new, store))


Act = Callable[[Scene, ObjectStore], None]


def on(search: SmallSearch, store: ObjectStore) -> SmallSearch:
    """The same owner with its fields, on another store."""
    twin = copy.copy(search)
    twin.store = store
    return twin


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


def acts(what: Callable[[Scene, ObjectStore], object], name: str) -> Act:
    """An act of one process; refusals and takeovers end it without an error."""

    def act(scene: Scene, store: ObjectStore) -> None:
        with suppress(TuneError):
            what(scene, store)
            scene.done.append(name)

    return act


def opens_what_was_read(_: Scene, store: ObjectStore) -> None:
    """Read the journal, then open it with that knowledge, like a retry."""
    known = load(store, first_generation("old"), side_by_side=map)
    owner, stamp = Owner(name="retry", host="here", pid=9), Stamp(write_id="retry", at="")
    take_over(store, first_generation("old"), owner, stamp, side_by_side=map, known=known)


def forks(_: Scene, store: ObjectStore) -> None:
    assert forked(store).lost == {}


removes_old = acts(lambda _, store: removed(store, "old"), "removes old")
removes_new = acts(lambda _, store: removed(store, "new", "n"), "removes new")
MEETINGS: Mapping[str, tuple[Callable[[], Scene], Act, Act]] = {
    "its trial saves": (a_search, removes_old, acts(lambda scene, store: on(scene.old, store).step("b"), "saves")),
    "its trial is begun": (a_search, removes_old, acts(lambda scene, store: on(scene.old, store).begin("c"), "begins")),
    "its trial is resumed": (
        a_search,
        removes_old,
        acts(lambda scene, store: on(scene.old, store).begin("b"), "resumes"),
    ),
    "it gets another trial": (a_search, removes_old, acts(lambda scene, store: on(scene.old, store).add("d"), "adds")),
    "it is opened": (a_search, removes_old, acts(opens_what_was_read, "opens")),
    "it is forked": (a_search, removes_old, acts(forks, "forks")),
    "it is deleted twice": (a_search, removes_old, acts(lambda _, store: removed(store, "old", "2"), "removes too")),
    "its fork is deleted": (a_fork, removes_old, removes_new),
    "its fork saves": (a_fork, removes_new, acts(lambda scene, store: on(_new(scene), store).step("b"), "saves")),
    "its fork is made whole": (a_fork_that_was_cut_short, removes_new, acts(forks, "forks")),
    "its origin saves": (a_fork, removes_new, acts(lambda scene, store: on(scene.old, store).step("b"), "saves")),
}
"""What happens to an experiment while it is deleted."""
WITHOUT_TRACE = {"its trial saves", "it gets another trial", "its fork saves"}
"""The acts that continue an existing journal, and so create none where the experiment is gone."""


def _new(scene: Scene) -> SmallSearch:
    assert scene.new is not None
    return scene.new


# ----------------------------------------------------------------------------------------- promises


def promises_broken(scene: Scene, *, begun_anew: bool = False) -> list[str]:
    """Every existing experiment is undamaged, and each can be deleted, the fork first."""
    broken = [each for name in ("old", "new") for each in _of_experiment(scene.store, name)]
    for name in ("old", "new") if begun_anew else ():
        if f"removes {name}" not in scene.done:
            continue
        broken += [f"there is still {path}" for path in below(scene.store, name) if "/journal/" in path]
    for name in ("new", "old"):
        try:
            removed(scene.store, name, f"the last of {name}")
        except TuneError as error:
            broken.append(f"{name} cannot be deleted: {type(error).__name__}: {error}")
    return [*broken, *(f"left behind: {path}" for path in left(scene.store))]


def _of_experiment(store: MemoryStore, name: str) -> list[str]:
    """Check an experiment, unless it is missing, incomplete or being deleted."""
    try:
        found = load(store, current_journal(store, name), side_by_side=map)
    except TuneError:
        return []
    if not found.number or found.is_removed or not found.is_whole:
        return []
    return unreadable(store, name, found.trials)


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


def after(turns: int, first: int) -> Choice:
    """The first process runs for `turns` turns, then the other to its end, then the rest of the first."""
    taken = 0

    def choose(running: Sequence[int]) -> int:
        nonlocal taken
        taken += 1
        wanted = first if taken <= turns else 1 - first
        return wanted if wanted in running else running[0]

    return choose


def meet(name: str, choose: Choice, is_point: IsPoint) -> list[str]:
    before, *both = MEETINGS[name]
    return _met(begun(before).again(), both, choose, is_point, name)


def _met(scene: Scene, both: Sequence[Act], choose: Choice, is_point: IsPoint, name: str) -> list[str]:
    died = in_turns(scene.store, [_process(scene, act) for act in both], choose, is_point)
    begun_anew = is_point is at_looks and name in WITHOUT_TRACE
    return [*died, *promises_broken(scene, begun_anew=begun_anew)]


def _process(scene: Scene, act: Act) -> Callable[[ObjectStore], None]:
    return lambda store: act(scene, store)


def one_within_the_other(name: str, is_point: IsPoint, *, every: int = 1, enough: int | None = None) -> Explored:
    """Run each of the two completely before each point (or each `every`-th point) of the other, and after its end."""
    explored = Explored()
    for first in (0, 1):
        for turns in range(0, 10_000, every):
            seen = _Seen(after(turns, first))
            explored.points += 1
            found = meet(name, seen.choose, is_point)
            explored.broken += [f"{turns} of process {first}, then the other: {each}" for each in found]
            if enough is not None and len(explored.broken) >= enough:
                return explored
            if seen.count <= turns:
                break
    return explored


def in_drawn_orders(name: str, seeds: Iterable[int]) -> Explored:
    explored = Explored()
    for seed in seeds:
        explored.points += 1
        explored.broken += [f"seed {seed}: {each}" for each in meet(name, drawn(seed), everywhere)]
    return explored


@dataclass
class _Seen:
    """Counts the choices between two running processes."""

    inner: Choice
    count: int = 0

    def choose(self, running: Sequence[int]) -> int:
        self.count += len(running) > 1
        return self.inner(running)


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
