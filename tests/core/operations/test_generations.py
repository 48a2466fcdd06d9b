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
from prefect_tune.core.operations.scrub import inspect_checkpoints
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
from tests.core.histories import append_next_entry
from tests.core.operations.test_delete_experiment import PausingStore, paths_below, remaining_paths, remove
from tests.core.operations.test_fork_experiment import make_fork
from tests.core.protocol.mutate import Mutant
from tests.core.small_search import SmallSearch, find_unreadable, load_trial, make_search
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import WRITES, Crash, DyingStore, Failure
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")

OWNER = Owner(name="late", host="there", pid=4)


def make_search_and_fork() -> MemoryStore:
    """Return the store of a search and of `new`, a fork of it."""
    store = MemoryStore()
    make_search(store)
    make_fork(store)
    return store


def reuse_name(store: MemoryStore) -> SmallSearch:
    """Use the name `new` for another fork of the same origin, and train it."""
    make_fork(store, write_id="again")
    search = SmallSearch(store, "new")
    search.start_attempt("b")
    search.train_step("b")
    return search


def find_problems(store: MemoryStore, search: SmallSearch, before: Mapping[str, bytes]) -> list[str]:
    """Check that the experiment that has the name now is untouched, can be read and continues."""
    name, problems = search.name, []
    problems += [f"{path} is gone or changed" for path, data in before.items() if store.objects.get(path) != data]
    try:
        problems += find_unreadable(store, name, {"b": load_trial(store, name, "b")})
    except (KeyError, TuneError) as error:
        return [*problems, f"it has lost a trial: {error!r}"]
    state = load_experiment(store, find_current_journal(store, name))
    if corrupt := inspect_checkpoints(store, state).corrupt_checkpoints:
        problems.append(f"verify finds damage: {corrupt}")
    resumed = SmallSearch(store, name)
    resumed.start_attempt("b")
    resumed.train_step("b")
    return problems + find_unreadable(store, name, {"b": load_trial(store, name, "b")})


def delete_with_pauses(enough: int | None = None) -> list[str]:
    """Pause a deletion before each of its requests; another one finishes, and the name is used again."""
    original, problems = make_search_and_fork(), list[str]()
    for nth in range(1, 10_000):
        store, reused = MemoryStore(original.objects), list[tuple[SmallSearch, Mapping[str, bytes]]]()

        def reuse(store: MemoryStore = store, reused: list[tuple[SmallSearch, Mapping[str, bytes]]] = reused) -> None:
            remove(store, "new", "the other")
            search = reuse_name(store)
            reused.append((search, {path: data for path, data in store.objects.items() if path.startswith("new/2/")}))

        stamp = WriteStamp(write_id="first", at="2026-11-21T07:00:00Z")
        count = iter(range(1, 10_000))
        paused = PausingStore(store, lambda _method, _path, nth=nth, count=count: next(count) == nth, reuse)
        with suppress(TuneError):
            delete_generation(paused, first_generation("new"), OWNER, stamp)
        if not reused:
            assert nth > 10
            return problems
        problems += [f"request {nth}: {problem}" for problem in find_problems(store, *reused[0])]
        if enough is not None and len(problems) >= enough:
            return problems
        if nth % 5 == 0:
            remove(store, "new", "the last")
            problems += [f"request {nth}: left: {path}" for path in paths_below(store, "new")]
    raise AssertionError("it never ends")


@pytest.mark.long
def test_a_deletion_paused_before_any_request_leaves_the_next_experiment_alone() -> None:
    assert delete_with_pauses() == []


@pytest.mark.parametrize("failure", [Failure.CRASH_BEFORE, Failure.TORN, Failure.REPLY_LOST])
def test_a_deletion_that_dies_at_any_write_leaves_a_name_that_can_be_deleted_or_used(failure: Failure) -> None:
    objects_before = make_search_and_fork().objects
    for nth in range(1, 1000):
        store = MemoryStore(objects_before)
        dying = DyingStore(store, nth, failure, only=WRITES)
        with suppress(Crash):
            remove(dying, "new")
        if (
            find_current_generation(store, "new") == 2
        ):  # what is left is garbage: the name is free before it is collected
            search = reuse_name(store)
            before = {path: data for path, data in store.objects.items() if path.startswith("new/2/")}
            delete_earlier_objects(store, "new", 2)
            assert find_problems(store, search, before) == []
            assert {path.split("/")[1] for path in paths_below(store, "new")} == {"2"}
        remove(store, "new", "again")
        assert paths_below(store, "new") == set()
        if dying.failed_at is None:
            assert nth > 4
            return


# ------------------------------------------------------------------------------------------------- late writers


