"""What the running attempts of a search have reported: the one record in its process, and the live status of it.

A report reaches the search's process up to three times: as the newest one of an attempt on another machine, then in
the order of the steps as soon as its step is known, then in an event of the journal. It counts once.

The live status is an object on the target, for readers: the running trials of a journal's owner. No decision and no
resume uses it. While it searches, the owner writes it every few seconds as a new object, and deletes the one before it:
the cost does not depend on the number of steps. Its path contains the owner's term, so that owners never write one
another's objects, and readers ignore the object of an earlier owner. The owner deletes its last one when its trials
have ended; that of a killed owner stays, and its time says how old it is. The next owner deletes it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from prefect_tune.core.errors import JournalCorrupt, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status, with_report
from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Event,
    Finished,
    GaveUp,
    Opened,
    Owner,
    Paused,
    Reported,
    Started,
    events_in,
)
from prefect_tune.core.storage.documents import Document, read_newest, seal
from prefect_tune.core.storage.layout import JournalKey, delete_numbered
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import MAX_LIVE_PERIOD_SECONDS, StepReport, TrialId, Value


class RunCounts(NamedTuple):
    """What a run has done until now."""

    reports: int = 0
    steps: int = 0
    """Trained steps; those that an attempt repeats count again."""
    ended_attempts: int = 0


class RunningTrial(Value):
    """A running attempt of a trial, with its newest report, as the live status holds it."""

    trial: TrialId
    attempt: int
    began_at: str | None = None
    """The time of day; None if an earlier owner started the attempt."""
    host: str | None = None
    """The machine of its supervisor; None if an earlier owner started the attempt."""
    report: StepReport | None = None
    """None before its first step."""
    reported_at: str | None = None


@dataclass(frozen=True, slots=True)
class RunningAttemptsView:
    """The running attempts at one moment, with the state of the journal at that moment."""

    experiment: Experiment
    running: Mapping[str, RunningTrial]
    counts: RunCounts
    """Of this run."""

    def newest(self, trial: str) -> StepReport | None:
        """Return the newest report of a running attempt; None if there is none."""
        return self.running[trial].report if trial in self.running else None


class RunningAttempts:
    """Records starts, reports and ends of attempts, in the search's thread; `view` may be called from another one.

    The caller passes the times of day, as in the journal.
    """

    def __init__(self, experiment: Experiment, at: str) -> None:
        """Begin with the attempts that have outlived an earlier run of the search."""
        running = [each for each in experiment.trials.values() if each.status is Status.RUNNING]
        self._guard = threading.Lock()
        self._began_at = at
        self._experiment = experiment
        self._running = {each.trial: RunningTrial(trial=each.trial, attempt=each.attempt) for each in running}
        self._steps = {each.trial: each.step for each in running}  # of the last report in the order of the steps
        self._hosts: dict[str, str] = {}
        self._counts = RunCounts()

    @property
    def experiment(self) -> Experiment:
        """The state of the journal at this moment."""
        return self._experiment

    def applied(self, event: Event, experiment: Experiment, at: str) -> None:
        """Take in a journaled event and the state after it."""
        written_at = (event.at if isinstance(event, Absorbed) else None) or at
        with self._guard:
            self._experiment, counts = experiment, self._counts
            for each in events_in(event):
                self._receive(each, written_at)
            is_ours = isinstance(event, Absorbed) and experiment.trial(event.trial).search_term == experiment.term > 0
            if isinstance(event, Absorbed) and not is_ours and written_at < self._began_at:
                self._counts = counts  # what an earlier run trained

    def reported(self, trial: str, report: StepReport, at: str) -> None:
        """Take in a step's report as soon as the step is known to be trained."""
        with self._guard:
            self._reported(trial, report, at)

    def latest(self, trial: str, report: StepReport, at: str) -> None:
        """Take in the newest report of an attempt, before those that precede it."""
        with self._guard:
            self._renew(trial, report, at)

    def wrote(self, experiment: Experiment) -> None:
        """Take in the state as written: entries of guests may be in it."""
        with self._guard:
            self._experiment = experiment

    def view(self) -> RunningAttemptsView:
        """Return the attempts at this moment."""
        with self._guard:
            return RunningAttemptsView(self._experiment, dict(self._running), self._counts)

    def _receive(self, event: Event, at: str) -> None:
        match event:
            case Opened(trial=str(trial), owner=owner):
                self._hosts[trial] = owner.host
                self._end(trial)
            case Started():
                self._begin(event, at)
            case Reported(trial=trial, report=report):
                self._reported(trial, report, at)
            case AttemptEnded(trial=trial) | Finished(trial=trial) | GaveUp(trial=trial) | Paused(trial=trial):
                self._end(trial)
            case _:
                pass

    def _begin(self, event: Started, at: str) -> None:
        trial, owner = event.trial, self._experiment.owner
        host = self._hosts.get(trial) or (owner.host if owner else None)
        self._running[trial] = RunningTrial(trial=trial, attempt=event.attempt, began_at=at, host=host)
        self._steps[trial] = event.from_step

    def _reported(self, trial: str, report: StepReport, at: str) -> None:
        if trial in self._running and report.step > self._steps[trial]:
            self._renew(trial, report, at)
            self._steps[trial] = report.step
            self._counts = self._counts._replace(reports=self._counts.reports + 1)

    def _renew(self, trial: str, report: StepReport, at: str) -> None:
        attempt = self._running.get(trial)
        if attempt is not None and (attempt.report is None or report.step > attempt.report.step):
            self._running[trial] = attempt.model_copy(update={"report": report, "reported_at": at})
            # What an attempt of an earlier run trained before its first report here does not count.
            begin = self._steps[trial] if attempt.began_at else report.step
            steps = report.step - (attempt.report.step if attempt.report else begin)
            self._counts = self._counts._replace(steps=self._counts.steps + steps)

    def _end(self, trial: str) -> None:
        if self._running.pop(trial, None) is not None:
            self._counts = self._counts._replace(ended_attempts=self._counts.ended_attempts + 1)


