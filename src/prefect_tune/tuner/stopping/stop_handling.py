"""Stop an experiment or a trial early. All causes but an interruption are journaled before they act."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from prefect_tune.core.errors import BadMetric
from prefect_tune.core.journal_events.experiment_events import Finished, StopAsked
from prefect_tune.core.messages.process_messages import Leave
from prefect_tune.core.messages.stop_requests import StopRequest, stop_event
from prefect_tune.core.texts import visible
from prefect_tune.executors.trial_executor import TrialExecutor
from prefect_tune.parameters.checks.search_limits import SearchLimits
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.tuner.pending_entry import PendingEntry
from prefect_tune.tuner.policy import SearchPolicy


class Outside:
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
        self, limits: SearchLimits, policy: SearchPolicy, executor: TrialExecutor, pending_entry: PendingEntry, log: Log
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._executor = executor
        self._pending_entry = pending_entry
        self._log = log
        self._began = time.monotonic()
        self.ends = False
        """Whether no trial starts any more, and all trials save and end."""

    def heed(self, outside: Outside) -> None:
        """Check interruptions, requests, time budget and stoppers; stop the experiment or the trial if one says so."""
        if outside.is_interrupted():
            self.ends = True
            self._executor.stop()  # at once, without waiting for the journal: time is short
        for request in outside.take():
            self._handle(stop_event(self._pending_entry.state, request))
        if reason := self._limits.why_end(self._pending_entry.state, None):
            self.end(reason)
        budget = self._limits.options.time_budget
        elapsed = timedelta(seconds=time.monotonic() - self._began)
        if budget is not None and elapsed >= budget:
            self.end(f"the time budget of {budget} is spent")
        elif (why := self._policy.why_end()) is not None:
            self.end(why)
        if self.ends:
            self._pending_entry.then(self._executor.stop)

    def end(self, why: str) -> None:
        """Journal the end and its reason; have every trial save and end."""
        if not self.ends:
            self._end(StopAsked(reason=why))

    def ends_undecided(self, error: BadMetric) -> bool:
        """End the experiment if its scheduler can decide about no trial; return whether it ends."""
        if why := self._limits.why_end(self._pending_entry.state, error):
            self.end(why)
        return bool(why)

    def finish(self, trial: str) -> None:
        """Finish a trial that has a request to stop, and no running attempt."""
        self._pending_entry.put(Finished(trial=trial, reason=self._pending_entry.state.stops[trial], left=True))

    def tell(self, trial: str) -> None:
        """Ask a running trial to save and end, after the next write; its own journal records how it ends."""
        reason = self._pending_entry.state.stops[trial]
        leave = Leave(reason=reason, save=True, for_good=True, end="interrupted")
        self._pending_entry.then(lambda: self._executor.answer(trial, leave))

    def _handle(self, asked: StopAsked) -> None:
        if asked.refused:
            self._log.warning("stop request ignored: %s (%s)", asked.refused, visible(asked.reason))
            self._pending_entry.put(asked)
        elif asked.trial is None:
            self._end(asked)
        else:
            self._log.warning("trial %s saves and ends: %s", asked.trial, visible(asked.reason))
            self._pending_entry.put(asked)
            self._stop_trial(asked.trial)

    def _end(self, asked: StopAsked) -> None:
        self._log.warning("%s: every trial saves and ends, and can be resumed", visible(asked.reason))
        self._pending_entry.put(asked)
        self.ends = True

    def _stop_trial(self, trial: str) -> None:
        if trial in self._executor:
            self.tell(trial)
        else:
            self.finish(trial)
