"""Owners, attempts on other machines and other writers that meet while trials clone each other's checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self

from prefect_tune.core.errors import Superseded
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from tests.core.protocol.population import Attempt, Chronicle, Search, check_recovery
from tests.fakes.stores.memory_store import MemoryStore


@dataclass
class Scene:
    """The state of a search: the store, the fields of its owner, and attempts on other machines."""

    store: MemoryStore = field(default_factory=MemoryStore)
    chronicle: Chronicle = field(default_factory=Chronicle)
    remote: dict[str, Attempt] = field(default_factory=dict)
    """By trial, the attempt on another machine."""
    to_delete: Sequence[CheckpointKey] = ()
    """The checkpoints that the owner has retired but not deleted yet."""
    search: Search = field(init=False)

    def __post_init__(self) -> None:
        self.search = Search(self.store, self.chronicle)

    def copy(self) -> Self:
        """Return a copy on a separate store."""
        twin = replace(self, store=MemoryStore(self.store.objects), chronicle=copy.deepcopy(self.chronicle))
        twin._take(self)
        return twin

    def with_store(self, store: ObjectStore) -> Self:
        twin = replace(self, store=store)  # type: ignore[arg-type]  # one before that of the scene
        twin._take(self)
        return twin

    def _take(self, other: Scene) -> None:
        self.search = other.search.with_store(self.store, self.chronicle)
        self.remote = {name: attempt.with_store(self.store, self.chronicle) for name, attempt in other.remote.items()}

    def find_broken_promises(self, *, tidy: bool = True) -> list[str]:
        return check_recovery(self.store, self.chronicle, tidy=tidy)

    def outcome(self) -> Hashable:
        return frozenset(self.store.objects.items()), repr(self.chronicle)


def plain_scene() -> Scene:
    """Trial s runs, and what it last retired is not deleted; trials c and d wait."""
    scene = Scene()
    scene.search.open()
    scene.search.add("s", "c", "d")
    scene.search.start("s")
    scene.search.save("s")
    scene.to_delete = scene.search.save_only("s")
    return scene


def clone_scene() -> Scene:
    """The same, but c trains from a clone, whose source checkpoint has been retired."""
    scene = plain_scene()
    scene.search.clone("c", "s")
    scene.search.start("c")
    scene.to_delete = scene.search.save_only("s")
    return scene


def stale_clone_scene() -> Scene:
    """The clone is retired by its trial, and nothing is deleted yet."""
    scene = clone_scene()
    scene.to_delete = [*scene.to_delete, *scene.search.save_only("c")]
    return scene


def remote_scene() -> Scene:
    """Trial s trains on another machine: the journal has its first save, and two posts wait in its outbox."""
    scene = Scene()
    scene.search.open()
    scene.search.add("s", "c", "d")
    scene.remote["s"] = attempt = scene.search.launch("s")
    attempt.post_start()
    attempt.post_save()
    scene.search.receive("s")
    attempt.post_save()
    attempt.post_save()
    return scene


def remote_clone_scene() -> Scene:
    """The same, and trial c trains here from a clone of what s has retired by a post that waits."""
    scene = remote_scene()
    scene.search.clone("c", "s")
    scene.search.start("c")
    return scene


# -------------------------------------------------------------------------------------------- operations


Act = Callable[[Scene], None]


def owner_act(*operations: Callable[[Search], object]) -> Act:
    """The owner does these; it may be superseded."""

    def act(scene: Scene) -> None:
        with suppress(Superseded):
            for operation in operations:
                operation(scene.search)

    return act


def save_act(name: str, times: int = 1) -> Act:
    """The trial saves, and the owner deletes the checkpoints that this retires."""
    return owner_act(*[lambda search: search.save(name)] * times)


def clone_act(name: str, source: str = "s") -> Act:
    """A trial clones the newest checkpoint of the source, restores it, and starts."""
    return owner_act(lambda search: search.clone(name, source), lambda search: search.start(name))


def delete_retired_late(scene: Scene) -> None:
    """The owner deletes the checkpoints that it has retired."""
    owner_act(lambda search: search.delete_checkpoints(scene.to_delete))(scene)


def receive_act(name: str, *, closes: bool = False) -> Act:
    """The owner journals what the attempt has posted, and deletes what that has retired."""
    return owner_act(lambda search: search.delete_checkpoints(search.receive(name, closes=closes)))


def takeover_act(*operations: Callable[[Search], object]) -> Act:
    """A new owner opens the journal, does these, and deletes leftovers."""

    def act(scene: Scene) -> None:
        search = Search(scene.store, scene.chronicle, owner=f"new {scene.chronicle.stamps}")
        with suppress(Superseded):
            search.open()
            for operation in operations:
                operation(search)
            search.delete_leftovers()

    return act


def resume(name: str) -> Callable[[Search], object]:
    """A new owner ends the attempt of a trial wherever it runs, and trains the trial on."""

    def resume_attempt(search: Search) -> None:
        search.fence_off(name)
        search.start(name)
        search.save(name)

    return resume_attempt


def remote_save_act(name: str = "s", times: int = 1) -> Act:
    """The attempt on another machine saves; it ends when its outbox is closed."""

    def act(scene: Scene) -> None:
        with suppress(Superseded):
            for _ in range(times):
                scene.remote[name].post_save()

    return act


# ------------------------------------------------------------------------------------------- interleavings


def at_decisions(method: str, path: str) -> bool:
    """Switch processes at operations that others can see, and at reads of what others write."""
    is_shared_read = path.endswith(("/snapshots", "/manifest.json"))
    return method in {"create", "delete"} or (method in {"read", "list"} and is_shared_read)
