"""Fail each operation of a scenario in each way, on both kinds of store; recover, and check the promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Protocol

from prefect_tune.core.journal_events import AttemptEnded, Cause, StepReported
from prefect_tune.core.storage.object_store import ObjectStore
from tests.core.driver import KEY, Session, Witness, run_to
from tests.core.protocol.exploring import Findings, Verdicts, catch_failure, delay_writes, explore
from tests.fakes.stores.dying_store import DyingStore, Failure
from tests.fakes.stores.memory_posix import DyingCalls, MemoryPosix, posix_store
from tests.fakes.stores.memory_store import MemoryStore

STEPS = 5

Story = Callable[[ObjectStore, Witness], None]
"""The operations of one process; the store may have state of earlier processes."""


class World(Protocol):
    """A store for processes that die."""

    def make_dying_store(self, nth: int, failure: Failure) -> ObjectStore:
        """Return the store for a process that fails at point `nth`; 0 means never."""
        ...

    @property
    def points(self) -> int:
        """The number of points that the last process passed."""
        ...

    def make_recovered_store(self) -> ObjectStore:
        """Return the store after the process exited, as the next process sees it."""
        ...


class ObjectWorld:
    """An object store: a point is an operation."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self._dying = DyingStore(self.inner, 0)

    def make_dying_store(self, nth: int, failure: Failure) -> ObjectStore:
        self._dying = DyingStore(self.inner, nth, failure)
        return self._dying

    @property
    def points(self) -> int:
        return self._dying.total

    def make_recovered_store(self) -> ObjectStore:
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

    def make_dying_store(self, nth: int, failure: Failure) -> ObjectStore:
        self._dying = DyingCalls(self.disk, nth, failure)
        return posix_store(self._dying)

    @property
    def points(self) -> int:
        return self._dying.total

    def make_recovered_store(self) -> ObjectStore:
        self.disk.die_with_process()
        if self._loses_power:
            self.disk.lose_power(self._seed)
        store = posix_store(self.disk)
        copy = MemoryStore()  # equal for the next process, and much faster
        copy.objects.update({listed.path: store.read(listed.path) for listed in store.list("")})
        return copy


def run_fresh(store: ObjectStore, witness: Witness) -> None:
    """Open an empty store, train and save and collect."""
    run_to(Session(store, witness), 3)


def run_longer(store: ObjectStore, witness: Witness) -> None:
    """Train until a checkpoint has the same content as a retired one."""
    run_to(Session(store, witness), STEPS)


def run_resumed(store: ObjectStore, witness: Witness) -> None:
    """Open the existing experiment, adopt, restore, continue, finish."""
    session = Session(store, witness, owner="resumed")
    run_to(session, STEPS)
    session.finish()


def die_before_entry(store: ObjectStore, witness: Witness) -> None:
    """Three checkpoints, one of them retired but not deleted, and a fourth with a manifest but no journal entry."""
    session = Session(store, witness)
    session.open()
    session.start()
    for _ in range(3):
        session.train()
        session.acknowledge(session.publish())
    session.train()
    session.publish()


def start_after_unknown_save(store: ObjectStore, witness: Witness) -> None:
    """A save that its owner gave up although its manifest exists; then another attempt, without a save."""
    session = Session(store, witness)
    session.open()
    session.start()
    session.train()
    session.save()
    session.train()
    session.train()
    session.publish()
    witness.published.popitem()  # given up: the save was never acknowledged
    session.pending.clear()
    session.append([AttemptEnded(trial=KEY.trial, cause=Cause.MACHINE, reason="the target did not say")])
    session.owner = "second attempt"
    session.start()
    session.train()
    session.append([StepReported(trial=KEY.trial, report=session.pending.pop())])


def fail_everywhere(
    world: Callable[[], World],
    story: Story,
    *,
    before: Story | None = None,
    failures: Iterable[Failure] = tuple(Failure),
    points: Callable[[int], Iterable[int]] = lambda total: range(1, total + 1),
    enough: int | None = None,
) -> Findings:
    """Run `story` (after a complete `before`) with every failure at every point, and recover from each."""
    verdicts = Verdicts()

    def run(world: World, nth: int, failure: Failure) -> Iterator[str]:
        witness = Witness()
        if before:
            before(world.make_dying_store(0, failure), witness)
        yield from catch_failure(lambda: story(world.make_dying_store(nth, failure), witness))
        if nth:
            session = Session(world.make_recovered_store(), witness, steps=STEPS, is_alone=True)
            yield from verdicts.find_broken_promises(session)

    whole = world()
    assert list(run(whole, 0, Failure.CRASH_BEFORE)) == []
    tries = product(points(whole.points), tuple(failures))
    return explore(((f"#{nth} {failure.name}", partial(run, world(), nth, failure)) for nth, failure in tries), enough)


def delay_every_write(story: Story, delays: Iterable[int | None], *, enough: int | None = None) -> Findings:
    """Lose the reply to each write of `story`, let the write arrive late or never, and recover meanwhile.

    The process retries like a task, before and after the write arrives.
    """
    scene = Session(MemoryStore(), Witness(), steps=STEPS, is_alone=True)
    return delay_writes(scene, lambda view: story(view.store, view.witness), delays, enough=enough)
