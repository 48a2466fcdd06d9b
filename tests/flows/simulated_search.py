"""Searches without a server and without training: the driver of `pt.tune` on a target, with simulated trials."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType

from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events import CheckpointRef
from prefect_tune.core.schedulers.base import FIFO, Scheduler
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.domains import uniform
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.executors.trial_executor import AttemptExited
from prefect_tune.journal_access import (
    JournalWriter,
    Opening,
    Writer,
    current_owner,
    new_write_id,
    open_journal,
    write_directly,
)
from prefect_tune.monitoring.search_observer import ObserverGroup
from prefect_tune.parameters.search_limits import SearchLimits
from prefect_tune.tuner.driver import Driver
from prefect_tune.tuner.search_policy import SearchPolicy
from prefect_tune.tuner.stop_requests import StopSource
from tests.fakes.searches.instant_executor import InstantExecutor
from tests.fakes.searches.limits import limits_of

NAME = "e"
NOTHING: Mapping[str, CheckpointRef] = MappingProxyType({})


class StoppableExecutor(InstantExecutor):
    """An executor that can be stopped: its trials then send no further message."""

    def __init__(self, steps: int, saved: Mapping[str, CheckpointRef] = NOTHING) -> None:
        super().__init__(steps)
        self._saved.update(saved)
        self.stopped = False
        self.start_count = 0

    def start(self, spec: TrialSpec, request: AttemptRequest, attempt: int, absorbed: int) -> None:
        self.start_count += 1
        super().start(spec, request, attempt, absorbed)

    def stop(self) -> None:
        self.stopped = True
        self._inbox.clear()
        self._inbox.extend(AttemptExited(trial) for trial in self._trials)


@dataclass
class SimulatedSearch:
    """One search that can run several times; its executor keeps the checkpoints from run to run."""

    target: LocalTarget
    executor: StoppableExecutor = field(default_factory=lambda: StoppableExecutor(9))
    samples: int = 9
    slots: int = 1
    metric: str = "loss"
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("tests"))

    def run(
        self,
        scheduler: Scheduler | None = None,
        search: Search | None = None,
        *,
        until: Callable[[], bool] = lambda: False,
        writer: Writer = write_directly,
        limits: SearchLimits | None = None,
    ) -> Experiment:
        """Open the experiment as a new owner and continue it, to its end or `until` it is interrupted."""
        objective = Objective(metrics=(self.metric,), modes=("min",))
        state = open_journal(
            self.target, JournalKey(experiment=NAME, generation=1), Opening(current_owner(), new_write_id())
        )
        proposals = (search or RandomSearch(self.samples)).begin({"x": uniform(0, 1)}, objective, 1)
        plan = TrialSpec(
            target=self.target,
            trial=TrialKey(experiment=NAME, generation=1, trial="any"),
            trainable="a:b",
            stopper="a:b",
            needs_curve=False,
            grace=timedelta(seconds=1),
            own_journal=True,
        )
        driver = Driver(
            plan,
            limits or limits_of(self.slots),
            SearchPolicy(proposals, (scheduler or FIFO()).begin(objective, 1)),
            self.executor,
            JournalWriter(self.target, state, writer, lambda _events, _state: None),
            log=self.log,
            listener=ObserverGroup(),
        )
        return driver.run(_StopSource(until))

    def are(self, state: Experiment) -> Sequence[str]:
        """Return the statuses of the trials."""
        return [str(each.phase) for each in state.trials.values()]


class _StopSource(StopSource):
    """No stop requests; an interrupt once `until` holds."""

    def __init__(self, until: Callable[[], bool]) -> None:
        self.is_interrupted = until
