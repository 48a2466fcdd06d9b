"""Owners, attempts on other machines and guests that meet while trials clone each other's checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self

from prefect_tune.core.errors import Superseded
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from tests.core.protocol.population import Attempt, Chronicle, Search, after_everybody_returned
from tests.fakes.stores.memory_store import MemoryStore


@dataclass
class Scene:
    """The state of a search: the store, the fields of its owner, and attempts on other machines."""

    store: MemoryStore = field(default_factory=MemoryStore)
    chronicle: Chronicle = field(default_factory=Chronicle)
    there: dict[str, Attempt] = field(default_factory=dict)
    """By trial, the attempt on another machine."""
    doomed: Sequence[CheckpointKey] = ()
    """The checkpoints that the owner has retired but not deleted yet."""
    search: Search = field(init=False)

    def __post_init__(self) -> None:
        self.search = Search(self.store, self.chronicle)

    def again(self) -> Self:
        """Return a copy on a separate store."""
        twin = replace(self, store=MemoryStore(self.store.objects), chronicle=copy.deepcopy(self.chronicle))
        twin._take(self)
        return twin

    def on(self, store: ObjectStore) -> Self:
        twin = replace(self, store=store)  # type: ignore[arg-type]  # one before that of the scene
        twin._take(self)
        return twin

    def _take(self, other: Scene) -> None:
        self.search = other.search.on(self.store, self.chronicle)
        self.there = {name: attempt.on(self.store, self.chronicle) for name, attempt in other.there.items()}

    def broken(self, *, tidy: bool = True) -> list[str]:
        return after_everybody_returned(self.store, self.chronicle, tidy=tidy)

    def outcome(self) -> Hashable:
        return frozenset(self.store.objects.items()), repr(self.chronicle)


def without_a_clone() -> Scene:
    """Trial s runs, and what it last retired is not deleted; trials c and d wait."""
    scene = Scene()
    scene.search.open()
    scene.search.add("s", "c", "d")
    scene.search.start("s")
    scene.search.save("s")
    scene.doomed = scene.search.save_only("s")
    return scene


def with_a_clone() -> Scene:
    """The same, but c trains from a clone, whose source checkpoint has been retired."""
    scene = without_a_clone()
    scene.search.clone("c", "s")
    scene.search.start("c")
    scene.doomed = scene.search.save_only("s")
    return scene


def with_a_clone_that_is_over() -> Scene:
    """The clone is retired by its trial, and nothing is deleted yet."""
    scene = with_a_clone()
    scene.doomed = [*scene.doomed, *scene.search.save_only("c")]
    return scene


def elsewhere() -> Scene:
    """Trial s trains on another machine: the journal has its first save, and two posts wait in its outbox."""
    scene = Scene()
    scene.search.open()
    scene.search.add("s", "c", "d")
    scene.there["s"] = attempt = scene.search.launch("s")
    attempt.begin_there()
    attempt.save_there()
    scene.search.receive("s")
    attempt.save_there()
    attempt.save_there()
    return scene


def elsewhere_with_a_clone() -> Scene:
    """The same, and trial c trains here from a clone of what s has retired by a post that waits."""
    scene = elsewhere()
    scene.search.clone("c", "s")
    scene.search.start("c")
    return scene


# -------------------------------------------------------------------------------------------- operations


Act = Callable[[Scene], None]


def owner_does(*deeds: Callable[[Search], object]) -> Act:
    """The owner does these; it may be superseded."""

    def act(scene: Scene) -> None:
        with suppress(Superseded):
            for deed in deeds:
                deed(scene.search)

    return act


def saves(name: str, times: int = 1) -> Act:
    """The trial saves, and the owner deletes the checkpoints that this retires."""
    return owner_does(*[lambda search: search.save(name)] * times)


def clones(name: str, source: str = "s") -> Act:
    """A trial clones the newest checkpoint of the source, restores it, and starts."""
    return owner_does(lambda search: search.clone(name, source), lambda search: search.start(name))


def clear_late(scene: Scene) -> None:
    """The owner deletes the checkpoints that it has retired."""
    owner_does(lambda search: search.clear(scene.doomed))(scene)


def receives(name: str, *, closes: bool = False) -> Act:
    """The owner journals what the attempt has posted, and deletes what that has retired."""
    return owner_does(lambda search: search.clear(search.receive(name, closes=closes)))


def takes_over(*deeds: Callable[[Search], object]) -> Act:
    """A new owner opens the journal, does these, and deletes leftovers."""

    def act(scene: Scene) -> None:
        new = Search(scene.store, scene.chronicle, owner=f"new {scene.chronicle.stamps}")
        with suppress(Superseded):
            new.open()
            for deed in deeds:
                deed(new)
            new.clear_away()

    return act


def resume(name: str) -> Callable[[Search], object]:
    """A new owner ends the attempt of a trial wherever it runs, and trains the trial on."""

    def deed(search: Search) -> None:
        search.settle(name)
        search.start(name)
        search.save(name)

    return deed


def saves_there(name: str = "s", times: int = 1) -> Act:
    """The attempt on another machine saves; it ends when its outbox is closed."""

    def act(scene: Scene) -> None:
        with suppress(Superseded):
            for _ in range(times):
                scene.there[name].save_there()

    return act


# ------------------------------------------------------------------------------------------- interleavings


def at_decisions(method: str, path: str) -> bool:
    """Switch processes at operations that others can see, and at reads of what others write."""
    looks = path.endswith(("/snapshots", "/manifest.json"))
    return method in {"create", "delete"} or (method in {"read", "list"} and looks)
