"""Explore what may happen to processes on one store: every order, random orders, every failure, every late write.

A scene is a store and the processes that use it. It is copied for each try; afterwards its promises are checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Protocol, Self, TypeVar, cast

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]  # the package has no types

from prefect_tune.core.errors import TuneError
from prefect_tune.core.storage.object_store import ObjectStore
from tests.fakes.stores.dying_store import Crash, DyingStore, Failure
from tests.fakes.stores.memory_store import MemoryStore, StoreWrapper
from tests.fakes.stores.slow_store import SlowStore

_Result = TypeVar("_Result")


class Scene(Protocol):
    """A store, and the processes that use it."""

    @property
    def store(self) -> ObjectStore: ...

    def copy(self) -> Self:
        """Return a copy on a separate store."""
        ...

    def with_store(self, store: ObjectStore) -> Self:
        """Return the same processes with the same fields, on another store."""
        ...

    def find_broken_promises(self, *, tidy: bool = True) -> list[str]:
        """Return the broken promises, once every process has ended. `tidy`: no write arrived late."""
        ...

    def outcome(self) -> Hashable:
        """Return everything that `find_broken_promises` reads of a scene on a `MemoryStore`."""
        ...


_Scene = TypeVar("_Scene", bound=Scene)
Act = Callable[[_Scene], None]
"""What one process does."""


@dataclass
class Findings:
    """The number of tries, and the promises that they broke."""

    points: int = 0
    broken: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add the results of another exploration."""
        self.points += other.points
        self.broken += other.broken

    def require_kept(self, record_property: Callable[[str, object], None], figure: str) -> None:
        """Check that no promise was broken; record the figures, for the test output and the reliability page."""
        record_property(f"figure: {figure}", self.points)
        record_property("figure: promises broken", len(self.broken))
        assert not self.broken, self.broken[:9]


class Verdicts:
    """Finds the broken promises of scenes once per outcome, since most orders end alike; for one exploration only."""

    def __init__(self) -> None:
        self._by_outcome: dict[Hashable, Sequence[str]] = {}

    def find_broken_promises(self, scene: Scene) -> Sequence[str]:
        """Return the promises that a scene breaks on which no write arrived late."""
        outcome = scene.outcome()
        if outcome not in self._by_outcome:
            self._by_outcome[outcome] = scene.find_broken_promises()
        return self._by_outcome[outcome]


def explore(tries: Iterable[tuple[str, Callable[[], Iterable[str]]]], enough: int | None = None) -> Findings:
    """Run every named try; end early once `enough` broken promises were found."""
    explored = Findings()
    for name, attempt in tries:
        explored.points += 1
        explored.broken += [f"{name}: {problem}" for problem in attempt()]
        if enough is not None and len(explored.broken) >= enough:
            break
    return explored


def run_acts(
    scene: _Scene, acts: Sequence[Act[_Scene]], choose: Choice, is_point: IsPoint, verdicts: Verdicts
) -> list[str]:
    """Let the acts run one operation at a time; return the broken promises."""

    def process(act: Act[_Scene]) -> Process:
        return lambda store: act(scene.with_store(store))

    died = run_in_turns(scene.store, [process(act) for act in acts], choose, is_point)
    return [*died, *verdicts.find_broken_promises(scene)]


def run_all_orders(
    scene: _Scene, acts: Sequence[Act[_Scene]], is_point: IsPoint, *, limit: int, enough: int | None = None
) -> Findings:
    """Run the acts in every order of their points."""
    explored, verdicts = Findings(), Verdicts()

    def run(choose: Choice) -> None:
        if enough is None or len(explored.broken) < enough:
            explored.broken += run_acts(scene.copy(), acts, choose, is_point, verdicts)

    explored.points = explore_orders(run, limit)
    return explored


