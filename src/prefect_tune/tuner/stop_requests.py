"""Stop an experiment or a trial early. Except for an interruption, every stop is journaled before it takes effect.

The stop of a single trial has no time limit; the trial ends at its next report. `wait_seconds` limits only how long
`stop` waits. When an experiment stops, its trials have `grace_period_seconds` to save (`attempt/supervisor.py`).
"""

from __future__ import annotations

import getpass
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal, Self

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.display_text import make_visible
from prefect_tune.core.errors import InvalidInput, StoreRefused, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import require_trial
from prefect_tune.core.experiment.trial_transitions import ENDED_PHASES, Phase
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.journal_events import FinishKind, StopRequested, TrialFinished
from prefect_tune.core.messages.process_messages import CheckpointAndStop, StopTrial
from prefect_tune.core.messages.target_messages import (
    UNSOLICITED_STEP,
    StopRequest,
    is_request_journaled,
    is_request_lost,
    make_stop_event,
    read_stop_request,
    write_answer,
    write_stop_request,
)
from prefect_tune.core.reasons import AnyReason, Reason, make_reason
from prefect_tune.core.storage.generations import find_current_journal, no_experiment_message
from prefect_tune.core.storage.layout import JournalKey, delete_older_documents, results_path
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.executors.trial_executor import TrialExecutor
from prefect_tune.parameters.plan_checks import SearchLimits
from prefect_tune.storage_retries import with_store
from prefect_tune.tuner.pending_entry import PendingEntry
from prefect_tune.tuner.search_policy import SearchPolicy


class StopSource:
    """Tells whether the process is interrupted. A subclass also reads stop requests, which only a search receives."""

    def __init__(self, interrupted: threading.Event) -> None:
        self.is_interrupted = interrupted.is_set
        """Returns whether the process has to end."""

    def take_requests(self) -> Sequence[StopRequest]:
        """Return the requests that were read since the last call."""
        return ()

    def on_requests_journaled(self, count: int) -> None:
        """Called when the journal has the first `count` requests."""


