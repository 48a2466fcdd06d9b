"""Which call of a run has the experiment of the run's name."""

from __future__ import annotations

from prefect_tune.core.storage.generations import claim_name, exists
from tests.core.small_search import search_of_three
from tests.fakes.stores.memory_store import MemoryStore


def test_the_first_call_has_the_name_and_each_repetition_of_it_has_it_again() -> None:
    store = MemoryStore()
    claims = [claim_name(store, "run", call) for call in ("one", "two", "one", "two")]
    assert claims == [True, False, True, False]
    assert not exists(store, "run")
    search_of_three(store)
    assert exists(store, "old")
