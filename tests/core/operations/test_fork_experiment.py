"""A fork has its origin's state as of one entry, and copies of its bytes that the target makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product

import pytest

from prefect_tune.core.checkpoints.manifest import revise_metadata
from prefect_tune.core.errors import IllegalTransition, InvalidInput, StoreUnavailable, Superseded
from prefect_tune.core.experiment.experiment import Experiment, apply_event
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, make_clone_ref
from prefect_tune.core.journal.journal import load_at, load_experiment
from prefect_tune.core.journal_events import (
    CheckpointCloned,
    CheckpointOrigin,
    CheckpointQuarantined,
    ExperimentForked,
    Owner,
    StopRequested,
)
from prefect_tune.core.operations import fork_experiment
from prefect_tune.core.operations.delete_experiment import delete_generation
from prefect_tune.core.operations.fork_experiment import (
    ForkResult,
    begin_fork,
    complete_fork,
    find_lost_checkpoints,
    load_fork_point,
)
from prefect_tune.core.operations.scrub import quarantine
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.generations import find_current_journal
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.values import WriteStamp
from tests.core.driver import retried
from tests.core.protocol.mutate import break_lines
from tests.core.small_search import SmallSearch, own_state, search_of_three, unreadable
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import WRITES, Crash, DyingStore, Failure
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs", "decoded_once")

OWNER = Owner(name="forker", host="here", pid=2)
Record = Callable[[str, object], None]


def forked(store: object, number: int | None = None, name: str = "new", write_id: str = "f") -> ForkResult:
    """Fork like the task, with retries."""
    stamp = WriteStamp(write_id=write_id, at="2026-11-21T09:00:00Z")

    def act() -> ForkResult:
        past = load_fork_point(store, find_current_journal(store, "old"), number)
        into = begin_fork(store, find_current_journal(store, name), past.origin, OWNER, stamp)
        return complete_fork(store, past, into, stamp)

    return retried(act)


def known(trial: Trial) -> dict[str, object]:
    """The fields of a trial that do not locate its bytes, and do not say what it cost its origin."""
    elsewhere = {
        "attempt_records",
        "checkpoints",
        "collected_up_to",
        "adopted_up_to",
        "restored_sequence",
        "quarantined_sequences",
    }
    checkpoints = [(each.step, each.metrics) for each in trial.checkpoints]
    running = {"phase": Phase.PENDING} if trial.phase is Phase.RUNNING else {}
    return {**trial.model_dump(exclude=elsewhere), "checkpoints": checkpoints, **running}


def what_is_known(experiment: Experiment) -> list[dict[str, object]]:
    return [known(trial) for trial in experiment.trials.values()]


def test_a_fork_of_every_entry_is_the_origin_as_of_that_entry() -> None:
    store = MemoryStore()
    last = search_of_three(store).state.entry_count
    for number in range(1, last + 1):
        then, _ = load_at(store, first_generation("old"), number)
        made = forked(store, number, f"new-{number}")
        assert load_experiment(store, first_generation(f"new-{number}")) == made.experiment
        assert made.experiment.policy_event_count == then.policy_event_count
        assert made.experiment.settings == then.settings
        lost = {trial: {each.step for each in refs} for trial, refs in made.lost_checkpoints.items()}
        for before, now in zip(then.trials.values(), made.experiment.trials.values(), strict=True):
            left = [each for each in before.checkpoints if each.step not in lost.get(before.id, ())]
            assert known(now) == known(before.model_copy(update={"checkpoints": tuple(left)}))
        assert unreadable(store, f"new-{number}", made.experiment.trials) == []


def test_of_a_trial_that_goes_on_a_fork_has_what_it_had_by_then() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    number = old.state.entry_count
    old.step("b")
    trials = forked(store, number).experiment.trials
    assert [(trial.id, trial.phase, trial.step) for trial in trials.values()] == [
        ("a", Phase.FINISHED, 3),
        ("b", Phase.PENDING, 3),
        ("c", Phase.PENDING, 0),
    ]
    names = {name: trial.next_sequence for name, trial in trials.items()}
    assert names == {name: trial.next_sequence for name, trial in as_of_entry(store, number).trials.items()}


def as_of_entry(store: MemoryStore, number: int) -> Experiment:
    return load_at(store, first_generation("old"), number)[0]


def test_no_byte_of_a_checkpoint_passes_through_this_machine_and_shared_blobs_are_copied_once() -> None:
    store = MemoryStore()
    search_of_three(store)
    blobs = {
        path
        for trial in ("a", "b")
        for ref in own_state(store, "old", trial).checkpoints
        for path in read_manifest(
            store, CheckpointKey(trial=first_generation("old").trial_key(trial), step=ref.step, sequence=ref.sequence)
        ).blob_paths()
    }
    before = store.operations.copy()
    forked(store)
    done = store.operations - before
    assert {path for path in store.objects if path.startswith("new/") and "/blobs/" in path} == {
        path.replace("old/", "new/", 1) for path in blobs
    }
    assert (done["copy"], done["put"]) == (len(blobs), 1), "its snapshot is the only object that is put"
    assert done["create"] == 6, "two entries, and a manifest for each of four checkpoints"


def test_a_clone_is_one_in_the_fork_too_and_keeps_its_origin_there() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    ref = old.state.trial("b").checkpoints[-1]
    origin = CheckpointOrigin(trial="b", step=ref.step, sequence=ref.sequence)
    copy = ref.model_copy(update={"sequence": old.state.trial("c").next_sequence, "origin": origin})
    old.append(CheckpointCloned(trial="c", checkpoint=copy, source="b"))
    for _ in range(3):
        old.step("b")
    made = forked(store).experiment
    assert made.trial("c").checkpoints == (copy,)
    assert [clone.trial for clone in made.trial("b").clones] == ["c"]
    removed = delete_generation(store, first_generation("old"), OWNER, WriteStamp(write_id="r", at=""))
    assert removed
    new = SmallSearch(store, "new")
    new.begin("b")
    for _ in range(3):
        new.step("b")
    assert unreadable(store, "new", new.state.trials) == []


def test_what_is_set_aside_in_the_origin_since_is_not_copied() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    number, bad = old.state.entry_count, old.state.trial("b").checkpoints[-1]
    old.append(CheckpointQuarantined(trial="b", sequence=bad.sequence, reason="damaged"))
    made = forked(store, number)
    assert made.lost_checkpoints == {"b": [bad]}
    assert [ref.step for ref in made.experiment.trial("b").checkpoints] == [1]


def by_a_guest(old: SmallSearch) -> None:
    """Quarantine the newest checkpoint of trial b, without the owner's knowledge."""
    newest = old.key("b").checkpoint_key(old.state.trial("b").checkpoints[-1])
    stamp = WriteStamp(write_id="guest", at="")
    quarantine(old.store, old.state.key, {newest: "damaged"}, stamp)