class StopHandler:
    """Decides whether this run of an experiment ends early, and stops the trials of the run."""

    def __init__(
        self,
        limits: SearchLimits,
        policy: SearchPolicy,
        executor: TrialExecutor,
        pending_entry: PendingEntry,
        close_outbox: Callable[[str], None],
        log: Log,
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._executor = executor
        self._pending_entry = pending_entry
        self._close_outbox = close_outbox
        self._log = log
        self._started_at = time.monotonic()
        self.is_stopping = False
        """Whether the run is stopping. If so, no further trial starts, and all running trials save and end."""

    def check_stop_causes(self, stop_source: StopSource) -> None:
        """Stop the experiment or a trial if an interruption, a request, the time budget or a stopper requires it."""
        if stop_source.is_interrupted():
            self.is_stopping = True
            self._executor.stop_all()  # without waiting for the journal, since the process ends soon
        for request in stop_source.take_requests():
            event = make_stop_event(self._pending_entry.state, request)
            if event.refused is not None:
                message = "stop request ignored: %s (%s)"
                self._log.warning(message, make_visible(event.refused), make_visible(event.reason))
                self._pending_entry.add_event(event)
            elif event.trial is None:
                self._journal_experiment_stop(event)
            else:
                self.stop_trial(event.trial, event)
        if self._limits.end_reason is not None:
            self.stop_experiment(self._limits.end_reason)
        budget = self._limits.plan.time_budget
        elapsed = timedelta(seconds=time.monotonic() - self._started_at)
        if budget is not None and elapsed >= budget:
            self.stop_experiment(make_reason("time-budget", seconds=budget.total_seconds()))
        elif (reason := self._policy.end_reason()) is not None:
            self.stop_experiment(reason)
        if self.is_stopping:
            self._pending_entry.run_after_forced_write(self._executor.stop_all)

    def stop_experiment(self, reason: AnyReason) -> None:
        """Journal that the experiment stops, and why; every trial then saves and ends."""
        if not self.is_stopping:
            self._journal_experiment_stop(StopRequested(reason=reason))

    def finish_trial(self, trial_id: str) -> None:
        """Finish a trial whose stop was requested, and which has no running attempt."""
        self._pending_entry.add_event(self._make_finish_event(trial_id))

    def send_stop(self, trial_id: str) -> None:
        """After the next write, tell a running trial to save and end; the message has the event that ends the trial."""
        stop = StopTrial(outcome=self._make_finish_event(trial_id), save=True)
        self._pending_entry.run_after_forced_write(lambda: self._executor.send_answer(trial_id, stop))

    def _make_finish_event(self, trial_id: str) -> TrialFinished:
        reason = self._pending_entry.state.pending_stops[trial_id]
        return TrialFinished(trial=trial_id, reason=reason, kind=FinishKind.STOPPED)

    def _journal_experiment_stop(self, event: StopRequested) -> None:
        self._log.warning("%s: every trial saves and ends, and can be resumed", make_visible(event.reason))
        self._pending_entry.add_event(event)
        self.is_stopping = True

    def stop_trial(self, trial_id: str, event: StopRequested) -> None:
        """Journal the stop of one trial, then stop the trial."""
        self._log.warning("trial %s saves and ends: %s", trial_id, make_visible(event.reason))
        self._pending_entry.add_event(event)
        if trial_id in self._executor:
            self.send_stop(trial_id)
        else:
            self._close_outbox(trial_id)  # so that an attempt that an earlier owner has launched cannot begin
            self.finish_trial(trial_id)


# Poll the target for stop requests in a separate thread.

_REQUEST_TIMEOUT = timedelta(seconds=30)
_JOIN_TIMEOUT = timedelta(seconds=1)


class StopRequestPoller(StopSource):
    """Reads the stop requests after number `journaled_count`, and deletes the requests that the journal has.

    It polls with one GET per `period`. `__enter__` reads the existing requests, so that a trial that has to stop does
    not start. If the target does not answer or refuses access, requests are read later; the first such error is logged.
    """

    def __init__(
        self,
        target: StorageTarget,
        experiment: JournalKey,
        journaled_count: int,
        period: timedelta,
        interrupted: threading.Event,
    ) -> None:
        super().__init__(interrupted)
        self._target = target
        self._experiment = experiment
        self._read_count = journaled_count
        self._journaled_count = journaled_count
        self._period = period
        self._unhandled_requests: queue.SimpleQueue[StopRequest] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._is_failing = False
        run = copy_context().run
        self._thread = threading.Thread(target=run, args=(self._poll_until_closed,), name="stops", daemon=True)

    def __enter__(self) -> Self:
        self._read_new_requests()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop polling, and delete the requests that the journal has; wait at most 1 s for the target."""
        self._closed.set()
        self._thread.join(_JOIN_TIMEOUT.total_seconds())

    def take_requests(self) -> Sequence[StopRequest]:
        """Return the requests that were read since the last call."""
        return [self._unhandled_requests.get() for _ in range(self._unhandled_requests.qsize())]

    def on_requests_journaled(self, count: int) -> None:
        """Let the thread delete the first `count` requests."""
        self._journaled_count = count

    def _poll_until_closed(self) -> None:
        deleted_count, is_closed = 0, False
        while not is_closed:
            is_closed = self._closed.wait(self._period.total_seconds())
            if not is_closed:
                self._read_new_requests()
            if (count := self._journaled_count) != deleted_count:
                # After an error, a later iteration deletes the requests.
                with suppress(StoreUnavailable, StoreRefused), self._target.open(timeout=_REQUEST_TIMEOUT) as store:
                    delete_older_documents(store, before=self._experiment.request_path(count + 1))
                    deleted_count = count

    def _read_new_requests(self) -> None:
        try:
            with self._target.open(timeout=_REQUEST_TIMEOUT) as store:
                while (request := read_stop_request(store, self._experiment, self._read_count + 1)) is not None:
                    self._read_count += 1
                    self._unhandled_requests.put(request)
        except (StoreUnavailable, StoreRefused) as error:
            if not self._is_failing:
                logging.getLogger("prefect_tune").warning("stop requests are read later: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False


# Request the stop of a running experiment or one of its trials, from any machine that reaches the target.

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """The outcome of a stop request."""

    status: Literal["stopped", "had-ended", "stopping", "refused", "unanswered"]
    """`stopping`: acknowledged, but not ended yet; `unanswered`: no run has acknowledged the request."""
    message: str
    """A sentence for the user."""
    experiment: Experiment
    """The state of the experiment when the outcome was determined."""


def stop(
    experiment: str,
    *,
    target: StorageTarget | str,
    trial: str | None = None,
    reason: str = "",
    wait_seconds: float = 60,
) -> StopOutcome:
    """Stop a running search, or one of its trials, after a save; wait for the end.

    A stopped trial saves a checkpoint and ends as `interrupted`; a resume does not continue it, even with a larger
    budget. A stopped experiment can be resumed: every trial saves, and `pt.tune` or `pt.resume` continues it. The run
    that owns the experiment reads requests every few seconds, and journals each request before acting on it.

    If no run is active, the next run ends the trial before it starts another trial. A request to stop the whole
    experiment then has no effect, because such a request never stops a run that begins later.

    ```python
    outcome = pt.stop("digits", target="runs", trial="3")
    ```

    Args:
        target: where the experiment is stored: a block, a `"block-type/name"` slug, or a URI.
        trial: stop only this trial; its number without leading zeros is enough.
        reason: stored in the journal.
        wait_seconds: how long to wait for the acknowledgement and the end; 0 only sends the request.

    Raises:
        InvalidInput: there is no such search or trial; no request was sent.
        StoreUnavailable: the target did not answer.
    """
    sender = socket.gethostname()
    with suppress(OSError, KeyError):  # a container's user may have no name
        sender = f"{getpass.getuser()}@{sender}"
    storage = resolve_existing(target)
    journal = with_store(storage, lambda store: find_current_journal(store, experiment))
    stop_reason = make_reason("stop-request", by=sender, text=reason or None)
    return _StopRequestSender(storage, journal, trial, stop_reason).send_and_wait(wait_seconds)


class _StopRequestSender:
    """Sends a stop request; if the journal has another request under its number, sends it with the next number."""

    def __init__(self, target: StorageTarget, journal: JournalKey, trial: str | None, reason: Reason) -> None:
        self._target = target
        self._journal = journal
        self._trial = trial
        self._reason = reason
        self._sent_to: set[str] = set()

    def send_and_wait(self, wait_seconds: float) -> StopOutcome:
        state = self._load_search()
        if (end_message := self._read_end_message(state)) is not None:
            return StopOutcome("had-ended", end_message, state)
        write_stamp = new_write_stamp()
        request = StopRequest(
            write_id=write_stamp.write_id, at=write_stamp.at, reason=self._reason, term=state.term, trial=self._trial
        )
        number = with_store(self._target, partial(write_stop_request, experiment=state, request=request))
        poll_seconds = _MIN_POLL_SECONDS
        started_at, deadline = time.monotonic(), time.monotonic() + wait_seconds
        while True:
            state = self._load_search()
            if not is_request_journaled(state, request) and time.monotonic() - started_at > wait_seconds / 4 > 0:
                self._send_to_attempts(state)
            if is_request_lost(state, request, number):
                number = with_store(self._target, partial(write_stop_request, experiment=state, request=request))
            outcome = self._make_outcome(state, request)
            may_wait = time.monotonic() + poll_seconds <= deadline  # False if `wait_seconds` is NaN
            if outcome.status not in ("stopping", "unanswered") or not may_wait:
                return outcome
            time.sleep(poll_seconds)
            poll_seconds = min(2 * poll_seconds, _MAX_POLL_SECONDS)

    def _load_search(self) -> Experiment:
        """Return the state of the experiment; raise `InvalidInput` unless it is a search that has the trial."""

        def load_state(store: ObjectStore) -> Experiment:
            state = load_experiment(store, self._journal)
            if not state.entry_count:
                raise InvalidInput(no_experiment_message(store, state.name, self._target.uri))
            return state

        state = with_store(self._target, load_state)
        if not state.settings:
            raise InvalidInput(
                f"experiment {state.name!r} at {self._target.uri} is not a search: cancel its flow run, or send "
                "SIGTERM to its process; the training saves, and can be resumed"
            )
        if self._trial is not None:
            self._trial = require_trial(state, self._trial).id
        return state

    def _send_to_attempts(self, state: Experiment) -> None:
        """Send the stop to each attempt with its own flow run, since such attempts can outlive the search's run."""
        if state.settings.get("trials") != "deployment":
            return
        for trial in [state.trial(self._trial)] if self._trial else state.trials.values():
            if trial.id in self._sent_to or trial.phase in ENDED_PHASES or trial.outbox is None:
                continue
            finish = TrialFinished(trial=trial.id, reason=self._reason, kind=FinishKind.STOPPED)
            command = StopTrial(outcome=finish, save=True) if self._trial else CheckpointAndStop()
            key, attempt = state.trial_key(trial.id), trial.attempt + (trial.phase is not Phase.RUNNING)
            send = partial(write_answer, trial=key, attempt=attempt, step=UNSOLICITED_STEP, answer=command)
            with_store(self._target, send)
            self._sent_to.add(trial.id)

    def _read_end_message(self, state: Experiment) -> str | None:
        """Return a message about the end of the trial, or of the search's last run; None if there is no end yet.

        When all trials have ended, the run itself has ended only once it has published the results of the journal's
        last entry, since until then it can propose another trial.
        """
        if self._trial is not None:
            trial = state.trial(self._trial)
            end = f"trial {trial.id} is {trial.status} at step {trial.step}: {trial.reason}"
            return end if trial.phase in ENDED_PHASES else None
        if any(trial.phase not in ENDED_PHASES for trial in state.trials.values()):
            return None
        path = results_path(state.key, "trials", state.entry_count)
        folder = path.rpartition("/")[0]
        published = with_store(self._target, lambda store: [listed.path for listed in store.list(folder)])
        end = f"experiment {state.name!r} has ended, with all of its {len(state.trials)} trials"
        return end if path in published else None

    def _make_outcome(self, state: Experiment, request: StopRequest) -> StopOutcome:
        if not is_request_journaled(state, request):
            if self._trial is None and state.term != request.term:
                message = f"another run has started in the meantime, by {state.owner}; request the stop again to end it"
                return StopOutcome("refused", message, state)
            message = "no run has answered" + (f" (the last run was by {state.owner})" if state.owner else "")
            if self._sent_to:
                message = f"{message}; the request was also sent to {len(self._sent_to)} attempts"
            effect = "if no run is active, nothing is stopped; a run that begins later is not stopped by this request"
            if self._trial is not None:
                effect = f"the next run of the experiment ends trial {self._trial}"
            return StopOutcome("unanswered", f"{message}: {effect}", state)
        if self._trial is not None:
            end_message = self._read_end_message(state)
            stopping_message = f"trial {self._trial} is stopping: it saves, or finishes a step"
            return StopOutcome("stopped" if end_message else "stopping", end_message or stopping_message, state)
        running_count = sum(trial.phase is Phase.RUNNING for trial in state.trials.values())
        if running_count and state.term == request.term:
            return StopOutcome("stopping", f"{running_count} trials are saving and stopping", state)
        if running_count:
            message = f"the stopped run has ended; another run has started, by {state.owner}"
            return StopOutcome("stopped", message, state)
        resumable_count = sum(trial.phase not in ENDED_PHASES for trial in state.trials.values())
        resumable = f"{resumable_count} of its {len(state.trials)} trials can be resumed"
        return StopOutcome("stopped", f"experiment {state.name!r} has ended; {resumable}", state)
