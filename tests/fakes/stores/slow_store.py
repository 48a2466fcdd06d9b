"""A store behind a network that delays one write past its reply, or loses it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from prefect_tune.core.errors import AlreadyExists, CommitUnknown, StoreUnavailable
from prefect_tune.core.storage.object_store import ObjectStore
from tests.fakes.stores.dying_store import WRITES
from tests.fakes.stores.memory_store import StoreWrapper

_T = TypeVar("_T")


class SlowStore(StoreWrapper):
    """The outcome of the nth write is unknown: it is carried out `delay` operations later, or never (None).

    Operations of later processes count too. `writes` is the number of writes so far.
    """

    def __init__(self, inner: ObjectStore, nth: int, delay: int | None) -> None:
        super().__init__(inner)
        self.writes = 0
        self._nth = nth
        self._delay = delay
        self._delayed_write: Callable[[], object] | None = None

    def intercept(self, method: str, path: str, operation: Callable[[], _T]) -> _T:
        self._advance()
        self.writes += method in WRITES
        if method not in WRITES or self.writes != self._nth:
            return operation()
        self._delayed_write = operation
        raise (CommitUnknown if method == "create" else StoreUnavailable)(f"{path}: no answer")

    def lose_write(self, ahead: int, delay: int | None) -> None:
        """Delay the write that comes `ahead`, 1 for the next, unless another one is delayed."""
        if self._delayed_write is None:
            self._nth, self._delay = self.writes + ahead, delay

    def _advance(self) -> None:
        if self._delayed_write is None or self._delay is None:
            return
        self._delay -= 1
        if self._delay < 0:
            with suppress(AlreadyExists):  # the caller has given up waiting
                self._delayed_write()
            self._delayed_write = None
