"""Stop an experiment or a trial early. All causes but an interruption are journaled before they act.

A trial that is stopped alone has no time limit: it ends at its next report. `wait_seconds` of `stop` ends only the
waiting for it. The trials of an experiment that stops have `grace_period_seconds` (`attempt/supervisor.py`).
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
from prefect_tune.clock import new_write_id
from prefect_tune.core.errors import InvalidInput, StoreRefused, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import trial_named
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase
from prefect_tune.core.journal.journal import load
from prefect_tune.core.journal_events import Finished, FinishKind, StopAsked
from prefect_tune.core.messages.process_messages import Leave, StopAndSave
from prefect_tune.core.messages.target_messages import (
    UNASKED,
    StopRequest,
    answer,
    ask,
    is_journaled,
    is_lost,
    read_request,
    stop_event,
)
from prefect_tune.core.reasons import AnyReason, Reason, make_reason
from prefect_tune.core.shown_text import visible
from prefect_tune.core.storage.generations import current_journal, no_experiment
from prefect_tune.core.storage.layout import JournalKey, delete_numbered, results_path
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.executors.trial_executor import TrialExecutor
from prefect_tune.parameters.plan_checks import SearchLimits
from prefect_tune.storage_retries import on_target
from prefect_tune.tuner.pending_entry import PendingEntry
from prefect_tune.tuner.search_policy import SearchPolicy


class StopSource:
    """Interruptions of the process, and stop requests; there are no requests for a single training."""

    def __init__(self, interrupted: threading.Event) -> None:
        self.is_interrupted = interrupted.is_set
        """Returns whether the process is to end."""

    def take(self) -> Sequence[StopRequest]:
        """Return the requests that were read since the last call."""
        return ()

    def journaled(self, count: int) -> None:
        """Take note that the journal names the first `count` requests."""


class Stopping:
    """Decides whether a run of an experiment ends, and stops its trials."""

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
        self._began = time.monotonic()
        self.ends = False
        """Whether no trial starts any more, and all trials save and end."""

    def heed(self, stop_source: StopSource) -> None:
        """Check interruptions, requests, time budget and stoppers; stop the experiment or the trial if one says so."""
        if stop_source.is_interrupted():
            self.ends = True
            self._executor.stop()  # at once, without waiting for the journal: time is short
        for request in stop_source.take():
            asked = stop_event(self._pending_entry.state, request)
            if asked.refused is not None:
                self._log.warning("stop request ignored: %s (%s)", visible(asked.refused), visible(asked.reason))
                self._pending_entry.put(asked)
            elif asked.trial is None:
                self._end(asked)
            else:
                self.stop_trial(asked.trial, asked)
        if self._limits.end_reason is not None:
            self.end(self._limits.end_reason)
        budget = self._limits.options.time_budget
        elapsed = timedelta(seconds=time.monotonic() - self._began)
        if budget is not None and elapsed >= budget:
            self.end(make_reason("time-budget", seconds=budget.total_seconds()))
        elif (why := self._policy.why_end()) is not None:
            self.end(why)
        if self.ends:
            self._pending_entry.then(self._executor.stop)

    def end(self, reason: AnyReason) -> None:
        """Journal the end and its reason; have every trial save and end."""
        if not self.ends:
            self._end(StopAsked(reason=reason))

    def finish(self, trial: str) -> None:
        """Finish a trial that has a request to stop, and no running attempt."""
        self._pending_entry.put(self._stopped(trial))

    def tell(self, trial: str) -> None:
        """Ask a running trial to save and end, after the next write; the journal records how it ends."""
        leave = Leave(outcome=self._stopped(trial), save=True)
        self._pending_entry.then(lambda: self._executor.answer(trial, leave))

    def _stopped(self, trial: str) -> Finished:
        return Finished(trial=trial, reason=self._pending_entry.state.stops[trial], kind=FinishKind.STOPPED)

    def _end(self, asked: StopAsked) -> None:
        self._log.warning("%s: every trial saves and ends, and can be resumed", visible(asked.reason))
        self._pending_entry.put(asked)
        self.ends = True

    def stop_trial(self, trial: str, asked: StopAsked) -> None:
        """Journal that one trial is to stop, and stop it."""
        self._log.warning("trial %s saves and ends: %s", trial, visible(asked.reason))
        self._pending_entry.put(asked)
        if trial in self._executor:
            self.tell(trial)
        else:
            self._close_outbox(trial)  # an earlier search may have launched an attempt that has not begun
            self.finish(trial)


# Poll the target for requests to stop the experiment, in a thread beside the driver's.

_REQUEST = timedelta(seconds=30)
_MOMENT = timedelta(seconds=1)


class StopRequestPoller(StopSource):
    """Reads the requests after number `journaled_count`; deletes acknowledged ones.

    It looks with one GET per `period`. Entering it reads the requests
    that are there already, so that no trial starts that was to stop. While the target does not answer or refuses,
    requests are read later; the first such error is logged.
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
        self._found: queue.SimpleQueue[StopRequest] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._fails = False
        self._thread = threading.Thread(target=copy_context().run, args=(self._watch,), name="stops", daemon=True)

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop polling, and delete acknowledged requests; wait at most 1 s for the target."""
        self._closed.set()
        self._thread.join(_MOMENT.total_seconds())

    def take(self) -> Sequence[StopRequest]:
        """Return the requests that were read since the last call."""
        taken: list[StopRequest] = []
        with suppress(queue.Empty):
            while True:
                taken.append(self._found.get_nowait())
        return taken

    def journaled(self, count: int) -> None:
        """Take note that the journal names the first `count` requests."""
        self._journaled_count = count

    def _watch(self) -> None:
        deleted_count = 0
        is_closed = False
        while not is_closed:
            is_closed = self._closed.wait(self._period.total_seconds())
            if not is_closed:
                self._look()
            if (count := self._journaled_count) != deleted_count:
                # After an error a later turn deletes them.
                with suppress(StoreUnavailable, StoreRefused), self._target.open(timeout=_REQUEST) as store:
                    delete_numbered(store, before=self._experiment.request_path(count + 1))
                    deleted_count = count

    def _look(self) -> None:
        try:
            with self._target.open(timeout=_REQUEST) as store:
                while (request := read_request(store, self._experiment, self._read_count + 1)) is not None:
                    self._read_count += 1
                    self._found.put(request)
        except (StoreUnavailable, StoreRefused) as error:
            if not self._fails:
                logging.getLogger("prefect_tune").warning("stop requests are read later: %s", error)
            self._fails = True
        else:
            self._fails = False


# Request that a running experiment, or one of its trials, stops; from any machine that reaches the target.

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """The outcome of a stop request."""

    status: Literal["stopped", "had-ended", "stopping", "refused", "unanswered"]
    """`stopping`: acknowledged, and not ended yet; `unanswered`: no run has acknowledged the request."""
    message: str
    """A sentence for the user."""
    experiment: Experiment
    """Its state when the outcome was determined."""


def stop(
    experiment: str,
    *,
    target: StorageTarget | str,
    trial: str | None = None,
    reason: str = "",
    wait_seconds: float = 60,
) -> StopOutcome:
    """Have a running search, or one trial of it, save and end; wait until it has ended.

    A stopped trial saves a checkpoint and ends, `interrupted`: no larger budget continues it. A stopped experiment
    can be resumed: every trial saves, and `pt.tune` or `pt.resume` continues it. The run that owns the experiment reads
    requests every few seconds, and journals each one before it acts on it.

    If no run is active, the trial is ended when the experiment is opened next, before any trial starts. A stop of
    the whole experiment then has no effect: it never stops a run that begins later.

    Args:
        experiment: its name on the target.
        target: where the experiment is stored: a block, a `"block-type/name"` slug, or a URI.
        trial: stop only this trial; its number without zeros is enough.
        reason: stored in the journal.
        wait_seconds: how long to wait for the acknowledgement and for the end; 0 sends the request only.

    Raises:
        InvalidInput: there is no such search or trial; no request was sent.
        StoreUnavailable: the target did not answer.
    """
    sender = socket.gethostname()
    with suppress(OSError, KeyError):  # a container's user may have no name
        sender = f"{getpass.getuser()}@{sender}"
    place = resolve_existing(target)
    journal = on_target(place, lambda store: current_journal(store, experiment))
    return _Asking(place, journal, trial, make_reason("stop-request", by=sender, text=reason or None)).until_answered(
        wait_seconds
    )


class _Asking:
    """One stop request, sent again under the next number if another request was acknowledged under its number."""

    def __init__(self, target: StorageTarget, journal: JournalKey, trial: str | None, reason: Reason) -> None:
        self._target = target
        self._journal = journal
        self._trial = trial
        self._reason = reason
        self._sent_to: set[str] = set()

    def until_answered(self, wait_seconds: float) -> StopOutcome:
        state = self._read()
        if (ended := self._end_message(state)) is not None:
            return StopOutcome("had-ended", ended, state)
        stamp = new_write_id()
        request = StopRequest(
            write_id=stamp.write_id, at=stamp.at, reason=self._reason, term=state.term, trial=self._trial
        )
        number = on_target(self._target, partial(ask, experiment=state, request=request))
        pause_seconds = _FIRST_PAUSE_SECONDS
        began, until = time.monotonic(), time.monotonic() + wait_seconds
        while True:
            state = self._read()
            if not is_journaled(state, request) and time.monotonic() - began > wait_seconds / 4 > 0:
                self._tell_attempts(state)
            if is_lost(state, request, number):
                number = on_target(self._target, partial(ask, experiment=state, request=request))
            outcome = self._outcome(state, request)
            may_wait = time.monotonic() + pause_seconds <= until  # never, if the wait is no number
            if outcome.status not in ("stopping", "unanswered") or not may_wait:
                return outcome
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _read(self) -> Experiment:
        """Return the state of the experiment, which has to be a search with the trial."""

        def read(store: ObjectStore) -> Experiment:
            state = load(store, self._journal)
            if not state.number:
                raise InvalidInput(no_experiment(store, state.name, self._target.uri))
            return state

        state = on_target(self._target, read)
        if not state.settings:
            raise InvalidInput(
                f"experiment {state.name!r} at {self._target.uri} is not a search: cancel its flow run, or send it "
                "SIGTERM; it saves, and can be resumed"
            )
        if self._trial is not None:
            self._trial = trial_named(state, self._trial).trial
        return state

    def _tell_attempts(self, state: Experiment) -> None:
        """Send the stop to each running attempt of a deployment: attempts may outlive the search's run."""
        if state.settings.get("trials") != "deployment":
            return
        for trial in [state.trial(self._trial)] if self._trial else state.trials.values():
            if trial.trial in self._sent_to or trial.phase in ENDED or trial.outbox is None:
                continue
            stopped = Finished(trial=trial.trial, reason=self._reason, kind=FinishKind.STOPPED)
            said = Leave(outcome=stopped, save=True) if self._trial else StopAndSave()
            key, attempt = state.trial_key(trial.trial), trial.attempt + (trial.phase is not Phase.RUNNING)
            on_target(self._target, partial(answer, trial=key, attempt=attempt, step=UNASKED, reply=said))
            self._sent_to.add(trial.trial)

    def _end_message(self, state: Experiment) -> str | None:
        """Return how the trial, or the last run of the search, has ended; None if it has not.

        A run that has ended by itself has published results of the journal's last entry. If only all trials have
        ended, the next one may be about to be proposed.
        """
        if self._trial is not None:
            trial = state.trial(self._trial)
            end = f"trial {trial.trial} is {trial.status} at step {trial.step}: {trial.reason}"
            return end if trial.phase in ENDED else None
        if any(each.phase not in ENDED for each in state.trials.values()):
            return None
        path = results_path(state.key, "trials", state.number)
        published = on_target(self._target, lambda store: [each.path for each in store.list(path.rpartition("/")[0])])
        end = f"experiment {state.name!r} has ended, with all of its {len(state.trials)} trials"
        return end if path in published else None

    def _outcome(self, state: Experiment, request: StopRequest) -> StopOutcome:
        if not is_journaled(state, request):
            return self._unanswered(state, request)
        if self._trial is not None:
            ended = self._end_message(state)
            waiting = f"trial {self._trial} is stopping: it saves, or finishes a step"
            return StopOutcome("stopped" if ended else "stopping", ended or waiting, state)
        running = sum(each.phase is Phase.RUNNING for each in state.trials.values())
        if running and state.term == request.term:
            return StopOutcome("stopping", f"{running} trials are stopping: they save", state)
        if running:
            message = f"the run with the request has ended; another one has started, by {state.owner}"
            return StopOutcome("stopped", message, state)
        resumable = sum(each.phase not in ENDED for each in state.trials.values())
        message = f"experiment {state.name!r} has ended; {resumable} of its {len(state.trials)} trials can be resumed"
        return StopOutcome("stopped", message, state)

    def _unanswered(self, state: Experiment, request: StopRequest) -> StopOutcome:
        if self._trial is None and state.term != request.term:
            message = f"another run has started meanwhile, by {state.owner}; request the stop again to end it"
            return StopOutcome("refused", message, state)
        message = f"no run has answered, the last one by {state.owner}" if state.owner else "no run has answered"
        if self._sent_to:
            message = f"{message}; {len(self._sent_to)} attempts got the request directly"
        later = "if no run is active, there is nothing to stop; a run that begins later is not stopped by this"
        if self._trial is not None:
            later = f"trial {self._trial} will be ended when the experiment is opened next"
        return StopOutcome("unanswered", f"{message}: {later}", state)
