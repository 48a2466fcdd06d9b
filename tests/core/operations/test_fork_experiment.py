"""A fork has its origin's state as of one entry, and copies of its bytes that the target makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product

import pytest

from prefect_tune.core.checkpoints.manifest import update_metadata
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
from prefect_tune.core.operations.scrub import quarantine_in_journal
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.generations import find_current_journal
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.values import WriteStamp
from tests.core.driver import retry
from tests.core.protocol.mutate import break_lines
from tests.core.small_search import SmallSearch, find_unreadable, load_trial, make_search
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import WRITES, Crash, DyingStore, Failure
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs", "decode_cache")

OWNER = Owner(name="forker", host="here", pid=2)
Record = Callable[[str, object], None]


def make_fork(store: object, number: int | None = None, name: str = "new", write_id: str = "f") -> ForkResult:
    """Fork like the task, with retries."""
    stamp = WriteStamp(write_id=write_id, at="2026-11-21T09:00:00Z")

    def act() -> ForkResult:
        fork_point = load_fork_point(store, find_current_journal(store, "old"), number)
        fork_key = begin_fork(store, find_current_journal(store, name), fork_point.origin, OWNER, stamp)
        return complete_fork(store, fork_point, fork_key, stamp)

    return retry(act)


def describe_trial(trial: Trial) -> dict[str, object]:
    """Return the fields of a trial that do not locate its bytes or measure its cost."""
    excluded = {
        "attempt_records",
        "checkpoints",
        "collected_up_to",
        "adopted_up_to",
        "restored_sequence",
        "quarantined_sequences",
    }
    checkpoints = [(ref.step, ref.metrics) for ref in trial.checkpoints]
    changed_phase = {"phase": Phase.PENDING} if trial.phase is Phase.RUNNING else {}
    return {**trial.model_dump(exclude=excluded), "checkpoints": checkpoints, **changed_phase}


def describe_trials(experiment: Experiment) -> list[dict[str, object]]:
    return [describe_trial(trial) for trial in experiment.trials.values()]


def test_a_fork_of_every_entry_is_the_origin_as_of_that_entry() -> None:
    store = MemoryStore()
    for number in range(1, make_search(store).state.entry_count + 1):
        origin, _ = load_at(store, first_generation("old"), number)
        fork = make_fork(store, number, f"new-{number}")
        assert load_experiment(store, first_generation(f"new-{number}")) == fork.experiment
        assert fork.experiment.policy_event_count == origin.policy_event_count
        assert fork.experiment.settings == origin.settings
        lost = {trial: {ref.step for ref in refs} for trial, refs in fork.lost_checkpoints.items()}
        for before, after in zip(origin.trials.values(), fork.experiment.trials.values(), strict=True):
            kept = [ref for ref in before.checkpoints if ref.step not in lost.get(before.id, ())]
            assert describe_trial(after) == describe_trial(before.model_copy(update={"checkpoints": tuple(kept)}))
        assert find_unreadable(store, f"new-{number}", fork.experiment.trials) == []


def test_of_a_trial_that_goes_on_a_fork_has_what_it_had_by_then() -> None:
    store = MemoryStore()
    old = make_search(store)
    number = old.state.entry_count
    old.train_step("b")
    trials = make_fork(store, number).experiment.trials
    assert [(trial.id, trial.phase, trial.step) for trial in trials.values()] == [
        ("a", Phase.FINISHED, 3),
        ("b", Phase.PENDING, 3),
        ("c", Phase.PENDING, 0),
    ]
    names = {name: trial.next_sequence for name, trial in trials.items()}
    assert names == {name: trial.next_sequence for name, trial in load_at_entry(store, number).trials.items()}


def load_at_entry(store: MemoryStore, number: int) -> Experiment:
    return load_at(store, first_generation("old"), number)[0]


def test_no_byte_of_a_checkpoint_passes_through_this_machine_and_shared_blobs_are_copied_once() -> None:
    store = MemoryStore()
    make_search(store)
    blobs = {
        path
        for trial in ("a", "b")
        for ref in load_trial(store, "old", trial).checkpoints
        for path in read_manifest(
            store, CheckpointKey(trial=first_generation("old").trial_key(trial), step=ref.step, sequence=ref.sequence)
        ).blob_paths()
    }
    before = store.operations.copy()
    make_fork(store)
    operations = store.operations - before
    assert {path for path in store.objects if path.startswith("new/") and "/blobs/" in path} == {
        path.replace("old/", "new/", 1) for path in blobs
    }
    assert (operations["copy"], operations["put"]) == (len(blobs), 1), "its snapshot is the only object that is put"
    assert operations["create"] == 6, "two entries, and a manifest for each of four checkpoints"


def test_a_clone_is_one_in_the_fork_too_and_keeps_its_origin_there() -> None:
    store = MemoryStore()
    old = make_search(store)
    ref = old.state.trial("b").checkpoints[-1]
    origin = CheckpointOrigin(trial="b", step=ref.step, sequence=ref.sequence)
    copy = ref.model_copy(update={"sequence": old.state.trial("c").next_sequence, "origin": origin})
    old.append(CheckpointCloned(trial="c", checkpoint=copy, source="b"))
    for _ in range(3):
        old.train_step("b")
    fork = make_fork(store).experiment
    assert fork.trial("c").checkpoints == (copy,)
    assert [clone.trial for clone in fork.trial("b").clones] == ["c"]
    assert delete_generation(store, first_generation("old"), OWNER, WriteStamp(write_id="r", at=""))
    new = SmallSearch(store, "new")
    new.start_attempt("b")
    for _ in range(3):
        new.train_step("b")
    assert find_unreadable(store, "new", new.state.trials) == []


def test_what_is_set_aside_in_the_origin_since_is_not_copied() -> None:
    store = MemoryStore()
    old = make_search(store)
    number, bad = old.state.entry_count, old.state.trial("b").checkpoints[-1]
    old.append(CheckpointQuarantined(trial="b", sequence=bad.sequence, reason="damaged"))
    fork = make_fork(store, number)
    assert fork.lost_checkpoints == {"b": [bad]}
    assert [ref.step for ref in fork.experiment.trial("b").checkpoints] == [1]


def quarantine_as_non_owner(old: SmallSearch) -> None:
    """Quarantine the newest checkpoint of trial b, without the owner's knowledge."""
    newest = old.key("b").checkpoint_key(old.state.trial("b").checkpoints[-1])
    quarantine_in_journal(old.store, old.state.key, {newest: "damaged"}, WriteStamp(write_id="guest", at=""))


