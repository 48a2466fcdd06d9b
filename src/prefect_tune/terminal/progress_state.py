"""The state of the live progress view, updated from the events and reports of a running search."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import ranked
from prefect_tune.core.experiment.trial import status_label
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Status, Trial, with_report
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Decided,
    Event,
    Finished,
    GaveUp,
    Quarantined,
    Requeued,
    Started,
    events_in,
)
from prefect_tune.core.messages.live_status import AttemptTimes, RunningAttempts
from prefect_tune.core.schedulers.base import Exploit
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.shown_text import first_line
from prefect_tune.core.values import StepReport
from prefect_tune.terminal.time_left import SearchEstimate, seconds_left

_NOTES = 50
_ERRORS = 5
_RATE_OVER = timedelta(seconds=15)
_TOO_EARLY = timedelta(seconds=1)


@dataclass(frozen=True)
class Note:
    """An event of a trial, in a few words."""

    at: datetime
    trial: str
    text: str
    is_bad: bool = False


@dataclass(frozen=True)
class ProgressState:
    """A running search at one moment."""

    outlook: SearchEstimate
    elapsed: timedelta
    counts: Mapping[Status, int]
    reports_per_second: float = 0.0
    left: timedelta | None = None
    """Estimated time left, from the seconds per step of this run and the slots; None once the search ends early."""
    may_take_longer: bool = False
    """Whether trials are paused, and it is unknown how many of them are resumed: `left` counts none."""
    rungs: Mapping[int, int] = field(default_factory=dict)
    """How many trials the scheduler has judged, by step."""
    running: Sequence[Trial] = ()
    """Running trials with their newest reports, in the order of proposal."""
    others: Sequence[Trial] = ()
    """Trials that do not run and can be compared, the best first."""
    best: Trial | None = None
    notes: Sequence[Note] = ()
    """The last events, oldest first."""
    errored: Sequence[Trial] = ()
    """The first trials that have errored."""
    share: float | None = None
    """The share of the training that is done, from 0 to 1; None if the number of trials is unknown."""
    ended_because: str = ""
    """Why the search ends early; empty while it does not."""
    lacking_count: int = 0
    """The number of completed trials that cannot be compared: their last report lacks a metric of the search."""
    has_trained: bool = True
    """Whether this run has started an attempt; if not, every trial had ended before it."""


class ProgressTracker:
    """Adds what the table shows to the record of attempts: notes, rungs, rates. `state` may be called in any thread.

    The caller passes the times: seconds of a monotonic clock, and the time of day for notes.
    """

    def __init__(self, attempts: RunningAttempts, outlook: SearchEstimate, now: float) -> None:
        """Args: attempts: of the search; each event is in it before it is passed to `applied`."""
        self._attempts = attempts
        self._outlook = outlook
        self._began = now
        self._guard = threading.Lock()
        self._rungs = Counter(
            each.report.step
            for trial in attempts.experiment.trials.values()
            for each in trial.past
            if each.report
            if each.what == "decided"
        )
        self._notes: deque[Note] = deque(maxlen=_NOTES)
        self._rates: deque[tuple[float, int]] = deque([(now, 0)])

    def applied(self, event: Event, experiment: Experiment, at: datetime) -> None:
        """Take in a journaled event and the state after it."""
        with self._guard:
            for each in events_in(event):
                if isinstance(each, Decided):
                    self._rungs[each.report.step] += 1
                if (note := _note_of(each, at, experiment)) is not None:
                    self._notes.append(note)

    # ----------------------------------------------------------------------------------------------------- reading

    def state(self, now: float) -> ProgressState:
        """Return the current progress; takes a few microseconds per trial."""
        with self._guard:
            notes, rungs = tuple(self._notes), dict(self._rungs)
        attempts = self._attempts.view()
        experiment = attempts.experiment
        trials = list(experiment.trials.values())
        outlook, elapsed = self._outlook, timedelta(seconds=now - self._began)
        objective = outlook.objective
        left = None if experiment.ends else self._left(now, trials, attempts.times)
        may_resume = bool(outlook.pauses) or any(each.phase is Phase.PAUSED for each in trials)
        newest = [
            with_report(each, attempts.newest(each.trial)) if each.phase is Phase.RUNNING else each for each in trials
        ]
        best_first = _best_first(newest, objective)
        others = [each for each in best_first if each.phase is not Phase.RUNNING]
        counts = Counter(each.status for each in trials)
        compared = sum(each.status is Status.COMPLETED for each in others)
        return ProgressState(
            outlook=outlook,
            elapsed=elapsed,
            counts=counts,
            reports_per_second=self._rate(now, attempts.report_count),
            left=left,
            may_take_longer=may_resume and left != self._budget_left(now),
            rungs=dict(sorted(rungs.items())),
            running=[each for each in newest if each.phase is Phase.RUNNING],
            others=others,
            best=next(iter(best_first), None),
            notes=notes,
            errored=[each for each in trials if each.status is Status.ERRORED][:_ERRORS],
            share=share_of_search(trials, attempts.newest, outlook),
            ended_because=experiment.ends,
            lacking_count=counts[Status.COMPLETED] - compared if objective else 0,
            has_trained=bool(attempts.times),
        )

    def _rate(self, now: float, reports: int) -> float:
        while len(self._rates) > 1 and now - self._rates[0][0] > _RATE_OVER.total_seconds():
            self._rates.popleft()
        since, before = self._rates[0]
        self._rates.append((now, reports))
        return (reports - before) / (now - since) if now > since else 0.0

    def _left(
        self, now: float, trials: Sequence[Trial], attempts: Mapping[str, Sequence[AttemptTimes]]
    ) -> timedelta | None:
        """Return the time that the remaining steps take, or until the time budget ends if that is sooner."""
        budget = self._budget_left(now)
        if now - self._began < _TOO_EARLY.total_seconds():
            return budget
        try:
            seconds = seconds_left(self._outlook, trials, attempts, now)
            left = budget if seconds is None else timedelta(seconds=seconds)
        except OverflowError:  # so large a number of steps is no limit: something else ends the search
            return budget
        return left if left is None or budget is None else min(left, budget)

    def _budget_left(self, now: float) -> timedelta | None:
        time = self._outlook.time
        return None if time is None else max(timedelta(0), time - timedelta(seconds=now - self._began))


def _best_first(trials: Sequence[Trial], objective: Objective | None) -> Sequence[Trial]:
    """Return the comparable trials, the best first; without an objective, the last ones that ended."""
    if objective is None:
        return [each for each in reversed(trials) if each.phase in ENDED]
    return [each for each, _ in ranked(trials, objective)]


def share_of_search(
    trials: Collection[Trial], newest: Callable[[str], StepReport | None], outlook: SearchEstimate
) -> float | None:
    """Return the share of the search's training that is done; None if its number of trials is unknown."""
    if outlook.trial_count is None:
        return None
    done = sum(share_of_trial(each, newest(each.trial), outlook) for each in trials)
    return min(1.0, done / max(1, outlook.trial_count, len(trials)))


