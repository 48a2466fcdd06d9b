"""A store behind a network that delays one write past its reply, or loses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from prefect_tune.core.errors import AlreadyExists, CommitUnknown, StoreUnavailable
from prefect_tune.core.storage.object_store import Buffer, Listed, ObjectStore


class SlowStore:
    """The nth write is answered by "not known", and is carried out `delay` operations later; None is never.

    The network outlives the process that wrote: operations of later processes count too.
    `writes` is how many there were.
    """

    def __init__(self, inner: ObjectStore, nth: int, delay: int | None) -> None:
        self.inner = inner
        self.writes = 0
        self._nth = nth
        self._delay = delay
        self._on_its_way: Callable[[], None] | None = None

    @property
    def conditional_create(self) -> bool:
        return self.inner.conditional_create

    def create(self, path: str, data: Buffer) -> None:
        copy = bytes(data)
        if self._is_lost(lambda: self.inner.create(path, copy)):
            raise CommitUnknown(f"{path}: no answer")
        self.inner.create(path, data)

    def put(self, path: str, data: Buffer) -> None:
        copy = bytes(data)
        if self._is_lost(lambda: self.inner.put(path, copy)):
            raise StoreUnavailable(f"{path}: no answer")
        self.inner.put(path, data)

    def copy(self, source: str, path: str) -> None:
        if self._is_lost(lambda: self.inner.copy(source, path)):
            raise StoreUnavailable(f"{path}: no answer")
        self.inner.copy(source, path)

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        copy = [bytes(piece) for piece in pieces]
        if self._is_lost(lambda: self.inner.replace(path, copy)):
            raise StoreUnavailable(f"{path}: no answer")
        self.inner.replace(path, copy)

    def delete(self, paths: Sequence[str]) -> None:
        copy = tuple(paths)
        if self._is_lost(lambda: self.inner.delete(copy)):
            raise StoreUnavailable(f"{paths}: no answer")
        self.inner.delete(paths)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Buffer:
        self._time_passes()
        return self.inner.read(path, offset=offset, length=length)

    def size(self, path: str) -> int | None:
        self._time_passes()
        return self.inner.size(path)

    def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
        self._time_passes()
        return self.inner.list(prefix, after=after)

    def lose(self, soon: int, delay: int | None) -> None:
        """Lose track of the write that comes `soon`, 1 for the next, unless another one is on its way."""
        if self._on_its_way is None:
            self._nth, self._delay = self.writes + soon, delay

    def _is_lost(self, write: Callable[[], None]) -> bool:
        self._time_passes()
        self.writes += 1
        if self.writes == self._nth:
            self._on_its_way = write
        return self.writes == self._nth

    def _time_passes(self) -> None:
        if self._on_its_way is None or self._delay is None:
            return
        self._delay -= 1
        if self._delay < 0:
            with suppress(AlreadyExists):  # the caller has given up waiting
                self._on_its_way()
            self._on_its_way = None
