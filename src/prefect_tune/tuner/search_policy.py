"""The search algorithm, scheduler and stoppers of one experiment behind one interface, which `Decisions` calls.

The same history gives the same proposals and decisions, so the state of the three is not stored. A resume creates them
anew and replays the journal to them (`replay`), in the order in which the first run passed the same events
(`PastEvent.order`); they then propose the same configurations as the interrupted run would have. Therefore they draw
random numbers only from a seed and a purpose (`core.seeded_random`), read no clock, and see of a trial only what the
journal holds: they get a report when it is journaled as a milestone, not when it arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.stoppers import End, NoMore, Tallies, Tally
from prefect_tune.core.experiment.trial_transitions import PastEvent, Phase, Trial, newest_checkpoint
from prefect_tune.core.journal_events import Finished, FinishKind, PriorTrial, Requeued
from prefect_tune.core.reasons import AnyReason, error_of, make_reason
from prefect_tune.core.schedulers.base import Decision, Exploit, Pause, Schedule, Stop, TrialReport
from prefect_tune.core.search.base import Exhausted, Proposals, Proposed, Suggestion
from prefect_tune.core.values import StepReport

ONLY_TRIAL = "trial"
"""The id of the trial of a single training."""


def trial_id(number: int) -> str:
    """Return the id of a search's trial with proposal number `number`, counted from 0."""
    return f"{number:05d}"


def number_of(trial: str) -> int:
    """Return the proposal number of a trial."""
    return 0 if trial == ONLY_TRIAL else int(trial)


def is_saved(trial: Trial) -> bool:
    """Return whether the newest checkpoint is of the last reported step, so that the next attempt starts there."""
    newest = newest_checkpoint(trial)
    return newest is not None and newest.step == trial.step


def open_decision(trial: Trial) -> PastEvent | None:
    """Return a trial's last decision if it is a stop or pause that is journaled without effect so far; else None.

    This happens when an owner dies between a decision and its effect.
    """
    last_event = trial.past[-1] if trial.past else None
    is_stop_or_pause = last_event is not None and isinstance(last_event.decision, Stop | Pause)
    return last_event if is_stop_or_pause and trial.phase in (Phase.PENDING, Phase.RUNNING) else None


def retry_of(trial: Trial) -> Requeued:
    """Return the event that requeues a failed trial with fresh retry budgets."""
    return Requeued(trial=trial.trial, reason=make_reason("retried", error=error_of(trial.end_reason)))


def finish_of(trial: str, stop: Stop) -> Finished:
    """Return the event that ends a trial by the scheduler's decision."""
    kind = FinishKind.PRUNED if stop.early else FinishKind.ALL_STEPS
    return Finished(trial=trial, reason=stop.reason, kind=kind)


def extension_of(trial: Trial) -> Requeued:
    """Return the event that requeues a finished trial that does not meet today's stop criterion."""
    return Requeued(trial=trial.trial, reason=make_reason("extended", step=trial.step))