def run_random(
    scene: _Scene, acts: Sequence[Act[_Scene]], seeds: Iterable[int], *, enough: int | None = None
) -> Findings:
    """Run the acts in random orders of all their operations."""
    verdicts = Verdicts()

    def attempt(seed: int) -> list[str]:
        return run_acts(scene.copy(), acts, random_choice(seed), everywhere, verdicts)

    return explore(((f"seed {seed}", partial(attempt, seed)) for seed in seeds), enough)


def run_crashing(scene: _Scene, acts: Sequence[Act[_Scene]], seeds: Iterable[int]) -> Findings:
    """Run the acts in random orders; each act may fail at a random operation in a random way."""
    verdicts = Verdicts()

    def make_dying_act(act: Act[_Scene], nth: int, failure: Failure) -> Act[_Scene]:
        def act_or_die(view: _Scene) -> None:
            with suppress(Crash):
                act(view.with_store(DyingStore(view.store, nth, failure)))

        return act_or_die

    def attempt(seed: int) -> list[str]:
        rng = random.Random(seed)
        failing = [make_dying_act(act, rng.randint(0, 60), rng.choice(list(Failure))) for act in acts]
        return run_acts(scene.copy(), failing, random_choice(seed), everywhere, verdicts)

    return explore((f"seed {seed}", partial(attempt, seed)) for seed in seeds)


def die_everywhere(
    scene: _Scene,
    act: Act[_Scene],
    failures: Iterable[Failure] = tuple(Failure),
    *,
    only: frozenset[str] | None = None,
    enough: int | None = None,
) -> Findings:
    """Fail the act at each of its operations (or at those in `only`) in each way, and recover."""
    twin = scene.copy()
    counting = DyingStore(twin.store, 0, only=only)
    act(twin.with_store(counting))
    verdicts = Verdicts()

    def attempt(nth: int, failure: Failure) -> Iterator[str]:
        twin = scene.copy()
        yield from catch_failure(lambda: act(twin.with_store(DyingStore(twin.store, nth, failure, only=only))))
        yield from verdicts.find_broken_promises(twin)

    points = product(range(1, counting.total + 1), tuple(failures))
    return explore(((f"#{nth} {failure.name}", partial(attempt, nth, failure)) for nth, failure in points), enough)


def catch_failure(act: Callable[[], None]) -> list[str]:
    """Return how a process failed other than by a crash: a fault that a retry mends must end no process."""
    try:
        act()
    except Crash:
        return []
    except TuneError as error:
        return [f"a fault that a retry mends ended it: {type(error).__name__}: {error}"]
    return []


def delay_writes(
    scene: _Scene, act: Act[_Scene], delays: Iterable[int | None], *, enough: int | None = None
) -> Findings:
    """Lose the reply to each write of the act, let the write arrive late or never, and recover meanwhile."""
    twin = scene.copy()
    counting = SlowStore(twin.store, 0, None)
    act(twin.with_store(counting))

    def attempt(nth: int, delay: int | None) -> Iterator[str]:
        twin = scene.copy()
        slow = twin.with_store(SlowStore(twin.store, nth, delay))
        yield from catch_failure(lambda: act(slow))
        yield from slow.find_broken_promises(tidy=False)

    points = product(range(1, counting.writes + 1), tuple(delays))
    return explore(
        ((f"write {nth}, {delay} operations late", partial(attempt, nth, delay)) for nth, delay in points), enough
    )


# One operation at a time, in every order or in a random one.

Process = Callable[[ObjectStore], None]
IsPoint = Callable[[str, str], bool]
"""By method and path: whether another process may run before this operation."""
State = tuple[object, ...]
"""What the store holds, and by process every operation so far with its result: the same state has the same future."""
Choice = Callable[[Sequence[int], Callable[[], State]], int]
"""Chooses the next process, given the running processes and a function that returns the state."""


class SeenBeforeError(BaseException):
    """Every continuation of the present state is explored already."""


