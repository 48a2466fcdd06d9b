"""Snapshots: opening reads one and the entries after it, and a bad or missing one never changes what is loaded."""

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
from prefect_tune.core.journal import journal
from prefect_tune.core.journal.journal import (
    compute_snapshot_interval,
    decode_snapshot,
    encode_snapshot,
    is_final_snapshot_due,
    is_snapshot_due,
    list_snapshot_numbers,
    write_snapshot,
)
from prefect_tune.core.journal_events import ExperimentConfigured, TrialAdded
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import hash_bytes
from tests.core.driver import JOURNAL
from tests.core.histories import append_next_entry, fold_entries, open_experiment, snapshots_every, stamp
from tests.fakes.stores.memory_store import MemoryStore

NAMES = [f"t{number}" for number in range(7)]


def write_history(store: MemoryStore, entries: int, key: JournalKey = JOURNAL, names: list[str] = NAMES) -> Experiment:
    """Write a journal with a snapshot after every tenth entry."""
    state = open_experiment(store, key)
    with snapshots_every(10):
        while state.entry_count < entries:
            state = append_next_entry(store, state, [names[state.entry_count * 3 % len(names)]])
            if is_snapshot_due(state, state.entry_count - 1):
                write_snapshot(store, state)
    return state


# ------------------------------------------------------------------------------------------------ read counts


def test_opening_reads_one_snapshot_and_the_entries_after_it() -> None:
    for entries in (9, 10, 11, 39, 40):
        state = write_history(store := MemoryStore(), entries)
        store.operations.clear()
        assert journal.load_experiment(store, JOURNAL) == state
        # It reads the snapshot and those entries (if there are none: the last one), and looks for an unlisted entry.
        assert store.operations == {"list": 2, "read": (entries >= 10) + (entries % 10 or 1) + 1}
    assert list_snapshot_numbers(store, JOURNAL) == [40]


def test_ten_thousand_trials_are_opened_with_a_handful_of_requests_in_the_order_in_which_they_were_added() -> None:
    store, names = MemoryStore(), [f"{number * 7919 % 10_000}" for number in range(10_000)]
    added = [TrialAdded(trial=name, config={}) for name in names]
    state = journal.append_events(store, open_experiment(store), added, stamp("trials"))
    write_snapshot(store, state)
    for _ in range(3):
        state = append_next_entry(store, state, names[:2])
    store.operations.clear()
    loaded = journal.load_experiment(store, JOURNAL)
    assert store.operations.total() == 2 + 3 + 3 + 1  # a document of more than 4 MiB takes three
    assert list(loaded.trials) == names
    assert loaded == state


@pytest.mark.parametrize(
    ("trials", "interval", "at_end"),
    [(0, 200, []), (1600, 200, []), (1601, 400, [200, 399]), (3200, 400, [200, 399]), (3201, 800, [200, 399, 400])],
)
def test_the_interval_between_snapshots_grows_with_the_trials(trials: int, interval: int, at_end: list[int]) -> None:
    state = Experiment(key=JOURNAL, trials=TrialMap.from_trials(make_trial(f"{number}") for number in range(trials)))
    assert compute_snapshot_interval(state) == interval
    due = [n for n in range(1, 3300) if is_snapshot_due(state.model_copy(update={"entry_count": n}), n - 1)]
    assert due == list(range(interval, 3300, interval))
    after_non_owner = state.model_copy(update={"entry_count": interval + 1})
    assert is_snapshot_due(after_non_owner, interval - 1), "a non-owner wrote the entry that ended the interval"
    states = [state.model_copy(update={"entry_count": number}) for number in (199, 200, 399, 400)]
    assert at_end == [state.entry_count for state in states if is_final_snapshot_due(state)]


def test_a_snapshot_that_no_reader_would_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_DOCUMENT_BYTES", 500)
    store = MemoryStore()
    write_history(store, 10)
    assert list_snapshot_numbers(store, JOURNAL) == []


# ----------------------------------------------------------------------------------- the state of all entries


@settings(max_examples=25)
@given(moves=st.lists(st.lists(st.sampled_from(NAMES), max_size=3), max_size=20), data=st.data())
def test_snapshots_may_come_in_any_order_late_twice_or_never(moves: list[list[str]], data: st.DataObject) -> None:
    store, states, kept = MemoryStore(), list[Experiment](), set[int]()
    states.append(state := open_experiment(store))
    for trials in moves:
        states.append(state := append_next_entry(store, state, trials))
    for chosen in data.draw(st.lists(st.sampled_from(states), max_size=len(states))):
        write_snapshot(store, chosen)
        kept = {number for number in kept if number > chosen.entry_count}  # it deletes only earlier ones
        kept.add(chosen.entry_count)
        assert list_snapshot_numbers(store, JOURNAL) == sorted(kept, reverse=True)
        loaded = journal.load_experiment(store, JOURNAL)
        assert loaded == state == fold_entries(store)
        assert list(loaded.trials) == list(state.trials)


