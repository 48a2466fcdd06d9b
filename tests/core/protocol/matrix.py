"""Fail each operation of a scenario in each way, recover, and check the promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prefect_tune.core.errors import TuneError
from prefect_tune.core.journal_events import AttemptEnded, Cause, Reported
from prefect_tune.core.storage.object_store import ObjectStore
from tests.core.driver import KEY, Session, Witness, run_to
from tests.core.protocol.invariants import after_recovery
from tests.core.protocol.worlds import World
from tests.fakes.stores.dying_store import Crash, Way
from tests.fakes.stores.memory_store import MemoryStore
from tests.fakes.stores.slow_store import SlowStore

STEPS = 5

Story = Callable[[ObjectStore, Witness], None]
"""The operations of one process; the store may have state of earlier processes."""


@dataclass
class Explored:
    """The number of tried failure points, and the promises that they broke."""

    points: int = 0
    broken: list[str] = field(default_factory=list)

    def add(self, other: Explored) -> None:
        """Add the results of another exploration."""
        self.points += other.points
        self.broken += other.broken

    def record(self, record_property: Callable[[str, object], None], what: str) -> None:
        """Record the figures for the end of the test output and for the reliability page."""
        record_property(f"figure: {what}", self.points)
        record_property("figure: promises broken", len(self.broken))


def fresh_run(store: ObjectStore, witness: Witness) -> None:
    """Open an empty store, train and save and collect."""
    run_to(Session(store, witness), 3)


def longer_run(store: ObjectStore, witness: Witness) -> None:
    """Train until a checkpoint has the same content as a retired one."""
    run_to(Session(store, witness), STEPS)


def resumed_run(store: ObjectStore, witness: Witness) -> None:
    """Open the existing experiment, adopt, restore, continue, finish."""
    session = Session(store, witness, owner="resumed")
    run_to(session, STEPS)
    session.finish()


def killed_before_its_entry(store: ObjectStore, witness: Witness) -> None:
    """Three checkpoints, one of them retired but not deleted, and a fourth with a manifest but no journal entry."""
    session = Session(store, witness)
    session.open()
    session.start()
    for _ in range(3):
        session.train()
        session.acknowledge(session.publish())
    session.train()
    session.publish()


def attempt_after_an_unknown_save(store: ObjectStore, witness: Witness) -> None:
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
    session.waiting.clear()
    session.append([AttemptEnded(trial=KEY.trial, cause=Cause.MACHINE, reason="the target did not say")])
    session.owner = "second attempt"
    session.start()
    session.train()
    session.append([Reported(trial=KEY.trial, report=session.waiting.pop())])


def explore(
    world: Callable[[], World],
    story: Story,
    *,
    before: Story | None = None,
    ways: Iterable[Way] = tuple(Way),
    points: Callable[[int], Iterable[int]] = lambda total: range(1, total + 1),
    enough: int | None = None,
) -> Explored:
    """Run `story` (after a complete `before`) with every failure at every point, and recover from each.

    Ends early once `enough` broken promises were found.
    """
    explored = Explored()
    ways = tuple(ways)
    for nth in points(_points(world(), story, before)):
        for way in ways:
            explored.points += 1
            explored.broken += [f"#{nth} {way.name}: {each}" for each in _tried(world(), story, before, nth, way)]
            if enough is not None and len(explored.broken) >= enough:
                return explored
    return explored


def explore_delays(
    story: Story, delays: Iterable[int | None], *, every: int = 1, enough: int | None = None
) -> Explored:
    """Lose the reply to each write of `story`, let the write arrive late or never, and recover meanwhile.

    The process retries like a task, before and after the write arrives.
    """
    counting = SlowStore(MemoryStore(), 0, None)
    story(counting, Witness())
    explored = Explored()
    for nth in range(1, counting.writes + 1, every):
        for delay in delays:
            explored.points += 1
            witness, store = Witness(), SlowStore(MemoryStore(), nth, delay)
            fault = f"write {nth}, {delay} operations late"
            try:
                story(store, witness)
            except TuneError as error:
                explored.broken.append(f"{fault}: it ended the run: {type(error).__name__}: {error}")
            left = after_recovery(store, witness, STEPS, alone=True, tidy=False)
            explored.broken += [f"{fault}: {each}" for each in left]
            if enough is not None and len(explored.broken) >= enough:
                return explored
    return explored


def _points(world: World, story: Story, before: Story | None) -> int:
    witness = Witness()
    if before:
        before(world.dying(0, Way.CRASH_BEFORE), witness)
    story(world.dying(0, Way.CRASH_BEFORE), witness)
    return world.points


def _tried(world: World, story: Story, before: Story | None, nth: int, way: Way) -> Iterator[str]:
    witness = Witness()
    if before:
        before(world.dying(0, way), witness)
    try:
        story(world.dying(nth, way), witness)
    except Crash:
        pass
    except TuneError as error:
        yield f"a fault that a retry mends ended the run: {type(error).__name__}: {error}"
    yield from after_recovery(world.left(), witness, STEPS, alone=True)
