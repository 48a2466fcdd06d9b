"""What is worth telling people and automations of an experiment, and what is said of it: the schema of our events.

The journal is the truth. News may get lost, and nothing is decided by them. Each kind is a class: its name is the
event's, its fields are the payload, its docstring says when. `docs/events.md` has all of them in one table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import ClassVar

from prefect_tune.core.events import (
    Absorbed,
    AttemptEnded,
    Cause,
    CheckpointRef,
    Cloned,
    Committed,
    Event,
    Finished,
    GaveUp,
    Paused,
    Quarantined,
    Requeued,
    Resumed,
    Started,
)
from prefect_tune.core.layout import TrialKey
from prefect_tune.core.trial import ENDED, Status, Trial, newest_checkpoint
from prefect_tune.core.values import Metrics, Value, first_line

__all__ = [
    "VERSION",
    "BestImproved",
    "BudgetNearlySpent",
    "CheckpointCommitted",
    "CheckpointCorrupt",
    "CheckpointQuarantined",
    "ExperimentFailed",
    "ExperimentFinished",
    "ExperimentStarted",
    "ExperimentStopped",
    "ExperimentSuperseded",
    "Lagging",
    "News",
    "TrialAttemptEnded",
    "TrialErrored",
    "TrialExploited",
    "TrialFinished",
    "TrialNews",
    "TrialPaused",
    "TrialRequeued",
    "TrialRestored",
    "TrialResumed",
    "TrialStale",
    "TrialStarted",
    "few",
    "news_of",
    "short",
]

VERSION = 1
"""Of the schema: a field that is renamed, or means something else, raises it; a new one does not."""
_TEXT = 500
_METRICS = 20


class News(Value):
    """Something that was heard of an experiment."""

    name: ClassVar[str]
    is_urgent: ClassVar[bool] = True
    """Whether it is told however much there is to tell."""

    def payload(self) -> dict[str, object]:
        """Return what the event says, as JSON, with the version of the schema."""
        return {"version": VERSION, **self.model_dump(mode="json")}


class TrialNews(News):
    """Something that was heard of one trial."""

    is_urgent: ClassVar[bool] = False
    trial: str


class TrialStarted(TrialNews):
    """An attempt begins, from nothing."""

    name: ClassVar[str] = "prefect-tune.trial.started"
    attempt: int


class TrialRestored(TrialNews):
    """An attempt begins, from the checkpoint of `step`."""

    name: ClassVar[str] = "prefect-tune.trial.restored"
    attempt: int
    step: int


class TrialPaused(TrialNews):
    """The trial has given its slot away."""

    name: ClassVar[str] = "prefect-tune.trial.paused"
    step: int
    reason: str


class TrialResumed(TrialNews):
    """The paused trial is to have a slot again."""

    name: ClassVar[str] = "prefect-tune.trial.resumed"
    step: int


class TrialExploited(TrialNews):
    """The trial goes on from a clone of another one's checkpoint, with another configuration."""

    name: ClassVar[str] = "prefect-tune.trial.exploited"
    step: int
    source: str
    """The other trial."""
    reason: str


class TrialAttemptEnded(TrialNews):
    """An attempt ended and the trial has not: it is tried again, unless `errored` follows."""

    name: ClassVar[str] = "prefect-tune.trial.attempt-ended"
    is_urgent: ClassVar[bool] = True
    attempt: int
    step: int
    cause: Cause
    message: str


class TrialRequeued(TrialNews):
    """A trial that had ended goes on: more steps, or another try."""

    name: ClassVar[str] = "prefect-tune.trial.requeued"
    reason: str


class TrialFinished(TrialNews):
    """The trial is done."""

    name: ClassVar[str] = "prefect-tune.trial.finished"
    step: int
    metrics: Metrics
    attempts: int
    wasted_steps: int
    reason: str


class TrialErrored(TrialNews):
    """The trial has failed, and is not tried again."""

    name: ClassVar[str] = "prefect-tune.trial.errored"
    is_urgent: ClassVar[bool] = True
    attempts: int
    step: int
    cause: Cause
    message: str


class TrialStale(TrialNews):
    """The trial trains, and has not reported for much longer than it ever took."""

    name: ClassVar[str] = "prefect-tune.trial.stale"
    is_urgent: ClassVar[bool] = True
    silent_seconds: float


class CheckpointCommitted(TrialNews):
    """A checkpoint's manifest was created: it can be restored."""

    name: ClassVar[str] = "prefect-tune.checkpoint.committed"
    attempt: int
    step: int
    sequence: int
    metrics: Metrics
    size_bytes: int
    manifest: str
    """Its path on the target."""
    parent: str | None
    """The name of the checkpoint before it."""


class CheckpointCorrupt(TrialNews):
    """A committed checkpoint could not be restored, its bytes being damaged or gone; the one before it is used."""

    name: ClassVar[str] = "prefect-tune.checkpoint.corrupt"
    is_urgent: ClassVar[bool] = True
    sequence: int
    step: int | None
    reason: str


class CheckpointQuarantined(TrialNews):
    """A checkpoint whose bytes are well is put aside: whoever loads it dies."""

    name: ClassVar[str] = "prefect-tune.checkpoint.quarantined"
    is_urgent: ClassVar[bool] = True
    sequence: int
    step: int | None
    reason: str


class ExperimentStarted(News):
    """A run begins with the experiment, or goes on with it."""

    name: ClassVar[str] = "prefect-tune.experiment.started"
    epoch: int
    """1 for the first run."""
    trials: Mapping[str, int]
    """How many there are by now, by status."""


class BestImproved(News):
    """No checkpoint and no finished trial was as good before; told at most every 30 s, and at the end."""

    name: ClassVar[str] = "prefect-tune.experiment.best-improved"
    trial: str
    step: int
    metrics: Metrics
    manifest: str | None
    """That of the checkpoint; none where that step was not saved."""


