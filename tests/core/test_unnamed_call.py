"""Which call of a run has the experiment of the run's name."""

from __future__ import annotations

from prefect_tune.core.storage.generations import call_that_has, claim_name, end_generation
from prefect_tune.core.storage.layout import JournalKey
from tests.fakes.stores.memory_store import MemoryStore


def test_the_first_call_has_the_name_and_each_repetition_of_it_has_it_again() -> None:
    store = MemoryStore()
    assert call_that_has(store, "run") is None
    claims = [claim_name(store, "run", call) for call in ("one", "two", "one", "two")]
    assert claims == [True, False, True, False]
    assert call_that_has(store, "run") == "one"


def test_the_name_of_a_deleted_experiment_is_free_and_was_in_use() -> None:
    store = MemoryStore()
    claim_name(store, "run", "one")
    end_generation(store, JournalKey(experiment="run", generation=1), at="now", by="a test")
    assert call_that_has(store, "run") == ""
    assert claim_name(store, "run", "two")