def _quarantine(search: SmallSearch, store: ObjectStore) -> None:
    bad = CheckpointQuarantined(trial="b", sequence=search.state.trial("b").checkpoints[-1].sequence, reason="damaged")
    append_as_non_owner(store, search.state.key, lambda _: [bad], WriteStamp(write_id="guest", at=""))


def _post(search: SmallSearch, store: ObjectStore) -> None:
    report = StepReported(trial="c", report=StepReport(step=1, metrics={}))
    write_post(store, search.key("c"), 1, 1, Post(write_id="post", at="", events=(report,)))


def _open(search: SmallSearch, store: ObjectStore) -> None:
    acquire_ownership(store, search.state.key, OWNER, WriteStamp(write_id="late", at=""))


def _move_to_store(search: SmallSearch, store: ObjectStore) -> SmallSearch:
    search.store = store
    return search


LATE_WRITES: Mapping[str, Callable[[SmallSearch, ObjectStore], None]] = {
    "adds a trial": lambda search, store: _move_to_store(search, store).add("d"),
    "saves": lambda search, store: _move_to_store(search, store).train_step("b"),
    "reports": lambda search, store: _move_to_store(search, store).train_step("b", saves=False),
    "puts aside": _quarantine,
    "posts": _post,
    "opens": _open,
}
"""What a process writes that was paused between its last check and this."""


def _catch_error(act: Callable[[], object]) -> TuneError | None:
    try:
        act()
    except TuneError as error:
        return error
    return None


def write_with_pauses(name: str, deletions: int, enough: int | None = None) -> list[str]:
    """Pause a writer before each creation while the experiment is deleted, and its name used and deleted again."""
    problems: list[str] = []
    for nth in range(1, 100):
        store = MemoryStore()
        search = make_search(store)
        reused: list[SmallSearch] = []
        write_count, is_entry = 0, False

        def is_nth_write(method: str, path: str, nth: int = nth, reused: list[SmallSearch] = reused) -> bool:
            nonlocal write_count, is_entry
            write_count += method in {"create", "put"}
            if write_count == nth and not reused:
                is_entry = method == "create" and ("/journal/" in path or "/outbox/" in path)
            return write_count == nth

        def reuse(store: MemoryStore = store, reused: list[SmallSearch] = reused) -> None:
            for number in range(deletions):
                remove(store, "old", f"deletion {number}")
                reused[:] = [make_search(store)]

        error = _catch_error(partial(LATE_WRITES[name], search, PausingStore(store, is_nth_write, reuse)))
        if not isinstance(error, Superseded) and (error or (reused and is_entry)):
            problems.append(f"write {nth}: it believes that it has written, or: {error!r}")
        if not reused:
            return problems
        search = reused[0]
        dead = [path for path in store.objects if path.startswith("old/") and f"old/{deletions + 1}/" not in path]
        problems += [
            f"write {nth}: an entry is left: {path}" for path in dead if "/journal/" in path or "/outbox/" in path
        ]
        assert ("old" in find_names_with_garbage(store.objects)) is (len(dead) > 1)
        before = {path: data for path, data in store.objects.items() if f"old/{deletions + 1}/" in path}
        delete_earlier_objects(store, "old", find_current_generation(store, "old"))
        assert find_names_with_garbage(store.objects) == []
        problems += [f"write {nth}: {problem}" for problem in find_problems(store, search, before)]
        if enough is not None and len(problems) >= enough:
            return problems
    raise AssertionError("it never ends")


@pytest.mark.parametrize("deletions", [1, 2])
@pytest.mark.parametrize("name", LATE_WRITES)
def test_a_late_writer_learns_of_the_deletion_and_leaves_the_next_experiment_alone(name: str, deletions: int) -> None:
    assert write_with_pauses(name, deletions) == []


def test_a_fresh_start_that_was_overtaken_by_an_experiment_and_its_deletion_leaves_nothing() -> None:
    store = MemoryStore()
    key = find_current_journal(store, "old")

    def is_first_entry(method: str, path: str) -> bool:
        return (method, path) == ("create", key.entry_path(1))

    def reuse() -> None:
        make_search(store)
        remove(store, "old")

    paused = PausingStore(store, is_first_entry, reuse)
    with pytest.raises(Superseded, match="'old': the experiment was deleted at 2026-11-21T09:00:00Z by deleter"):
        acquire_ownership(paused, key, OWNER, WriteStamp(write_id="w", at=""))
    assert remaining_paths(store) == set()


# ------------------------------------------------------------------------------------------------- names


