"""Decide what follows a report or a failed attempt; journal each decision before acting on it.

`SearchPolicy.decide` calls the scheduler. Other modules stop trials for other reasons: the trial's process
(`runtime/session.py`) checks `stop=`, and `tuner/stop_requests.py` carries out stop requests and enforces budgets.
"""

from __future__ import annotations

from collections import deque
from typing import assert_never

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.core.display_text import first_line
from prefect_tune.core.errors import BadMetric, CommitUnknown, StoreRefused, StoreUnavailable, TrialFailed
from prefect_tune.core.experiment.experiment import last_report
from prefect_tune.core.experiment.failure_policy import (
    EndRun,
    FailTrial,
    QuarantineCheckpoint,
    RetryTrial,
    decide_after_failure,
    end_reason_after_error,
    is_machine_budget_spent,
    should_reset_budgets,
)
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, newest_checkpoint
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointQuarantined,
    DecisionMade,
    TrialErrored,
    TrialPaused,
    TrialResumed,
)
from prefect_tune.core.messages.process_messages import ContinueTraining, StopTrial
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.schedulers.base import Continue, Decision, Exploit, Pause, Stop
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import TrialExecutor
from prefect_tune.parameters.plan_checks import SearchLimits
from prefect_tune.tuner.pending_entry import PendingEntry
from prefect_tune.tuner.search_policy import SearchPolicy, make_finish_event, make_retry_event, pending_decision
from prefect_tune.tuner.stop_requests import StopHandler

_TARGET_ERRORS = (StoreUnavailable, StoreRefused, CommitUnknown)