def test_a_search_can_be_forked_in_which_a_guest_has_quarantined_a_checkpoint_during_a_save() -> None:
    old = make_search(store := MemoryStore())
    quarantine_as_non_owner(old)
    old.train_step("b")
    assert [ref.step for ref in old.state.trial("b").checkpoints] == [1, 4], "the save was overtaken, and repeated"
    assert [ref.step for ref in make_fork(store).experiment.trial("b").checkpoints] == [1, 4]


def test_an_owner_may_clone_a_checkpoint_that_a_guest_quarantines_at_the_same_time() -> None:
    old = make_search(MemoryStore())
    clone = make_clone_ref(old.state.trial("c"), old.state.trial("b").checkpoints[-1], "b")
    quarantine_as_non_owner(old)
    old.append(CheckpointCloned(trial="c", checkpoint=clone, source="b"))
    assert [ref.step for ref in old.state.trial("c").checkpoints] == [2]


def test_metadata_that_was_set_after_the_save_is_in_the_forks_manifest() -> None:
    store = MemoryStore()
    old = make_search(store)
    key = old.key("b").checkpoint_key(old.state.trial("b").checkpoints[-1])
    update_metadata(store, key.metadata_folder, lambda _: {"note": "best"}, initial={}, write_id="m")
    new = make_fork(store).experiment
    assert read_manifest(
        store, new.trial_key("b").checkpoint_key(new.trial("b").checkpoints[-1])
    ).metadata.user_metadata == {"note": "best"}