def test_a_search_can_be_forked_in_which_a_guest_has_quarantined_a_checkpoint_during_a_save() -> None:
    old = search_of_three(store := MemoryStore())
    by_a_guest(old)
    old.step("b")
    assert [ref.step for ref in old.state.trial("b").checkpoints] == [1, 4], "the save was overtaken, and repeated"
    assert [ref.step for ref in forked(store).experiment.trial("b").checkpoints] == [1, 4]


def test_an_owner_may_clone_a_checkpoint_that_a_guest_quarantines_at_the_same_time() -> None:
    old = search_of_three(MemoryStore())
    clone = make_clone_ref(old.state.trial("c"), old.state.trial("b").checkpoints[-1], "b")
    by_a_guest(old)
    old.append(CheckpointCloned(trial="c", checkpoint=clone, source="b"))
    assert [ref.step for ref in old.state.trial("c").checkpoints] == [2]


def test_metadata_that_was_set_after_the_save_is_in_the_forks_manifest() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    key = old.key("b").checkpoint_key(old.state.trial("b").checkpoints[-1])
    revise_metadata(store, key.metadata_folder, lambda _: {"note": "best"}, initial={}, write_id="m")
    new = forked(store).experiment
    assert read_manifest(
        store, new.trial_key("b").checkpoint_key(new.trial("b").checkpoints[-1])
    ).metadata.user_metadata == {"note": "best"}