def run_in_turns(inner: ObjectStore, processes: Sequence[Process], choose: Choice, is_point: IsPoint) -> list[str]:
    """Run `processes`, each in a greenlet, one at a time; return the errors that ended them."""
    runners = [_Runner(inner, process, is_point) for process in processes]

    def state() -> State:
        return (frozenset(cast(MemoryStore, inner).objects.items()), *(runner.history for runner in runners))

    for runner in runners:
        runner.resume()
    try:
        while running := [index for index, runner in enumerate(runners) if not runner.has_ended]:
            runners[choose(running, state)].resume()
    except SeenBeforeError:
        for runner in runners:
            runner.abandon()
        raise
    return [f"process {index}: {runner.error!r}" for index, runner in enumerate(runners) if runner.error]


def explore_orders(run: Callable[[Choice], None], limit: int, *, merges: bool = False) -> int:
    """Call `run` once for every order of its choices; return the number of orders.

    `run` must be deterministic for given choices. More than `limit` orders are an error. With `merges`, an order ends
    where it comes to a state that another one has been in: for processes that share nothing but the store.
    """
    path: list[tuple[int, int]] = []  # the choice, and the number of choices
    seen: set[State] | None = set() if merges else None
    for count in range(1, limit + 1):
        with suppress(SeenBeforeError):
            run(_follow_path(path, seen))
        while path and path[-1][0] == path[-1][1] - 1:
            path.pop()
        if not path:
            return count
        path[-1] = (path[-1][0] + 1, path[-1][1])
    raise AssertionError(f"more than {limit} orders")


def _follow_path(path: list[tuple[int, int]], seen: set[State] | None) -> Choice:
    """Choose along `path`, then always the first process; add these choices to `path`."""
    depth: Iterator[int] = iter(range(10**6))

    def choose(running: Sequence[int], state: Callable[[], State]) -> int:
        index = next(depth)
        if index == len(path):
            if seen is not None:
                if (current := state()) in seen:
                    raise SeenBeforeError
                seen.add(current)
            path.append((0, len(running)))
        return running[path[index][0]]

    return choose


def random_choice(seed: int) -> Choice:
    """Choose at random, sometimes the same process many times in a row."""
    rng = random.Random(seed)
    favourite: list[int] = []

    def choose(running: Sequence[int], _state: Callable[[], State]) -> int:
        if not favourite or favourite[0] not in running or rng.random() < 0.3:
            favourite[:] = [rng.choice(running)]
        return favourite[0]

    return choose


class _Runner(StoreWrapper):
    """One process and its view of the store: each point waits for this process's turn."""

    def __init__(self, inner: ObjectStore, process: Process, is_point: IsPoint) -> None:
        super().__init__(inner)
        self.error: BaseException | None = None
        self.has_ended = False
        self.history: State = ()
        """Every operation so far, with its result."""
        self._process = process
        self._is_point = is_point
        self._is_abandoned = False
        self._caller = getcurrent()
        self._greenlet = greenlet(self._run)  # no thread: a switch takes no time, however busy the machine is

    def resume(self) -> None:
        """Run the process to its next point, or to its end."""
        self._greenlet.switch()

    def abandon(self) -> None:
        """End the process where it is."""
        self._is_abandoned = True
        if not self.has_ended:
            self._greenlet.switch()

    def _run(self) -> None:
        try:
            self._process(self)
        except BaseException as error:  # noqa: BLE001 - the process's edge: reported by `in_turns`
            self.error = error
        finally:
            self.has_ended = True

    def intercept(self, method: str, path: str, operation: Callable[[], _Result]) -> _Result:
        if self._is_abandoned:
            raise SeenBeforeError
        if self._is_point(method, path):
            self._caller.switch()
        if self._is_abandoned:
            raise SeenBeforeError
        try:
            result = operation()
        except TuneError as error:
            self.history = (*self.history, (method, path, type(error)))
            raise
        self.history = (*self.history, (method, path, tuple(result) if isinstance(result, list) else result))
        return result


def everywhere(method: str, path: str) -> bool:
    """Switch processes at every call of the store."""
    del method, path
    return True
