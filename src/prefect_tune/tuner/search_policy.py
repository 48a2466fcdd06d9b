"""The search algorithm, scheduler and stoppers of one experiment behind one interface, for the driver and the audit.

The same history gives the same proposals and decisions, so these objects are not stored. A resume creates new ones, and
replays the journal to them (`replay`) in the original order (`ReplayEvent.order`). Then they propose what the
interrupted run would have proposed. For this, each random number is a hash of the seed and of the number's purpose
(`core.seeded_random`); they read no clock, and get reports only at a decision or a trial's end, in the journal's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.stoppers import CompositeState, StopExperiment, StopperState, StopProposing
from prefect_tune.core.experiment.trial_transitions import Phase, ReplayEvent, Trial
from prefect_tune.core.journal_events import FinishKind, PriorTrial, TrialFinished, TrialRequeued
from prefect_tune.core.reasons import AnyReason, find_root_error, make_reason
from prefect_tune.core.schedulers.base import Decision, Exploit, Pause, Schedule, Stop, TrialReport
from prefect_tune.core.search.base import Exhausted, Proposed, SearchState, Suggestion
from prefect_tune.core.values import StepReport

ONLY_TRIAL = "trial"
"""The id of the trial of a single training."""


def format_trial_id(number: int) -> str:
    """Return the id of the trial with this proposal number, counted from 0."""
    return f"{number:05d}"


def parse_trial_number(trial_id: str) -> int:
    """Return the proposal number of a trial."""
    return 0 if trial_id == ONLY_TRIAL else int(trial_id)


def pending_decision(trial: Trial) -> ReplayEvent | None:
    """Return a trial's last decision if it is a stop or pause that has had no effect yet; None otherwise.

    The decision has had its effect once the trial has ended or paused; an owner may exit before that.
    """
    last_event = trial.policy_events[-1] if trial.policy_events else None
    is_stop_or_pause = last_event is not None and isinstance(last_event.decision, Stop | Pause)
    return last_event if is_stop_or_pause and trial.phase in (Phase.PENDING, Phase.RUNNING) else None


def make_retry_event(trial: Trial) -> TrialRequeued:
    """Return the event that requeues a failed trial with fresh retry budgets."""
    return TrialRequeued(trial=trial.id, reason=make_reason("retried", error=find_root_error(trial.end_reason)))


def make_finish_event(trial_id: str, stop: Stop) -> TrialFinished:
    """Return the event that ends a trial by the scheduler's decision."""
    kind = FinishKind.PRUNED if stop.early else FinishKind.ALL_STEPS
    return TrialFinished(trial=trial_id, reason=stop.reason, kind=kind)


def make_extension_event(trial: Trial) -> TrialRequeued:
    """Return the event that requeues a finished trial, because the present stop criterion would not have ended it."""
    return TrialRequeued(trial=trial.id, reason=make_reason("extended", step=trial.step))


