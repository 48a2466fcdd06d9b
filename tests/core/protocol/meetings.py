"""Trials that clone, retire and release each other's checkpoints concurrently: every order, with crashes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from prefect_tune.core.errors import Superseded, TuneError
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from tests.core.protocol.matrix import Explored
from tests.core.protocol.population import Chronicle, Member, after_everybody_returned, begin_experiment, own
from tests.core.protocol.turns import Choice, IsPoint, drawn, every_order, everywhere, in_turns
from tests.fakes.stores.dying_store import Crash, DyingStore, Way
from tests.fakes.stores.memory_store import MemoryStore
from tests.fakes.stores.slow_store import SlowStore


@dataclass
class Scene:
    """The state of several trials: the store, and the fields of their owners."""

    store: MemoryStore = field(default_factory=MemoryStore)
    chronicle: Chronicle = field(default_factory=Chronicle)
    members: dict[str, Member] = field(default_factory=dict)
    doomed: Sequence[CheckpointKey] = ()
    """The checkpoints that the source has retired but not deleted yet."""

    @property
    def journals(self) -> dict[str, JournalKey]:
        return {name: member.journal for name, member in self.members.items()}

    def join(self, name: str, journal: JournalKey) -> Member:
        """Add a trial, opened and pending."""
        self.members[name] = member = Member(self.store, self.chronicle, journal, name)
        begin_experiment(self.store, journal)
        member.open()
        return member

    def again(self) -> Scene:
        """Return a copy on a separate store."""
        twin = Scene(chronicle=copy.deepcopy(self.chronicle), doomed=self.doomed)
        twin.store.objects.update(self.store.objects)
        twin.members = {name: member.on(twin.store, twin.chronicle) for name, member in self.members.items()}
        return twin


Act = Callable[[Scene, ObjectStore], None]
"""The operations of one process on its store."""


def without_a_clone(source: JournalKey, clone: JournalKey) -> Scene:
    """A running source, which has not deleted what it last retired, and two pending trials."""
    scene = Scene()
    first = scene.join("s", source)
    first.start()
    first.save()
    scene.doomed = first.save_only()
    scene.join("c", clone)
    scene.join("d", own("e", "d"))
    return scene


def with_a_clone(source: JournalKey, clone: JournalKey) -> Scene:
    """The same, but the first of the two trains from a clone, whose source checkpoint has been retired."""
    scene = without_a_clone(source, clone)
    scene.members["c"].clone(scene.members["s"].key)
    scene.members["c"].start()
    scene.doomed = scene.members["s"].save_only()
    return scene


def with_a_clone_that_is_over(source: JournalKey, clone: JournalKey) -> Scene:
    """The clone is retired by its trial, whose owner died before it deleted or released anything."""
    scene = with_a_clone(source, clone)
    scene.members["c"].save_only()
    return scene


# -------------------------------------------------------------------------------------------- operations


def saves(name: str, times: int = 1) -> Act:
    """The trial saves, and deletes the checkpoints that this retires."""

    def act(scene: Scene, store: ObjectStore) -> None:
        member = scene.members[name].on(store, scene.chronicle)
        for _ in range(times):
            member.save()

    return act


def clones(name: str, source: str = "s") -> Act:
    """A trial clones the newest checkpoint of the source, restores it, and starts."""

    def act(scene: Scene, store: ObjectStore) -> None:
        member = scene.members[name].on(store, scene.chronicle)
        member.clone(scene.members[source].key)
        member.start()

    return act


def clone_of_the_clone(scene: Scene, store: ObjectStore) -> None:
    """The other trial clones the clone."""
    clones("d", "c")(scene, store)


def takes_over(name: str) -> Act:
    """A new owner opens the trial's journal and deletes leftovers."""

    def act(scene: Scene, store: ObjectStore) -> None:
        old = scene.members[name]
        new = Member(store, scene.chronicle, old.journal, name, owner=f"new {scene.chronicle.stamps}")
        new.open()
        new.clear_away()

    return act


def clear_late(scene: Scene, store: ObjectStore) -> None:
    """The source deletes the checkpoints that it has retired."""
    scene.members["s"].on(store, scene.chronicle).clear(scene.doomed)


# ------------------------------------------------------------------------------------------- interleavings


def at_decisions(method: str, path: str) -> bool:
    """Switch processes at operations that others can see, and at reads of what others write."""
    looks = path.endswith(("/segments", "/manifest.json"))
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
    return [*died, *after_everybody_returned(scene.store, scene.chronicle, scene.journals)]


def _process(scene: Scene, act: Act) -> Callable[[ObjectStore], None]:
    return lambda store: act(scene, store)


def _failing(act: Act, nth: int, way: Way) -> Act:
    def dying(scene: Scene, store: ObjectStore) -> None:
        with suppress(Crash):
            act(scene, DyingStore(store, nth, way))

    return dying


def or_superseded(act: Act) -> Act:
    """Let the act end when its owner is superseded."""

    def ending(scene: Scene, store: ObjectStore) -> None:
        with suppress(Superseded):
            act(scene, store)

    return ending


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
    yield from after_everybody_returned(scene.store, scene.chronicle, scene.journals)


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
            left = after_everybody_returned(store, twin.chronicle, twin.journals, tidy=False)
            explored.broken += [f"{fault}: {each}" for each in left]
            if enough is not None and len(explored.broken) >= enough:
                return explored
    return explored
