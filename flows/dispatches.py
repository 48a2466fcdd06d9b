"""What happens to an experiment becomes events of Prefect: which, about what, and how many at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID, uuid5

from prefect_tune.core.best import BestSoFar
from prefect_tune.core.events import Absorbed, Event, Reported, StopAsked, TrialAdded
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.experiment_stoppers import TimeBudget, TrialBudget, of_experiment
from prefect_tune.core.lookout import Allowance, Budget, Lookout, Patience
from prefect_tune.core.news import (
    BestImproved,
    CheckpointCommitted,
    ExperimentFinished,
    ExperimentStarted,
    ExperimentStopped,
    News,
    TrialAttemptEnded,
    TrialErrored,
    TrialExploited,
    TrialFinished,
    TrialNews,
    TrialPaused,
    TrialRestored,
    TrialStarted,
    news_of,
)
from prefect_tune.core.objective import Objective
from prefect_tune.core.standing import counted
from prefect_tune.core.stoppers import Stopper
from prefect_tune.core.trial import ENDED, Status, Trial
from prefect_tune.flows.assets import Notice, Place
from prefect_tune.flows.lineage import Lineage

__all__ = ["Dispatches", "Subject", "budgets_of"]

_AT_ONCE, _PER_SECOND = 100, 5
_BEST_EVERY_SECONDS = 30.0
_BEYOND_A_SYNC_SECONDS = 120.0


@dataclass(frozen=True)
class Subject:
    """What is told of."""

    place: Place
    objective: Objective | None = None
    budgets: Sequence[Budget] = ()
    sync_period: timedelta = timedelta(minutes=5)
    run: UUID | None = None
    """The flow run. What one run tells twice, since it was killed and retried in between, is the same event."""

    @property
    def patience(self) -> Patience:
        """How long something may take before somebody should look."""
        return Patience(for_the_journal=self.sync_period.total_seconds() + _BEYOND_A_SYNC_SECONDS)


class Dispatches:
    """Says for all that happens which events it is worth. Not for two threads at once; times are a clock's seconds.

    Events of trials are rationed: 100 at once and 5 a second in the long run; those beyond are counted and left
    out. What somebody may have to act on, and what is about the experiment, is always told.
    """

    def __init__(self, subject: Subject, experiment: Experiment, now: float) -> None:
        self._subject = subject
        self._place = subject.place
        self._best = BestSoFar(subject.objective, experiment)
        self._better: tuple[BestImproved, Experiment] | None = None
        self._told_best_at = now - _BEST_EVERY_SECONDS
        self._lineage = Lineage(subject.place)
        self._allowance = Allowance(_AT_ONCE, _PER_SECOND)
        self._untold = 0
        self._trained_seconds = sum(each.trained_seconds for each in experiment.trials.values())
        self._ended = sum(each.status in ENDED for each in experiment.trials.values())
        self.lookout = Lookout(now, subject.budgets, subject.patience)
        """Hears of reports directly."""
        for each in experiment.trials.values():
            if each.status is Status.RUNNING:  # an attempt that outlived its search
                self.lookout.started(each.trial, each.step, now)

    def begun(self, experiment: Experiment) -> Iterator[Notice]:
        """Return the event of a run that begins."""
        yield self._notice(ExperimentStarted(epoch=experiment.epoch, trials=counted(experiment)))

    def heard(self, event: Event, before: Experiment, after: Experiment, now: float) -> Iterator[Notice]:
        """Return the events that something that happened is worth."""
        name = getattr(event, "trial", None)
        if name is None or isinstance(event, StopAsked | TrialAdded):
            return
        was, trial = before.trials.get(name), after.trial(name)
        self._count(was, trial)
        for index, news in enumerate(news_of(event, after.name, was, trial)):
            self._look_after(news, trial, now)
            if news.is_urgent or self._allowance.take(_cost(news), now):
                yield self._notice(news, self._id_of(event, index))
                yield from self._made(news, trial)
            else:
                self._untold += 1
            self._compare(news, trial, after)
        if isinstance(event, Absorbed) and any(isinstance(each, Reported) for each in event.events):
            self.lookout.journaled(name, trial.step)
        yield from self._improved(now)

    def looked(self, now: float) -> Iterator[Notice]:
        """Return the events of what has gone on for too long by now."""
        for news in self.lookout.look(now, self._trained_seconds, self._ended):
            yield self._notice(news)
        yield from self._improved(now)

    def over(self, ending: News | None, experiment: Experiment, reason: str) -> Iterator[Notice]:
        """Return the last events: what is left to be told, and how the run ended.

        Args:
            ending: what it died of; None where it ended in order.
            experiment: as it stands now.
            reason: why it ended before there was nothing more to do; empty where that is not so.
        """
        yield from self._improved(None)
        counts = counted(experiment)
        if ending is not None:
            yield self._notice(ending)
        elif reason:
            yield self._notice(ExperimentStopped(reason=reason, trials=counts, untold=self._untold))
        else:
            yield self._notice(ExperimentFinished(trials=counts, best=self._best.trial, untold=self._untold))

    def _count(self, before: Trial | None, after: Trial) -> None:
        self._trained_seconds += after.trained_seconds - (before.trained_seconds if before else 0.0)
        self._ended += (after.status in ENDED) - (before is not None and before.status in ENDED)

    def _look_after(self, news: TrialNews, trial: Trial, now: float) -> None:
        match news:
            case TrialStarted() | TrialRestored():
                self.lookout.started(trial.trial, trial.step, now)
            case TrialAttemptEnded() | TrialErrored() | TrialFinished() | TrialPaused():
                self.lookout.ended(trial.trial)
            case CheckpointCommitted():
                self.lookout.committed(trial.trial, now)
            case _:
                pass

    def _made(self, news: TrialNews, trial: Trial) -> Iterator[Notice]:
        match news:
            case CheckpointCommitted():
                yield from self._lineage.committed(news)
            case TrialExploited(source=source):
                yield from self._lineage.exploited(trial, source)
            case _:
                pass

    def _compare(self, news: TrialNews, trial: Trial, experiment: Experiment) -> None:
        match news:
            case CheckpointCommitted():
                better = self._best.committed(trial)
            case TrialFinished():
                better = self._best.ended(trial)
            case _:
                return
        if better is not None:
            self._better = (better, experiment)

    def _improved(self, now: float | None) -> Iterator[Notice]:
        """Tell of the best model, where it is time; without a time it is."""
        if self._better is None or (now is not None and now - self._told_best_at < _BEST_EVERY_SECONDS):
            return
        news, experiment = self._better
        self._better, self._told_best_at = None, self._told_best_at if now is None else now
        yield self._notice(news)
        yield from self._lineage.best(news, experiment)

    def _notice(self, news: News, identity: UUID | None = None) -> Notice:
        said = {"target": self._place.target, "experiment": self._place.experiment, **news.payload()}
        if not isinstance(news, TrialNews):
            return Notice(news.name, self._place.resource, payload=said)
        related = [self._place.related, *self._lineage.related(news)]
        return Notice(news.name, self._place.trial_resource(news.trial), related, said, identity)

    def _id_of(self, event: Event, index: int) -> UUID | None:
        """What is in a trial's own journal has a number there."""
        if self._subject.run is None or not isinstance(event, Absorbed):
            return None
        return uuid5(self._subject.run, f"{self._place.uri}/{event.trial}/{event.number}/{index}")


def budgets_of(stopper: Stopper, *, time: timedelta | None, trial_count: int | None) -> Sequence[Budget]:
    """Return what a run may spend.

    Args:
        stopper: the experiment's.
        time: of the run.
        trial_count: of all trials, where the search knows it.
    """
    stoppers = of_experiment(stopper)
    counts = [each.trials for each in stoppers if isinstance(each, TrialBudget)]
    most = min([*counts, *([] if trial_count is None else [trial_count])], default=None)
    found = [Budget("training-time", each.time.total_seconds()) for each in stoppers if isinstance(each, TimeBudget)]
    found += [] if time is None else [Budget("time", time.total_seconds())]
    return [*found, *([] if most is None else [Budget("trials", most)])]


def _cost(news: TrialNews) -> int:
    """With the materialization that follows."""
    return 2 if isinstance(news, CheckpointCommitted | TrialExploited) else 1
