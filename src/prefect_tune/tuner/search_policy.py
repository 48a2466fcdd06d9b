"""The search algorithm, scheduler and stoppers of one experiment, behind one interface; `Decisions` asks it.

The same history gives the same proposals and decisions, so none of the three has a state that is stored. A resume
creates them anew and replays the journal to them (`replay`), in the order in which the first run passed the same events
(`PastEvent.order`): what they then propose is what the interrupted run would have proposed. For this to hold, they draw
randomness only from a seed and a purpose (`core.seeded_random`), read no clock, and learn of a trial only what the
journal holds: a report reaches them when it is journaled as a milestone, never when it arrives.
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
    """Whether the newest checkpoint is of the last reported step, so that the next attempt starts there."""
    newest = newest_checkpoint(trial)
    return newest is not None and newest.step == trial.step


def open_decision(trial: Trial) -> PastEvent | None:
    """Return the last decision of a trial if it is a stop or pause that was journaled and not carried out; else None.

    This happens when an owner dies between the decision and its effect.
    """
    last = trial.past[-1] if trial.past else None
    stands = last is not None and isinstance(last.decision, Stop | Pause)
    return last if stands and trial.phase in (Phase.PENDING, Phase.RUNNING) else None


def retry_of(trial: Trial) -> Requeued:
    """Return the event with which a trial that has failed gets fresh retry budgets, and is trained again."""
    return Requeued(trial=trial.trial, reason=make_reason("retried", error=error_of(trial.end_reason)))


def finish_of(trial: str, stop: Stop) -> Finished:
    """Return the event with which the scheduler's decision ends a trial."""
    kind = FinishKind.PRUNED if stop.early else FinishKind.ALL_STEPS
    return Finished(trial=trial, reason=stop.reason, kind=kind)


def extension_of(trial: Trial) -> Requeued:
    """Return the event with which a finished trial that does not meet today's stop criterion is trained further."""
    return Requeued(trial=trial.trial, reason=make_reason("extended", step=trial.step))


class SearchPolicy:
    """The search, the scheduler and the stoppers of one experiment, in the state that its journal implies.

    `record` notes every change, in a running search and in a replay, so that both reach the same state.
    """

    def __init__(self, proposals: Proposals, schedule: Schedule, tallies: Sequence[Tally] = ()) -> None:
        self._tally = Tallies(tallies)
        self._proposals = proposals
        self.schedule = schedule
        """Asked directly for what it decides about no single trial: whether it waits, which paused trial is next."""
        self.proposed = 0
        """The number of trials that the journal holds."""
        self._suggested: int | None = None  # the search itself proposed it: no `recall` needed
        self._paused: set[str] = set()
        self._decided: dict[str, int] = {}  # the step of each trial's last decision, in the history of its weights

    def warm_start(self, prior: Iterable[PriorTrial]) -> int:
        """Pass trials of other experiments to the search, before anything else; return how many it accepts."""
        return sum(self._proposals.learn(each.config, each.report, stopped=each.stopped) for each in prior)

    def replay(self, experiment: Experiment) -> None:
        """Replay the history of an experiment to the search, the scheduler and the stoppers, in the journal's order."""
        history = [(past_event, trial) for trial in experiment.trials.values() for past_event in trial.past]
        for past_event, trial in sorted(history, key=lambda pair: pair[0].order):
            if past_event.what == "decided" and past_event.report is not None:
                self.decide(trial, past_event.report)  # the decision itself is in the journal already
            else:
                self.record(trial, past_event)
        for trial in experiment.trials.values():
            self.note_training(trial.trial, trial.trained_seconds)

    def note_training(self, trial: str, trained_seconds: float) -> None:
        """Record the training time of a trial, which may have trained further."""
        self._tally.trained(trial, trained_seconds)

    def why_end(self) -> AnyReason | None:
        """Return why the stoppers end the experiment; None as long as they do not."""
        verdict = self._tally.verdict()
        return verdict.reason if isinstance(verdict, End) else None

    def suggest(self) -> Suggestion:
        """Return the next configuration; it counts as proposed once the journal holds its trial."""
        if isinstance(enough := self._tally.verdict(), NoMore):
            return Exhausted(reason=str(enough.reason))
        suggestion = self._proposals.suggest(self.proposed)
        if isinstance(suggestion, Proposed):
            self._suggested = self.proposed
        return suggestion

    def decide(self, trial: Trial, report: StepReport) -> Decision:
        """Return the scheduler's decision about a trial at a milestone.

        Raises:
            BadMetric: the report lacks the metric that the scheduler compares.
        """
        self._proposals.reported(number_of(trial.trial), report)
        decision = self.schedule.decide(TrialReport(trial.trial, report))
        took_over = decision.source if isinstance(decision, Exploit) else None
        self._decided[trial.trial] = report.step if took_over is None else self._decided.get(took_over, 0)
        (self._paused.add if isinstance(decision, Pause) else self._paused.discard)(trial.trial)
        return decision

    def holds(self, trial: str) -> bool:
        """Whether the scheduler has paused a trial, and so will resume or stop it.

        False if an earlier owner's scheduler paused the trial, or if it paused without a decision.
        """
        return trial in self._paused

    def is_to_resume(self, trial: Trial) -> bool:
        """Whether a trial is paused, and is to be resumed at once: to exploit another, or not held by the scheduler."""
        return trial.phase is Phase.PAUSED and (trial.exploits is not None or not self.holds(trial.trial))

    def milestone(self, trial: Trial) -> int | None:
        """Return the step at which the trial next asks for a decision; None if it never does.

        After a stop or pause that was not carried out, this is the step of that decision again.
        """
        found = open_decision(trial)
        if found is not None and found.report is not None:
            return found.report.step
        return self.schedule.milestone(trial.trial, self._decided.get(trial.trial, 0))

    def record(self, trial: Trial, past_event: PastEvent) -> None:
        """Record an event of the journal, new or replayed; `trial` is its state after the event."""
        number = number_of(trial.trial)
        match past_event.what:
            case "added":
                proposed = trial.proposed or trial.config
                self._tally.added(trial.trial)
                if number == self.proposed:
                    if self._suggested != number:
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
                self._tally.ended(trial.trial, past_event.report, failed=past_event.failed)
            case "decided":
                pass  # `decide` has recorded it
