"""Decide about the reports of trials: ask the scheduler, journal its decision, and only then answer the trial.

The scheduler is asked by `SearchPolicy.decide`. `stop=` is decided in the trial's process (`runtime/session.py`);
people and budgets stop trials by `tuner/stop_requests.py`.
"""

from __future__ import annotations

from typing import assert_never

from prefect_tune.attempt.attempt import last_report
from prefect_tune.core.errors import BadMetric
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal_events import Decided, Paused, Resumed
from prefect_tune.core.messages.process_messages import Leave, Proceed
from prefect_tune.core.schedulers.base import Continue, Decision, Exploit, Pause, Stop
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import TrialExecutor
from prefect_tune.tuner.failure_handling import FailureHandler
from prefect_tune.tuner.pending_entry import PendingEntry
from prefect_tune.tuner.search_policy import SearchPolicy, finish_of, is_saved, open_decision


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
                if self._policy.resume_next() == name:  # no other trial needs the slot
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
