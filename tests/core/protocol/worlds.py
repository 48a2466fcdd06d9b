"""The two kinds of store, each with a first process that dies, and the state for the next process."""

from __future__ import annotations

from typing import Protocol

from prefect_tune.core.storage.object_store import ObjectStore
from tests.fakes.stores.dying_store import DyingStore, Way
from tests.fakes.stores.memory_posix import DyingCalls, MemoryPosix, posix_store
from tests.fakes.stores.memory_store import MemoryStore


class World(Protocol):
    """A store for processes that die."""

    def dying(self, nth: int, way: Way) -> ObjectStore:
        """The store for a process that fails at point `nth`; 0 means never."""
        ...

    @property
    def points(self) -> int:
        """The number of points that the last process passed."""
        ...

    def left(self) -> ObjectStore:
        """The store after the process died, as the next process sees it."""
        ...


class ObjectWorld:
    """An object store: a point is an operation."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self._dying = DyingStore(self.inner, 0)

    def dying(self, nth: int, way: Way) -> ObjectStore:
        self._dying = DyingStore(self.inner, nth, way)
        return self._dying

    @property
    def points(self) -> int:
        return self._dying.total

    def left(self) -> ObjectStore:
        return self.inner


class PosixWorld:
    """A file store on a disk with a cache: a point is a system call.

    With `loses_power` the machine dies with the process; `seed` decides which unsynced bytes survive.
    """

    def __init__(self, *, loses_power: bool = True, seed: int | None = None, fsync_works: bool = True) -> None:
        self.disk = MemoryPosix(fsync_works=fsync_works)
        self._loses_power = loses_power
        self._seed = seed
        self._dying = DyingCalls(self.disk, 0)

    def dying(self, nth: int, way: Way) -> ObjectStore:
        self._dying = DyingCalls(self.disk, nth, way)
        return posix_store(self._dying)

    @property
    def points(self) -> int:
        return self._dying.total

    def left(self) -> ObjectStore:
        self.disk.die_with_process()
        if self._loses_power:
            self.disk.lose_power(self._seed)
        store = posix_store(self.disk)
        copy = MemoryStore()  # equal for the next process, and much faster
        copy.objects.update({each.path: store.read(each.path) for each in store.list("")})
        return copy
