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
from tests.core.driver import retry
from tests.core.operations.test_fork_experiment import make_fork
from tests.core.protocol.exploring import Act, Findings, IsPoint, Verdicts, everywhere, explore, run_acts, run_random
from tests.core.protocol.mutate import Mutant
from tests.core.protocol.population import Chronicle, Search
from tests.core.small_search import SmallSearch, find_unreadable, load_trial, make_search
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import WRITES, Crash, DyingStore, Failure
from tests.fakes.stores.memory_store import MemoryStore, StoreWrapper
from tests.long_cases import deep_count, long_after

pytestmark = pytest.mark.usefixtures("tiny_blobs", "decode_cache")

OWNER = Owner(name="deleter", host="here", pid=3)
_T = TypeVar("_T")


def remove(store: ObjectStore, experiment: str, write_id: str = "r") -> int:
    stamp = WriteStamp(write_id=write_id, at="2026-11-21T09:00:00Z")
    journal = find_generation_to_delete(store, experiment) or first_generation(experiment)
    return retry(lambda: delete_generation(store, journal, OWNER, stamp))


def remaining_paths(store: MemoryStore) -> set[str]:
    """Return all objects except the marker of each name's current generation."""
    names = {path.partition("/")[0] for path in store.objects}
    markers = {f"{name}/generations/{find_current_generation(store, name):010d}.json" for name in names}
    return store.objects.keys() - markers


def paths_below(store: MemoryStore, folder: str) -> set[str]:
    return {path for path in remaining_paths(store) if path.startswith(f"{folder}/")}


def begin_fork_of_old(store: MemoryStore) -> Callable[[], ForkResult]:
    """Create the experiment `new` as an incomplete fork; return a function that completes it."""
    fork_point, stamp = load_fork_point(store, first_generation("old"), None), WriteStamp(write_id="new", at="")
    new = begin_fork(store, first_generation("new"), fork_point.origin, OWNER, stamp)
    return lambda: complete_fork(store, fork_point, new, stamp)


def make_fork_and_origin() -> MemoryStore:
    """Return a fork, and an origin that has since retired every checkpoint of the fork."""
    store = MemoryStore()
    old = make_search(store)
    make_fork(store)
    for _ in range(3):
        old.train_step("b")
    return store


@pytest.mark.parametrize(("deleted", "kept"), [("new", "old"), ("old", "new")])
def test_neither_a_fork_nor_its_origin_needs_the_other(deleted: str, kept: str) -> None:
    store = make_fork_and_origin()
    before = {path: data for path, data in store.objects.items() if path.startswith(f"{kept}/")}
    assert remove(store, deleted) > 0
    assert paths_below(store, deleted) == set()
    assert {path: data for path, data in store.objects.items() if path.startswith(f"{kept}/")} == before
    search = SmallSearch(store, kept)
    search.start_attempt("b")
    search.train_step("b")
    assert find_unreadable(store, kept, search.state.trials) == []


def test_whoever_runs_it_writes_no_more_and_nobody_forks_it() -> None:
    store = MemoryStore()
    old = make_search(store)
    with suppress(Crash):
        remove(DyingStore(store, 2, Failure.CRASH_BEFORE, only=WRITES), "old")
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
    assert remove(store, "old") == 0
    make_search(store)
    del store.objects["old/1/journal/0000000003.json"]
    before = dict(store.objects)
    with pytest.raises(JournalCorrupt):
        remove(store, "old")
    assert store.objects == before


class PausingStore(StoreWrapper):
    """A store that calls `act` once, before the first operation for which `is_due` is true."""

    def __init__(self, inner: ObjectStore, is_due: Callable[[str, str], bool], interrupt: Callable[[], object]) -> None:
        super().__init__(inner)
        self._is_interruption = is_due
        self._acts = [interrupt]

    def intercept(self, method: str, path: str, operation: Callable[[], _T]) -> _T:
        if self._acts and self._is_interruption(method, path):
            self._acts.pop()()
        return operation()


def is_deletion(method: str, path: str) -> bool:
    del path
    return method == "delete"


