"""Opening a journal that was just loaded: known entries are not read again, later entries are not missed."""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.journal import journal
from prefect_tune.core.journal.snapshot import write_snapshot
from prefect_tune.core.storage.object_store import Listed
from tests.core.driver import JOURNAL
from tests.core.histories import ME, next_state, opened, stamp
from tests.fakes.stores.memory_store import MemoryStore


def some_history(entries: int) -> MemoryStore:
    store = MemoryStore()
    state = opened(store)
    while state.number < entries:
        state = next_state(store, state, [f"t{state.number * 3 % 7}"])
        if state.number == 20:
            write_snapshot(store, state)
    return store


def load(store: MemoryStore) -> Experiment:
    return journal.load(store, JOURNAL, side_by_side=map)


def test_who_has_just_read_an_experiment_opens_it_by_its_last_entry() -> None:
    store = some_history(23)
    known = load(store)
    before = store.operations["read"]
    after = journal.take_over(store, JOURNAL, ME, stamp("next"), side_by_side=map, known=known)
    assert (after.number, after.trials) == (24, known.trials)
    # It reads past the last known entry, verifies that entry, and looks up the previous owner.
    assert store.operations["read"] - before == 3


def test_what_was_written_since_it_was_read_is_not_missed() -> None:
    store = some_history(23)
    known = load(store)
    next_state(store, known, ["late"])
    assert "late" in journal.take_over(store, JOURNAL, ME, stamp("next"), side_by_side=map, known=known).trials


def test_what_was_read_of_a_journal_that_is_another_one_now_is_forgotten() -> None:
    known, other = load(some_history(23)), some_history(22)
    after = journal.take_over(other, JOURNAL, ME, stamp("next"), side_by_side=map, known=known)
    assert after.number == 23


def test_a_journal_that_is_thought_to_be_empty_is_opened_by_one_request_and_a_look_for_a_deletion() -> None:
    store = MemoryStore()
    after = journal.take_over(store, JOURNAL, ME, stamp("first"), side_by_side=map, known=nothing_yet(JOURNAL))
    assert after.number == 1
    assert store.operations == {"create": 1, "list": 1}


def test_a_journal_that_is_not_empty_after_all_is_read_by_its_snapshot() -> None:
    store = some_history(23)
    whole, before = load(store), store.operations["read"]
    after = journal.take_over(store, JOURNAL, ME, stamp("next"), side_by_side=map, known=nothing_yet(JOURNAL))
    assert (after.number, after.trials) == (24, whole.trials)
    assert store.operations["read"] - before <= 8


def test_a_first_entry_that_a_listing_hides_is_found() -> None:
    class Lags(MemoryStore):
        def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
            return super().list(f"{prefix}/nothing", after=after)

    store = Lags()
    first = opened(store)
    after = journal.take_over(store, JOURNAL, ME, stamp("next"), side_by_side=map, known=nothing_yet(JOURNAL))
    assert (after.number, after.term) == (2, first.term + 1)