class BudgetNearlySpent(News):
    """80 % of a budget is spent: of `time` of this run, of `training-time` of all trials, or of `trials`."""

    name: ClassVar[str] = "prefect-tune.experiment.budget"
    what: str
    spent: float
    """In seconds, or trials that have ended."""
    budget: float


class Lagging(News):
    """What was trained is not safe: the `journal`, or the saves of a trial (`checkpoint`), lag behind."""

    name: ClassVar[str] = "prefect-tune.experiment.lag"
    what: str
    seconds: float
    trial: str | None


class ExperimentStopped(News):
    """This run ended before there was nothing more to do: the next one goes on."""

    name: ClassVar[str] = "prefect-tune.experiment.stopped"
    reason: str
    trials: Mapping[str, int]
    untold: int
    """How many events of trials were left out; see the rule on their rate."""


class ExperimentFinished(News):
    """There is nothing more to do."""

    name: ClassVar[str] = "prefect-tune.experiment.finished"
    trials: Mapping[str, int]
    best: str | None
    """The trial with the best model."""
    untold: int


class ExperimentSuperseded(News):
    """Another run has taken the experiment over, and this one ends."""

    name: ClassVar[str] = "prefect-tune.experiment.superseded"
    message: str


class ExperimentFailed(News):
    """This run ended with an error: what was committed is safe."""

    name: ClassVar[str] = "prefect-tune.experiment.failed"
    message: str


def news_of(event: Event, experiment: str, before: Trial | None, after: Trial) -> Iterator[TrialNews]:
    """Return what is news in something that happened to a trial, and in what it absorbs; mostly that is nothing.

    Args:
        event: of the journal.
        experiment: its name.
        before: the trial before it; None for a new one.
        after: the trial after it.
    """
    if isinstance(event, Absorbed):
        for each in event.events:
            yield from news_of(each, experiment, before, after)
        return
    status = before.status if before else Status.PENDING
    match event:
        case Started(trial=trial, attempt=attempt, from_sequence=None):
            yield TrialStarted(trial=trial, attempt=attempt)
        case Started(trial=trial, attempt=attempt, from_step=step):
            yield TrialRestored(trial=trial, attempt=attempt, step=step)
        case Committed(checkpoint=checkpoint):
            yield _committed(checkpoint, experiment, before, after)
        case Quarantined():
            yield _put_aside(event, before)
        case Cloned(trial=trial, source=source, reason=reason):
            yield TrialExploited(trial=trial, step=after.step, source=source.trial.trial, reason=short(reason))
        case AttemptEnded() | GaveUp() | Finished():
            yield from _ended(event, status, after)
        case Paused() | Resumed() | Requeued():
            yield from _waits(event, status, after)
        case _:
            pass


def _ended(event: AttemptEnded | GaveUp | Finished, status: Status, after: Trial) -> Iterator[TrialNews]:
    """What a trial and the search that asked for it both say is told once."""
    name, step, attempt = after.trial, after.step, after.attempt
    match event:
        case AttemptEnded(cause=cause, message=message):
            yield TrialAttemptEnded(trial=name, attempt=attempt, step=step, cause=cause, message=short(message))
        case GaveUp(cause=cause, message=message) if status is not Status.ERRORED:
            yield TrialErrored(trial=name, attempts=attempt, step=step, cause=cause, message=short(message))
        case Finished(reason=reason) if status is not Status.FINISHED:
            yield TrialFinished(
                trial=name,
                step=step,
                metrics=few(after.metrics),
                attempts=attempt,
                wasted_steps=after.wasted_steps,
                reason=short(reason),
            )
        case _:
            pass


def _waits(event: Paused | Resumed | Requeued, status: Status, after: Trial) -> Iterator[TrialNews]:
    match event:
        case Paused(reason=reason) if status is not Status.PAUSED:
            yield TrialPaused(trial=after.trial, step=after.step, reason=short(reason))
        case Resumed() if status is Status.PAUSED:
            yield TrialResumed(trial=after.trial, step=after.step)
        case Requeued(reason=reason) if status in ENDED:
            yield TrialRequeued(trial=after.trial, reason=short(reason))
        case _:
            pass


def _committed(checkpoint: CheckpointRef, experiment: str, before: Trial | None, after: Trial) -> CheckpointCommitted:
    parent = newest_checkpoint(before) if before else None
    folder = TrialKey(experiment=experiment, trial=after.trial)
    return CheckpointCommitted(
        trial=after.trial,
        attempt=after.attempt,
        step=checkpoint.step,
        sequence=checkpoint.sequence,
        metrics=few(checkpoint.metrics),
        size_bytes=checkpoint.size_bytes,
        manifest=folder.checkpoint_key(checkpoint).manifest_path,
        parent=folder.checkpoint_key(parent).name if parent else None,
    )


def _put_aside(event: Quarantined, before: Trial | None) -> TrialNews:
    known = before.checkpoints if before else ()
    step = next((each.step for each in known if each.sequence == event.sequence), None)
    kind = CheckpointQuarantined if event.kills else CheckpointCorrupt
    return kind(trial=event.trial, sequence=event.sequence, step=step, reason=short(event.reason))


def short(text: str) -> str:
    """Return the first line of a text, or the beginning of one that is long: not all of a traceback."""
    line = first_line(text)
    return line if len(line) <= _TEXT else f"{line[: _TEXT - 1]}…"


def few(metrics: Metrics) -> Metrics:
    """Return the metrics, or the first of many."""
    found = islice(metrics.items(), _METRICS)
    return {name: short(value) if isinstance(value, str) else value for name, value in found}