def test_a_fork_of_what_is_deleted_meanwhile_says_so_and_is_not_made() -> None:
    def is_copy_operation(method: str, path: str) -> bool:
        del path
        return method == "copy"

    store = MemoryStore()
    make_search(store)
    with pytest.raises(InvalidInput, match="'old' is being deleted: the fork 'new' cannot be completed; delete the"):
        make_fork(PausingStore(store, is_copy_operation, lambda: remove(store, "old")))
    assert not load_experiment(store, first_generation("new")).is_complete
    remove(store, "new", "n")
    assert remaining_paths(store) == set()


@pytest.mark.parametrize("cut", [True, False])
def test_what_a_deletion_was_faster_than_is_no_fork(cut: bool) -> None:
    store = MemoryStore()
    make_search(store)
    complete = begin_fork_of_old(store)
    with suppress(Crash):
        remove(DyingStore(store, 1 if cut else 0, Failure.CRASH_BEFORE, only=frozenset({"delete"})), "old")
    with pytest.raises(InvalidInput, match="'old' is being deleted: the fork 'new' cannot be completed"):
        complete()


def test_a_fork_that_has_copied_all_is_made_though_its_origin_is_deleted_by_then() -> None:
    def is_last_entry(method: str, path: str) -> bool:
        return (method, path) == ("create", first_generation("new").entry_path(2))

    store = MemoryStore()
    make_search(store)
    fork = make_fork(PausingStore(store, is_last_entry, lambda: remove(store, "old")))
    assert paths_below(store, "old") == set()
    assert fork.lost_checkpoints == {}
    assert find_unreadable(store, "new", fork.experiment.trials) == []


def test_a_retry_that_has_read_it_does_not_open_it_while_it_is_deleted() -> None:
    store = MemoryStore()
    loaded = make_search(store).state

    def acquire_again() -> None:
        stamp = WriteStamp(write_id="retry", at="")
        with pytest.raises(ResumeFailed, match="experiment 'old' is being deleted by deleter"):
            acquire_ownership(store, loaded.key, OWNER, stamp, loaded=loaded)

    remove(PausingStore(store, is_deletion, acquire_again), "old")
    assert remaining_paths(store) == set()


def test_an_attempt_elsewhere_learns_of_the_deletion_at_its_next_post_and_leaves_none() -> None:
    store = MemoryStore()
    search = Search(store, Chronicle())
    search.open()
    search.add("s")
    attempt = search.launch("s")
    attempt.post_start()
    remove(store, "e")
    with pytest.raises(Superseded, match="was deleted at 2026-11-21T09:00:00Z by deleter"):
        attempt.post_save()
    assert [path for path in remaining_paths(store) if "/outbox/" in path] == []
    remove(store, "e", "again")
    assert remaining_paths(store) == set()


def test_an_entry_that_arrives_when_all_is_deleted_is_deleted_by_the_next() -> None:
    store = MemoryStore()
    make_search(store)
    journal = first_generation("old")
    late = journal.entry_path(2)
    data = store.objects[late]
    remove(store, "old")
    store.objects[late] = data
    with pytest.raises(Superseded, match="was deleted at 2026-11-21T09:00:00Z by deleter"):
        load_experiment(store, journal)
    assert remove(store, "old", "again") == 1
    assert remaining_paths(store) == set()


def test_a_name_that_is_taken_again_while_the_last_of_it_is_deleted_is_left_to_whoever_has_it() -> None:
    store = MemoryStore()
    make_search(store)
    remove(PausingStore(store, is_deletion, lambda: make_search(store)), "old")
    assert find_unreadable(store, "old", {"b": load_trial(store, "old", "b")}) == []
    assert {path.split("/")[1] for path in paths_below(store, "old")} == {"2"}