# --------------------------------------------------------------------------------------------- bad snapshots

DAMAGES = [
    pytest.param(lambda _: b"", id="empty"),
    pytest.param(lambda data: data[:-9], id="torn"),
    pytest.param(lambda data: data[: data.index(b"\n")], id="torn after its first line"),
    pytest.param(lambda data: data.replace(b'"running"', b'"pending"'), id="altered"),
    pytest.param(
        lambda data: data.replace(b'"owner_since_entry":1', b'"owner_since_entry":2'), id="its first line altered"
    ),
    pytest.param(lambda data: data + b"\n", id="longer"),
    pytest.param(lambda data: data.replace(b'"version":2', b'"version":3', 1), id="of a newer version"),
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("entries", [22, 20])
def test_a_bad_snapshot_costs_time_and_nothing_else(damage: Callable[[bytes], bytes], entries: int) -> None:
    store = MemoryStore()
    state = write_history(store, entries)
    path = JOURNAL.snapshot_path(20)
    whole = store.objects[path]
    store.objects[path] = damage(whole)
    assert store.objects[path] != whole

    store.operations.clear()
    assert journal.load_experiment(store, JOURNAL) == state
    assert store.operations["read"] == 1 + entries + 1

    write_snapshot(store, later := open_experiment(store, write_id="later"))
    assert list_snapshot_numbers(store, JOURNAL) == [later.entry_count]
    assert journal.load_experiment(store, JOURNAL) == later


def test_an_earlier_snapshot_is_read_where_the_newest_one_is_bad() -> None:
    store = MemoryStore()
    earlier, state = encode_snapshot(write_history(MemoryStore(), 10)), write_history(store, 22)
    store.objects.update({JOURNAL.snapshot_path(10): earlier, JOURNAL.snapshot_path(20): b"", "e/1/snapshots/x": b""})
    store.operations.clear()
    assert journal.load_experiment(store, JOURNAL) == state
    assert store.operations["read"] == 2 + 12 + 1


def test_every_cut_and_every_flipped_bit_of_a_snapshot_is_noticed() -> None:
    store = MemoryStore()
    write_history(store, 21, names=["t"])
    data = store.objects[JOURNAL.snapshot_path(20)]
    for index in range(len(data)):
        with pytest.raises(JournalCorrupt):
            decode_snapshot(data[:index], JOURNAL, 20)
        with pytest.raises((JournalCorrupt, UnknownVersion)):
            decode_snapshot(data[:index] + bytes([data[index] ^ 1 << index % 8]) + data[index + 1 :], JOURNAL, 20)


@pytest.mark.parametrize(
    ("written", "altered"),
    [(b'"attempt":', b'"attemqt":'), (b'"id":"t0"', b'"id":"../../t0"'), (b'"id":"t0"', b'"id":"/t0"')],
)
def test_a_snapshot_whose_trials_are_none_is_noticed(written: bytes, altered: bytes) -> None:
    first, _, lines = encode_snapshot(write_history(MemoryStore(), 20)).partition(b"\n")
    document = json.loads(first)
    del document["digest_of_document"]
    head = journal._SnapshotHeader.model_validate_json(json.dumps(document))
    assert written in lines
    altered_lines = lines.replace(written, altered)
    forged = seal(head.model_copy(update={"digest_of_trials": hash_bytes(altered_lines)}))
    with pytest.raises(JournalCorrupt, match="its trials cannot be read"):
        decode_snapshot(forged + b"\n" + altered_lines, JOURNAL, 20)


@pytest.mark.parametrize(
    ("key", "number"),
    [
        pytest.param(JournalKey(experiment="another", generation=1), 20, id="of another experiment"),
        pytest.param(JOURNAL, 10, id="after another entry"),
    ],
)
def test_a_snapshot_from_elsewhere_is_not_used(key: JournalKey, number: int) -> None:
    store = MemoryStore()
    foreign = encode_snapshot(write_history(MemoryStore(), number, key=key, names=["old"]))
    state = write_history(store, 23)
    store.objects[JOURNAL.snapshot_path(20)] = foreign
    with pytest.raises(JournalCorrupt, match=f"holds experiment '{key.experiment}' after entry {number}"):
        decode_snapshot(foreign, JOURNAL, 20)
    assert journal.load_experiment(store, JOURNAL) == state


@pytest.mark.parametrize("before", [10, 12, 28])
@pytest.mark.parametrize("after", [1, 9, 10, 12, 29])
def test_a_snapshot_of_a_journal_that_was_deleted_is_not_used(before: int, after: int) -> None:
    """`journal/` was deleted but not `snapshots/`, and a new experiment has the same name."""
    store = MemoryStore()
    stale = encode_snapshot(write_history(MemoryStore(), before, names=["old"]))
    state = write_history(store, after)
    store.objects[JOURNAL.snapshot_path(before)] = stale
    assert journal.load_experiment(store, JOURNAL) == state == fold_entries(store)
    write_snapshot(store, state)
    assert journal.load_experiment(store, JOURNAL) == state


def test_without_a_snapshot_a_journal_that_is_corrupt_is_read_once() -> None:
    store = MemoryStore()
    write_history(store, 2)
    del store.objects[JOURNAL.entry_path(1)]
    store.operations.clear()
    with pytest.raises(JournalCorrupt, match="the entry is missing"):
        journal.load_experiment(store, JOURNAL)
    assert store.operations["read"] == 1


def test_a_journal_that_is_corrupt_stays_corrupt_beside_its_snapshot() -> None:
    store = MemoryStore()
    write_history(store, 23)
    store.objects[JOURNAL.entry_path(22)] = store.objects[JOURNAL.entry_path(21)]
    with pytest.raises(JournalCorrupt):
        journal.load_experiment(store, JOURNAL)


def test_an_owner_at_work_deletes_the_snapshot_that_a_reader_has_just_listed() -> None:
    class Busy(MemoryStore):
        owner: Experiment | None = None

        def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
            if self.owner is not None and "/snapshots/" in path:
                owner, self.owner = self.owner, None
                while owner.entry_count < 31:
                    owner = append_next_entry(self, owner, ["t1"])
                write_snapshot(self, owner)
            return super().read(path, offset=offset, length=length)

    store = Busy()
    store.owner = write_history(store, 29)
    store.operations.clear()
    loaded = journal.load_experiment(store, JOURNAL)
    assert (loaded.entry_count, loaded) == (31, fold_entries(store))


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), StoreRefused("403")])
@pytest.mark.parametrize("method", ["put", "list", "delete"])
def test_a_target_that_fails_at_a_snapshot_does_not_end_the_run(error: Exception, method: str) -> None:
    store, original = MemoryStore(), getattr(MemoryStore, method)

    def fail(store: MemoryStore, paths: str | Sequence[str], *arguments: object, **options: object) -> object:
        if "/snapshots" in (paths if isinstance(paths, str) else paths[0]):
            raise error
        return original(store, paths, *arguments, **options)

    state = open_experiment(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryStore, method, fail)
        while state.entry_count < 9:
            state = append_next_entry(store, state, ["t"])
            write_snapshot(store, state)
    assert journal.load_experiment(store, JOURNAL) == state


