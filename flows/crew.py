"""Who trains: attempts of trials on the flow's task runner, and what they say, in one queue."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Protocol, TypeAlias

from prefect import Task
from prefect.futures import PrefectFuture

from prefect_tune.core.wire import GoOn, Leave
from prefect_tune.tasks.line import DirectLine, Heard, Line
from prefect_tune.tasks.nursery import Nursery
from prefect_tune.tasks.plan import Orders, TrialPlan
from prefect_tune.tasks.run_trial import AttemptResult, run_trial
from prefect_tune.tasks.transient import unseen

__all__ = ["Began", "Crew", "LocalCrew", "Message", "Over", "attempt_of", "have_ended"]

_PATIENCE = timedelta(seconds=0.5)
# What a supervisor needs beyond the grace of its trial: a last journal entry.
_LAST_WORDS = timedelta(seconds=3)


@dataclass(frozen=True, slots=True)
class Over:
    """An attempt has ended, and perhaps what it died of; how it ended is in its journal."""

    trial: str
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Began:
    """An attempt has begun elsewhere that may not know what the trial was told, and may ask where it stands."""

    trial: str


Message: TypeAlias = Heard | Over | Began


def attempt_of(plan: TrialPlan) -> Task[[TrialPlan, Orders, Line], AttemptResult]:
    """Return the task of one attempt: whoever runs the experiment decides whether there is another, and journals it."""
    return _tagged(plan.tags)


@cache  # one of the dearest steps of a short trial: Prefect reads the source of the function again
def _tagged(tags: tuple[str, ...]) -> Task[[TrialPlan, Orders, Line], AttemptResult]:
    return run_trial.with_options(retries=0, tags=tags)


class Crew(Protocol):
    """Who trains."""

    @property
    def outlives(self) -> bool:
        """Whether an attempt goes on when the search that started it is gone."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, trial: str) -> bool: ...

    def start(self, plan: TrialPlan, orders: Orders, attempt: int, absorbed: int) -> None:
        """Start attempt number `attempt`; entry `absorbed` of the trial's journal is the last one known."""
        ...

    def answer(self, trial: str, said: GoOn | Leave, step: int | None = None) -> None:
        """Tell a trial that asked at `step`, or was not asked; one that has ended meanwhile need not hear it."""
        ...

    def stop(self) -> None:
        """Have every trial save and end."""
        ...

    def hear(self, patience: timedelta) -> list[Message]:
        """Return what has been said since, after waiting for the first word."""
        ...

    def dismiss(self, trial: str) -> None:
        """Take note that an attempt is over."""
        ...


def have_ended(crew: Crew, grace: timedelta) -> None:
    """Have every trial save and end that nobody will answer any more, and wait for it, `grace` and a moment at most.

    Attempts that outlive their search go on: whoever takes it over answers them. Raises what `Crew.stop` raises.
    """
    if crew.outlives:
        return
    crew.stop()
    until = time.monotonic() + (grace + _LAST_WORDS).total_seconds()
    while len(crew) and time.monotonic() < until:
        for message in crew.hear(_PATIENCE):
            if isinstance(message, Over):
                crew.dismiss(message.trial)


class LocalCrew:
    """The attempts that run now, each in a thread of the task runner that supervises a process of its own."""

    outlives = False

    def __init__(self, nursery: Nursery, environments: Sequence[Mapping[str, str]] = ()) -> None:
        """Args: environments: those of the places that trials train in; the first that is free is taken."""
        self._nursery = nursery
        self._environments = environments
        self._places: dict[str, int] = {}
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lines: dict[str, DirectLine] = {}
        self._futures: dict[str, PrefectFuture[AttemptResult]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def __contains__(self, trial: str) -> bool:
        return trial in self._futures

    def start(self, plan: TrialPlan, orders: Orders, attempt: int, absorbed: int) -> None:
        del attempt, absorbed  # everything is told here
        trial = plan.trial.trial
        line = DirectLine(trial, self._inbox.put, self._nursery)
        self._lines[trial] = line
        self._futures[trial] = attempt_of(plan).submit(unseen(plan), unseen(self._placed(trial, orders)), unseen(line))
        self._futures[trial].add_done_callback(lambda future: self._inbox.put(Over(trial, _error_of(future))))

    def answer(self, trial: str, said: GoOn | Leave, step: int | None = None) -> None:
        del step  # the line leads to the attempt that asked
        if trial in self._lines:
            self._lines[trial].answer(said)

    def stop(self) -> None:
        for line in self._lines.values():
            line.stop.set()

    def hear(self, patience: timedelta) -> list[Message]:
        heard: list[Message] = []
        try:
            heard.append(self._inbox.get(timeout=patience.total_seconds()))
            while True:
                heard.append(self._inbox.get_nowait())
        except queue.Empty:
            return heard

    def dismiss(self, trial: str) -> None:
        del self._lines[trial], self._futures[trial]
        self._places.pop(trial, None)

    def _placed(self, trial: str, orders: Orders) -> Orders:
        """The lowest place: a process that waits there has the same devices in use."""
        if not self._environments:
            return orders
        taken = self._places.values()
        self._places[trial] = next(place for place in range(len(self._environments)) if place not in taken)
        return replace(orders, environment={**orders.environment, **self._environments[self._places[trial]]})


def _error_of(future: PrefectFuture[AttemptResult]) -> BaseException | None:
    try:
        future.wait()
        if not future.state.is_completed():  # the result itself costs a turn of Prefect's event loop
            future.result()
    except BaseException as error:  # noqa: BLE001  whatever ended it is judged by the driver
        return error
    return None