def test_what_is_written_again_and_again_is_not_deleted_for_ever() -> None:
    class Haunted(MemoryStore):
        def delete(self, paths: Sequence[str]) -> None:
            super().delete(paths)
            self.objects["old/1/trials/b/blobs/late"] = b"late"

    store = Haunted()
    make_search(store)
    with pytest.raises(StoreUnavailable, match="new objects appeared"):
        remove(store, "old")


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

    def copy(self) -> Self:
        """Return a copy on a separate store."""
        return replace(self.with_store(MemoryStore(self.store.objects)), done=[])

    def with_store(self, store: ObjectStore) -> Self:
        twins = [search and search.with_store(store, search.chronicle) for search in (self.old, self.new)]
        return replace(self, store=store, old=twins[0], new=twins[1])  # type: ignore[arg-type]  # one before its store

    def find_broken_promises(self, *, tidy: bool = True) -> list[str]:
        """Every existing experiment is undamaged, and each can be deleted, the fork first."""
        problems = [problem for name in ("old", "new") for problem in _find_unreadable_checkpoints(self.store, name)]
        for name in ("old", "new") if self.leaves_no_trace else ():
            if f"removes {name}" in self.done:
                problems += [f"there is still {path}" for path in paths_below(self.store, name) if "/journal/" in path]
        for name in ("new", "old"):
            try:
                remove(self.store, name, f"the last of {name}")
            except TuneError as error:
                problems.append(f"{name} cannot be deleted: {type(error).__name__}: {error}")
        return [*problems, *(f"left behind: {path}" for path in remaining_paths(self.store) if tidy)]

    def outcome(self) -> Hashable:
        return frozenset(self.store.objects.items()), tuple(self.done), self.leaves_no_trace


def _find_unreadable_checkpoints(store: MemoryStore, name: str) -> list[str]:
    """Check an experiment, unless it is missing, incomplete or being deleted."""
    try:
        state = load_experiment(store, find_current_journal(store, name))
    except TuneError:
        return []
    if not state.entry_count or state.is_being_deleted or not state.is_complete:
        return []
    return find_unreadable(store, name, state.trials)


# ---------------------------------------------------------------------------------------------- concurrent acts


def search_scene() -> Scene:
    store = MemoryStore()
    return Scene(store, make_search(store))


def fork_scene() -> Scene:
    """Return a fork whose origin has since retired every checkpoint of the fork."""
    scene = search_scene()
    make_fork(scene.store)
    for _ in range(3):
        scene.old.train_step("b")
    scene.new = SmallSearch(scene.store, "new")
    scene.new.start_attempt("b")
    return scene


def incomplete_fork_scene() -> Scene:
    """Return a fork that was killed when half of its manifests were published."""
    scene = search_scene()
    with suppress(Crash):
        make_fork(DyingStore(scene.store, 4, Failure.CRASH_BEFORE, only=frozenset({"create"})))
    return scene


def make_act(operation: Callable[[Scene], object], name: str) -> Act[Scene]:
    """Make the act of one process; refusals and takeovers end it without an error."""

    def act(scene: Scene) -> None:
        with suppress(TuneError):
            operation(scene)
            scene.done.append(name)

    return act


def open_loaded(scene: Scene) -> None:
    """Load the experiment, then acquire it with the loaded state, like a retry."""
    loaded = load_experiment(scene.store, first_generation("old"))
    owner, stamp = Owner(name="retry", host="here", pid=9), WriteStamp(write_id="retry", at="")
    acquire_ownership(scene.store, first_generation("old"), owner, stamp, loaded=loaded)


def fork_old(scene: Scene) -> None:
    assert make_fork(scene.store).lost_checkpoints == {}


def train_fork(scene: Scene) -> None:
    assert scene.new is not None
    scene.new.train_step("b")


delete_old = make_act(lambda scene: remove(scene.store, "old"), "removes old")
delete_new = make_act(lambda scene: remove(scene.store, "new", "n"), "removes new")
train_old = make_act(lambda scene: scene.old.train_step("b"), "saves")
MEETINGS: Mapping[str, tuple[Callable[[], Scene], Act[Scene], Act[Scene]]] = {
    "its trial saves": (search_scene, delete_old, train_old),
    "its trial is begun": (search_scene, delete_old, make_act(lambda scene: scene.old.start_attempt("c"), "begins")),
    "its trial is resumed": (search_scene, delete_old, make_act(lambda scene: scene.old.start_attempt("b"), "resumes")),
    "it gets another trial": (search_scene, delete_old, make_act(lambda scene: scene.old.add("d"), "adds")),
    "it is opened": (search_scene, delete_old, make_act(open_loaded, "opens")),
    "it is forked": (search_scene, delete_old, make_act(fork_old, "forks")),
    "it is deleted twice": (search_scene, delete_old, make_act(lambda scene: remove(scene.store, "old", "2"), "too")),
    "its fork is deleted": (fork_scene, delete_old, delete_new),
    "its fork saves": (fork_scene, delete_new, make_act(train_fork, "saves")),
    "its fork is made whole": (incomplete_fork_scene, delete_new, make_act(fork_old, "forks")),
    "its origin saves": (fork_scene, delete_new, train_old),
}
WITHOUT_TRACE = {"its trial saves", "it gets another trial", "its fork saves"}
"""The acts that continue an existing journal, and so create none where the experiment is gone."""


