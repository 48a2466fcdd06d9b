"""Who is asked: the search what to try next, the scheduler who goes on, and whether that is enough.

Told the same, they say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect_tune.core.events import Lesson
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.experiment_stoppers import End, NoMore, Tallies, Tally
from prefect_tune.core.schedulers.scheduler import Decision, Pause, Schedule, Stop, TrialReport
from prefect_tune.core.search.search import Exhausted, Proposals, Proposed, Suggestion
from prefect_tune.core.trial import Happening, Status, Trial
from prefect_tune.core.values import StepReport

__all__ = ["Council", "number_of", "standing_decision", "trial_id"]


def trial_id(number: int) -> str:
    """Return the name of the trial that was proposed as the `number`th, from 0."""
    return f"{number:05d}"


def number_of(trial: str) -> int:
    """Return which proposal a trial is."""
    return int(trial)


def standing_decision(trial: Trial) -> Happening | None:
    """Return what was decided last about a trial, if it was to leave, and whoever ran it died before it did."""
    last = trial.past[-1] if trial.past else None
    stands = last is not None and isinstance(last.decision, Stop | Pause)
    return last if stands and trial.status in (Status.PENDING, Status.RUNNING) else None


class Council:
    """The search, the scheduler and the stoppers of one experiment, kept at the journal's state.

    What happens is told by `hear`, now or after a resume: there is one way to get there.
    """

    def __init__(self, proposals: Proposals, schedule: Schedule, tallies: Sequence[Tally] = ()) -> None:
        self._tally = Tallies(tallies)
        self._proposals = proposals
        self._schedule = schedule
        self._proposed = 0
        self._suggested: int | None = None  # the search knows it already
        self._paused: set[str] = set()

    @property
    def proposed(self) -> int:
        """How many trials there are."""
        return self._proposed

    @property
    def saves_first(self) -> bool:
        """Whether the scheduler wants a checkpoint before it is asked."""
        return self._schedule.saves_first

    def learn(self, lessons: Iterable[Lesson]) -> int:
        """Tell the search of trials of other experiments, before all else; return how many are of use to it."""
        return sum(self._proposals.learn(each.config, each.report, stopped=each.stopped) for each in lessons)

    def recall(self, experiment: Experiment) -> None:
        """Tell both everything that the journal holds, in its order."""
        told = [(happening, trial) for trial in experiment.trials.values() for happening in trial.past]
        for happening, trial in sorted(told, key=lambda pair: pair[0].order):
            if happening.what == "decided" and happening.report is not None:
                self.decide(trial, happening.report)  # the answer is in the journal, and was acted on
            else:
                self.hear(trial, happening)
        for trial in experiment.trials.values():
            self.has_trained(trial)

    def has_trained(self, trial: Trial) -> None:
        """Hear that a trial has gone on."""
        self._tally.trained(trial.trial, trial.trained_seconds)

    def why_end(self) -> str | None:
        """Return why the experiment has had enough; None as long as it has not."""
        verdict = self._tally.verdict()
        return verdict.reason if isinstance(verdict, End) else None

    def suggest(self) -> Suggestion:
        """Return the next configuration; it is taken when the journal tells of the trial."""
        if isinstance(enough := self._tally.verdict(), NoMore):
            return Exhausted(reason=enough.reason)
        suggestion = self._proposals.suggest(self._proposed)
        if isinstance(suggestion, Proposed):
            self._suggested = self._proposed
        return suggestion

    def no_more(self) -> None:
        """Tell the scheduler that no trial can be added now."""
        self._schedule.exhausted()

    def decide(self, trial: Trial, report: StepReport) -> Decision:
        """Ask the scheduler what becomes of a trial at a milestone.

        Raises:
            BadMetric: the report lacks what the scheduler goes by.
        """
        self._proposals.reported(number_of(trial.trial), report)
        decision = self._schedule.decide(TrialReport(trial.trial, report))
        (self._paused.add if isinstance(decision, Pause) else self._paused.discard)(trial.trial)
        return decision

    def holds(self, trial: str) -> bool:
        """Whether the scheduler has paused a trial, and so will say what becomes of it.

        Not where an earlier owner had another one, or where the trial paused without a decision.
        """
        return trial in self._paused

    def milestone(self, trial: Trial) -> int | None:
        """Return the step at which the trial asks next: again, where it was decided that it leaves there."""
        standing = standing_decision(trial)
        if standing is not None and standing.report is not None:
            return standing.report.step
        asked = [each.report.step for each in trial.past if each.what == "decided" and each.report is not None]
        return self._schedule.milestone(trial.trial, asked[-1] if asked else 0)

    def resume_next(self) -> str | None:
        """Return the paused trial that is to have the next slot."""
        return self._schedule.resume_next()

    def stop_next(self) -> tuple[str, Stop] | None:
        """Return a paused trial that is not needed any more."""
        return self._schedule.stop_next()

    def is_waiting(self) -> bool:
        """Whether the scheduler wants no new trial now."""
        return self._schedule.is_waiting()

    def hear(self, trial: Trial, happening: Happening) -> None:
        """Hear what the journal has just been told, or was told once; `trial` is as it is afterwards."""
        number = number_of(trial.trial)
        match happening.what:
            case "added":
                self._added(trial, number)
            case "resumed":
                self._paused.discard(trial.trial)
                self._schedule.resumed(trial.trial)
            case "ended":
                self._paused.discard(trial.trial)
                self._schedule.ended(trial.trial)
                if happening.stopped:
                    self._proposals.stopped(number)
                self._proposals.ended(number, happening.report, failed=happening.failed)
                self._tally.ended(trial.trial, happening.report, failed=happening.failed)
            case "decided":
                pass  # `decide` was asked for it

    def _added(self, trial: Trial, number: int) -> None:
        self._tally.added(trial.trial)
        proposed = trial.proposed or trial.config
        if number == self._proposed:
            if self._suggested != number:
                self._proposals.recall(number, proposed)
            self._proposed += 1
        self._schedule.added(trial.trial, proposed)