def test_a_fork_and_its_running_origin_go_on_side_by_side_and_keep_each_others_bytes() -> None:
    store = MemoryStore()
    old = make_search(store)
    make_fork(store)
    for _ in range(4):
        old.train_step("b")  # retires and deletes every checkpoint that the fork has
    new = SmallSearch(store, "new")
    assert find_unreadable(store, "new", new.state.trials) == []
    for _ in range(4):
        new.start_attempt("b")
        new.train_step("b")
    old.finish_trial("b")
    assert find_unreadable(store, "new", new.state.trials) == find_unreadable(store, "old", old.state.trials) == []
    assert new.state.trial("b").step == 6
    for name in ("old", "new"):
        manifests = [
            path for path in store.objects if path.startswith(f"{name}/1/trials/b/") and path.endswith("manifest.json")
        ]
        assert len(manifests) == 2


def test_what_the_origin_has_deleted_since_is_said_and_the_newest_that_is_left_is_used() -> None:
    store = MemoryStore()
    old = make_search(store)
    number = old.state.entry_count
    old.train_step("b")
    deleted = find_lost_checkpoints(store, load_fork_point(store, first_generation("old"), number))
    fork = make_fork(store, number)
    assert {trial: [ref.step for ref in refs] for trial, refs in deleted.items()} == {"b": [1]}
    assert fork.lost_checkpoints == deleted
    assert [ref.step for ref in fork.experiment.trial("b").checkpoints] == [2]


def test_a_trial_of_which_nothing_is_left_begins_anew_and_that_is_legal() -> None:
    store = MemoryStore()
    old = make_search(store)
    number = old.state.entry_count
    for _ in range(3):
        old.train_step("b")
    assert [ref.step for ref in make_fork(store, number).lost_checkpoints["b"]] == [1, 2]
    new = SmallSearch(store, "new")
    new.start_attempt("b")
    new.train_step("b")
    assert (new.state.trial("b").step, new.state.trial("b").recomputed_steps) == (1, 3)


def test_a_stop_that_was_asked_of_the_origin_is_not_asked_of_the_fork() -> None:
    store = MemoryStore()
    old = make_search(store)
    old.append(StopRequested(trial="b", reason="no good", request="r"), StopRequested(reason="enough"))
    fork = make_fork(store).experiment
    assert (old.state.stop_requests, old.state.pending_stops) == (("r",), {"b": "no good"})
    assert old.state.stop_reason == "enough"
    assert (fork.stop_requests, fork.pending_stops, fork.stop_reason) == ((), {}, "")


def test_what_is_something_already_does_not_become_a_fork() -> None:
    store = MemoryStore()
    old = make_search(store)
    origin = load_fork_point(store, first_generation("old"), 2).origin
    for state in (old.state, make_fork(store).experiment):
        with pytest.raises(IllegalTransition, match="it already has trials or an origin"):
            apply_event(state, ExperimentForked(origin=origin), state.entry_count + 1)


def test_a_fork_can_be_forked() -> None:
    store = MemoryStore()
    make_search(store)
    make_fork(store)
    new = SmallSearch(store, "new")
    new.start_attempt("b")
    new.train_step("b")

    fork_point = load_fork_point(store, first_generation("new"), None)
    stamp = WriteStamp(write_id="g", at="")
    fork_key = begin_fork(store, first_generation("third"), fork_point.origin, OWNER, stamp)
    third = complete_fork(store, fork_point, fork_key, stamp).experiment
    assert describe_trials(third) == describe_trials(new.state)
    assert find_unreadable(store, "third", third.trials) == []
    search = SmallSearch(store, "third")
    search.start_attempt("b")
    search.train_step("b")
    assert search.state.trial("b").step == 4


def test_a_fork_that_is_there_already_stays_as_it_is() -> None:
    store = MemoryStore()
    number = make_search(store).state.entry_count
    make_fork(store, number)
    new = SmallSearch(store, "new")
    new.start_attempt("b")
    new.train_step("b")
    fork = make_fork(store, number, write_id="again").experiment
    assert fork.trial("b").step == 3
    assert fork.trials == new.state.trials


