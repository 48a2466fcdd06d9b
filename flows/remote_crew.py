"""Attempts on other machines: started by whatever reaches them, heard by their journals, answered on the target."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.answers import UNASKED, answer, take_back
from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.core.events import Reported, Started
from prefect_tune.core.experiment import Entry
from prefect_tune.core.journal import next_entry
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.wire import GoOn, Leave, StopAndSave
from prefect_tune.flows.crew import Began, Message, Over
from prefect_tune.tasks.experiment_state import experiment_id
from prefect_tune.tasks.line import Told, Wrote
from prefect_tune.tasks.plan import Orders, TrialPlan
from prefect_tune.tasks.store_line import StoreLine
from prefect_tune.tasks.transient import retrying

__all__ = ["Elsewhere", "RemoteCrew"]

_REQUEST = timedelta(seconds=60)
_UNREAD = timedelta(minutes=10)
"""How long the target may fail before the search ends for it."""


class Elsewhere(Protocol):
    """Starts an attempt on another machine; started again with the same attempt number, it finds the same one."""

    @property
    def outlives(self) -> bool:
        """Whether an attempt goes on when the search that started it is gone."""
        ...

    def __call__(self, plan: TrialPlan, orders: Orders, line: StoreLine, attempt: int) -> Callable[[], object]:
        """Return what waits for its end: it raises what the attempt died of, where that is known."""
        ...

    def withdraw(self) -> None:
        """Have what has not begun yet not begin any more, where that can be had. Waits for nothing."""
        ...


@dataclass
class _Attempt:
    plan: TrialPlan
    number: int
    milestone: int | None
    read: int
    """The last entry of its journal that was read."""

    def is_due(self, step: int) -> bool:
        """Whether it is to be decided about there."""
        return self.milestone is not None and step >= self.milestone


class RemoteCrew:
    """As `Crew`, for attempts that share nothing with this process but the target."""

    def __init__(self, target: StorageTarget, elsewhere: Elsewhere, look_every: timedelta) -> None:
        self._target = target
        self._elsewhere = elsewhere
        self._look_every = look_every
        self._ends: queue.SimpleQueue[Over] = queue.SimpleQueue()
        self._attempts: dict[str, _Attempt] = {}
        self._experiment_id: str | None = None
        self._stopped = False
        self._unread_since: float | None = None

    @property
    def outlives(self) -> bool:
        return self._elsewhere.outlives

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, trial: str) -> bool:
        return trial in self._attempts

    def start(self, plan: TrialPlan, orders: Orders, attempt: int, absorbed: int) -> None:
        """Start an attempt; its journal is read from entry `absorbed` on."""
        trial = plan.trial.trial
        self._on_store(lambda store: take_back(store, plan.trial, attempt))
        line = StoreLine(self._target, plan.trial, attempt)
        wait = self._elsewhere(plan, replace(orders, experiment_id=self._id_of(plan)), line, attempt)
        self._attempts[trial] = _Attempt(plan, attempt, orders.milestone, absorbed)
        threading.Thread(target=copy_context().run, args=(self._await, trial, wait), daemon=True).start()

    def answer(self, trial: str, said: GoOn | Leave, step: int | None = None) -> None:
        """Tell a trial, durably; one that has ended meanwhile need not hear it."""
        attempt = self._attempts.get(trial)
        if attempt is None:
            return
        if isinstance(said, GoOn):
            attempt.milestone = said.milestone
        self._say(attempt, UNASKED if step is None else step, said)

    def stop(self) -> None:
        """Have every trial save and end. Where one cannot be told, the next call tells all of them again."""
        if not self._stopped:
            self._elsewhere.withdraw()
            for attempt in self._attempts.values():
                self._say(attempt, UNASKED, StopAndSave())
            self._stopped = True

    def hear(self, patience: timedelta) -> list[Message]:
        """Return what has been said since, after waiting for the first word."""
        end = time.monotonic() + patience.total_seconds()
        while True:
            over = self._over(min(self._look_every, timedelta(seconds=max(0.0, end - time.monotonic()))))
            heard = [message for attempt in self._attempts.values() for message in self._read(attempt)]
            if heard or over or time.monotonic() >= end:
                return [*heard, *over]

    def dismiss(self, trial: str) -> None:
        """Take note that an attempt is over."""
        del self._attempts[trial]

    def _id_of(self, plan: TrialPlan) -> str:
        """What orders that wait in a pool until their experiment is deleted are known by."""
        if self._experiment_id is None:
            self._experiment_id = experiment_id(self._target, plan.trial.experiment)
        return self._experiment_id or ""

    def _await(self, trial: str, wait: Callable[[], object]) -> None:
        try:
            wait()
        except BaseException as error:  # noqa: BLE001  whatever ended it is judged by the driver
            self._ends.put(Over(trial, error))
        else:
            self._ends.put(Over(trial))

    def _over(self, patience: timedelta) -> list[Over]:
        found: list[Over] = []
        try:
            found.append(self._ends.get(timeout=patience.total_seconds()))
            while True:
                found.append(self._ends.get_nowait())
        except queue.Empty:
            return found

    def _read(self, attempt: _Attempt) -> list[Message]:
        """What its journal says that is new. Where the target goes away, or refuses, the rest is read later."""
        entries: list[Entry] = []
        with self._read_later(), self._target.open(timeout=_REQUEST) as store:
            while (entry := next_entry(store, attempt.plan.journal, attempt.read)) is not None:
                attempt.read = entry.number
                entries.append(entry)
        return [message for entry in entries for message in self._said_in(entry, attempt)]

    @contextmanager
    def _read_later(self) -> Iterator[None]:
        """Let the target fail for a while: nothing is lost that a later look does not find."""
        try:
            yield
        except (StoreUnavailable, StoreRefused) as error:
            if self._unread_since is None:
                logging.getLogger("prefect_tune").warning("what trials elsewhere have done is read later: %s", error)
                self._unread_since = time.monotonic()
            if time.monotonic() - self._unread_since > _UNREAD.total_seconds():
                raise
        else:
            self._unread_since = None

    def _said_in(self, entry: Entry, attempt: _Attempt) -> list[Message]:
        trial = attempt.plan.trial.trial
        heard: list[Message] = [Wrote(trial, entry.number, entry.events, entry.at)]
        for event in entry.events:
            match event:
                case Started():
                    heard += self._begun(attempt, event)
                case Reported(report=report, asks=asks):
                    is_due = attempt.is_due(report.step)
                    if asks and not is_due:  # its orders are older than what has been decided
                        self._say(attempt, report.step, GoOn(milestone=attempt.milestone))
                    heard.append(Told(trial, report, asks and is_due))
                case _:
                    pass
        return heard

    def _begun(self, attempt: _Attempt, started: Started) -> list[Message]:
        """It is another than was started where a task runner runs again what a dead worker ran, with its orders."""
        is_another = started.attempt != attempt.number
        attempt.number = started.attempt
        if is_another and self._stopped:
            self._say(attempt, UNASKED, StopAndSave())
        return [Began(started.trial)] if is_another or attempt.is_due(started.from_step) else []

    def _say(self, attempt: _Attempt, step: int, said: GoOn | Leave | StopAndSave) -> None:
        self._on_store(lambda store: answer(store, attempt.plan.trial, attempt.number, step, said))

    def _on_store(self, act: Callable[[ObjectStore], None]) -> None:
        def acted() -> None:
            with self._target.open(timeout=_REQUEST) as store:
                act(store)

        retrying(acted)