def share_of_trial(trial: Trial, report: StepReport | None, outlook: SearchEstimate) -> float:
    """Return the share of the trial's training that is done; a paused one counts as done unless all are resumed."""
    if trial.phase in ENDED or (trial.phase is Phase.PAUSED and not outlook.resumes_paused):
        return 1.0
    step, steps = max(trial.step, report.step if report else 0), next(iter(outlook.pauses), None) or outlook.step_count
    return min(1.0, step / steps) if steps else 0.0


def _note_of(event: Event, at: datetime, experiment: Experiment) -> Note | None:
    match event:
        case Finished(trial=trial, reason=reason):
            ended = experiment.trial(trial)
            return Note(at, trial, f"{status_label(ended.status, ended.step)}: {first_line(reason)}")
        case GaveUp(trial=trial, message=message):
            return Note(at, trial, f"errored: {first_line(message)}", is_bad=True)
        case AttemptEnded(trial=trial, cause=cause, message=message):
            return Note(at, trial, f"attempt ended: {cause}: {first_line(message)}", is_bad=True)
        case Started(trial=trial, attempt=attempt, from_step=step) if attempt > 1:
            return Note(at, trial, f"attempt {attempt}, from step {step}")
        case Quarantined(trial=trial, reason=reason):
            return Note(at, trial, f"a checkpoint is quarantined: {first_line(reason)}", is_bad=True)
        case Requeued(trial=trial, reason=reason):
            return Note(at, trial, f"resumes: {first_line(reason)}")
        case Decided(trial=trial, decision=Exploit(source=source)):
            return Note(at, trial, f"exploits {source}")
        case _:
            return None