@pytest.mark.parametrize(
    ("number", "name", "message"),
    [
        (0, "new", "expected an entry from 1 to"),
        (99, "new", "expected an entry from 1 to .*, found 99"),
        (2, "old", "found another experiment"),
        (3, "taken", "found a fork of experiment 'old' as of entry 2"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_before_anything_is_written(number: int, name: str, message: str) -> None:
    store = MemoryStore()
    make_search(store)
    make_fork(store, 2, "taken")
    before = dict(store.objects)
    with pytest.raises(InvalidInput, match=message):
        make_fork(store, number, name, "other")
    assert store.objects == before


def test_of_two_who_make_the_same_fork_one_owns_it() -> None:
    store = MemoryStore()
    make_search(store)
    fork_point = load_fork_point(store, first_generation("old"), None)
    first_stamp, second_stamp = WriteStamp(write_id="one", at=""), WriteStamp(write_id="other", at="")
    first = begin_fork(store, first_generation("new"), fork_point.origin, OWNER, first_stamp)
    second = begin_fork(store, first_generation("new"), fork_point.origin, OWNER, second_stamp)
    with pytest.raises(Superseded):
        complete_fork(store, fork_point, first, first_stamp)
    assert complete_fork(store, fork_point, second, second_stamp).experiment.is_complete
    assert find_unreadable(store, "new", load_experiment(store, first_generation("new")).trials) == []


def test_a_fork_that_is_cut_short_is_not_forked() -> None:
    store = MemoryStore()
    make_search(store)
    fork_point = load_fork_point(store, first_generation("old"), None)
    begin_fork(store, first_generation("new"), fork_point.origin, OWNER, WriteStamp(write_id="w", at=""))
    with pytest.raises(InvalidInput, match="an incomplete fork"):
        load_fork_point(store, first_generation("new"), None)


def _crash_everywhere(only: frozenset[str] | None, failures: Sequence[Failure], *, continue_every: int) -> int:
    original = MemoryStore()
    number = make_search(original).state.entry_count
    objects_before = dict(original.objects)
    origin = load_experiment(original, first_generation("old"))
    counting = DyingStore(original, 0, only=only)
    expected = describe_trials(make_fork(counting, number).experiment)
    for nth, failure in product(range(1, counting.total + 1), failures):
        store = MemoryStore(objects_before)
        with suppress(Crash):
            make_fork(DyingStore(store, nth, failure, only=only), number)
        assert load_experiment(store, first_generation("old")) == origin
        fork = make_fork(store, number, write_id="the next").experiment
        assert describe_trials(fork) == expected, (nth, failure)
        assert find_unreadable(store, "new", fork.trials) == [], (nth, failure)
        assert objects_before == {path: data for path, data in store.objects.items() if path.startswith("old/")}
        if nth % continue_every == 0:
            _continue_both(store)
    return counting.total * len(failures)


def test_a_fork_that_dies_at_any_write_leaves_the_origin_as_it_was_and_is_made_by_the_next(
    record_property: Record,
) -> None:
    points = _crash_everywhere(WRITES, (Failure.CRASH_AFTER, Failure.REPLY_LOST), continue_every=10)
    record_property("figure: points at which a fork died", points)
    assert points > 30


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_nor_does_any_other_operation_matter(record_property: Record) -> None:
    record_property("figure: points at which a fork died", _crash_everywhere(None, tuple(Failure), continue_every=5))


def _continue_both(store: MemoryStore) -> None:
    """Check that fork and origin lack no bytes when both continue."""
    old, new = SmallSearch(store, "old"), SmallSearch(store, "new")
    for search in (old, new, new, old):
        for _ in range(3):
            search.start_attempt("b")
            search.train_step("b")
    assert find_unreadable(store, "new", new.state.trials) == find_unreadable(store, "old", old.state.trials) == []


# --------------------------------------------------------------------------------------------- mutants

COPY = "deleted = set(store.map(copy_blob, missing))"
LAST = "    if len(copied) < len(needed):"
MUTANTS = {
    "manifests before their blobs": {
        COPY: "deleted = set()",
        "require_blobs_stored(store, folder, required)": "pass",
        LAST: f"    list(store.map(copy_blob, missing))\n{LAST}",
    },
    "no look at what was copied before a crash": {
        "missing = [": "missing = [] if existing else [",
        "require_blobs_stored(store, folder, required)": "pass",
    },
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_lines(monkeypatch, fork_experiment._copy_checkpoints, MUTANTS[name])
    with pytest.raises((AssertionError, StoreUnavailable)):
        _crash_everywhere(WRITES, [Failure.CRASH_AFTER], continue_every=1000)