def test_a_deletion_leaves_one_small_marker_of_the_next_generation() -> None:
    store = MemoryStore()
    for generation in (2, 3):
        make_search(store)
        remove(store, "old", str(generation))
        (path,) = store.objects
        assert path == f"old/generations/000000000{generation}.json"
        assert len(store.objects[path]) < 300
        marker = read_sealed(store, GenerationMarker, path, TuneError)
        assert marker
        assert (marker.generation, marker.deleted_by) == (generation, "deleter (pid 3 on here)")
    assert list_experiment_names(store) == []
    assert find_current_generation(store, "old") == 3


def names_writer(store: MemoryStore, name: str, generation: int) -> bool:
    """Whether the marker before a generation names the owner as a writer of an earlier one."""
    try:
        reject_earlier_writer(store, JournalKey(experiment=JOURNAL.experiment, generation=generation), name)
    except Superseded:
        return True
    return False


def make_history(owner: Owner) -> MemoryStore:
    """Return a journal of 12 entries, the last one by another owner, and a snapshot of it."""
    store = MemoryStore()
    state = journals.acquire_ownership(store, JOURNAL, owner, WriteStamp(write_id="open", at=""))
    while state.entry_count < 11:
        state = append_next_entry(store, state, [f"t{state.entry_count}"])
    write_snapshot(store, state)
    journals.acquire_ownership(store, JOURNAL, OWNER, WriteStamp(write_id="later", at=""))
    return store


def test_the_marker_names_the_writers_before_it_until_a_later_generation_has_its_own() -> None:
    by_flow, by_script = Owner(name="x", host="h", pid=1, flow_run="f", attempt=2), Owner(name="y", host="h", pid=2)
    for owner in (by_flow, by_script):
        store = make_history(owner)
        remove(store, JOURNAL.experiment)
        results = [names_writer(store, name, generation) for name in ("f/2", "y") for generation in (1, 2, 3)]
        assert results == [False, owner is by_flow, False, False, owner is by_script, False]
        assert names_writer(store, OWNER.identity, 2)


def test_a_damaged_entry_of_old_does_not_make_an_experiment_undeletable() -> None:
    store = make_history(Owner(name="x", host="h", pid=1))
    for number in range(2, 9):
        store.objects[JOURNAL.entry_path(number)] = b"{}"
    remove(store, JOURNAL.experiment)
    assert find_current_generation(store, JOURNAL.experiment) == 2
    assert paths_below(store, JOURNAL.experiment) == set()
    assert not names_writer(store, "x", 2)


def test_foreign_files_are_no_generations() -> None:
    store = MemoryStore()
    make_search(store)
    names = ["old/generations/notes.txt", "old/generations/12.json", "old/02/a", "old/x/a", "old/a", "b c/1/a", "top"]
    store.objects.update(dict.fromkeys(names, b""))
    assert (find_current_generation(store, "old"), list_experiment_names(store)) == (1, ["old"])
    remove(store, "old")
    assert store.objects.keys() == {*names, "old/generations/0000000002.json"}


def test_an_experiment_of_a_development_version_is_refused_in_one_sentence() -> None:
    store = MemoryStore()
    store.objects["old/journal/0000000001.json"] = b"whatever"
    with pytest.raises(UnknownVersion) as error:
        find_current_journal(store, "old")
    assert str(error.value) == (
        "experiment 'old' was written by a development version of prefect-tune, before its first release, and "
        "cannot be read: finish it with that version, delete its folder old/, or choose another name"
    )
    assert list_experiment_names(store) == ["old"]


def test_only_a_placeholder_and_the_drill_name_a_generation_themselves() -> None:
    root = Path(__file__).parents[3]
    names = ("src", "flows", "tasks", "blocks")
    sources = [path for name in names for path in (root / name).rglob("*.py") if "generation=1" in path.read_text()]
    assert sorted(path.name for path in sources) == ["plan_checks.py", "run_drill.py"]


# ------------------------------------------------------------------------------------------------- mutants

_CHECK = "    confirm_creation(store, experiment.key, path)\n"
MUTANTS: Mapping[str, Mutant] = {
    "a deletion removes what comes after it, too": Mutant(
        lambda: delete_with_pauses(enough=1),
        {delete_generation: {"experiment.generation + 1": "experiment.generation + 2"}},
    ),
    "an entry does not look for a deletion": Mutant(
        lambda: write_with_pauses("saves", 2, enough=1), {journals._try_append: {_CHECK: ""}}
    ),
    "it looks before it writes": Mutant(
        lambda: write_with_pauses("adds a trial", 2, enough=1),
        {journals._try_append: {_CHECK: "", "    create_idempotently(": f"{_CHECK}    create_idempotently("}},
    ),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    MUTANTS[name].require_noticed(monkeypatch, record_property)
