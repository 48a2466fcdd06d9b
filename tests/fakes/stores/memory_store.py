"""A correct object store in a dictionary, which counts every operation; and a wrapper of a store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from prefect_tune.core.errors import AlreadyExists, ObjectNotFound
from prefect_tune.core.storage.object_store import Buffer, ListedObject, ObjectStore, validate_folder, validate_path
from prefect_tune.stores.parallel_map import ParallelStore

_In = TypeVar("_In")
_Out = TypeVar("_Out")
_T = TypeVar("_T")


class MemoryStore:
    """Object-store semantics: an object is there whole or not at all, and visible at once.

    A test may read and damage `objects`. `operations` counts the calls by method name.
    """

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self.objects = dict(objects or {})
        self.operations: Counter[str] = Counter()
        self.bytes_in = 0
        self.bytes_out = 0
        self._lock = threading.Lock()

    @property
    def has_conditional_create(self) -> bool:
        return True

    def create(self, path: str, data: Buffer) -> None:
        with self._lock:
            self.operations["create"] += 1
            if validate_path(path) in self.objects:
                raise AlreadyExists(f"{path}: there already")
            self._store(path, data)

    def put(self, path: str, data: Buffer) -> None:
        with self._lock:
            self.operations["put"] += 1
            self._store(validate_path(path), data)

    def copy(self, source: str, path: str) -> None:
        with self._lock:
            self.operations["copy"] += 1
            source, path = validate_path(source), validate_path(path)
            if source not in self.objects:
                raise ObjectNotFound(f"{source}: nothing there")
            self.objects[path] = self.objects[source]

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        data = b"".join(pieces)
        with self._lock:
            self.operations["replace"] += 1
            self._store(validate_path(path), data)

    def _store(self, path: str, data: Buffer) -> None:
        self.objects[path] = bytes(data)
        self.bytes_in += len(self.objects[path])

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        with self._lock:
            self.operations["read"] += 1
            data = self.objects.get(validate_path(path))
            if data is None:
                raise ObjectNotFound(f"{path}: nothing there")
            part = data[offset:] if length is None else data[offset : offset + length]
            self.bytes_out += len(part)
            return part

    def size(self, path: str) -> int | None:
        with self._lock:
            self.operations["size"] += 1
            data = self.objects.get(validate_path(path))
            return None if data is None else len(data)

    def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
        folder = validate_folder(prefix)
        start = f"{folder}/" if folder else ""
        with self._lock:
            self.operations["list"] += 1
            names = sorted(path for path in self.objects if path.startswith(start) and path > after)
            return [ListedObject(path, len(self.objects[path])) for path in names]

    def delete(self, paths: Sequence[str]) -> None:
        with self._lock:
            self.operations["delete"] += 1
            for path in paths:
                self.objects.pop(validate_path(path), None)

    def map(self, function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
        """Call `function` with one item after the other, so that simulations are deterministic."""
        return map(function, items)


class OneWriterStore(MemoryStore):
    """The same store without atomic create-if-absent, as its `has_conditional_create` says."""

    @classmethod
    def holding(cls, objects: Mapping[str, bytes]) -> OneWriterStore:
        store = cls()
        store.objects.update(objects)
        return store

    @property
    def has_conditional_create(self) -> bool:
        return False


class ParallelMemoryStore(ParallelStore, MemoryStore):
    """The same store, which is used by several threads at once, as the stores of targets are."""


class StoreWrapper:
    """Passes each operation on to `inner` through `intercept`, which a subclass overrides."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    def intercept(self, method: str, path: str, operation: Callable[[], _T]) -> _T:
        """Carry out an operation, now, later or never; `path` has all of several paths."""
        del method, path
        return operation()

    @property
    def has_conditional_create(self) -> bool:
        return self.inner.has_conditional_create

    def create(self, path: str, data: Buffer) -> None:
        copy = bytes(data)
        self.intercept("create", path, lambda: self.inner.create(path, copy))

    def put(self, path: str, data: Buffer) -> None:
        copy = bytes(data)
        self.intercept("put", path, lambda: self.inner.put(path, copy))

    def copy(self, source: str, path: str) -> None:
        self.intercept("copy", path, lambda: self.inner.copy(source, path))

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        copy = [bytes(piece) for piece in pieces]
        self.intercept("replace", path, lambda: self.inner.replace(path, copy))

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Buffer:
        return self.intercept("read", path, lambda: self.inner.read(path, offset=offset, length=length))

    def size(self, path: str) -> int | None:
        return self.intercept("size", path, lambda: self.inner.size(path))

    def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
        return self.intercept("list", prefix, lambda: self.inner.list(prefix, after=after))

    def delete(self, paths: Sequence[str]) -> None:
        copy = tuple(paths)
        self.intercept("delete", ", ".join(paths), lambda: self.inner.delete(copy))

    def map(self, function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
        return self.inner.map(function, items)
