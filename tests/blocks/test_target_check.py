"""`check()` of a target detects stores with one defect each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import pytest

from prefect_tune.blocks.storage_target import TargetCheck, probe_target
from prefect_tune.core.errors import AlreadyExists, CommitUnknown, DeadlineExceeded, InvalidInput, StoreRefused
from prefect_tune.core.storage.object_store import Buffer, ObjectStore
from tests.blocks.conftest import SHORT
from tests.fakes.stores.memory_store import MemoryStore

SECRET = "secret-of-mine"
REFUSED = StoreRefused("403")


class Target:
    """The smallest target that `check()` accepts."""

    uri: ClassVar[str] = "shelf://third"

    def __init__(self, open_store: Callable[[], ObjectStore]) -> None:
        self._open_store = open_store

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        assert timeout == SHORT
        yield self._open_store()

    def iter_secret_values(self) -> Iterator[str]:
        yield SECRET


class Overwrites(MemoryStore):
    def create(self, path: str, data: Buffer) -> None:
        self.put(path, data)


class LetsSomeRacersWin(MemoryStore):
    """A store that rejects late creates only: it checks, then writes."""

    def create(self, path: str, data: Buffer) -> None:
        if path.endswith("race"):
            self.put(path, data)
        else:
            super().create(path, data)


class LetsALaterWriterWin(MemoryStore):
    def create(self, path: str, data: Buffer) -> None:
        if path.endswith("probe"):
            self.put(path, data)
        else:
            super().create(path, data)


class LosesReplies(MemoryStore):
    """A store that loses replies: the writer has to read back."""

    def create(self, path: str, data: Buffer) -> None:
        try:
            super().create(path, data)
        except AlreadyExists:
            raise CommitUnknown(f"{path}: 412 on the client's own retry") from None
        if path.endswith("race"):
            raise CommitUnknown(f"{path}: no reply")


def fail_with(error: Exception) -> Callable[..., Any]:
    def method(*_: object, **__: object) -> Any:
        raise error

    return method


def make_store_class(**methods: object) -> Callable[[], ObjectStore]:
    """Return a class of memory stores with these methods."""
    return type("Defective", (MemoryStore,), methods)


def read_other_bytes(self: MemoryStore, path: str) -> bytes:
    data = MemoryStore.read(self, path)
    return data[:-1] + bytes([data[-1] ^ 1])


def check_store(open_store: Callable[[], ObjectStore]) -> TargetCheck:
    return probe_target(Target(open_store), timeout=SHORT)


def test_an_honest_store_passes_and_is_left_empty() -> None:
    store = MemoryStore()
    result = check_store(lambda: store)
    assert (result.ok, result.conditional_create) == (True, True)
    assert store.objects == {}


def test_a_store_that_says_it_serves_one_runner_is_believed() -> None:
    result = check_store(make_store_class(has_conditional_create=False))
    assert (result.ok, result.conditional_create) == (True, False)
    assert "ONE RUNNER ONLY" in result.message


@pytest.mark.parametrize("store", [Overwrites, LetsSomeRacersWin, LetsALaterWriterWin])
def test_a_store_that_lets_two_writers_win_fails_loudly(store: type[MemoryStore]) -> None:
    result = check_store(store)
    assert (result.ok, result.conditional_create) == (False, False)
    assert "NO CONDITIONAL WRITES" in result.message


def test_a_lost_reply_is_no_second_winner() -> None:
    assert check_store(LosesReplies).ok


@pytest.mark.parametrize(
    ("methods", "complaint"),
    [
        ({"read": read_other_bytes}, "could not read back: read back a probe"),
        ({"list": lambda *_: []}, "could not list: listed a probe"),
        ({"delete": lambda *_: None}, "could not delete: deleted, then listed a probe"),
        ({"delete": fail_with(StoreRefused(f"403 with {SECRET}"))},
         "old checkpoints could never be removed; could not delete: 403 with"),
        ({"read": fail_with(REFUSED), "delete": fail_with(REFUSED)}, "could not read back: 403"),
        ({"create": fail_with(REFUSED)}, "read-only: listing is permitted, writing is not; could not write: "),
        ({"create": fail_with(DeadlineExceeded("no answer"))}, "could not write: no answer"),
    ],
)  # fmt: skip
def test_what_a_store_does_wrong_is_named(methods: dict[str, object], complaint: str) -> None:
    result = check_store(make_store_class(**methods))
    assert not result.ok
    assert complaint in result.message
    assert SECRET not in result.message


def test_settings_that_cannot_work_are_an_answer_too() -> None:
    def refuse() -> ObjectStore:
        raise InvalidInput("the client does not accept\nthese settings")

    result = check_store(refuse)
    assert not result.ok
    assert "the client does not accept these settings" in result.message


def test_a_bug_is_not_mistaken_for_a_finding() -> None:
    def fail() -> ObjectStore:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check_store(fail)