def test_a_fork_and_its_running_origin_go_on_side_by_side_and_keep_each_others_bytes() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    forked(store)
    for _ in range(4):
        old.step("b")  # retires and deletes every checkpoint that the fork has
    new = SmallSearch(store, "new")
    assert unreadable(store, "new", new.state.trials) == []
    for _ in range(4):
        new.begin("b")
        new.step("b")
    old.finish("b")
    assert unreadable(store, "new", new.state.trials) == unreadable(store, "old", old.state.trials) == []
    assert new.state.trial("b").step == 6
    for name in ("old", "new"):
        left = [
            path for path in store.objects if path.startswith(f"{name}/1/trials/b/") and path.endswith("manifest.json")
        ]
        assert len(left) == 2


def test_what_the_origin_has_deleted_since_is_said_and_the_newest_that_is_left_is_used() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    number = old.state.entry_count
    old.step("b")
    gone = find_lost_checkpoints(store, load_fork_point(store, first_generation("old"), number))
    made = forked(store, number)
    assert {trial: [each.step for each in refs] for trial, refs in gone.items()} == {"b": [1]}
    assert made.lost_checkpoints == gone
    assert [each.step for each in made.experiment.trial("b").checkpoints] == [2]


def test_a_trial_of_which_nothing_is_left_begins_anew_and_that_is_legal() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    number = old.state.entry_count
    for _ in range(3):
        old.step("b")
    assert [each.step for each in forked(store, number).lost_checkpoints["b"]] == [1, 2]
    new = SmallSearch(store, "new")
    new.begin("b")
    new.step("b")
    assert (new.state.trial("b").step, new.state.trial("b").recomputed_steps) == (1, 3)


def test_a_stop_that_was_asked_of_the_origin_is_not_asked_of_the_fork() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    old.append(StopRequested(trial="b", reason="no good", request="r"), StopRequested(reason="enough"))
    made = forked(store).experiment
    assert (old.state.stop_requests, old.state.pending_stops, old.state.stop_reason) == (
        ("r",),
        {"b": "no good"},
        "enough",
    )
    assert (made.stop_requests, made.pending_stops, made.stop_reason) == ((), {}, "")


def test_what_is_something_already_does_not_become_a_fork() -> None:
    store = MemoryStore()
    old = search_of_three(store)
    origin = load_fork_point(store, first_generation("old"), 2).origin
    for state in (old.state, forked(store).experiment):
        with pytest.raises(IllegalTransition, match="it already has trials or an origin"):
            apply_event(state, ExperimentForked(origin=origin), state.entry_count + 1)


def test_a_fork_can_be_forked() -> None:
    store = MemoryStore()
    search_of_three(store)
    forked(store)
    new = SmallSearch(store, "new")
    new.begin("b")
    new.step("b")

    past = load_fork_point(store, first_generation("new"), None)
    stamp = WriteStamp(write_id="g", at="")
    into = begin_fork(store, first_generation("third"), past.origin, OWNER, stamp)
    third = complete_fork(store, past, into, stamp).experiment
    assert what_is_known(third) == what_is_known(new.state)
    assert unreadable(store, "third", third.trials) == []
    again = SmallSearch(store, "third")
    again.begin("b")
    again.step("b")
    assert again.state.trial("b").step == 4


def test_a_fork_that_is_there_already_stays_as_it_is() -> None:
    store = MemoryStore()
    number = search_of_three(store).state.entry_count
    forked(store, number)
    new = SmallSearch(store, "new")
    new.begin("b")
    new.step("b")
    again = forked(store, number, write_id="again").experiment
    assert again.trial("b").step == 3
    assert again.trials == new.state.trials


