"""Trial executors: run attempts of trials, and return their messages from one queue."""

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

from prefect_tune.core.messages.process_messages import GoOn, Leave
from prefect_tune.retry_policy import unseen
from prefect_tune.supervisor.process_pool import Nursery
from prefect_tune.supervisor.search_link import DirectLine, Heard, Line
from prefect_tune.supervisor.trial_spec import Orders, TrialPlan
from prefect_tune.tasks.run_trial import AttemptResult, run_trial

__all__ = ["Began", "Crew", "LocalCrew", "Message", "Over", "attempt_of", "have_ended"]

_PATIENCE = timedelta(seconds=0.5)
# Time that a supervisor needs after its trial's grace period, to write a last journal entry.
_LAST_WORDS = timedelta(seconds=3)


@dataclass(frozen=True, slots=True)
class Over:
    """An attempt has ended, with the error of its task if there was one; its journal holds how the trial ended."""

    trial: str
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Began:
    """An attempt has started on another machine: it may have missed answers, and may wait for one at its milestone."""

    trial: str


Message: TypeAlias = Heard | Over | Began


def attempt_of(plan: TrialPlan) -> Task[[TrialPlan, Orders, Line], AttemptResult]:
    """Return the task of one attempt, without task retries: the owner of the experiment decides and journals those."""
    return _tagged(plan.tags)


@cache  # `with_options` is one of the most expensive steps of a short trial: Prefect reads the function's source again
def _tagged(tags: tuple[str, ...]) -> Task[[TrialPlan, Orders, Line], AttemptResult]:
    return run_trial.with_options(retries=0, tags=tags)


class Crew(Protocol):
    """Runs attempts of trials."""

    @property
    def outlives(self) -> bool:
        """Whether an attempt continues when the search that started it has ended."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, trial: str) -> bool: ...

    def start(self, plan: TrialPlan, orders: Orders, attempt: int, absorbed: int) -> None:
        """Start attempt number `attempt`; `absorbed` is the last entry of the trial's journal that is known."""
        ...

    def answer(self, trial: str, said: GoOn | Leave, step: int | None = None) -> None:
        """Send an answer to a trial: to its question at `step`, or unasked if `step` is None.

        An answer to a trial that has ended meanwhile has no effect.
        """
        ...

    def stop(self) -> None:
        """Request every trial to save and end."""
        ...

    def hear(self, patience: timedelta) -> list[Message]:
        """Return the messages since the last call; wait up to `patience` for the first one."""
        ...

    def dismiss(self, trial: str) -> None:
        """Forget an attempt that has ended, and free its slot."""
        ...


def have_ended(crew: Crew, grace: timedelta) -> None:
    """Request every trial to save and end, and wait for that for `grace` and 3 s at most.

    Attempts that outlive their search continue: the next owner answers them. Raises what `Crew.stop` raises.
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
    """Runs attempts on this machine, each as a task in a thread that supervises a process of its own."""

    outlives = False

    def __init__(self, nursery: Nursery, environments: Sequence[Mapping[str, str]] = ()) -> None:
        """Args: environments: environment variables of each slot; an attempt takes the lowest free slot."""
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
        del attempt, absorbed  # a local attempt sends every entry through the queue
        trial = plan.trial.trial
        line = DirectLine(trial, self._inbox.put, self._nursery)
        self._lines[trial] = line
        self._futures[trial] = attempt_of(plan).submit(unseen(plan), unseen(self._placed(trial, orders)), unseen(line))
        self._futures[trial].add_done_callback(lambda future: self._inbox.put(Over(trial, _error_of(future))))

    def answer(self, trial: str, said: GoOn | Leave, step: int | None = None) -> None:
        del step  # the connection belongs to the attempt that asked
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
        """Take the lowest free slot: a kept process of that slot uses the same devices."""
        if not self._environments:
            return orders
        taken = self._places.values()
        self._places[trial] = next(place for place in range(len(self._environments)) if place not in taken)
        return replace(orders, environment={**orders.environment, **self._environments[self._places[trial]]})


def _error_of(future: PrefectFuture[AttemptResult]) -> BaseException | None:
    try:
        future.wait()
        if not future.state.is_completed():  # reading the result costs a turn of Prefect's event loop
            future.result()
    except BaseException as error:  # noqa: BLE001  the driver handles the error
        return error
    return None
