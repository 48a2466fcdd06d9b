"""A store that fails at its nth operation, in every way an operation can fail."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import TypeVar

from prefect_tune.core.errors import CommitUnknown, StoreUnavailable, TuneError
from prefect_tune.core.storage.object_store import ObjectStore
from tests.fakes.stores.memory_store import StoreWrapper

WRITES = frozenset({"create", "put", "copy", "replace", "delete"})

_T = TypeVar("_T")


class Crash(BaseException):
    """The process is dead: nothing in it may catch this and continue."""


class Failure(Enum):
    """How the nth operation fails."""

    CRASH_BEFORE = "the process dies before anything is done"
    CRASH_AFTER = "the process dies after it is done"
    TORN = "the process dies in the middle: an object is not there, of several deletes the first half is done"
    REPLY_LOST = "the operation is done or refused, and its reply is lost"
    UNAVAILABLE = "the operation is not done, and the reply says so"


class DyingStore(StoreWrapper):
    """Passes everything on to `inner`, and fails once: at operation `nth` (from 1), or never (0).

    After a crash every further operation crashes too, in all threads: the process is dead. `inner` keeps what
    survived. `operations` counts the calls by method name, the failing one included; `total` is their number.
    With `only`, just these methods are counted in `total`.
    """

    def __init__(
        self, inner: ObjectStore, nth: int, way: Failure = Failure.CRASH_BEFORE, *, only: frozenset[str] | None = None
    ) -> None:
        super().__init__(inner)
        self.operations: Counter[str] = Counter()
        self.dead = False
        self.failed_at: str | None = None
        self._nth = nth
        self._way = way
        self._only = only
        self._points = 0
        self._half: Sequence[str] = ()
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Operations so far that count as points."""
        return self._points

    def delete(self, paths: Sequence[str]) -> None:
        self._half = paths[: len(paths) // 2]
        super().delete(paths)

    def intercept(self, method: str, path: str, operation: Callable[[], _T]) -> _T:
        if not self._count(method):
            return operation()
        self.failed_at = f"{method} {path}"
        if self._way is Failure.UNAVAILABLE:
            raise StoreUnavailable(f"{path}: {method} was made to fail")
        if self._way is Failure.TORN and method == "delete":
            self.inner.delete(self._half)
        if self._way in (Failure.CRASH_AFTER, Failure.REPLY_LOST):
            with suppress(TuneError):  # the reply, also a refusal, gets lost
                operation()
        if self._way is not Failure.REPLY_LOST:
            self.dead = True
            raise Crash(f"at {self.failed_at}: {self._way.value}")
        error = CommitUnknown if method == "create" else StoreUnavailable
        raise error(f"{path}: the reply to {method} was lost")

    def _count(self, method: str) -> bool:
        """Count a call; return whether it is the one that fails."""
        with self._lock:
            if self.dead:
                raise Crash("the process is dead")
            self.operations[method] += 1
            is_point = self._only is None or method in self._only
            self._points += is_point
            return is_point and self._points == self._nth
