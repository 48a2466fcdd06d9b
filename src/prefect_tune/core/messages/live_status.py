"""The live status of a search: an object on the target, for readers, with the running trials of a journal's owner.

No decision and no resume uses it. While it searches, the owner writes it every few seconds as a new object, and deletes
the one before it: the cost does not depend on the number of steps. Its path contains the owner's term, so that owners
never write one another's objects, and readers ignore the object of an earlier owner. The owner deletes its last one
when its trials have ended; that of a killed owner stays, and its time says how old it is. The next owner deletes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from prefect_tune.core.errors import JournalCorrupt, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status, with_report
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.storage.documents import Document, read_newest, seal
from prefect_tune.core.storage.layout import JournalKey, delete_numbered
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import MAX_LIVE_PERIOD_SECONDS, StepReport, TrialId, Value


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