class FailureHandler:
    """Applies the failure policy to failed trials; those that are to be retried are appended to `ready_queue`."""

    def __init__(
        self,
        limits: SearchLimits,
        pending_entry: PendingEntry,
        stop_handler: StopHandler,
        ready_queue: deque[str],
        log: Log,
    ) -> None:
        self._limits = limits
        self._pending_entry = pending_entry
        self._stop_handler = stop_handler
        self._ready_queue = ready_queue
        self._log = log
        self._lost_attempts: dict[str, tuple[int, int]] = {}  # by trial: count since a commit; sequence of this commit
        self._undecidable_trials: dict[str, Reason] = {}  # by trial: why the scheduler cannot decide
        running = (trial for trial in pending_entry.state.trials.values() if trial.phase is Phase.RUNNING)
        self.has_trained = any(trial.step for trial in running)
        """Whether this owner's attempts, or a remote attempt that outlived its search, have trained a step."""
        self._import_failure = ""  # the first failed import before any training; this import would fail in all trials

    def require_loaded_trainable(self) -> None:
        """Raise `TrialFailed` if this owner trained nothing because the trainable could not be loaded.

        No trial is marked as errored, so the next owner retries the trials that this owner has begun.
        """
        if self._import_failure:
            raise TrialFailed(
                "nothing was trained: the trainable could not be loaded where the trials run. Correct it, and start "
                f"the search again under the same name. First failure: {self._import_failure}"
            )

    def on_attempt_failed(self, trial: Trial, cause: Cause, error: BaseException | None = None) -> None:
        """Log a failed attempt; retry its trial, or give the trial up.

        Raises:
            StoreUnavailable, StoreRefused, CommitUnknown: the attempt failed with this error, and the budget of machine
                failures is spent. All trials share the target, so the search ends; the next owner resumes this trial.
        """
        if isinstance(error, _TARGET_ERRORS) and is_machine_budget_spent(trial, self._limits.plan.failure_policy):
            raise error
        if cause is Cause.IMPORT and trial.proposed_by_search and not self.has_trained:
            self._import_failure = self._import_failure or f"trial {trial.id}: {first_line(trial.reason)}"
            self._stop_handler.is_stopping = True
            return
        if not isinstance(decide_after_failure(trial, cause, self._limits.plan.failure_policy), FailTrial | EndRun):
            prefix, reason = f"trial {trial.id}: " if trial.proposed_by_search else "", first_line(trial.reason)
            next_try = "the next run retries it" if self._stop_handler.is_stopping else "retrying"
            self._log.warning("%sattempt %d failed (%s), %s: %s", prefix, trial.attempt, cause, next_try, reason)
        self.retry_or_give_up(trial.id, cause)

    def retry_or_give_up(self, trial_id: str, cause: Cause) -> None:
        """Retry a trial from its newest good checkpoint, or give it up if the failure policy allows no retry."""
        trial = self._pending_entry.state.trial(trial_id)
        match decide_after_failure(trial, cause, self._limits.plan.failure_policy):
            case RetryTrial() | EndRun():
                self._ready_queue.append(trial_id)
            case QuarantineCheckpoint(sequence=sequence, reason=reason):
                prefix = f"trial {trial_id}: " if trial.proposed_by_search else ""
                self._log.error("%scheckpoint quarantined: %s", prefix, first_line(reason))
                event = CheckpointQuarantined(trial=trial_id, sequence=sequence, reason=reason, crashes_trainable=True)
                self._pending_entry.add_event(event)
                self._ready_queue.append(trial_id)
            case FailTrial(reason=reason):
                self.give_up(trial_id, cause, reason)
            case never:
                assert_never(never)

    def recover_failed_trial(self, trial: Trial, cause: Cause) -> None:
        """Retry or give up a trial that failed under an earlier owner.

        The trial's earlier machine failures do not count, unless the trial may have crashed that owner.
        """
        if should_reset_budgets(trial, self._limits.plan.failure_policy):
            self._pending_entry.add_event(make_retry_event(trial))
            self._ready_queue.append(trial.id)
        else:
            self.retry_or_give_up(trial.id, cause)

    def retry_lost_attempt(self, trial_id: str, error: BaseException | None) -> None:
        """Count a lost attempt, whose end is not journaled yet; retry its trial, or give the trial up.

        The count is not stored, so each owner counts from 0. `Driver._end_attempt_if_lost` journals the attempt's end
        when the trial leaves the queue. Raises like `on_attempt_failed`.
        """
        reason = make_reason("no-result") if error is None else f"{type(error).__name__}: {error}"
        newest = newest_checkpoint(self._pending_entry.state.trial(trial_id))
        sequence = newest.sequence if newest else 0
        earlier_count, earlier_sequence = self._lost_attempts.get(trial_id, (0, sequence))
        count = 1 if sequence > earlier_sequence else earlier_count + 1
        self._lost_attempts[trial_id] = (count, sequence)
        if count > self._limits.plan.failure_policy.max_machine_failures:
            if isinstance(error, _TARGET_ERRORS):
                raise error
            self.give_up(trial_id, Cause.MACHINE, make_reason("attempts-lost", count=count, error=reason))
        else:
            self._pending_entry.observer.on_attempt_lost(self._pending_entry.state.trial(trial_id), str(reason))
            self._ready_queue.append(trial_id)

    def record_undecidable(self, trial_id: str, error: BadMetric) -> StopTrial:
        """Record that the scheduler cannot decide about a trial; return the answer that ends its attempt as errored."""
        reason = self._undecidable_trials[trial_id] = make_reason("raised", text=str(error))
        errored = AttemptEnded(trial=trial_id, cause=Cause.BAD_METRIC, reason=reason)
        return StopTrial(outcome=errored, save=False)

    def give_up_if_undecidable(self, trial_id: str) -> bool:
        """Give up a trial if the scheduler could not decide about it; return whether it was given up."""
        reason = self._undecidable_trials.pop(trial_id, None)
        if reason is not None:
            self.give_up(trial_id, Cause.BAD_METRIC, reason)
        return reason is not None

    def give_up(self, trial_id: str, cause: Cause, reason: Reason) -> None:
        """Mark a trial as errored; end the experiment if `fail_fast` requires it."""
        self._pending_entry.add_event(TrialErrored(trial=trial_id, cause=cause, reason=reason))
        trials, fail_fast = self._pending_entry.state.trials, self._limits.plan.fail_fast
        end_reason = end_reason_after_error(trials[trial_id], trials.values(), fail_fast=fail_fast)
        if end_reason is not None:
            self._stop_handler.stop_experiment(end_reason)


