"""Decide what follows a report or a failed attempt: journal the decision first, then act on it.

`SearchPolicy.decide` calls the scheduler. The trial's process (`runtime/session.py`) checks `stop=`;
`tuner/stop_requests.py` stops trials for users and budgets.
"""

from __future__ import annotations

from collections import deque
from typing import assert_never

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.core.errors import BadMetric, CommitUnknown, StoreRefused, StoreUnavailable, TrialFailed
from prefect_tune.core.experiment.experiment import Experiment, last_report
from prefect_tune.core.experiment.failure_policy import (
    GiveUp,
    Quarantine,
    Resumable,
    TryAgain,
    errors_end_reason,
    is_forgiven,
    machines_spent,
    verdict,
)
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, newest_checkpoint
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Decided,
    GaveUp,
    Paused,
    Quarantined,
    Resumed,
)
from prefect_tune.core.messages.process_messages import Leave, Proceed
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.schedulers.base import Continue, Decision, Exploit, Pause, Stop
from prefect_tune.core.shown_text import first_line
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import TrialExecutor
from prefect_tune.parameters.plan_checks import SearchLimits
from prefect_tune.tuner.pending_entry import PendingEntry
from prefect_tune.tuner.search_policy import SearchPolicy, finish_of, is_saved, open_decision, retry_of
from prefect_tune.tuner.stop_requests import Stopping

_TARGET_ERRORS = (StoreUnavailable, StoreRefused, CommitUnknown)


class FailureHandler:
    """Applies the failure policy to the journal's state; adds trials to retry to `startable`."""

    def __init__(
        self, limits: SearchLimits, pending_entry: PendingEntry, stopping: Stopping, startable: deque[str], log: Log
    ) -> None:
        self._limits = limits
        self._pending_entry = pending_entry
        self._stopping = stopping
        self._startable = startable
        self._log = log
        self._lost_attempts: dict[str, tuple[int, int]] = {}  # by trial: consecutive losses, its checkpoint at the last
        self._undecidable_trials: dict[str, Reason] = {}  # trials whose report lacked the metric, and the error
        running = (trial for trial in pending_entry.state.trials.values() if trial.phase is Phase.RUNNING)
        self.has_trained = any(trial.step for trial in running)
        """Whether this run trained a step, or a remote attempt that outlived an earlier run did."""
        self._import_failure = ""  # the first failed import before any training: it would fail in all trials

    def require_imported(self, experiment: Experiment) -> Experiment:
        """Return the experiment; no trial runs any more.

        Raises:
            TrialFailed: this run trained nothing, since the trainable could not be loaded. No trial errored: the next
                run retries the trials that this one has begun.
        """
        if self._import_failure:
            raise TrialFailed(
                "nothing was trained: the trainable could not be loaded where the trials run. Correct it, and start "
                f"the search again under the same name. First failure: {self._import_failure}"
            )
        return experiment

    def failed(self, trial: Trial, cause: Cause, error: BaseException | None = None) -> None:
        """Log a failed attempt; retry its trial or give it up.

        Raises:
            StoreUnavailable, StoreRefused, CommitUnknown: the attempt failed with this error, and the budget of machine
                failures is spent. All trials share the target, so the search ends; its next run resumes this trial.
        """
        if isinstance(error, _TARGET_ERRORS) and machines_spent(trial, self._limits.options.failure_policy):
            raise error
        if cause is Cause.IMPORT and trial.of_search and not self.has_trained:
            self._import_failure = self._import_failure or f"trial {trial.trial}: {first_line(trial.reason)}"
            self._stopping.ends = True
            return
        if not isinstance(verdict(trial, cause, self._limits.options.failure_policy), GiveUp | Resumable):
            name, reason = f"trial {trial.trial}: " if trial.of_search else "", first_line(trial.reason)
            next_try = "the next run retries it" if self._stopping.ends else "retrying"
            self._log.warning("%sattempt %d failed (%s), %s: %s", name, trial.attempt, cause, next_try, reason)
        self.retry_or_give_up(trial.trial, cause)

    def retry_or_give_up(self, trial: str, cause: Cause) -> None:
        """Retry a trial from its newest good checkpoint within its retry budgets; otherwise give it up."""
        state = self._pending_entry.state.trial(trial)
        match verdict(state, cause, self._limits.options.failure_policy):
            case TryAgain() | Resumable():
                self._startable.append(trial)
            case Quarantine(sequence=sequence, reason=reason):
                name = f"trial {trial}: " if state.of_search else ""
                self._log.error("%scheckpoint quarantined: %s", name, first_line(reason))
                self._pending_entry.put(Quarantined(trial=trial, sequence=sequence, reason=reason, kills=True))
                self._startable.append(trial)
            case GiveUp(reason=reason):
                self.give_up(trial, cause, reason)
            case never:
                assert_never(never)

    def resumed(self, trial: Trial, cause: Cause) -> None:
        """Retry or give up a trial that an earlier run left failed.

        Its earlier machine failures do not count, unless the trial may have killed that run.
        """
        if is_forgiven(trial, self._limits.options.failure_policy):
            self._pending_entry.put(retry_of(trial))
            self._startable.append(trial.trial)
        else:
            self.retry_or_give_up(trial.trial, cause)

    def lost(self, trial: str, error: BaseException | None) -> None:
        """Count an attempt that ended without writing its end as a machine failure; retry the trial or give it up.

        The journal does not hold these failures: each run counts its own. Raises the errors of `failed`.
        """
        reason = make_reason("no-result") if error is None else f"{type(error).__name__}: {error}"
        newest = newest_checkpoint(self._pending_entry.state.trial(trial))
        sequence = newest.sequence if newest else 0
        earlier_count, earlier_sequence = self._lost_attempts.get(trial, (0, sequence))
        count = 1 if sequence > earlier_sequence else earlier_count + 1
        self._lost_attempts[trial] = (count, sequence)
        if count > self._limits.options.failure_policy.max_machine_failures:
            if isinstance(error, _TARGET_ERRORS):
                raise error
            self.give_up(trial, Cause.MACHINE, make_reason("attempts-lost", count=count, error=reason))
        else:
            self._pending_entry.listener.lost(self._pending_entry.state.trial(trial), str(reason))
            self._startable.append(trial)

    def undecided(self, trial: str, error: BadMetric) -> Leave:
        """Return the answer to a trial that the scheduler cannot judge; `conclude_undecided` gives the trial up."""
        reason = self._undecidable_trials[trial] = make_reason("raised", text=str(error))
        errored = AttemptEnded(trial=trial, cause=Cause.BAD_METRIC, reason=reason)
        return Leave(outcome=errored, save=False)

    def conclude_undecided(self, trial: str) -> bool:
        """Give up `trial` if the scheduler could not judge it; return whether it was given up."""
        reason = self._undecidable_trials.pop(trial, None)
        if reason is not None:
            self.give_up(trial, Cause.BAD_METRIC, reason)
        return reason is not None

    def give_up(self, trial: str, cause: Cause, reason: Reason) -> None:
        """Mark a trial as errored; end the experiment if `fail_fast` requires it."""
        self._pending_entry.put(GaveUp(trial=trial, cause=cause, reason=reason))
        trials, fail_fast = self._pending_entry.state.trials, self._limits.options.fail_fast
        end_reason = errors_end_reason(trials[trial], trials.values(), fail_fast=fail_fast)
        if end_reason is not None:
            self._stopping.end(end_reason)