class SearchPolicy:
    """The search, the scheduler and the stoppers of one experiment, in the state that follows from its journal.

    `record` gets every change, in a running search and in a replay, so that both reach the same state.
    """

    def __init__(self, proposals: Proposals, schedule: Schedule, stopper_states: Sequence[Tally] = ()) -> None:
        self._stopper_state = Tallies(stopper_states)
        self._proposals = proposals
        self.schedule = schedule
        """Called directly for questions about no single trial: whether it waits, which trial to resume or stop next."""
        self.proposed = 0
        """The number of trials that the journal holds."""
        self._suggested_number: int | None = None  # the number that `_proposals` itself proposed: needs no `recall`
        self._paused: set[str] = set()
        self._decision_steps: dict[str, int] = {}  # by trial: the step of the last decision about its weights

    def warm_start(self, prior_trials: Iterable[PriorTrial]) -> int:
        """Pass trials of other experiments to the search, before any other call; return how many it accepts."""
        return sum(self._proposals.learn(trial.config, trial.report, stopped=trial.stopped) for trial in prior_trials)

    def replay(self, experiment: Experiment) -> None:
        """Replay the history of an experiment to the search, the scheduler and the stoppers, in the journal's order."""
        history = [(past_event, trial) for trial in experiment.trials.values() for past_event in trial.past]
        for past_event, trial in sorted(history, key=lambda pair: pair[0].order):
            if past_event.what == "decided" and past_event.report is not None:
                self.decide(trial, past_event.report)  # the journal already has the decision
            else:
                self.record(trial, past_event)
        for trial in experiment.trials.values():
            self.note_training(trial.trial, trial.trained_seconds)

    def note_training(self, trial: str, trained_seconds: float) -> None:
        """Record the training time of a trial, which may have grown."""
        self._stopper_state.trained(trial, trained_seconds)

    def why_end(self) -> AnyReason | None:
        """Return why the stoppers end the experiment; None if they do not."""
        verdict = self._stopper_state.verdict()
        return verdict.reason if isinstance(verdict, End) else None

    def suggest(self) -> Suggestion:
        """Return the next configuration; it counts as proposed once the journal holds its trial."""
        if isinstance(verdict := self._stopper_state.verdict(), NoMore):
            return Exhausted(reason=str(verdict.reason))
        suggestion = self._proposals.suggest(self.proposed)
        if isinstance(suggestion, Proposed):
            self._suggested_number = self.proposed
        return suggestion

    def decide(self, trial: Trial, report: StepReport) -> Decision:
        """Return the scheduler's decision about a trial at a milestone.

        Raises:
            BadMetric: the report lacks the metric that the scheduler compares.
        """
        self._proposals.reported(number_of(trial.trial), report)
        decision = self.schedule.decide(TrialReport(trial.trial, report))
        exploited = decision.source if isinstance(decision, Exploit) else None
        self._decision_steps[trial.trial] = report.step if exploited is None else self._decision_steps.get(exploited, 0)
        (self._paused.add if isinstance(decision, Pause) else self._paused.discard)(trial.trial)
        return decision

    def holds(self, trial: str) -> bool:
        """Return whether the scheduler has paused a trial, and so will resume or stop it.

        False if an earlier owner's scheduler paused the trial, or if the trial paused without a decision.
        """
        return trial in self._paused

    def is_to_resume(self, trial: Trial) -> bool:
        """Return whether to resume a trial at once: its pause is for an exploit, or not by the scheduler."""
        return trial.phase is Phase.PAUSED and (trial.exploits is not None or not self.holds(trial.trial))

    def milestone(self, trial: Trial) -> int | None:
        """Return the step of the trial's next decision; None if there is none.

        If the last stop or pause has had no effect yet, this is its step again.
        """
        last_decision = open_decision(trial)
        if last_decision is not None and last_decision.report is not None:
            return last_decision.report.step
        return self.schedule.milestone(trial.trial, self._decision_steps.get(trial.trial, 0))

    def record(self, trial: Trial, past_event: PastEvent) -> None:
        """Record an event of the journal, new or replayed; `trial` is the state after the event."""
        number = number_of(trial.trial)
        match past_event.what:
            case "added":
                proposed = trial.proposed or trial.config
                self._stopper_state.added(trial.trial)
                if number == self.proposed:
                    if self._suggested_number != number:
                        self._proposals.recall(number, proposed)
                    self.proposed += 1
                self.schedule.added(trial.trial, proposed)
            case "resumed":
                self._paused.discard(trial.trial)
                self.schedule.resumed(trial.trial)
            case "ended":
                self._paused.discard(trial.trial)
                self.schedule.ended(trial.trial)
                if past_event.stopped:
                    self._proposals.stopped(number)
                self._proposals.ended(number, past_event.report, failed=past_event.failed)
                self._stopper_state.ended(trial.trial, past_event.report, failed=past_event.failed)
            case "decided":
                pass  # `decide` has recorded it