@pytest.mark.parametrize(
    ("number", "name", "said"),
    [
        (0, "new", "expected an entry from 1 to"),
        (99, "new", "expected an entry from 1 to .*, found 99"),
        (2, "old", "found another experiment"),
        (3, "taken", "found a fork of experiment 'old' as of entry 2"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_before_anything_is_written(number: int, name: str, said: str) -> None:
    store = MemoryStore()
    search_of_three(store)
    forked(store, 2, "taken")
    before = dict(store.objects)
    with pytest.raises(InvalidInput, match=said):
        forked(store, number, name, "other")
    assert store.objects == before


def test_of_two_who_make_the_same_fork_one_owns_it() -> None:
    store = MemoryStore()
    search_of_three(store)
    past = load_fork_point(store, first_generation("old"), None)
    one, other = WriteStamp(write_id="one", at=""), WriteStamp(write_id="other", at="")
    first = begin_fork(store, first_generation("new"), past.origin, OWNER, one)
    second = begin_fork(store, first_generation("new"), past.origin, OWNER, other)
    with pytest.raises(Superseded):
        complete_fork(store, past, first, one)
    assert complete_fork(store, past, second, other).experiment.is_complete
    assert unreadable(store, "new", load_experiment(store, first_generation("new")).trials) == []


def test_a_fork_that_is_cut_short_is_not_forked() -> None:
    store = MemoryStore()
    search_of_three(store)
    past = load_fork_point(store, first_generation("old"), None)
    begin_fork(store, first_generation("new"), past.origin, OWNER, WriteStamp(write_id="w", at=""))
    with pytest.raises(InvalidInput, match="an incomplete fork"):
        load_fork_point(store, first_generation("new"), None)


def _dies_everywhere(only: frozenset[str] | None, ways: Sequence[Failure], *, goes_on_every: int) -> int:
    world = MemoryStore()
    number = search_of_three(world).state.entry_count
    begun = dict(world.objects)
    origin = load_experiment(world, first_generation("old"))
    counting = DyingStore(world, 0, only=only)
    expected = what_is_known(forked(counting, number).experiment)
    for nth, way in product(range(1, counting.total + 1), ways):
        store = MemoryStore(begun)
        with suppress(Crash):
            forked(DyingStore(store, nth, way, only=only), number)
        assert load_experiment(store, first_generation("old")) == origin
        made = forked(store, number, write_id="the next").experiment
        assert what_is_known(made) == expected, (nth, way)
        assert unreadable(store, "new", made.trials) == [], (nth, way)
        assert begun == {path: data for path, data in store.objects.items() if path.startswith("old/")}
        if nth % goes_on_every == 0:
            _both_go_on(store)
    return counting.total * len(ways)


def test_a_fork_that_dies_at_any_write_leaves_the_origin_as_it_was_and_is_made_by_the_next(
    record_property: Record,
) -> None:
    points = _dies_everywhere(WRITES, (Failure.CRASH_AFTER, Failure.REPLY_LOST), goes_on_every=10)
    record_property("figure: points at which a fork died", points)
    assert points > 30


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_nor_does_any_other_operation_matter(record_property: Record) -> None:
    record_property("figure: points at which a fork died", _dies_everywhere(None, tuple(Failure), goes_on_every=5))


def _both_go_on(store: MemoryStore) -> None:
    """Fork and origin miss no bytes."""
    old, new = SmallSearch(store, "old"), SmallSearch(store, "new")
    for search in (old, new, new, old):
        for _ in range(3):
            search.begin("b")
            search.step("b")
    assert unreadable(store, "new", new.state.trials) == unreadable(store, "old", old.state.trials) == []


# --------------------------------------------------------------------------------------------- mutants

COPY = "deleted = set(store.map(copy_blob, missing))"
LAST = "    if len(copied) < len(needed):"
MUTANTS = {
    "manifests before their blobs": {
        COPY: "deleted = set()",
        "require_stored(store, folder, required)": "pass",
        LAST: f"    list(store.map(copy_blob, missing))\n{LAST}",
    },
    "no look at what was copied before a crash": {
        "missing = [": "missing = [] if existing else [",
        "require_stored(store, folder, required)": "pass",
    },
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_lines(monkeypatch, fork_experiment._copy_checkpoints, MUTANTS[name])
    with pytest.raises((AssertionError, StoreUnavailable)):
        _dies_everywhere(WRITES, [Failure.CRASH_AFTER], goes_on_every=1000)
