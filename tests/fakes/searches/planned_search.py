"""Searches with the options of `pt.tune`, without a server and without training: their journals hold their settings."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from prefect_tune.attempt.attempt import make_attempt_started
from prefect_tune.attempt.search_channel import OutboxJournal
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention, find_checkpoints_to_retire
from prefect_tune.core.experiment.stoppers import extract_trial_stopper
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptEvent,
    AttemptLaunched,
    Cause,
    CheckpointRef,
    ExperimentConfigured,
    TrialAdded,
)
from prefect_tune.core.messages.process_messages import ContinueTraining, StopTrial
from prefect_tune.core.search.domains import loguniform, randint
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.executors.trial_executor import AttemptExited, Message, TrialExecutor
from prefect_tune.journal_access import (
    EntryWriter,
    JournalWriter,
    OwnershipRequest,
    acquire_and_adopt_with_retries,
    make_process_owner,
    write_entry_directly,
)
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.parameters.plan_checks import SearchLimits, make_trial_spec
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.tuner.driver import Driver
from prefect_tune.tuner.run_search import make_search_policy
from prefect_tune.tuner.stop_requests import StopSource
from tests.fakes.searches.instant_executor import InstantExecutor, _Attempt

STEPS = 9
SPACE: Mapping[str, Any] = {"lr": loguniform(1e-4, 1e-1), "width": randint(1, 9)}


class UnreliableExecutor(InstantExecutor):
    """An executor that can be stopped, whose first attempts of some trials fail, and which retires checkpoints.

    With a `seed`, the messages of different trials arrive in a random order.
    """

    def __init__(
        self,
        steps: int = STEPS,
        failures: Mapping[str, tuple[Cause, int]] | None = None,
        retention: Retention | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(steps)
        self._failures = failures or {}
        self._retention = retention or Retention()
        self._order = None if seed is None else random.Random(seed)
        self._stopped = False
        self.start_count = 0

    def start_attempt(self, spec: TrialSpec, request: AttemptRequest) -> None:
        self._stopped = False
        self.start_count += 1
        trial = spec.trial.trial
        assert trial not in self, f"trial {trial}: attempt {request.attempt} begins beside another"
        cause, count = self._failures.get(trial, (Cause.TRAINABLE, 0))
        if request.attempt > count:
            super().start_attempt(spec, request)
            return
        self._trials[trial] = failing = self._make_attempt(request.trial)
        self._inbox.append(failing.begin())
        reason = f"failed {request.attempt}"
        self._end(trial, AttemptEnded(trial=trial, cause=cause, reason=reason, before_first_step=True))

    def _make_attempt(self, trial: Trial) -> _Attempt:
        return _RetiringAttempt(trial, self._retention)

    def poll_messages(self, timeout: timedelta) -> list[Message]:
        """Return the first message of a trial."""
        if self._order is not None:
            first = {message.trial: message for message in reversed(self._inbox)}
            chosen = first[self._order.choice(sorted(first))]
            self._inbox.remove(chosen)
            self._inbox.appendleft(chosen)
        return super().poll_messages(timeout)

    def send_answer(self, trial: str, answer: ContinueTraining | StopTrial, step: int | None = None) -> None:
        if not self._stopped:
            super().send_answer(trial, answer, step)

    def stop_all(self) -> None:
        """End each attempt that has not sent its end; what it has sent stays."""
        self._stopped = True
        ended = {message.trial for message in self._inbox if isinstance(message, AttemptExited)}
        for trial in self._trials.keys() - ended:
            self._end(trial, AttemptEnded(trial=trial, cause=Cause.PREEMPTED, reason="stopped"))

    def _end(self, trial: str, event: AttemptEnded) -> None:
        self._inbox.extend([self._trials[trial]._submit(event), AttemptExited(trial)])


class _RetiringAttempt(_Attempt):
    """An attempt that retires checkpoints as a commit worker does."""

    def __init__(self, state: Trial, retention: Retention) -> None:
        super().__init__(state)
        self._retention = retention

    def retired_sequences(self, new: CheckpointRef) -> tuple[int, ...]:
        return tuple(ref.sequence for ref in find_checkpoints_to_retire(self.state, new, self._retention))


@dataclass
class PlannedSearch:
    """One search that can run several times; its executor keeps the checkpoints from run to run."""

    target: LocalTarget
    name: str = "e"
    slots: int = 3
    executor: TrialExecutor = field(default_factory=UnreliableExecutor)

    def run(
        self,
        until: Callable[[], bool] = lambda: False,
        *,
        write: EntryWriter = write_entry_directly,
        stays_finished: Callable[[Trial], bool] = lambda _: True,
        **options: Any,
    ) -> Experiment:
        """Continue the experiment as a new owner, to its end or `until` it is interrupted."""
        options = {"space": SPACE, "metric": "loss", "num_samples": 9, "stop": {"step": STEPS}, **options}
        plan = SearchPlan(trainable="tests.trainables.moody:Moody", target=self.target, experiment=self.name, **options)
        key = JournalKey(experiment=self.name, generation=1)
        state = acquire_and_adopt_with_retries(
            self.target, key, OwnershipRequest(make_process_owner(), new_write_stamp())
        )
        writer = JournalWriter(self.target, state, write)
        if plan.settings != state.settings:
            writer.write([ExperimentConfigured(settings=plan.settings)])
        driver = Driver(
            make_trial_spec(plan, extract_trial_stopper(plan.stopper)),
            SearchLimits(plan, self.slots, stays_finished=stays_finished),
            make_search_policy(plan),
            self.executor,
            writer,
            log=logging.getLogger("tests"),
            observer=SearchObserver(),
        )
        return driver.run(_InterruptOnly(until))


class _InterruptOnly(StopSource):
    """No stop requests; an interrupt once `until()` is true."""

    def __init__(self, until: Callable[[], bool]) -> None:
        self.is_interrupted = until


def make_remote_experiment(target: LocalTarget, *events: AttemptEvent) -> Experiment:
    """Return an experiment with one trial, whose first attempt has posted events that no search has received."""
    added = TrialAdded(trial="00000", config={"x": 0.5}, proposed_by_search=True)
    request = OwnershipRequest(make_process_owner(), new_write_stamp())
    state = acquire_and_adopt_with_retries(target, JournalKey(experiment="e", generation=1), request)
    state = write_entry_directly(target, state, [added, AttemptLaunched(trial="00000", outbox=1)])
    trial = state.trial("00000")
    OutboxJournal(target, state.trial_key("00000"), trial).write([make_attempt_started(trial), *events])
    return state