class SearchPolicy:
    """The search, the scheduler and the stoppers of one experiment, in the state that follows from its journal.

    `record` receives the same events in a running search and in a replay, so that both reach the same state.
    """

    def __init__(
        self, search_state: SearchState, schedule: Schedule, stopper_states: Sequence[StopperState] = ()
    ) -> None:
        self._stopper_state = CompositeState(stopper_states)
        self._search_state = search_state
        self.schedule = schedule
        """The scheduler's state. It tells `Driver` whether to wait, and which trial to resume or stop next."""
        self.proposed_count = 0
        """The number of proposed trials in the journal, which is also the number of the next proposal."""
        self._suggested_number: int | None = None  # number of the last suggestion, which the search need not restore
        self._paused: set[str] = set()
        self._decided_steps: dict[str, int] = {}  # by trial: the step at which the scheduler last judged its weights

    def add_prior_trials(self, prior_trials: Iterable[PriorTrial]) -> int:
        """Pass other experiments' trials to the search, and return how many it accepts. Call this method first."""
        add_prior_trial = self._search_state.add_prior_trial
        return sum(add_prior_trial(trial.config, trial.report, stopped=trial.stopped) for trial in prior_trials)

    def replay(self, experiment: Experiment) -> None:
        """Replay the history of an experiment to the search, the scheduler and the stoppers, in the journal's order."""
        history = [(past_event, trial) for trial in experiment.trials.values() for past_event in trial.policy_events]
        for past_event, trial in sorted(history, key=lambda pair: pair[0].order):
            if past_event.kind == "decided" and past_event.report is not None:
                self.decide(trial, past_event.report)  # repeats the journaled decision, to restore the state
            else:
                self.record(trial, past_event)
        for trial in experiment.trials.values():
            self.record_training_time(trial.id, trial.trained_seconds)

    def record_training_time(self, trial_id: str, trained_seconds: float) -> None:
        """Record the present training time of a trial."""
        self._stopper_state.on_training_time(trial_id, trained_seconds)

    def end_reason(self) -> AnyReason | None:
        """Return why the stoppers end the experiment; None if they do not."""
        verdict = self._stopper_state.verdict()
        return verdict.reason if isinstance(verdict, StopExperiment) else None

    def suggest(self) -> Suggestion:
        """Return the search's next suggestion; a configuration counts as proposed once the journal has its trial."""
        if isinstance(verdict := self._stopper_state.verdict(), StopProposing):
            return Exhausted(reason=str(verdict.reason))
        suggestion = self._search_state.suggest(self.proposed_count)
        if isinstance(suggestion, Proposed):
            self._suggested_number = self.proposed_count
        return suggestion

    def decide(self, trial: Trial, report: StepReport) -> Decision:
        """Return the scheduler's decision about a trial at a milestone.

        Raises:
            BadMetric: the report lacks the metric that the scheduler compares.
        """
        self._search_state.on_report(parse_trial_number(trial.id), report)
        decision = self.schedule.decide(TrialReport(trial.id, report))
        exploited = decision.source if isinstance(decision, Exploit) else None
        self._decided_steps[trial.id] = report.step if exploited is None else self._decided_steps.get(exploited, 0)
        (self._paused.add if isinstance(decision, Pause) else self._paused.discard)(trial.id)
        return decision

    def resumes_without_scheduler(self, trial: Trial) -> bool:
        """Return whether to resume a paused trial at once, without waiting for the scheduler.

        True if the trial paused for an exploit, without a decision, or by a decision of an earlier owner's other
        scheduler. The present scheduler resumes or ends the trials for which it has decided a pause.
        """
        return trial.phase is Phase.PAUSED and (trial.pending_exploit is not None or trial.id not in self._paused)

    def next_milestone(self, trial: Trial) -> int | None:
        """Return the step of the trial's next decision; None if there is none.

        If the last decision was a stop or pause that has had no effect yet, return the step of that decision again.
        """
        last_decision = pending_decision(trial)
        if last_decision is not None and last_decision.report is not None:
            return last_decision.report.step
        return self.schedule.next_milestone(trial.id, self._decided_steps.get(trial.id, 0))

    def record(self, trial: Trial, past_event: ReplayEvent) -> None:
        """Record an event of the journal, new or replayed; `trial` is the trial's state after the event."""
        number = parse_trial_number(trial.id)
        match past_event.kind:
            case "added":
                proposed = trial.original_config or trial.config
                self._stopper_state.on_trial_added(trial.id)
                if number == self.proposed_count:
                    if self._suggested_number != number:
                        self._search_state.restore_trial(number, proposed)
                    self.proposed_count += 1
                self.schedule.on_trial_added(trial.id, proposed)
            case "resumed":
                self._paused.discard(trial.id)
                self.schedule.on_trial_resumed(trial.id)
            case "ended":
                self._paused.discard(trial.id)
                self.schedule.on_trial_ended(trial.id)
                if past_event.stopped:
                    self._search_state.on_trial_stopped(number)
                self._search_state.on_trial_ended(number, past_event.report, failed=past_event.failed)
                self._stopper_state.on_trial_ended(trial.id, past_event.report, failed=past_event.failed)
            case "decided":
                pass  # `decide` has recorded it
