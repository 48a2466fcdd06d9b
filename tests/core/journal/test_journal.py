"""The journal: history and fencing, foreign files beside its entries, and lagging listings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from prefect_tune.core.errors import CommitUnknown, InvalidInput, JournalCorrupt, StoreUnavailable, Superseded
from prefect_tune.core.experiment.experiment import Experiment, apply_event, make_empty_experiment
from prefect_tune.core.journal import journal
from prefect_tune.core.journal.journal import write_snapshot
from prefect_tune.core.journal_events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointQuarantined,
    CheckpointRef,
    CheckpointsAdopted,
    CheckpointsRetired,
    Entry,
    Event,
    NonOwnerEvent,
    Owner,
    OwnerChanged,
    StepReported,
    TrialAdded,
    TrialFinished,
)
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.generations import end_generation
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import Buffer, ListedObject
from prefect_tune.core.values import StepReport, hash_bytes
from tests.core.driver import JOURNAL
from tests.core.histories import ME, append_next_entry, open_experiment, stamp
from tests.fakes.stores.memory_store import MemoryStore

YOU = Owner(name="you", host="there", pid=2, flow_run="brave-otter")


def load(store: MemoryStore) -> Experiment:
    return journal.load_experiment(store, JOURNAL)


def acquire_ownership(store: MemoryStore, owner: Owner = ME, write_id: str = "open") -> Experiment:
    return journal.acquire_ownership(store, JOURNAL, owner, stamp(write_id))


def report(step: int, metrics: object = None) -> StepReported:
    return StepReported(trial="t", report=StepReport(step=step, metrics={"loss": metrics}))


def begin_trial(store: MemoryStore) -> Experiment:
    """Write three entries: an owner, a trial, the start of its attempt."""
    experiment, added = acquire_ownership(store), TrialAdded(trial="t", config={})
    experiment = journal.append_events(store, experiment, [CheckpointsAdopted(), added], stamp("a"))
    return journal.append_events(store, experiment, [AttemptStarted(trial="t", attempt=1, from_step=0)], stamp("b"))


def append_steps(store: MemoryStore, steps: int, *, snapshot: bool = False) -> Experiment:
    """Write the entries of `begin_trial`, and `steps` reports."""
    experiment = begin_trial(store)
    for step in range(1, steps + 1):
        experiment = journal.append_events(store, experiment, [report(step)], stamp(f"step {step}"))
        if snapshot and step == steps - 3:
            write_snapshot(store, experiment)
    return experiment


def test_an_empty_journal_is_the_empty_experiment() -> None:
    assert load(MemoryStore()) == make_empty_experiment(JOURNAL)


def test_what_append_returns_is_what_is_loaded() -> None:
    store = MemoryStore()
    assert append_steps(store, 3) == load(store)


def test_events_are_taken_as_they_will_be_read_back() -> None:
    store = MemoryStore()
    experiment = acquire_ownership(store)
    config = {"sizes": (1, 2), "by": {"a": {3: 4}}}
    experiment = journal.append_events(store, experiment, [TrialAdded(trial="t", config=config)], stamp("a"))

    assert experiment.trial("t").config == {"sizes": [1, 2], "by": {"a": {"3": 4}}}
    assert experiment == load(store)


def nest_lists(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "metrics",
    [
        pytest.param(math.nan, id="a NaN"),
        pytest.param(math.inf, id="an infinity"),
        pytest.param(object(), id="an object"),
        pytest.param("\ud800", id="half a character"),
        pytest.param(b"\xff", id="bytes that are not text"),
        *[pytest.param(nest_lists(depth), id=f"{depth} levels") for depth in (150, 199, 250, 500, 1000, 100_000)],
    ],
)
def test_nothing_is_written_that_could_not_be_read_again(metrics: object) -> None:
    store = MemoryStore()
    experiment = begin_trial(store)
    try:
        after = journal.append_events(store, experiment, [report(1, metrics)], stamp("c"))
    except InvalidInput:
        after = experiment
    assert load(store) == after


def test_nan_is_refused_before_anything_is_written() -> None:
    store = MemoryStore()
    with pytest.raises(InvalidInput, match="cannot be stored as JSON"):
        journal.append_events(store, begin_trial(store), [report(1, math.nan)], stamp("c"))


def test_events_that_cannot_follow_are_refused_before_anything_is_written() -> None:
    store = MemoryStore()
    experiment = begin_trial(store)
    with pytest.raises(JournalCorrupt, match=r"entry 4.*never added"):
        journal.append_events(store, experiment, [AttemptStarted(trial="other", attempt=1, from_step=0)], stamp("c"))
    with pytest.raises(JournalCorrupt, match="already added"):
        journal.append_events(store, experiment, [TrialAdded(trial="t", config={})], stamp("c"))
    assert load(store) == experiment


# ------------------------------------------------------------------------------------------ fencing


def test_whoever_was_superseded_learns_by_whom_and_writes_nothing() -> None:
    store = MemoryStore()
    mine = begin_trial(store)
    theirs = acquire_ownership(store, YOU, "yours")

    message = r"owner 1, but owner 2, you \(pid 2 on there, flow run brave-otter\), took over"
    with pytest.raises(Superseded, match=message):
        journal.append_events(store, mine, [report(1)], stamp("c"))

    assert (theirs.term, theirs.owner) == (2, YOU)
    assert load(store) == theirs


def test_who_lost_to_an_entry_that_opens_nothing_learns_the_number_of_the_owner() -> None:
    store = MemoryStore()
    mine = begin_trial(store)
    journal.append_events(store, mine, [report(1)], stamp("the same owner, elsewhere"))
    with pytest.raises(Superseded, match="another process wrote as owner 1"):
        journal.append_events(store, mine, [report(1)], stamp("c"))


NON_OWNER_EVENTS: Sequence[NonOwnerEvent] = [
    CheckpointQuarantined(trial="t", sequence=3, reason="damaged"),
    CheckpointQuarantined(trial="t", sequence=3, quarantined=False),
    CheckpointsRetired(trial="t", retired_sequences=()),
]


def test_an_owner_continues_after_the_entry_of_a_guest() -> None:
    store = MemoryStore()
    owner = begin_trial(store)
    journal.append_as_non_owner(store, JOURNAL, lambda _: NON_OWNER_EVENTS, stamp("non-owner"))
    after = journal.append_events(store, owner, [report(1)], stamp("c"))
    assert (after.entry_count, after.term) == (5, 1)
    writers = [entry.writer for entry in journal.read_entries(store, JOURNAL)]
    assert writers == [*["owner"] * 3, "non-owner", "owner"]


def seal_non_owner_entry(owner: Experiment, *events: Event) -> bytes:
    """Return an entry after the owner's last one, marked as a non-owner's."""
    follows = {"number": owner.entry_count + 1, "term": owner.term, "previous": owner.digest}
    fields = {**follows, "write_id": "x", "at": "now", "writer": "non-owner", "events": events}
    return seal(Entry.model_validate(fields))


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([], id="nothing"),
        pytest.param([report(1)], id="a report"),
        pytest.param([*NON_OWNER_EVENTS, TrialFinished(trial="t", reason="enough")], id="an end beside the allowed"),
        pytest.param([OwnerChanged(experiment="e", generation=1, term=2, owner=YOU)], id="an opening"),
        pytest.param(
            [CheckpointQuarantined(trial="t", sequence=3, reason="it dies", crashes_trainable=True)], id="blame"
        ),
    ],
)
def test_an_entry_of_a_guest_with_anything_else_is_damage_for_owner_and_reader(events: Sequence[Event]) -> None:
    store = MemoryStore()
    owner = begin_trial(store)
    store.put(JOURNAL.entry_path(4), seal_non_owner_entry(owner, *events))
    with pytest.raises(JournalCorrupt, match="entry 4: expected events that a non-owner may write, found"):
        journal.append_events(store, owner, [report(1)], stamp("c"))
    with pytest.raises(JournalCorrupt, match="entry 4: expected events that a non-owner may write, found"):
        load(store)


def test_a_guest_writes_nothing_but_what_a_guest_may_write() -> None:
    store = MemoryStore()
    begin_trial(store)
    before = dict(store.objects)
    with pytest.raises(JournalCorrupt, match="expected events that a non-owner may write, found step-reported"):
        journal.append_as_non_owner(store, JOURNAL, lambda _: [report(1)], stamp("non-owner"))  # type: ignore[list-item]  # invalid on purpose
    assert store.objects == before


def test_what_a_guest_may_write_supersedes_the_owner_where_an_owner_has_written_it() -> None:
    store = MemoryStore()
    owner = begin_trial(store)
    journal.append_events(store, load(store), NON_OWNER_EVENTS, stamp("other"))
    with pytest.raises(Superseded, match="another process wrote as owner 1"):
        journal.append_events(store, owner, [report(1)], stamp("c"))


def test_a_quarantine_is_a_limit_for_running_saves_by_an_owner_and_not_by_a_guest() -> None:
    owner = begin_trial(MemoryStore())
    by_owner = apply_event(owner, NON_OWNER_EVENTS[0], 4, "owner").trial("t")
    by_non_owner = apply_event(owner, NON_OWNER_EVENTS[0], 4, "non-owner").trial("t")
    assert (by_owner.collected_up_to, by_non_owner.collected_up_to) == (2, 0)


def test_the_same_append_again_is_the_same_entry() -> None:
    store = MemoryStore()
    experiment = begin_trial(store)
    once = journal.append_events(store, experiment, [report(1)], stamp("c"))
    assert journal.append_events(store, experiment, [report(1)], stamp("c")) == once
    assert load(store) == once


def test_the_same_take_over_again_is_the_same_epoch() -> None:
    store = MemoryStore()
    once = acquire_ownership(store)
    assert acquire_ownership(store) == once
    later = journal.append_events(store, once, [CheckpointsAdopted()], stamp("a"))
    assert acquire_ownership(store) == later


class BusyStore(MemoryStore):
    """A store on which another owner writes an entry before each of the first `times` creates."""

    times = 0
    opens = False

    def create(self, path: str, data: Buffer) -> None:
        if self.times and "/journal/" in path:
            self.times -= 1
            store, write_id = MemoryStore(), f"busy {self.times}"
            store.objects = self.objects  # without another race
            if self.opens:
                journal.acquire_ownership(store, JOURNAL, YOU, stamp(write_id))
            else:
                experiment = journal.load_experiment(store, JOURNAL)
                journal.append_events(store, experiment, [report(experiment.trial("t").step + 1)], stamp(write_id))
        super().create(path, data)


@pytest.mark.parametrize("opens", [False, True])
def test_a_take_over_races_with_a_live_writer_until_it_wins(*, opens: bool) -> None:
    store = BusyStore()
    begin_trial(store)
    store.times, store.opens = 5, opens

    mine = acquire_ownership(store, ME, "late")

    assert mine.owner == ME
    assert mine.entry_count == 3 + 5 + 1
    assert load(store) == mine


def test_a_take_over_that_only_ever_loses_ends() -> None:
    store = BusyStore()
    begin_trial(store)
    store.times = 10**6
    with pytest.raises(Superseded, match="lost 16 races"):
        acquire_ownership(store, ME, "late")


def test_an_outcome_that_stays_unknown_is_said_to_be() -> None:
    class NeverAnswers(MemoryStore):
        def create(self, path: str, data: Buffer) -> None:
            del data
            raise CommitUnknown(f"{path}: no answer")

    with pytest.raises(CommitUnknown, match="may still arrive"):
        acquire_ownership(NeverAnswers())


# --------------------------------------------------------------------------------- listings and snapshots


class LaggingStore(MemoryStore):
    """A store whose listings omit the newest `lag` objects."""

    lag = 0

    def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
        listed = super().list(prefix, after=after)
        return listed[: max(0, len(listed) - self.lag)]


@pytest.mark.parametrize("lag", [0, 1, 2, 99])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_listing_that_lags_hides_no_entry(lag: int, *, snapshot: bool) -> None:
    store = LaggingStore()
    expected = append_steps(store, 23, snapshot=snapshot)
    store.lag = lag
    assert load(store) == expected


def test_the_whole_history_is_there_beside_a_snapshot() -> None:
    store = MemoryStore()
    append_steps(store, 20, snapshot=True)
    entries = journal.read_entries(store, JOURNAL)
    assert [entry.number for entry in entries] == list(range(1, 24))


def test_who_has_read_so_far_reads_on_from_there() -> None:
    store = MemoryStore()
    append_steps(store, 20, snapshot=True)
    assert [entry.number for entry in journal.read_entries(store, JOURNAL, 21)] == [22, 23]


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        ".DS_Store",
        "README.md",
        "zzz.txt",
        "0000000009",
        "9.json",
        "00000000009.json",
        "٠٠٠٠٠٠٠٠٠٩.json",
        "backup/0000000009.json",
        "0000000009.json.bak",
    ],
)
def test_foreign_files_beside_the_entries_change_nothing(name: str, *, snapshot: bool) -> None:
    store = MemoryStore()
    experiment = append_steps(store, 20, snapshot=snapshot)
    store.objects[f"e/1/journal/{name}"] = b"not ours"
    store.objects[f"e/1/snapshots/{name}"] = b"not ours"
    store.objects[f"e/1/snapshots/{name}l"] = b"not ours"
    assert load(store) == experiment


# --------------------------------------------------------------------------------------- damaged history


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_entry_that_is_missing_in_the_middle_is_said(number: int) -> None:
    store = MemoryStore()
    append_steps(store, 2)
    del store.objects[JOURNAL.entry_path(number)]
    with pytest.raises(JournalCorrupt, match=rf"{number:010d}\.json: the entry is missing"):
        load(store)


READS: Sequence[Callable[[MemoryStore, Experiment], object]] = (
    lambda store, state: journal.load_experiment(store, state.key),
    lambda store, state: journal.read_entries(store, state.key),
    lambda store, state: journal.load_at(store, state.key, None),
    lambda store, state: journal.read_entries(store, state.key, 2),
    journal.read_earlier_owners,
)


@pytest.mark.parametrize("read", READS, ids=["load", "history", "as of", "beyond", "owners"])
@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "damaged"])
def test_a_journal_that_is_being_deleted_is_not_called_corrupt(
    read: Callable[[MemoryStore, Experiment], object], *, is_deleted: bool
) -> None:
    store = MemoryStore()
    append_steps(store, 5)
    state = acquire_ownership(store, YOU, "later")
    if is_deleted:
        end_generation(store, state.key, at="2026-11-21", by="deleter")
    store.delete([state.key.entry_path(number) for number in (1, 2, 3)])
    with pytest.raises(Superseded if is_deleted else JournalCorrupt, match="was deleted" if is_deleted else "missing"):
        read(store, state)


def test_a_file_named_like_the_last_possible_entry_is_not_believed() -> None:
    store = MemoryStore()
    append_steps(store, 2)
    store.objects[JOURNAL.entry_path(9_999_999_999)] = b"{}"
    with pytest.raises(JournalCorrupt, match=r"0000000006\.json: the entry is missing"):
        load(store)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"number": 4}, id="another number"),
        pytest.param({"previous": hash_bytes(b"another entry")}, id="another predecessor"),
        pytest.param({"term": 2}, id="a term that no owner opened"),
        pytest.param({"term": 0}, id="a term that has ended"),
        pytest.param({"events": ()}, id="other events, so that the next does not follow"),
        pytest.param({"at": "tomorrow"}, id="another time, so that the next does not follow"),
    ],
)
def test_an_entry_that_was_rewritten_is_found(changes: dict[str, object]) -> None:
    store = MemoryStore()
    append_steps(store, 2)
    assert JOURNAL.entry_path(3) in store.objects
    store.objects[JOURNAL.entry_path(3)] = seal(journal.read_entries(store, JOURNAL)[2].model_copy(update=changes))
    with pytest.raises(JournalCorrupt):
        load(store)


@pytest.mark.parametrize(
    "opening",
    [
        pytest.param(OwnerChanged(experiment="another", generation=1, term=2, owner=YOU), id="of another experiment"),
        pytest.param(OwnerChanged(experiment="e", generation=1, term=7, owner=YOU), id="for another term"),
    ],
)
def test_an_opening_that_does_not_fit_is_refused(opening: OwnerChanged) -> None:
    store = MemoryStore()
    experiment = begin_trial(store)
    with pytest.raises(JournalCorrupt, match="cannot follow term 1 of experiment 'e'"):
        journal.append_events(store, experiment, [opening], stamp("c"))


def test_an_experiment_is_opened_by_the_first_event_of_an_entry_or_not_at_all() -> None:
    store = MemoryStore()
    events: list[Event] = [report(1), OwnerChanged(experiment="e", generation=1, term=2, owner=YOU)]
    with pytest.raises(JournalCorrupt, match="expected number, predecessor and term"):
        journal.append_events(store, begin_trial(store), events, stamp("c"))


def test_a_journal_of_another_experiment_is_not_read_as_this_ones() -> None:
    store = MemoryStore()
    begin_trial(store)
    other = JournalKey(experiment="other", generation=1)
    store.objects[other.entry_path(1)] = store.objects[JOURNAL.entry_path(1)]
    with pytest.raises(JournalCorrupt, match="entry 1: term 1 of experiment 'e' cannot follow term 0 of"):
        journal.load_experiment(store, other)


def test_an_adoption_that_the_journal_knows_already_is_refused() -> None:
    store = MemoryStore()
    experiment = journal.append_events(store, begin_trial(store), [report(1)], stamp("c"))
    ref = CheckpointRef(step=1, sequence=1)
    experiment = journal.append_events(store, experiment, [CheckpointCommitted(trial="t", checkpoint=ref)], stamp("d"))
    with pytest.raises(JournalCorrupt, match="has sequence 1"):
        journal.append_events(store, experiment, [CheckpointsAdopted(checkpoints={"t": (ref,)})], stamp("e"))


def test_an_entry_knows_its_place() -> None:
    entry = Entry(number=1, term=1, write_id="w", at="now", previous="", events=())
    store = MemoryStore()
    store.objects[JOURNAL.entry_path(1)] = seal(entry.model_copy(update={"number": 2}))
    with pytest.raises(JournalCorrupt, match=r"0000000001\.json: holds entry 2"):
        load(store)


# Opening a journal that was just loaded: its entries are not read again, later ones are not missed.


def make_history(entries: int) -> MemoryStore:
    store = MemoryStore()
    state = open_experiment(store)
    while state.entry_count < entries:
        state = append_next_entry(store, state, [f"t{state.entry_count * 3 % 7}"])
        if state.entry_count == 20:
            write_snapshot(store, state)
    return store


def test_who_has_just_read_an_experiment_opens_it_by_its_last_entry() -> None:
    store = make_history(23)
    loaded = load(store)
    before = store.operations["read"]
    after = journal.acquire_ownership(store, JOURNAL, ME, stamp("next"), loaded=loaded)
    assert (after.entry_count, after.trials) == (24, loaded.trials)
    # It reads past the last known entry, verifies that entry, and looks up the previous owner.
    assert store.operations["read"] - before == 3


def test_what_was_written_since_it_was_read_is_not_missed() -> None:
    store = make_history(23)
    loaded = load(store)
    append_next_entry(store, loaded, ["late"])
    assert "late" in journal.acquire_ownership(store, JOURNAL, ME, stamp("next"), loaded=loaded).trials


def test_what_was_read_of_a_journal_that_is_another_one_now_is_forgotten() -> None:
    loaded, other = load(make_history(23)), make_history(22)
    after = journal.acquire_ownership(other, JOURNAL, ME, stamp("next"), loaded=loaded)
    assert after.entry_count == 23


def test_a_journal_that_is_thought_to_be_empty_is_opened_by_one_request_and_a_look_for_a_deletion() -> None:
    store = MemoryStore()
    after = journal.acquire_ownership(store, JOURNAL, ME, stamp("first"), loaded=make_empty_experiment(JOURNAL))
    assert after.entry_count == 1
    assert store.operations == {"create": 1, "list": 1}


def test_a_journal_that_is_not_empty_after_all_is_read_by_its_snapshot() -> None:
    store = make_history(23)
    expected, before = load(store), store.operations["read"]
    after = journal.acquire_ownership(store, JOURNAL, ME, stamp("next"), loaded=make_empty_experiment(JOURNAL))
    assert (after.entry_count, after.trials) == (24, expected.trials)
    assert store.operations["read"] - before <= 8


def test_a_first_entry_that_a_listing_hides_is_found() -> None:
    class HidesEntries(MemoryStore):
        def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
            return super().list(f"{prefix}/nothing", after=after)

    store = HidesEntries()
    first = open_experiment(store)
    after = journal.acquire_ownership(store, JOURNAL, ME, stamp("next"), loaded=make_empty_experiment(JOURNAL))
    assert (after.entry_count, after.term) == (2, first.term + 1)


# ------------------------------------------------------------------------------------------- a missing journal


def test_nothing_is_written_after_an_entry_that_is_gone() -> None:
    """An unmounted target shows the empty folder below its mount point, which accepts every write."""
    store = MemoryStore()
    state = begin_trial(store)
    mounted, store.objects = store.objects, {}
    with pytest.raises(StoreUnavailable, match="target is mounted"):
        journal.append_events(store, state, [report(1)], stamp("c"))
    assert store.objects == {}
    store.objects = mounted
    assert journal.append_events(store, state, [report(1)], stamp("c")).trial("t").step == 1


def test_a_first_entry_needs_none_before_it_and_is_needed_by_the_second() -> None:
    store = MemoryStore()
    state = acquire_ownership(store)
    del store.objects[JOURNAL.entry_path(1)]
    with pytest.raises(StoreUnavailable):
        journal.append_events(store, state, [CheckpointsAdopted()], stamp("a"))
