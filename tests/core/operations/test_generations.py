"""A deletion, or a late writer, that continues after the name of the experiment was used again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from prefect_tune.core.errors import Superseded, TuneError, UnknownVersion
from prefect_tune.core.journal import journal as journals
from prefect_tune.core.journal.journal import acquire_ownership, append_as_non_owner, load_experiment, write_snapshot
from prefect_tune.core.journal.outbox import Post, write_post
from prefect_tune.core.journal_events import CheckpointQuarantined, Owner, StepReported
from prefect_tune.core.operations.delete_experiment import delete_generation
from prefect_tune.core.operations.scrub import inspect_checkpoints as inspected
from prefect_tune.core.storage.documents import read_sealed
from prefect_tune.core.storage.generations import (
    GenerationMarker,
    delete_earlier_objects,
    find_current_generation,
    find_current_journal,
    find_names_with_garbage,
    list_experiment_names,
    reject_earlier_writer,
)
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport, WriteStamp
from tests.core.driver import JOURNAL
from tests.core.histories import next_state
from tests.core.operations.test_delete_experiment import Meanwhile, below, left, removed
from tests.core.operations.test_fork_experiment import forked
from tests.core.protocol.mutate import Mutant
from tests.core.small_search import SmallSearch, own_state, search_of_three, unreadable
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import WRITES, Crash, DyingStore, Failure
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")

OWNER = Owner(name="late", host="there", pid=4)


def world() -> MemoryStore:
    """A search, and `new`, a fork of it."""
    store = MemoryStore()
    search_of_three(store)
    forked(store)
    return store


def used_again(store: MemoryStore) -> SmallSearch:
    """Use the name `new` again, for a fork of the same origin that trains on."""
    forked(store, write_id="again")
    search = SmallSearch(store, "new")
    search.begin("b")
    search.step("b")
    return search


def broken(store: MemoryStore, search: SmallSearch, before: Mapping[str, bytes]) -> list[str]:
    """Check that the experiment that has the name now is untouched, can be read and continues."""
    name, found = search.name, []
    found += [f"{path} is gone or changed" for path, data in before.items() if store.objects.get(path) != data]
    try:
        found += unreadable(store, name, {"b": own_state(store, name, "b")})
    except (KeyError, TuneError) as error:
        return [*found, f"it has lost a trial: {error!r}"]
    state = load_experiment(store, find_current_journal(store, name))
    if damaged := inspected(store, state).corrupt_checkpoints:
        found.append(f"verify finds damage: {damaged}")
    resumed = SmallSearch(store, name)
    resumed.begin("b")
    resumed.step("b")
    return found + unreadable(store, name, {"b": own_state(store, name, "b")})


def paused_before_each_request(enough: int | None = None) -> list[str]:
    """Pause a deletion before each of its requests; another one finishes, and the name is used again."""
    begun, found = world(), list[str]()
    for nth in range(1, 10_000):
        store, again = MemoryStore(begun.objects), list[tuple[SmallSearch, Mapping[str, bytes]]]()

        def meanwhile(store: MemoryStore = store, again: list[tuple[SmallSearch, Mapping[str, bytes]]] = again) -> None:
            removed(store, "new", "the other")
            search = used_again(store)
            again.append((search, {path: data for path, data in store.objects.items() if path.startswith("new/2/")}))

        stamp = WriteStamp(write_id="first", at="2026-11-21T07:00:00Z")
        count = iter(range(1, 10_000))
        paused = Meanwhile(store, lambda _method, _path, nth=nth, count=count: next(count) == nth, meanwhile)
        with suppress(TuneError):
            delete_generation(paused, first_generation("new"), OWNER, stamp)
        if not again:
            assert nth > 10
            return found
        found += [f"request {nth}: {each}" for each in broken(store, *again[0])]
        if enough is not None and len(found) >= enough:
            return found
        if nth % 5 == 0:
            removed(store, "new", "the last")
            found += [f"request {nth}: left: {path}" for path in below(store, "new")]
    raise AssertionError("it never ends")


@pytest.mark.long
def test_a_deletion_paused_before_any_request_leaves_the_next_experiment_alone() -> None:
    assert paused_before_each_request() == []


@pytest.mark.parametrize("way", [Failure.CRASH_BEFORE, Failure.TORN, Failure.REPLY_LOST])
def test_a_deletion_that_dies_at_any_write_leaves_a_name_that_can_be_deleted_or_used(way: Failure) -> None:
    begun = world().objects
    for nth in range(1, 1000):
        store = MemoryStore(begun)
        dying = DyingStore(store, nth, way, only=WRITES)
        with suppress(Crash):
            removed(dying, "new")
        if (
            find_current_generation(store, "new") == 2
        ):  # what is left is garbage: the name is free before it is collected
            search = used_again(store)
            before = {path: data for path, data in store.objects.items() if path.startswith("new/2/")}
            delete_earlier_objects(store, "new", 2)
            assert broken(store, search, before) == []
            assert {path.split("/")[1] for path in below(store, "new")} == {"2"}
        removed(store, "new", "again")
        assert below(store, "new") == set()
        if dying.failed_at is None:
            assert nth > 4
            return


# ------------------------------------------------------------------------------------------------- late writers


def _puts_aside(search: SmallSearch, store: ObjectStore) -> None:
    bad = CheckpointQuarantined(trial="b", sequence=search.state.trial("b").checkpoints[-1].sequence, reason="damaged")
    append_as_non_owner(store, search.state.key, lambda _: [bad], WriteStamp(write_id="guest", at=""))


def _posts(search: SmallSearch, store: ObjectStore) -> None:
    report = StepReported(trial="c", report=StepReport(step=1, metrics={}))
    write_post(store, search.key("c"), 1, 1, Post(write_id="post", at="", events=(report,)))


def _opens(search: SmallSearch, store: ObjectStore) -> None:
    acquire_ownership(store, search.state.key, OWNER, WriteStamp(write_id="late", at=""))


def _on(search: SmallSearch, store: ObjectStore) -> SmallSearch:
    search.store = store
    return search


LATE: Mapping[str, Callable[[SmallSearch, ObjectStore], None]] = {
    "adds a trial": lambda search, store: _on(search, store).add("d"),
    "saves": lambda search, store: _on(search, store).step("b"),
    "reports": lambda search, store: _on(search, store).step("b", saves=False),
    "puts aside": _puts_aside,
    "posts": _posts,
    "opens": _opens,
}
"""What a process writes that was paused between its last check and this."""


def _died_of(act: Callable[[], object]) -> TuneError | None:
    try:
        act()
    except TuneError as error:
        return error
    return None


def paused_before_each_write(name: str, deletions: int, enough: int | None = None) -> list[str]:
    """Pause a writer before each creation while the experiment is deleted, and its name used and deleted again."""
    found: list[str] = []
    for nth in range(1, 100):
        store = MemoryStore()
        search = search_of_three(store)
        reached: list[SmallSearch] = []
        seen, is_entry = 0, False

        def is_it(method: str, path: str, nth: int = nth, reached: list[SmallSearch] = reached) -> bool:
            nonlocal seen, is_entry
            seen += method in {"create", "put"}
            if seen == nth and not reached:
                is_entry = method == "create" and ("/journal/" in path or "/outbox/" in path)
            return seen == nth

        def meanwhile(store: MemoryStore = store, reached: list[SmallSearch] = reached) -> None:
            for each in range(deletions):
                removed(store, "old", f"deletion {each}")
                reached[:] = [search_of_three(store)]

        died = _died_of(partial(LATE[name], search, Meanwhile(store, is_it, meanwhile)))
        if not isinstance(died, Superseded) and (died or (reached and is_entry)):
            found.append(f"write {nth}: it believes that it has written, or: {died!r}")
        if not reached:
            return found
        again = reached[0]
        dead = [path for path in store.objects if path.startswith("old/") and f"old/{deletions + 1}/" not in path]
        found += [
            f"write {nth}: an entry is left: {path}" for path in dead if "/journal/" in path or "/outbox/" in path
        ]
        assert ("old" in find_names_with_garbage(store.objects)) is (len(dead) > 1)
        before = {path: data for path, data in store.objects.items() if f"old/{deletions + 1}/" in path}
        delete_earlier_objects(store, "old", find_current_generation(store, "old"))
        assert find_names_with_garbage(store.objects) == []
        found += [f"write {nth}: {each}" for each in broken(store, again, before)]
        if enough is not None and len(found) >= enough:
            return found
    raise AssertionError("it never ends")


@pytest.mark.parametrize("deletions", [1, 2])
@pytest.mark.parametrize("name", LATE)
def test_a_late_writer_learns_of_the_deletion_and_leaves_the_next_experiment_alone(name: str, deletions: int) -> None:
    assert paused_before_each_write(name, deletions) == []


def test_a_fresh_start_that_was_overtaken_by_an_experiment_and_its_deletion_leaves_nothing() -> None:
    store = MemoryStore()
    key = find_current_journal(store, "old")

    def is_first_entry(method: str, path: str) -> bool:
        return (method, path) == ("create", key.entry_path(1))

    def meanwhile() -> None:
        search_of_three(store)
        removed(store, "old")

    paused = Meanwhile(store, is_first_entry, meanwhile)
    with pytest.raises(Superseded, match="'old': the experiment was deleted at 2026-11-21T09:00:00Z by deleter"):
        acquire_ownership(paused, key, OWNER, WriteStamp(write_id="w", at=""))
    assert left(store) == set()


# ------------------------------------------------------------------------------------------------- names


def test_a_deletion_leaves_one_small_marker_of_the_next_generation() -> None:
    store = MemoryStore()
    for generation in (2, 3):
        search_of_three(store)
        removed(store, "old", str(generation))
        (path,) = store.objects
        assert path == f"old/generations/000000000{generation}.json"
        assert len(store.objects[path]) < 300
        marker = read_sealed(store, GenerationMarker, path, TuneError)
        assert marker
        assert (marker.generation, marker.deleted_by) == (generation, "deleter (pid 3 on here)")
    assert list_experiment_names(store) == []
    assert find_current_generation(store, "old") == 3


def written_by(store: MemoryStore, name: str, generation: int) -> bool:
    """Return whether the marker before a generation names the owner as a writer of those before."""
    try:
        reject_earlier_writer(store, JournalKey(experiment=JOURNAL.experiment, generation=generation), name)
    except Superseded:
        return True
    return False


def some_history(owner: Owner) -> MemoryStore:
    """Return a journal of 12 entries, the last one by another owner, and a snapshot of it."""
    store = MemoryStore()
    state = journals.acquire_ownership(store, JOURNAL, owner, WriteStamp(write_id="open", at=""))
    while state.entry_count < 11:
        state = next_state(store, state, [f"t{state.entry_count}"])
    write_snapshot(store, state)
    journals.acquire_ownership(store, JOURNAL, OWNER, WriteStamp(write_id="later", at=""))
    return store


def test_the_marker_names_the_writers_before_it_until_a_later_generation_has_its_own() -> None:
    by_flow, by_script = Owner(name="x", host="h", pid=1, flow_run="f", attempt=2), Owner(name="y", host="h", pid=2)
    for owner in (by_flow, by_script):
        store = some_history(owner)
        removed(store, JOURNAL.experiment)
        known = [written_by(store, name, generation) for name in ("f/2", "y") for generation in (1, 2, 3)]
        assert known == [False, owner is by_flow, False, False, owner is by_script, False]
        assert written_by(store, OWNER.identity, 2)


def test_a_damaged_entry_of_old_does_not_make_an_experiment_undeletable() -> None:
    store = some_history(Owner(name="x", host="h", pid=1))
    for number in range(2, 9):
        store.objects[JOURNAL.entry_path(number)] = b"{}"
    removed(store, JOURNAL.experiment)
    assert find_current_generation(store, JOURNAL.experiment) == 2
    assert below(store, JOURNAL.experiment) == set()
    assert not written_by(store, "x", 2)


def test_foreign_files_are_no_generations() -> None:
    store = MemoryStore()
    search_of_three(store)
    names = ["old/generations/notes.txt", "old/generations/12.json", "old/02/a", "old/x/a", "old/a", "b c/1/a", "top"]
    store.objects.update(dict.fromkeys(names, b""))
    assert (find_current_generation(store, "old"), list_experiment_names(store)) == (1, ["old"])
    removed(store, "old")
    assert store.objects.keys() == {*names, "old/generations/0000000002.json"}


def test_an_experiment_of_a_development_version_is_refused_in_one_sentence() -> None:
    store = MemoryStore()
    store.objects["old/journal/0000000001.json"] = b"whatever"
    with pytest.raises(UnknownVersion) as refused:
        find_current_journal(store, "old")
    assert str(refused.value) == (
        "experiment 'old' was written by a development version of prefect-tune, before its first release, and "
        "cannot be read: finish it with that version, delete its folder old/, or choose another name"
    )
    assert list_experiment_names(store) == ["old"]


def test_only_a_placeholder_and_the_drill_name_a_generation_themselves() -> None:
    root = Path(__file__).parents[3]
    rooms = ("src", "flows", "tasks", "blocks")
    sources = [path for room in rooms for path in (root / room).rglob("*.py") if "generation=1" in path.read_text()]
    assert sorted(path.name for path in sources) == ["plan_checks.py", "run_drill.py"]


# ------------------------------------------------------------------------------------------------- mutants

_LOOK = "    require_first_entry(store, experiment.key, path)\n"
MUTANTS: Mapping[str, Mutant] = {
    "a deletion removes what comes after it, too": Mutant(
        lambda: paused_before_each_request(enough=1),
        {delete_generation: {"experiment.generation + 1": "experiment.generation + 2"}},
    ),
    "an entry does not look for a deletion": Mutant(
        lambda: paused_before_each_write("saves", 2, enough=1), {journals._try_append: {_LOOK: ""}}
    ),
    "it looks before it writes": Mutant(
        lambda: paused_before_each_write("adds a trial", 2, enough=1),
        {journals._try_append: {_LOOK: "", "    create_or_recognize(": f"{_LOOK}    create_or_recognize("}},
    ),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    MUTANTS[name].require_noticed(monkeypatch, record_property)
