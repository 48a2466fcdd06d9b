"""The stores of the tests: one that dies at an operation, and one in memory."""

from __future__ import annotations

import pytest

from prefect_tune.core.errors import AlreadyExists, CommitUnknown
from tests.fakes.stores.dying_store import Crash, DyingStore, Failure
from tests.fakes.stores.memory_store import MemoryStore
from tests.stores.contract import StoreContract


@pytest.mark.parametrize(
    ("failure", "survives"), [(Failure.CRASH_BEFORE, False), (Failure.TORN, False), (Failure.CRASH_AFTER, True)]
)
def test_a_crash_leaves_what_its_way_says_and_a_dead_process(failure: Failure, *, survives: bool) -> None:
    store = DyingStore(MemoryStore(), nth=2, way=failure)
    store.put("a", b"1")

    with pytest.raises(Crash):
        store.create("b", b"2")
    with pytest.raises(Crash):
        store.delete(["a"])

    assert (store.inner.size("b") is not None) == survives
    assert store.inner.size("a") == 1
    assert store.operations == {"put": 1, "create": 1}
    assert store.failed_at == "create b"


def test_a_lost_reply_means_done_and_not_known() -> None:
    store = DyingStore(MemoryStore(), nth=1, way=Failure.REPLY_LOST)

    with pytest.raises(CommitUnknown):
        store.create("a", b"1")

    assert bytes(store.read("a")) == b"1"
    with pytest.raises(AlreadyExists):
        store.create("a", b"1")


def test_a_torn_delete_removes_the_first_half() -> None:
    inner = MemoryStore()
    for name in "abcd":
        inner.put(name, b"")
    with pytest.raises(Crash):
        DyingStore(inner, nth=1, way=Failure.TORN).delete(list("abcd"))
    assert list(inner.objects) == ["c", "d"]


class TestMemoryStore(StoreContract):
    maps_in_parallel = False

    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()
