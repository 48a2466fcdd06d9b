"""Searches whose trials are `FarAttempt`s: no server, and no event except those that the test writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from logging import getLogger
from unittest.mock import patch

from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.messages.target_messages import StopRequest
from prefect_tune.core.schedulers.base import FIFO, Scheduler
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.core.storage.generations import find_current_journal
from prefect_tune.executors.remote_executor import RemoteExecutor
from prefect_tune.executors.trial_executor import TrialExecutor
from prefect_tune.journal_access import (
    JournalWriter,
    OwnershipRequest,
    acquire_and_adopt_with_retries,
    make_process_owner,
    write_entry_directly,
)
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.parameters.plan_checks import SearchLimits
from prefect_tune.tuner import driver
from prefect_tune.tuner.driver import Driver
from prefect_tune.tuner.search_policy import SearchPolicy
from tests.fakes.searches.far_attempts import FarMachines, make_spec
from tests.fakes.searches.pending_entries import make_limits

_LOSS = Objective(metrics=("loss",), modes=("min",))


class Death(BaseException):
    """The search's process is gone."""


def nothing() -> None:
    """Let the search run without a new event."""


class FarSearch:
    """One owner of the experiment; it dies when no action is left."""

    def __init__(
        self,
        target: StorageTarget,
        scheduler: Scheduler | None = None,
        *,
        samples: int = 1,
        limits: SearchLimits | None = None,
        attempts_outlive_search: bool = True,
        period: timedelta | None = None,
        executor: TrialExecutor | None = None,
    ) -> None:
        self.machines = FarMachines(attempts_outlive_search=attempts_outlive_search)
        with target.open(timeout=timedelta(seconds=9)) as store:
            key = find_current_journal(store, "e")
        request = OwnershipRequest(make_process_owner(), new_write_stamp())
        state = acquire_and_adopt_with_retries(target, key, request)
        self._journal_writer = JournalWriter(target, state, write_entry_directly)
        schedule = (scheduler or FIFO()).begin(_LOSS, 0)
        policy = SearchPolicy(RandomSearch(samples).begin({}, _LOSS, 0), schedule)
        if executor is None:
            executor = RemoteExecutor(target, self.machines, poll_interval=timedelta(seconds=0.01))
        limits = limits or make_limits(2)
        spec, log = make_spec(target), getLogger(__name__)
        if period is not None:
            spec = replace(spec, sync=SyncConfig(sync_period_seconds=period.total_seconds()))
        self._driver = Driver(spec, limits, policy, executor, self._journal_writer, log=log, observer=SearchObserver())
        self._actions: deque[Callable[[], object]] = deque()
        self._requests: list[StopRequest] = []

    def simulate(self, *actions: Callable[[], object]) -> Experiment:
        """Take these actions one by one; the search reads the effect of each, then dies. Return its state."""
        self._actions.extend(actions)
        with (
            suppress(Death),
            patch.object(driver, "_POLL_TIMEOUT", timedelta(seconds=0.02)),
            patch.object(driver, "stop_and_wait", lambda *_: None),  # a dead process stops no trial
        ):
            self._driver.run(self)
        return self._driver._experiment

    def stop(self, trial: str | None = None) -> None:
        """Ask for a stop, from outside."""
        term = self._journal_writer.experiment.term
        self._requests.append(StopRequest(write_id="w", at="now", reason="enough", term=term, trial=trial))

    def is_interrupted(self) -> bool:
        if not self._actions:
            raise Death
        self._actions.popleft()()
        return False

    def take_requests(self) -> Sequence[StopRequest]:
        requests, self._requests = self._requests, []
        return requests

    def on_requests_journaled(self, count: int) -> None:
        del count