class Decisions:
    """Lets the policy decide at each milestone; sends the decision once it is journaled."""

    def __init__(
        self,
        policy: SearchPolicy,
        executor: TrialExecutor,
        pending_entry: PendingEntry,
        failure_handler: FailureHandler,
        *,
        saves_at_end: bool,
    ) -> None:
        self._policy = policy
        self._executor = executor
        self._pending_entry = pending_entry
        self._failure_handler = failure_handler
        self._saves_at_end = saves_at_end

    def answer(self, name: str, report: StepReport) -> None:
        """Decide about the report of a trial that waits for a decision, and send the answer."""
        try:
            answer = self._make_answer(name, self._decide_or_replay(name, report))
        except BadMetric as error:
            answer = self._failure_handler.undecided(name, error)
        self._send_after_write(name, answer, report.step)

    def carry_out(self, name: str, decision: Decision, step: int) -> None:
        """Send a trial at `step` the answer for a journaled decision."""
        self._send_after_write(name, self._make_answer(name, decision), step)

    def decide_what_is_open(self, name: str) -> None:
        """Decide a milestone that was reported before a crash, without training the step again."""
        trial = self._pending_entry.state.trial(name)
        milestone = self._policy.milestone(trial)
        if milestone is None or trial.step < milestone or trial.exploits is not None:
            return  # the trial has not reached the milestone, or its weights are about to be replaced
        if trial.phase is not Phase.PENDING or not is_saved(trial):
            return
        try:
            answer = self._make_answer(name, self._decide_or_replay(name, last_report(trial)))
        except BadMetric as error:
            self._failure_handler.undecided(name, error)
            self._failure_handler.conclude_undecided(name)
            return
        if isinstance(answer, Leave):
            self._pending_entry.put(answer.outcome)

    def _decide_or_replay(self, name: str, report: StepReport) -> Decision:
        """Return the journaled decision if it has had no effect yet; else let the scheduler decide, and journal it."""
        trial = self._pending_entry.state.trial(name)
        last_decision = open_decision(trial)
        if last_decision is not None and last_decision.decision is not None:
            return last_decision.decision
        decision = self._policy.decide(trial, report)
        self._pending_entry.put(Decided(trial=name, report=report, decision=decision))
        return decision

    def _make_answer(self, name: str, decision: Decision) -> Proceed | Leave:
        match decision:
            case Continue():
                return self._make_continue_answer(name)
            case Pause(reason=reason):
                if self._policy.schedule.resume_next() == name:  # no other trial needs the slot
                    self._pending_entry.put(Resumed(trial=name))
                    return self._make_continue_answer(name)
                return Leave(outcome=Paused(trial=name, reason=reason), save=True)
            case Stop() as stop:
                return Leave(outcome=finish_of(name, stop), save=self._saves_at_end)
            case Exploit(reason=reason):
                return Leave(outcome=Paused(trial=name, reason=reason), save=False)
            case never:
                assert_never(never)

    def _make_continue_answer(self, name: str) -> Proceed:
        return Proceed(milestone=self._policy.milestone(self._pending_entry.state.trial(name)))

    def _send_after_write(self, name: str, answer: Proceed | Leave, step: int) -> None:
        self._pending_entry.then(lambda: self._executor.answer(name, answer, step))
