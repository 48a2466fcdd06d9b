"""`check()` of a target detects stores with one defect each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import ClassVar

import pytest

from prefect_tune.blocks.target_check import TargetCheck, check_target, diagnosis
from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    DeadlineExceeded,
    InvalidInput,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.storage.object_store import Buffer, Listed, ObjectStore
from tests.fakes.stores.memory_store import MemoryStore

SHORT = timedelta(seconds=10)
SECRET = "secret-of-mine"


class Target:
    """The smallest target that `check()` accepts."""

    uri: ClassVar[str] = "shelf://third"

    def __init__(self, opened: Callable[[], ObjectStore]) -> None:
        self._opened = opened

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        assert timeout == SHORT
        yield self._opened()

    def secret_values(self) -> Iterator[str]:
        yield SECRET


class Overwrites(MemoryStore):
    def create(self, path: str, data: Buffer) -> None:
        self.put(path, data)


class LetsSomeRacersWin(MemoryStore):
    """Refuses late creates only, like a store that checks first and then writes."""

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
    """Writes, and loses the reply: the writer has to read back."""

    def create(self, path: str, data: Buffer) -> None:
        try:
            super().create(path, data)
        except AlreadyExists:
            raise CommitUnknown(f"{path}: 412 on the client's own retry") from None
        if path.endswith("race"):
            raise CommitUnknown(f"{path}: no reply")


class ReadsOtherBytes(MemoryStore):
    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        read = super().read(path, offset=offset, length=length)
        return read[:-1] + bytes([read[-1] ^ 1])


class ListsNothing(MemoryStore):
    def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:  # noqa: ARG002  it never looks
        return []


class KeepsWhatIsDeleted(MemoryStore):
    def delete(self, paths: Sequence[str]) -> None:
        pass


class ForbidsDeleting(MemoryStore):
    def delete(self, paths: Sequence[str]) -> None:
        raise StoreRefused(f"403 Forbidden: delete {paths[0]} with {SECRET}")


class ForbidsReading(ForbidsDeleting):
    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:  # noqa: ARG002  it never looks
        raise StoreRefused("403 Forbidden")


class SingleRunner(MemoryStore):
    @property
    def conditional_create(self) -> bool:
        return False


def _check(opened: Callable[[], ObjectStore]) -> TargetCheck:
    return check_target(Target(opened), timeout=SHORT)


def test_an_honest_store_passes_and_is_left_empty() -> None:
    store = MemoryStore()
    found = _check(lambda: store)
    assert (found.ok, found.conditional_create) == (True, True)
    assert store.objects == {}


def test_a_store_that_says_it_serves_one_runner_is_believed() -> None:
    found = _check(SingleRunner)
    assert (found.ok, found.conditional_create) == (True, False)
    assert "ONE RUNNER ONLY" in found.message


@pytest.mark.parametrize("store", [Overwrites, LetsSomeRacersWin, LetsALaterWriterWin])
def test_a_store_that_lets_two_writers_win_fails_loudly(store: type[MemoryStore]) -> None:
    found = _check(store)
    assert (found.ok, found.conditional_create) == (False, False)
    assert "NO CONDITIONAL WRITES" in found.message


def test_a_lost_reply_is_no_second_winner() -> None:
    assert _check(LosesReplies).ok


@pytest.mark.parametrize(
    ("store", "complaint"),
    [
        (ReadsOtherBytes, "at: read back; read back a probe"),
        (ListsNothing, "at: list; listed a probe"),
        (KeepsWhatIsDeleted, "at: delete; deleted, then listed a probe"),
        (ForbidsDeleting, "no permission to delete: old checkpoints could never be removed"),
        (ForbidsReading, "no permission to read back, or wrong credentials"),
    ],
)
def test_what_a_store_does_wrong_is_named(store: type[MemoryStore], complaint: str) -> None:
    found = _check(store)
    assert not found.ok
    assert complaint in found.message
    assert SECRET not in found.message


def test_settings_that_cannot_work_are_an_answer_too() -> None:
    def refuse() -> ObjectStore:
        raise InvalidInput("the client does not accept\nthese settings")

    found = _check(refuse)
    assert not found.ok
    assert "the client does not accept these settings" in found.message


def test_a_bug_is_not_mistaken_for_a_finding() -> None:
    def fail() -> ObjectStore:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _check(fail)


@pytest.mark.parametrize(
    ("step", "error", "sentence"),
    [
        ("write", StoreRefused("403 Forbidden"), "read-only: listing is permitted, writing is not"),
        ("write", StoreUnavailable("the disk is full (No space left on device)"), "full: no space is left"),
        ("list", DeadlineExceeded("list: not done within 10 s"), "no answer within 10 s"),
        ("list", StoreUnavailable("the connection was closed"), "unavailable at the moment: try again"),
        ("list", TuneError("no idea"), "unusable"),
    ],
)
def test_an_error_is_explained_by_what_was_being_done(step: str, error: TuneError, sentence: str) -> None:
    assert diagnosis(step, error, SHORT).startswith(sentence)


def test_missing_credentials_are_said_once_with_what_to_give_first() -> None:
    refused = StoreRefused(
        "list a probe: no credentials were given and this machine has none of its own: give keys, a credentials block "
        "or a profile (PUT http://169.254.169.254/latest/api/token 403)"
    )
    assert diagnosis("list", refused, SHORT) == (
        "no credentials: none in the block, environment or profile, and this machine has none of its own; give keys, a "
        "credentials block or a profile [at: list; list a probe: (PUT http://169.254.169.254/latest/api/token 403)]"
    )
