"""Owners, attempts on other machines and guests that meet while trials clone each other's checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from prefect_tune.core.errors import Superseded, TuneError
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from tests.core.protocol.matrix import Explored
from tests.core.protocol.population import Attempt, Chronicle, Search, after_everybody_returned
from tests.core.protocol.turns import Choice, IsPoint, drawn, every_order, everywhere, in_turns
from tests.fakes.stores.dying_store import Crash, DyingStore, Way
from tests.fakes.stores.memory_store import MemoryStore
from tests.fakes.stores.slow_store import SlowStore


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

    def again(self) -> Scene:
        """Return a copy on a separate store."""
        twin = Scene(chronicle=copy.deepcopy(self.chronicle), doomed=self.doomed)
        twin.store.objects.update(self.store.objects)
        twin.search = self.search.on(twin.store, twin.chronicle)
        twin.there = {name: attempt.on(twin.store, twin.chronicle) for name, attempt in self.there.items()}
        return twin


Act = Callable[[Scene, ObjectStore], None]
"""The operations of one process on its store."""


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


def owner_does(*deeds: Callable[[Search], object]) -> Act:
    """The owner does these; it may be superseded."""

    def act(scene: Scene, store: ObjectStore) -> None:
        search = scene.search.on(store, scene.chronicle)
        with suppress(Superseded):
            for deed in deeds:
                deed(search)

    return act


def saves(name: str, times: int = 1) -> Act:
    """The trial saves, and the owner deletes the checkpoints that this retires."""
    return owner_does(*[lambda search: search.save(name)] * times)


def clones(name: str, source: str = "s") -> Act:
    """A trial clones the newest checkpoint of the source, restores it, and starts."""
    return owner_does(lambda search: search.clone(name, source), lambda search: search.start(name))


def clear_late(scene: Scene, store: ObjectStore) -> None:
    """The owner deletes the checkpoints that it has retired."""
    owner_does(lambda search: search.clear(scene.doomed))(scene, store)


def receives(name: str, *, closes: bool = False) -> Act:
    """The owner journals what the attempt has posted, and deletes what that has retired."""
    return owner_does(lambda search: search.clear(search.receive(name, closes=closes)))


def takes_over(*deeds: Callable[[Search], object]) -> Act:
    """A new owner opens the journal, does these, and deletes leftovers."""

    def act(scene: Scene, store: ObjectStore) -> None:
        new = Search(store, scene.chronicle, owner=f"new {scene.chronicle.stamps}")
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

    def act(scene: Scene, store: ObjectStore) -> None:
        attempt = scene.there[name].on(store, scene.chronicle)
        with suppress(Superseded):
            for _ in range(times):
                attempt.save_there()

    return act


# ------------------------------------------------------------------------------------------- interleavings


def at_decisions(method: str, path: str) -> bool:
    """Switch processes at operations that others can see, and at reads of what others write."""
    looks = path.endswith(("/snapshots", "/manifest.json"))
    return method in {"create", "delete"} or (method in {"read", "list"} and looks)


def meet_in_every_order(
    scene: Scene, acts: Sequence[Act], is_point: IsPoint = at_decisions, *, limit: int, enough: int | None = None
) -> Explored:
    """Run the acts in every order of their points; check the promises after each order."""
    explored = Explored()

    def run(choose: Choice) -> None:
        if enough is None or len(explored.broken) < enough:
            explored.broken += _met(scene.again(), acts, choose, is_point)

    explored.points = every_order(run, limit)
    return explored


def meet_at_random(scene: Scene, acts: Sequence[Act], seeds: Iterable[int], *, enough: int | None = None) -> Explored:
    """Run the acts in random orders of all their operations."""
    return _drawn(scene, seeds, enough, lambda twin, seed: _met(twin, acts, drawn(seed), everywhere))


def meet_dying(scene: Scene, acts: Sequence[Act], seeds: Iterable[int], *, enough: int | None = None) -> Explored:
    """The same, and each act may fail at a random operation in a random way."""

    def meet(twin: Scene, seed: int) -> list[str]:
        rng = Random(seed)
        failing = [_failing(act, rng.randint(0, 60), rng.choice(list(Way))) for act in acts]
        return _met(twin, failing, drawn(seed), everywhere)

    return _drawn(scene, seeds, enough, meet)


def _drawn(scene: Scene, seeds: Iterable[int], enough: int | None, meet: Callable[[Scene, int], list[str]]) -> Explored:
    explored = Explored()
    for seed in seeds:
        explored.points += 1
        explored.broken += [f"seed {seed}: {each}" for each in meet(scene.again(), seed)]
        if enough is not None and len(explored.broken) >= enough:
            break
    return explored


def _met(scene: Scene, acts: Sequence[Act], choose: Choice, is_point: IsPoint) -> list[str]:
    processes = [_process(scene, act) for act in acts]
    died = in_turns(scene.store, processes, choose, is_point)
    return [*died, *after_everybody_returned(scene.store, scene.chronicle)]


def _process(scene: Scene, act: Act) -> Callable[[ObjectStore], None]:
    return lambda store: act(scene, store)


def _failing(act: Act, nth: int, way: Way) -> Act:
    def dying(scene: Scene, store: ObjectStore) -> None:
        with suppress(Crash):
            act(scene, DyingStore(store, nth, way))

    return dying


def die_everywhere(
    scene: Scene,
    act: Act,
    ways: Iterable[Way] = tuple(Way),
    *,
    only: frozenset[str] | None = None,
    enough: int | None = None,
) -> Explored:
    """Fail the act at each of its operations (or at those in `only`) in each way, and recover."""
    twin = scene.again()
    counting = DyingStore(twin.store, 0, only=only)
    act(twin, counting)
    ways = tuple(ways)
    explored = Explored()
    for nth in range(1, counting.total + 1):
        for way in ways:
            explored.points += 1
            explored.broken += [f"#{nth} {way.name}: {each}" for each in _died(scene.again(), act, nth, way, only)]
            if enough is not None and len(explored.broken) >= enough:
                return explored
    return explored


def _died(scene: Scene, act: Act, nth: int, way: Way, only: frozenset[str] | None) -> Iterator[str]:
    try:
        act(scene, DyingStore(scene.store, nth, way, only=only))
    except Crash:
        pass
    except TuneError as error:
        yield f"a fault that a retry mends ended it: {type(error).__name__}: {error}"
    yield from after_everybody_returned(scene.store, scene.chronicle)


def late_writes(scene: Scene, act: Act, delays: Iterable[int | None], *, enough: int | None = None) -> Explored:
    """Lose the reply to each write of the act, let the write arrive late or never, and recover meanwhile."""
    twin = scene.again()
    counting = SlowStore(twin.store, 0, None)
    act(twin, counting)
    explored = Explored()
    for nth in range(1, counting.writes + 1):
        for delay in delays:
            explored.points += 1
            twin = scene.again()
            store = SlowStore(twin.store, nth, delay)
            fault = f"write {nth}, {delay} operations late"
            try:
                act(twin, store)
            except TuneError as error:
                explored.broken.append(f"{fault}: it ended the run: {type(error).__name__}: {error}")
            left = after_everybody_returned(store, twin.chronicle, tidy=False)
            explored.broken += [f"{fault}: {each}" for each in left]
            if enough is not None and len(explored.broken) >= enough:
                return explored
    return explored