class LiveStatus(Document):
    """The running trials of one owner at one moment."""

    format: Literal["prefect-tune/live-status"] = "prefect-tune/live-status"
    version: Literal[1] = 1
    term: int
    owner: Owner | None
    """Tells the owner from that of an earlier experiment of the same name, which was deleted."""
    number: int
    """Counts the objects of this owner, from 1."""
    at: str
    run_at: str | None = None
    """The same time by the clock of the run, which nobody sets; for the cost only."""
    period_seconds: Annotated[float, Field(gt=0, le=MAX_LIVE_PERIOD_SECONDS)]
    """The time until the owner writes the next one."""
    trials: tuple[RunningTrial, ...]


@dataclass(frozen=True, slots=True)
class ExperimentView:
    """An experiment for readers: the state of its journal, with the newest reports of its running trials."""

    experiment: Experiment
    as_of: str
    """The time of the live status or of the journal's last entry, the later one; empty if unknown."""
    live: LiveStatus | None = None
    """The live status of the journal's present owner; None if there is none."""

    @property
    def cost_until(self) -> str:
        """Until when the attempts have lasted, by the clock of their run where that is known; empty if unknown."""
        return (self.live.run_at if self.live is not None else None) or self.as_of

    def running(self, trial: str) -> RunningTrial | None:
        """Return the running attempt of a trial; None if it does not run, or if there is no live status."""
        return _attempts_in(self.live, self.experiment).get(trial)


def write_live_status(store: ObjectStore, key: JournalKey, status: LiveStatus) -> None:
    """Write `status`, and delete the one before it; the first one of an owner deletes those of earlier owners.

    Raises:
        InvalidInput: a report holds a value that JSON cannot represent.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed; the next write needs no repair.
    """
    path = key.live_status_path(status.term, status.number)
    store.put(path, seal(status))
    if status.number > 1:
        store.delete([key.live_status_path(status.term, status.number - 1)])
    else:
        delete_numbered(store, before=path)


def delete_live_status(store: ObjectStore, key: JournalKey, term: int) -> None:
    """Delete the live status of the owner of the term `term`, and those of earlier ones."""
    delete_numbered(store, before=key.live_status_path(term + 1, 0))


def newest_live_status(store: ObjectStore, key: JournalKey) -> LiveStatus | None:
    """Return the live status of the newest owner that has written one; None if there is none that can be read."""
    try:
        return read_newest(store, LiveStatus, key.live, JournalCorrupt)
    except (JournalCorrupt, UnknownVersion):
        return None  # the journal says everything else


def live_status_of(store: ObjectStore, experiment: Experiment) -> LiveStatus | None:
    """Return the live status of the experiment's present owner; None if there is none that can be read."""
    live = newest_live_status(store, experiment.key)
    return live if live and (live.term, live.owner) == (experiment.term, experiment.owner) else None


@dataclass(frozen=True, slots=True)
class LastKnown:
    """What the live status of an earlier owner has of the trials that run by the journal."""

    reports: Mapping[str, StepReport] = field(default_factory=dict)
    """By trial, its last report."""
    at: str | None = None
    """The time of that live status by the clock of its run; None if there is none."""


NOTHING_KNOWN = LastKnown()


def last_known_reports(store: ObjectStore, experiment: Experiment) -> LastKnown:
    """Return the last reports in the live status of an earlier owner: two requests if a trial runs."""
    runs = any(each.status is Status.RUNNING for each in experiment.trials.values())
    live = newest_live_status(store, experiment.key) if runs else None
    reports = {name: each.report for name, each in _attempts_in(live, experiment).items() if each.report}
    return LastKnown(reports, (live.run_at or live.at) if live else None)


def view_of(store: ObjectStore, experiment: Experiment, written_at: str) -> ExperimentView:
    """Return the view of an experiment whose last entry was written at `written_at`: two requests if a trial runs."""
    runs = any(each.status is Status.RUNNING for each in experiment.trials.values())
    live = live_status_of(store, experiment) if runs else None
    if live is None:
        return ExperimentView(experiment, written_at)
    trials = experiment.trials
    for name, each in _attempts_in(live, experiment).items():
        trials = trials.with_trial(with_report(trials[name], each.report))
    return ExperimentView(experiment.model_copy(update={"trials": trials}), max(live.at, written_at), live)


def _attempts_in(live: LiveStatus | None, experiment: Experiment) -> Mapping[str, RunningTrial]:
    """Return the attempts of `live` that run by the journal too, which may be newer, by their trials."""
    found = {each.trial: each for each in live.trials} if live is not None else {}
    known = ((each, experiment.trials.get(name)) for name, each in found.items())
    return {
        each.trial: each
        for each, trial in known
        if trial is not None and trial.status is Status.RUNNING and trial.attempt == each.attempt
    }