# --------------------------------------------------------------------------------------------------- trials


def make_trial(name: str, step: int = 0) -> Trial:
    return Trial(id=name, config={}, step=step)


def test_trials_are_a_mapping_in_the_order_in_which_they_were_added() -> None:
    names = ["z", "a", "m"]
    before = TrialMap.from_trials(map(make_trial, names))
    after = before.with_trial(make_trial("a", step=5))
    assert [(name, trial.step) for name, trial in after.items()] == [("z", 0), ("a", 5), ("m", 0)]
    assert before["a"].step == 0
    assert ("b" in after, len(after)) == (False, 3)
    assert after == {name: after[name] for name in names}
    assert after not in (before, 3)
    assert pickle.loads(pickle.dumps(after)) == after
    assert repr(TrialMap.from_trials([make_trial("a")])).startswith("Trials([Trial(trial='a'")
    with pytest.raises(KeyError):
        after["b"]
    with pytest.raises(TypeError, match="unhashable"):
        hash(after)


def test_an_experiment_keeps_the_order_of_its_trials_in_json_and_in_snapshots() -> None:
    store = MemoryStore()
    state = write_history(store, 23, names=["z", "a", "m", "b"])
    order = list(state.trials)
    assert order != sorted(order)
    decoded = decode_snapshot(encode_snapshot(state), JOURNAL, 23)
    assert list(journal.load_experiment(store, JOURNAL).trials) == list(decoded.trials) == order
    again = Experiment.model_validate_json(state.model_dump_json())
    assert (again, list(again.trials)) == (state, order)
    assert Experiment.model_validate(state.model_dump()) == state


def test_what_runs_have_added_is_in_the_snapshot() -> None:
    store = MemoryStore()
    first = ExperimentConfigured(settings={}, extensions={"a": 5})
    second = ExperimentConfigured(settings={}, extensions={"b": 2})
    state = journal.append_events(store, open_experiment(store), [first], stamp("1"))
    state = journal.append_events(store, state, [second], stamp("2"))
    assert decode_snapshot(encode_snapshot(state), JOURNAL, 3).extensions == {"a": 5, "b": 2}
    with pytest.raises(JournalCorrupt, match="run a has already added its samples"):
        journal.append_events(store, state, [first], stamp("3"))