@cache
def scene_before(before: Callable[[], Scene]) -> Scene:
    return before()


# ------------------------------------------------------------------------------------------------- interleavings


def at_writes(method: str, path: str) -> bool:
    del path
    return method in {"create", "put", "copy", "delete"}


def at_checks(method: str, path: str) -> bool:
    """Switch processes also between an owner's entry and its check for a deletion."""
    return method == "delete" or (method == "size" and "/journal/" in path)


def run_within(name: str, is_point: IsPoint, *, every: int = 1, enough: int | None = None) -> Findings:
    """Run each of the two completely before each point (or each `every`-th point) of the other, and after its end."""
    before, *acts = MEETINGS[name]
    contested_choices, verdicts = [0], Verdicts()

    def attempt(first: int, turns: int) -> list[str]:
        choice_count = contested_choices[0] = 0

        def choose(running: Sequence[int], _state: object) -> int:
            nonlocal choice_count
            choice_count += 1
            contested_choices[0] += len(running) > 1
            preferred = first if choice_count <= turns else 1 - first
            return preferred if preferred in running else running[0]

        scene = replace(scene_before(before).copy(), leaves_no_trace=is_point is at_checks and name in WITHOUT_TRACE)
        return run_acts(scene, acts, choose, is_point, verdicts)

    def tries() -> Iterator[tuple[str, Callable[[], list[str]]]]:
        for first in (0, 1):
            for turns in range(0, 10_000, every):
                yield f"{turns} of process {first}, then the other", partial(attempt, first, turns)
                if contested_choices[0] <= turns:
                    break

    return explore(tries(), enough)


@pytest.mark.parametrize("name", long_after(4, MEETINGS))
def test_whatever_is_done_within_a_deletion_or_around_it_breaks_no_promise(name: str, record_property: Record) -> None:
    run_within(name, at_writes, every=3).require_kept(record_property, "orders of deletions and others")


@pytest.mark.parametrize("name", sorted(WITHOUT_TRACE))
def test_whoever_goes_on_after_something_leaves_nothing_where_it_was_deleted(
    name: str, record_property: Record
) -> None:
    run_within(name, at_checks).require_kept(record_property, "orders of deletions and others")


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MEETINGS)
def test_in_many_orders_they_break_no_promise(name: str, record_property: Record) -> None:
    before, *acts = MEETINGS[name]
    explored = run_within(name, everywhere)
    explored.add(run_random(scene_before(before), acts, range(1000, 1000 + deep_count(300))))
    explored.require_kept(record_property, "orders of deletions and others")


# --------------------------------------------------------------------------------------------- mutants


def find_harm_to_fork() -> Sequence[str]:
    return run_within("it is forked", at_writes, enough=1).broken


MUTANTS: Mapping[str, Mutant] = {
    "a fork does not ask whether its origin is deleted": Mutant(
        find_harm_to_fork, {forking._load_origin: {"raise InvalidInput(": "return point.experiment; raise("}}
    ),
    "a blob that is gone counts as copied": Mutant(
        find_harm_to_fork,
        {
            forking._copy_checkpoints: {
                "return path  # the blob's checkpoint was deleted after its manifest was read": "return None",
                "require_blobs_stored(store, folder, required)": "pass",
            }
        },
    ),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(name: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    MUTANTS[name].require_noticed(monkeypatch, record_property)
