"""Attempts on simulated remote machines: a test posts their events and reads the answers of the search."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

from prefect_tune.attempt.attempt import make_attempt_started
from prefect_tune.attempt.search_channel import OutboxJournal
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import StorageTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import (
    AttemptEvent,
    CheckpointCommitted,
    CheckpointRef,
    CheckpointsAdopted,
    StepReported,
)
from prefect_tune.core.messages.process_messages import CheckpointAndStop, ContinueTraining, StopTrial
from prefect_tune.core.messages.target_messages import UNSOLICITED_STEP, read_answer
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.core.values import StepReport
from prefect_tune.executors.remote_executor import RemoteSearchChannel
from prefect_tune.journal_access import (
    OwnershipRequest,
    acquire_and_adopt_with_retries,
    make_process_owner,
    read_experiment,
    read_experiment_id,
)

_REQUEST = timedelta(seconds=9)


def make_spec(target: StorageTarget, trial: str = "00000", trainable: str = "") -> TrialSpec:
    key = TrialKey(experiment="e", generation=1, trial=trial)
    return TrialSpec(
        target=target, trial=key, trainable=trainable, stopper="", needs_history=False, proposed_by_search=True
    )


class FarMachines:
    """Starts nothing, and records each request to start an attempt: trial, attempt, milestone."""

    def __init__(self, *, attempts_outlive_search: bool = True) -> None:
        self.attempts_outlive_search = attempts_outlive_search
        self.started: list[tuple[str, int, int | None]] = []
        self.requests: list[AttemptRequest] = []
        self.is_withdrawn = False
        self._ends: dict[str, tuple[threading.Event, Future[threading.Thread]]] = {}

    def __call__(
        self, spec: TrialSpec, request: AttemptRequest, channel: RemoteSearchChannel, attempt: int
    ) -> Callable[[], object]:
        del channel
        trial = spec.trial.trial
        self.started.append((trial, attempt, request.milestone))
        self.requests.append(request)
        end, thread = self._ends[trial] = threading.Event(), Future()

        def wait() -> None:
            thread.set_result(threading.current_thread())
            end.wait()

        return wait

    def cancel_unstarted_attempts(self) -> None:
        self.is_withdrawn = True

    def end(self, trial: str) -> None:
        """End the present attempt of a trial; return when the executor's thread has seen it."""
        end, thread = self._ends[trial]
        end.set()
        thread.result().join()


def require_experiment(target: StorageTarget, key: JournalKey) -> None:
    """Acquire the experiment's journal if it has no owner yet: no trial has a journal before that."""
    if read_experiment_id(target, key) is None:
        acquire_and_adopt_with_retries(
            target, key, OwnershipRequest(make_process_owner(), new_write_stamp(), lambda _: [CheckpointsAdopted()])
        )


class FarAttempt:
    """One attempt, which posts to the outbox that its search has opened, or to the first one of a new trial."""

    def __init__(self, target: StorageTarget, trial: str = "00000") -> None:
        self._target = target
        self._key = TrialKey(experiment="e", generation=1, trial=trial)
        require_experiment(target, self._key.journal_key)
        trials = read_experiment(target, self._key.journal_key).trials
        state = trials.get(trial) or Trial(id=trial, config={})
        if state.outbox is None:
            state = state.model_copy(update={"outbox": state.outbox_count + 1, "outbox_count": state.outbox_count + 1})
        self.journal = OutboxJournal(target, self._key, state)
        self.post_count = 0

    @property
    def trial(self) -> Trial:
        return self.journal.trial

    def start(self) -> None:
        self.post(make_attempt_started(self.trial))

    def report(self, *steps: int, awaits_decision: bool = False) -> None:
        """Post each step; with `awaits_decision`, the last one awaits a decision of the search."""
        for step in steps:
            is_awaited = awaits_decision and step == steps[-1]
            self.post(StepReported(trial=self._key.trial, report=_make_report(step), awaits_decision=is_awaited))

    def save(self, step: int, *, awaits_decision: bool = False) -> None:
        """Report a step, and commit its checkpoint."""
        ref = CheckpointRef(sequence=self.trial.next_sequence, **_make_report(step).model_dump())
        event = StepReported(trial=self._key.trial, report=_make_report(step), awaits_decision=awaits_decision)
        self.post(event, CheckpointCommitted(trial=self._key.trial, checkpoint=ref))

    def post(self, *events: AttemptEvent) -> None:
        self.journal.write(events)
        self.post_count += 1

    def read_answer(
        self, step: int = UNSOLICITED_STEP, *, attempt: int | None = None
    ) -> ContinueTraining | StopTrial | CheckpointAndStop | None:
        """Return the answer of the search to the trial at a step, or the unsolicited one."""
        with self._target.open(timeout=_REQUEST) as store:
            return read_answer(store, self._key, self.trial.attempt if attempt is None else attempt, step)


def _make_report(step: int) -> StepReport:
    return StepReport(step=step, metrics={"loss": 1 / step}, trained_seconds=float(step))
