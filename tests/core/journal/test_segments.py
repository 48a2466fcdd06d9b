"""Segments: opening reads few objects, and bad or missing segments never change the loaded state."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_tune.core.errors import JournalCorrupt, StoreRefused, StoreUnavailable, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment, TrialMap
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal import journal, segments
from prefect_tune.core.journal.segments import (
    decode_segment,
    encode_segment,
    listed_segments,
    steps,
    write_due_segment,
)
from prefect_tune.core.journal_events import Configured
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import JournalKey, begin_of, boundaries, is_boundary
from prefect_tune.core.storage.object_store import Buffer, Listed
from prefect_tune.core.values import digest_of
from tests.core.driver import JOURNAL
from tests.core.histories import base, fold, next_state, opened, stamp
from tests.fakes.stores.memory_store import MemoryStore

NAMES = [f"t{number}" for number in range(7)]
BASES = [2, 3, 10]


def load(store: MemoryStore, key: JournalKey = JOURNAL) -> Experiment:
    return journal.load(store, key, side_by_side=map)


def run(store: MemoryStore, entries: int, *, key: JournalKey = JOURNAL, names: Sequence[str] = NAMES) -> Experiment:
    """A history with every segment."""
    state = opened(store, key)
    while state.number < entries:
        state = next_state(store, state, [names[state.number * 3 % len(names)]])
        write_due_segment(store, state)
    return state


def segment_paths(store: MemoryStore) -> list[str]:
    return sorted(path for path in store.objects if "/segments/" in path)


# ------------------------------------------------------------------------------------------------ read counts


@given(number=st.integers(1, 10**10 - 1))
def test_no_number_of_entries_takes_more_than_eighteen_objects(number: int) -> None:
    ends = boundaries(number)
    assert len(ends) + number - (ends[-1] if ends else 0) <= 18
    assert [begin_of(end) for end in ends] == [0, *ends][:-1]


@given(digits=st.sampled_from(BASES), number=st.integers(1, 500))
def test_the_way_is_over_the_segments_that_are_there_when_all_were_written(digits: int, number: int) -> None:
    with base(digits):
        there: set[int] = set()
        for end in filter(is_boundary, range(1, number + 1)):
            there = {each for each in there if not begin_of(end) < each < end} | {end}
        entries = range(max(there, default=0) + 1, number + 1)
        assert list(steps(frozenset(there), number)) == [*boundaries(number), *entries]
        assert len(there) <= digits * 10


def test_opening_reads_few_objects_after_any_number_of_entries() -> None:
    store, worst = MemoryStore(), 0
    state = opened(store)
    with base(3):
        while state.number < 90:
            state = next_state(store, state, [NAMES[state.number % 7]])
            write_due_segment(store, state)
            store.operations.clear()
            assert load(store) == state
            assert store.operations["list"] == 2
            wanted = len(boundaries(state.number)) + (state.number % 3 or 1)
            assert store.operations["read"] == wanted + 1  # the search for an entry that is not listed yet
            worst = max(worst, wanted)
    assert worst == 3 + 2


def test_a_journal_of_hundreds_of_entries_is_opened_with_a_dozen_reads() -> None:
    store = MemoryStore()
    state = run(store, 399)
    store.operations.clear()
    assert load(store) == state
    assert store.operations["read"] <= 2 + 9 + 1
    assert len(segment_paths(store)) <= 4
    assert segment_paths(store) == [JOURNAL.segment_path(number) for number in (300, 390)]


# ----------------------------------------------------------------------------------- the state of all entries


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[list[str]], list[bool]]:
    moves = draw(st.lists(st.lists(st.sampled_from(NAMES), max_size=3), max_size=30))
    kept = draw(st.lists(st.booleans(), min_size=len(moves), max_size=len(moves)))
    return draw(st.sampled_from([2, 3, 4])), moves, kept


@settings(max_examples=40)
@given(histories())
def test_what_is_loaded_is_the_fold_of_all_entries_whichever_segments_are_missing(
    history: tuple[int, list[list[str]], list[bool]],
) -> None:
    digits, moves, kept = history
    store = MemoryStore()
    with base(digits):
        state = opened(store)
        for trials, keeps in zip(moves, kept, strict=True):
            state = next_state(store, state, trials)
            if keeps:
                write_due_segment(store, state)
            found = load(store)
            assert found == state == fold(store)
            assert list(found.trials) == list(state.trials)
            assert found.trials._changed == state.trials._changed  # the next segment needs all changed trials


@settings(max_examples=25)
@given(digits=st.sampled_from([2, 3]), entries=st.integers(2, 30), data=st.data())
def test_segments_may_come_in_any_order_late_twice_or_never(digits: int, entries: int, data: st.DataObject) -> None:
    store, states = MemoryStore(), []
    with base(digits):
        state = opened(store)
        while state.number < entries:
            state = next_state(store, state, [NAMES[state.number % 5]])
            states.append(state)
        for late in data.draw(st.lists(st.sampled_from(states), max_size=entries)):
            write_due_segment(store, late)
            assert load(store) == state


def test_a_trials_own_journal_has_segments_of_its_own() -> None:
    store, key = MemoryStore(), JournalKey(experiment="e", generation=1, trial="t")
    state = run(store, 23, key=key, names=["t"])
    assert segment_paths(store) == [f"e/1/trials/t/segments/00000000{number}.jsonl" for number in (20,)]
    assert load(store, key) == state == fold(store, key)


# --------------------------------------------------------------------------------------------- bad segments

DAMAGES = [
    pytest.param(lambda _: b"", id="empty"),
    pytest.param(lambda data: data[:-9], id="torn"),
    pytest.param(lambda data: data[: data.index(b"\n")], id="torn after its first line"),
    pytest.param(lambda data: data.replace(b'"running"', b'"pending"'), id="altered"),
    pytest.param(lambda data: data.replace(b'"opened_at":1', b'"opened_at":2'), id="its first line altered"),
    pytest.param(lambda data: data + b"\n", id="longer"),
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("entries", [122, 120])
def test_a_damaged_segment_is_passed_over_and_mended_by_the_next_owner(
    damage: Callable[[bytes], bytes], which: int, entries: int
) -> None:
    store = MemoryStore()
    state = run(store, entries)
    path = segment_paths(store)[which % len(segment_paths(store))]
    whole = store.objects[path]
    store.objects[path] = damage(whole)
    assert store.objects[path] != whole

    assert load(store) == state
    later = opened(store, write_id="later")

    assert store.objects[path] == whole
    assert load(store) == later


def test_every_cut_and_every_flipped_bit_of_a_segment_is_noticed() -> None:
    store = MemoryStore()
    run(store, 21, names=["t"])
    (path,) = segment_paths(store)
    data = store.objects[path]
    for at in range(len(data)):
        with pytest.raises(JournalCorrupt):
            decode_segment(data[:at], JOURNAL, 20)
        for bit in (0, 6):
            with pytest.raises((JournalCorrupt, UnknownVersion)):
                decode_segment(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], JOURNAL, 20)


@pytest.mark.parametrize(
    ("written", "spoilt"),
    [(b'"attempt":', b'"attemqt":'), (b'"trial":"t0"', b'"trial":"../../t0"'), (b'"trial":"t0"', b'"trial":"/t0"')],
)
def test_a_segment_whose_trials_are_none_is_noticed(written: bytes, spoilt: bytes) -> None:
    store = MemoryStore()
    state = run(store, 20)
    first, _, lines = encode_segment(state).partition(b"\n")
    document = json.loads(first)
    del document["digest_of_document"]
    head = segments._Head.model_validate_json(json.dumps(document))
    assert written in lines
    spoilt_lines = lines.replace(written, spoilt)
    forged = seal(head.model_copy(update={"digest_of_trials": digest_of(spoilt_lines)}))
    with pytest.raises(JournalCorrupt, match="its trials cannot be read"):
        decode_segment(forged + b"\n" + spoilt_lines, JOURNAL, 20)


@pytest.mark.parametrize(
    ("key", "number"),
    [
        pytest.param(JournalKey(experiment="another", generation=1), 20, id="of another experiment"),
        pytest.param(JournalKey(experiment="e", generation=1, trial="t"), 20, id="of a trial's own journal"),
        pytest.param(JOURNAL, 10, id="of another stretch"),
    ],
)
def test_a_segment_from_elsewhere_is_passed_over(key: JournalKey, number: int) -> None:
    elsewhere, store = MemoryStore(), MemoryStore()
    foreign = encode_segment(run(elsewhere, number, key=key, names=["t"]))
    state = run(store, 23, names=["t"])
    store.objects[JOURNAL.segment_path(20)] = foreign
    assert load(store) == state


def test_a_segment_of_a_newer_version_is_refused_loudly() -> None:
    store = MemoryStore()
    run(store, 23)
    path = JOURNAL.segment_path(20)
    store.objects[path] = store.objects[path].replace(b'"version":2', b'"version":3', 1)
    with pytest.raises(UnknownVersion, match="upgrade"):
        load(store)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("before", [2, 3, 7, 12, 28, 57])
@pytest.mark.parametrize("after", [1, 2, 3, 7, 12, 29])
def test_segments_of_a_journal_that_was_deleted_are_not_believed(before: int, after: int) -> None:
    """`journal/` was deleted but not `segments/`, and the experiment was begun again under its name."""
    store = MemoryStore()
    run(store, before, names=["old"])
    store.delete([path for path in store.objects if "/journal/" in path])

    state = run(store, after)

    assert load(store) == state == fold(store)
    later = opened(store, write_id="later")
    assert load(store) == later
    assert {number for number in listed_segments(store, JOURNAL) if number > later.number} == set()


def test_a_mixture_of_two_histories_is_sorted_out() -> None:
    """The oldest segment belongs to a deleted history, all later objects to the present one."""
    store, old = MemoryStore(), MemoryStore()
    run(old, 110, names=["old"])
    state = run(store, 123)
    store.objects[JOURNAL.segment_path(100)] = old.objects[JOURNAL.segment_path(100)]
    assert load(store) == state
    opened(store, write_id="later")
    store.operations.clear()
    assert load(store).number == 124
    assert store.operations["read"] <= 8


def test_without_segments_a_journal_that_is_corrupt_is_read_once() -> None:
    store = MemoryStore()
    state = opened(store)
    next_state(store, state, ["t"])
    del store.objects[JOURNAL.entry_path(1)]
    store.operations.clear()
    with pytest.raises(JournalCorrupt, match="it is missing"):
        load(store)
    assert store.operations["read"] == 1


def test_a_journal_that_is_corrupt_stays_corrupt_beside_its_segments() -> None:
    store = MemoryStore()
    run(store, 23)
    store.objects[JOURNAL.entry_path(22)] = store.objects[JOURNAL.entry_path(21)]
    with pytest.raises(JournalCorrupt):
        load(store)


def test_an_owner_at_work_deletes_what_a_reader_has_just_listed() -> None:
    class Busy(MemoryStore):
        owner: Experiment | None = None

        def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
            if self.owner is not None and "/segments/" in path:
                owner, self.owner = self.owner, None
                while owner.number < 131:
                    owner = next_state(self, owner, ["t1"])
                    write_due_segment(self, owner)
            return super().read(path, offset=offset, length=length)

    store = Busy()
    store.owner = run(store, 119)
    store.operations.clear()
    found = load(store)
    assert (found.number, found) == (131, fold(store))


# ------------------------------------------------------------------------------------ when segments are written


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), StoreRefused("403")])
@pytest.mark.parametrize("method", ["put", "list", "delete"])
def test_a_target_that_fails_at_a_segment_does_not_end_the_run(error: Exception, method: str) -> None:
    class Failing(MemoryStore):
        fails = True

        def _fail(self, name: str, path: str) -> None:
            if self.fails and name == method and "/segments" in path:
                raise error

        def put(self, path: str, data: Buffer) -> None:
            self._fail("put", path)
            super().put(path, data)

        def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
            if after:
                self._fail("list", prefix)
            return super().list(prefix, after=after)

        def delete(self, paths: Sequence[str]) -> None:
            self._fail("delete", paths[0])
            super().delete(paths)

    store = Failing()
    state = run(store, 129)
    assert load(store) == state
    store.objects[JOURNAL.segment_path(120)] = b"damaged"
    later = opened(store, write_id="later")
    assert load(store) == later
    store.fails = False
    opened(store, write_id="and later")
    assert set(boundaries(131)) <= listed_segments(store, JOURNAL)


def test_an_owner_that_died_before_a_segment_leaves_it_to_the_next() -> None:
    store = MemoryStore()
    state = run(store, 99)
    state = next_state(store, state, ["t1"])
    for _ in range(5):
        state = next_state(store, state, ["t2"])
    assert listed_segments(store, JOURNAL) == {90}
    assert load(store) == state

    later = opened(store, write_id="later")

    assert listed_segments(store, JOURNAL) == {100}
    store.operations.clear()
    assert load(store) == later
    assert store.operations["read"] == 1 + 6 + 1


def test_what_a_segment_does_not_hold_it_does_not_cost() -> None:
    store = MemoryStore()
    state = opened(store)
    with_many = next_state(store, state, [f"trial-{number}" for number in range(500)])
    while with_many.number < 100:
        with_many = next_state(store, with_many, ["trial-7"])
        write_due_segment(store, with_many)
    for _ in range(10):
        with_many = next_state(store, with_many, ["trial-7", "trial-8"])
    assert encode_segment(with_many).count(b"\n") == 1 + 2
    assert len(store.objects[JOURNAL.segment_path(100)].splitlines()) == 1 + 500


# --------------------------------------------------------------------------------------------------- trials


def trial(name: str, step: int = 0) -> Trial:
    return Trial(trial=name, config={}, step=step)


def test_trials_are_a_mapping_in_the_order_in_which_they_were_added() -> None:
    names = ["z", "a", "m"]
    before = TrialMap.of(map(trial, names))
    after = before.with_trial(trial("a", step=5))
    assert list(after) == names
    assert [each.step for each in after.values()] == [0, 5, 0]
    assert before["a"].step == 0
    assert "b" not in after
    assert len(after) == 3
    assert after == {name: after[name] for name in names}
    assert before != after
    assert after != 3
    assert pickle.loads(pickle.dumps(after)) == after
    assert repr(TrialMap.of([trial("a")])).startswith("Trials([Trial(trial='a'")
    with pytest.raises(KeyError):
        after["b"]
    with pytest.raises(TypeError, match="unhashable"):
        hash(after)


def test_an_experiment_keeps_the_order_of_its_trials_in_json_and_in_segments() -> None:
    store = MemoryStore()
    state = run(store, 23, names=["z", "a", "m", "b"])
    order = list(state.trials)
    assert order != sorted(order)
    assert list(load(store).trials) == order
    again = Experiment.model_validate_json(state.model_dump_json())
    assert (again, list(again.trials)) == (state, order)
    assert Experiment.model_validate(state.model_dump()) == state


def test_an_experiment_that_was_read_from_json_writes_segments_that_hold_enough() -> None:
    store = MemoryStore()
    state = Experiment.model_validate_json(run(store, 123).model_dump_json())
    while state.number < 205:
        state = next_state(store, state, ["t1"])
        write_due_segment(store, state)
    assert load(store) == state == fold(store)


# ------------------------------------------------------------------------------------------------ extensions


def test_what_runs_have_added_is_in_the_segments() -> None:
    store = MemoryStore()
    state = run(store, 8)
    state = journal.append(store, state, [Configured(settings={}, extensions={"a": 5})], stamp("9"))
    state = journal.append(store, state, [Configured(settings={}, extensions={"b": 2})], stamp("10"))
    write_due_segment(store, state)
    assert decode_segment(encode_segment(state), JOURNAL, 10).experiment.extensions == {"a": 5, "b": 2}
    assert load(store).extensions == fold(store).extensions == {"a": 5, "b": 2}
    with pytest.raises(JournalCorrupt, match="run a has added its samples before"):
        journal.append(store, state, [Configured(settings={}, extensions={"a": 5})], stamp("11"))
