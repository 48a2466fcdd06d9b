from __future__ import annotations

import pytest

from tests.fakes.stores.memory_store import MemoryStore
from tests.stores.contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()


def test_operations_and_bytes_are_counted() -> None:
    store = MemoryStore()
    store.put("a", b"12345")
    store.read("a", offset=1, length=2)
    store.size("a")
    assert store.operations == {"put": 1, "read": 1, "size": 1}
    assert (store.bytes_in, store.bytes_out) == (5, 2)
