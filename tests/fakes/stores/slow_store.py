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
    """The nth write is answered by "not known", and is carried out `delay` operations later; None is never.

    The network outlives the process that wrote: operations of later processes count too.
    `writes` is how many there were.
    """

    def __init__(self, inner: ObjectStore, nth: int, delay: int | None) -> None:
        super().__init__(inner)
        self.writes = 0
        self._nth = nth
        self._delay = delay
        self._on_its_way: Callable[[], object] | None = None

    def intercept(self, method: str, path: str, operation: Callable[[], _T]) -> _T:
        self._time_passes()
        self.writes += method in WRITES
        if method not in WRITES or self.writes != self._nth:
            return operation()
        self._on_its_way = operation
        raise (CommitUnknown if method == "create" else StoreUnavailable)(f"{path}: no answer")

    def lose_write(self, soon: int, delay: int | None) -> None:
        """Lose track of the write that comes `soon`, 1 for the next, unless another one is on its way."""
        if self._on_its_way is None:
            self._nth, self._delay = self.writes + soon, delay

    def _time_passes(self) -> None:
        if self._on_its_way is None or self._delay is None:
            return
        self._delay -= 1
        if self._delay < 0:
            with suppress(AlreadyExists):  # the caller has given up waiting
                self._on_its_way()
            self._on_its_way = None