class DecisionHandler:
    """Lets the policy decide at each milestone, journals the decision, and then sends it to the trial."""

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

    def answer_report(self, trial_id: str, report: StepReport) -> None:
        """Decide about the report of a trial that waits for a decision, and send the answer."""
        try:
            answer = self._make_answer(trial_id, self._get_or_make_decision(trial_id, report))
        except BadMetric as error:
            answer = self._failure_handler.record_undecidable(trial_id, error)
        self._send_after_write(trial_id, answer, report.step)

    def send_decision(self, trial_id: str, decision: Decision, step: int) -> None:
        """Send the answer for a journaled decision to a trial that waits at `step`."""
        self._send_after_write(trial_id, self._make_answer(trial_id, decision), step)

    def decide_missed_milestone(self, trial_id: str) -> None:
        """Decide at a milestone that the trial reached before a crash, so that it need not train that step again."""
        trial = self._pending_entry.state.trial(trial_id)
        milestone = self._policy.next_milestone(trial)
        if milestone is None or trial.step < milestone or trial.pending_exploit is not None:
            return  # the trial has not reached the milestone, or its weights are about to be replaced
        newest = newest_checkpoint(trial)
        if trial.phase is not Phase.PENDING or newest is None or newest.step != trial.step:
            return  # the next attempt does not start at the last reported step
        try:
            answer = self._make_answer(trial_id, self._get_or_make_decision(trial_id, last_report(trial)))
        except BadMetric as error:
            self._failure_handler.record_undecidable(trial_id, error)
            self._failure_handler.give_up_if_undecidable(trial_id)
            return
        if isinstance(answer, StopTrial):
            self._pending_entry.add_event(answer.outcome)

    def _get_or_make_decision(self, trial_id: str, report: StepReport) -> Decision:
        """Return the journaled decision if it has had no effect yet; otherwise make a decision, and journal it."""
        trial = self._pending_entry.state.trial(trial_id)
        last_decision = pending_decision(trial)
        if last_decision is not None and last_decision.decision is not None:
            return last_decision.decision
        decision = self._policy.decide(trial, report)
        self._pending_entry.add_event(DecisionMade(trial=trial_id, report=report, decision=decision))
        return decision

    def _make_answer(self, trial_id: str, decision: Decision) -> ContinueTraining | StopTrial:
        """Return the answer for a decision. If a pause would end at once, journal the resume; the trial continues."""
        match decision:
            case Continue():
                return self._make_continue_answer(trial_id)
            case Pause(reason=reason):
                if self._policy.schedule.next_trial_to_resume() == trial_id:  # no other trial needs the slot
                    self._pending_entry.add_event(TrialResumed(trial=trial_id))
                    return self._make_continue_answer(trial_id)
                return StopTrial(outcome=TrialPaused(trial=trial_id, reason=reason), save=True)
            case Stop() as stop:
                return StopTrial(outcome=make_finish_event(trial_id, stop), save=self._saves_at_end)
            case Exploit(reason=reason):
                return StopTrial(outcome=TrialPaused(trial=trial_id, reason=reason), save=False)
            case never:
                assert_never(never)

    def _make_continue_answer(self, trial_id: str) -> ContinueTraining:
        return ContinueTraining(milestone=self._policy.next_milestone(self._pending_entry.state.trial(trial_id)))

    def _send_after_write(self, trial_id: str, answer: ContinueTraining | StopTrial, step: int) -> None:
        self._pending_entry.run_after_forced_write(lambda: self._executor.send_answer(trial_id, answer, step))
