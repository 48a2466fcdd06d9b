"""Decide what follows a report and a failed attempt: journal the decision, and only then act on it.

The scheduler is asked by `SearchPolicy.decide`. `stop=` is decided in the trial's process (`runtime/session.py`);
people and budgets stop trials by `tuner/stop_requests.py`.
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

_TARGET_FAILS = (StoreUnavailable, StoreRefused, CommitUnknown)


class FailureHandler:
    """Applies the failure policy to the journal's state; trials to retry are added to `startable`."""

    def __init__(
        self, limits: SearchLimits, pending_entry: PendingEntry, stopping: Stopping, startable: deque[str], log: Log
    ) -> None:
        self._limits = limits
        self._pending_entry = pending_entry
        self._stopping = stopping
        self._startable = startable
        self._log = log
        self._lost: dict[str, tuple[int, int]] = {}  # lost attempts in a row, and the newest checkpoint then
        self._undecided: dict[str, Reason] = {}  # trials whose report lacked the metric, and the error
        running = (each for each in pending_entry.state.trials.values() if each.phase is Phase.RUNNING)
        self.has_trained = any(each.step for each in running)
        """Whether a step was trained in this run, or in an earlier one by an attempt elsewhere that outlived it."""
        self._unimportable = ""  # the first import that failed before anything was trained: it would in all trials

    def require_imported(self, ended: Experiment) -> Experiment:
        """Return the experiment, in which no trial runs any more.

        Raises:
            TrialFailed: this run of a search has trained nothing, since the trainable could not be loaded. No trial was
                given up: the next run tries again those that were begun.
        """
        if self._unimportable:
            raise TrialFailed(
                "nothing was trained, since the trainable could not be loaded where the trials run: correct it, and "
                f"start the search again under the same name. The first failure was in {self._unimportable}"
            )
        return ended

    def failed(self, trial: Trial, cause: Cause, error: BaseException | None = None) -> None:
        """Retry the trial of a failed attempt, which is logged, or give it up.

        Raises:
            StoreUnavailable, StoreRefused, CommitUnknown: the attempt failed by this error, and the budget of machine
                failures is spent. All trials share the target, so the search ends; its next run resumes this trial.
        """
        if isinstance(error, _TARGET_FAILS) and machines_spent(trial, self._limits.options.failure_policy):
            raise error
        if cause is Cause.IMPORT and trial.of_search and not self.has_trained:
            self._unimportable = self._unimportable or f"trial {trial.trial}: {first_line(trial.reason)}"
            self._stopping.ends = True
            return
        if not isinstance(verdict(trial, cause, self._limits.options.failure_policy), GiveUp | Resumable):
            name, why = f"trial {trial.trial}: " if trial.of_search else "", first_line(trial.reason)
            next_try = "the next run retries it" if self._stopping.ends else "it is retried"
            self._log.warning("%sattempt %d failed (%s), %s: %s", name, trial.attempt, cause, next_try, why)
        self.retry_or_give_up(trial.trial, cause)

    def retry_or_give_up(self, trial: str, cause: Cause) -> None:
        """Retry a trial from its newest good checkpoint while its retry budgets last; then give it up."""
        state = self._pending_entry.state.trial(trial)
        match verdict(state, cause, self._limits.options.failure_policy):
            case TryAgain() | Resumable():
                self._startable.append(trial)
            case Quarantine(sequence=sequence, reason=reason):
                name = f"trial {trial}: " if state.of_search else ""
                self._log.error("%sa checkpoint is quarantined: %s", name, first_line(reason))
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

        The journal does not hold this failure; the count is of this run. Raises what `failed` raises.
        """
        reason = make_reason("no-result") if error is None else f"{type(error).__name__}: {error}"
        newest = newest_checkpoint(self._pending_entry.state.trial(trial))
        saved = newest.sequence if newest else 0
        before, had = self._lost.get(trial, (0, saved))
        count = 1 if saved > had else before + 1
        self._lost[trial] = (count, saved)
        if count > self._limits.options.failure_policy.max_machine_failures:
            if isinstance(error, _TARGET_FAILS):
                raise error
            self.give_up(trial, Cause.MACHINE, make_reason("attempts-lost", count=count, error=reason))
        else:
            self._pending_entry.listener.lost(self._pending_entry.state.trial(trial), str(reason))
            self._startable.append(trial)

    def undecided(self, trial: str, error: BadMetric) -> Leave:
        """Return the answer to a trial about which the scheduler could not decide; `conclude_undecided` gives it up."""
        reason = self._undecided[trial] = make_reason("raised", text=str(error))
        errored = AttemptEnded(trial=trial, cause=Cause.BAD_METRIC, reason=reason)
        return Leave(outcome=errored, save=False)

    def conclude_undecided(self, trial: str) -> bool:
        """Give up a trial about which the scheduler could not decide; return whether `trial` is one."""
        why = self._undecided.pop(trial, None)
        if why is not None:
            self.give_up(trial, Cause.BAD_METRIC, why)
        return why is not None

    def give_up(self, trial: str, cause: Cause, reason: Reason) -> None:
        """Mark a trial as errored; end the experiment if `fail_fast` says so."""
        self._pending_entry.put(GaveUp(trial=trial, cause=cause, reason=reason))
        trials, fail_fast = self._pending_entry.state.trials, self._limits.options.fail_fast
        ends = errors_end_reason(trials[trial], trials.values(), fail_fast=fail_fast)
        if ends is not None:
            self._stopping.end(ends)


class Decisions:
    """Asks the policy about each report at a milestone; the answer is sent once the decision is journaled."""

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
        """Decide about the report of a trial that asks, and answer it."""
        try:
            answer = self._answer_to(name, self._decided(name, report))
        except BadMetric as error:
            answer = self._failure_handler.undecided(name, error)
        self._send(name, answer, report.step)

    def carry_out(self, name: str, decision: Decision, step: int) -> None:
        """Answer a trial at `step` by a decision that is journaled."""
        self._send(name, self._answer_to(name, decision), step)

    def decide_what_is_open(self, name: str) -> None:
        """Decide a milestone that was reported before the crash, without training it again."""
        trial = self._pending_entry.state.trial(name)
        milestone = self._policy.milestone(trial)
        if milestone is None or trial.step < milestone or trial.exploits is not None:
            return  # it has not reached it, or its weights are about to be replaced
        if trial.phase is not Phase.PENDING or not is_saved(trial):
            return
        try:
            answer = self._answer_to(name, self._decided(name, last_report(trial)))
        except BadMetric as error:
            self._failure_handler.undecided(name, error)
            self._failure_handler.conclude_undecided(name)
            return
        if isinstance(answer, Leave):
            self._pending_entry.put(answer.outcome)

    def _decided(self, name: str, report: StepReport) -> Decision:
        """Return the journaled decision if it was not carried out yet; else ask the scheduler, and journal it."""
        trial = self._pending_entry.state.trial(name)
        found = open_decision(trial)
        if found is not None and found.decision is not None:
            return found.decision
        decision = self._policy.decide(trial, report)
        self._pending_entry.put(Decided(trial=name, report=report, decision=decision))
        return decision

    def _answer_to(self, name: str, decision: Decision) -> Proceed | Leave:
        match decision:
            case Continue():
                return self._proceed(name)
            case Pause(reason=reason):
                if self._policy.schedule.resume_next() == name:  # no other trial needs the slot
                    self._pending_entry.put(Resumed(trial=name))
                    return self._proceed(name)
                return Leave(outcome=Paused(trial=name, reason=reason), save=True)
            case Stop() as stop:
                return Leave(outcome=finish_of(name, stop), save=self._saves_at_end)
            case Exploit(reason=reason):
                return Leave(outcome=Paused(trial=name, reason=reason), save=False)
            case never:
                assert_never(never)

    def _proceed(self, name: str) -> Proceed:
        return Proceed(milestone=self._policy.milestone(self._pending_entry.state.trial(name)))

    def _send(self, name: str, answer: Proceed | Leave, step: int) -> None:
        self._pending_entry.then(lambda: self._executor.answer(name, answer, step))
