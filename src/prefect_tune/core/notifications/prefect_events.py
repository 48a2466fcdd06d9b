"""The schema of the Prefect events that prefect-tune emits about an experiment and its trials.

The journal is the truth: these events may get lost, and no decision depends on them. Each kind is a class: `name` is
the event's name, the fields are its payload, the docstring says when it is emitted. `docs/events.md` lists them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import ClassVar

from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Status, Trial, newest_checkpoint
from prefect_tune.core.journal_events.experiment_events import (
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
from prefect_tune.core.models import Metrics, Value, first_line
from prefect_tune.core.storage.layout import TrialKey

VERSION = 1
"""The version of the schema: raised when a field is renamed or changes its meaning, not for a new field.

2: the keys of `trials` are the words of `Status`; 1 said `finished` for completed, pruned and some interrupted ones.
"""
_TEXT = 500
_METRICS = 20


class LifecycleEvent(Value):
    """An event about an experiment."""

    name: ClassVar[str]
    is_urgent: ClassVar[bool] = True
    """Whether it is emitted even when the rate limit is reached."""

    def payload(self) -> dict[str, object]:
        """Return the event's payload as JSON, with the version of the schema."""
        return {"version": VERSION, **self.model_dump(mode="json")}


class TrialLifecycleEvent(LifecycleEvent):
    """An event about one trial."""

    is_urgent: ClassVar[bool] = False
    trial: str


class UrgentTrialEvent(TrialLifecycleEvent):
    """An event about one trial that is emitted even when the rate limit is reached."""

    is_urgent: ClassVar[bool] = True


class TrialStarted(TrialLifecycleEvent):
    """An attempt begins, from nothing."""

    name: ClassVar[str] = "prefect-tune.trial.started"
    status: Status = Status.RUNNING
    attempt: int


class TrialRestored(TrialLifecycleEvent):
    """An attempt begins, from the checkpoint of `step`."""

    name: ClassVar[str] = "prefect-tune.trial.restored"
    status: Status = Status.RUNNING
    attempt: int
    step: int


class TrialPaused(TrialLifecycleEvent):
    """The trial has given up its slot."""

    name: ClassVar[str] = "prefect-tune.trial.paused"
    status: Status = Status.PAUSED
    step: int
    reason: str


class TrialResumed(TrialLifecycleEvent):
    """The scheduler gives the paused trial a slot again."""

    name: ClassVar[str] = "prefect-tune.trial.resumed"
    status: Status = Status.PENDING
    step: int


class TrialExploited(TrialLifecycleEvent):
    """The trial continues from a clone of another trial's checkpoint, with another configuration."""

    name: ClassVar[str] = "prefect-tune.trial.exploited"
    step: int
    source: str
    """The other trial."""
    reason: str


class TrialAttemptEnded(UrgentTrialEvent):
    """An attempt ended before its trial did: the trial is retried, unless `errored` follows."""

    name: ClassVar[str] = "prefect-tune.trial.attempt-ended"
    status: Status = Status.INTERRUPTED
    attempt: int
    step: int
    cause: Cause
    message: str


class TrialRequeued(TrialLifecycleEvent):
    """A trial that had ended continues: it gets more steps, or another try."""

    name: ClassVar[str] = "prefect-tune.trial.requeued"
    status: Status = Status.PENDING
    reason: str


class TrialFinished(TrialLifecycleEvent):
    """The trial has ended, and not by an error: completed, pruned, or interrupted by a stop request."""

    name: ClassVar[str] = "prefect-tune.trial.finished"
    status: Status
    step: int
    metrics: Metrics
    attempts: int
    wasted_steps: int
    wasted_at_least: bool
    reason: str


class TrialErrored(UrgentTrialEvent):
    """The trial has failed, and is not retried."""

    name: ClassVar[str] = "prefect-tune.trial.errored"
    status: Status = Status.ERRORED
    attempts: int
    step: int
    cause: Cause
    message: str


class TrialStale(UrgentTrialEvent):
    """The trial is training, and has not reported for an unusually long time."""

    name: ClassVar[str] = "prefect-tune.trial.stale"
    silent_seconds: float


class CheckpointCommitted(TrialLifecycleEvent):
    """A checkpoint's manifest was created: it can be restored."""

    name: ClassVar[str] = "prefect-tune.checkpoint.committed"
    attempt: int
    step: int
    sequence: int
    metrics: Metrics
    size_bytes: int
    manifest: str
    """The manifest's path on the target."""
    parent: str | None
    """The name of the checkpoint before it."""


class CheckpointCorruptFound(UrgentTrialEvent):
    """A committed checkpoint could not be restored: its bytes are damaged or missing. The one before it is used."""

    name: ClassVar[str] = "prefect-tune.checkpoint.corrupt"
    sequence: int
    step: int | None
    reason: str


class CheckpointQuarantined(UrgentTrialEvent):
    """A checkpoint is quarantined because attempts that load it die; its bytes are undamaged."""

    name: ClassVar[str] = "prefect-tune.checkpoint.quarantined"
    sequence: int
    step: int | None
    reason: str


class ExperimentStarted(LifecycleEvent):
    """A run starts the experiment, or resumes it."""

    name: ClassVar[str] = "prefect-tune.experiment.started"
    term: int
    """The number of the owner: 1 for the first run."""
    trials: Mapping[str, int]
    """The number of trials by status."""


class BestImproved(LifecycleEvent):
    """A checkpoint or an ended trial is better than all before; emitted at most every 30 s, and at the end."""

    name: ClassVar[str] = "prefect-tune.experiment.best-improved"
    trial: str
    step: int
    metrics: Metrics
    manifest: str | None
    """The path of the checkpoint's manifest; None where that step was not saved."""


class BudgetNearlySpent(LifecycleEvent):
    """80 % of a budget is spent: of `time` of this run, of `training-time` of all trials, or of `trials`."""

    name: ClassVar[str] = "prefect-tune.experiment.budget"
    what: str
    spent: float
    """Seconds, or the number of trials that have ended."""
    budget: float


class SyncLagged(LifecycleEvent):
    """Training is ahead of what is stored: the `journal`, or a trial's saves (`checkpoint`), lag behind."""

    name: ClassVar[str] = "prefect-tune.experiment.lag"
    what: str
    seconds: float
    trial: str | None


class ExperimentStopped(LifecycleEvent):
    """This run ended before the experiment was finished; the next run continues it."""

    name: ClassVar[str] = "prefect-tune.experiment.stopped"
    reason: str
    trials: Mapping[str, int]
    untold: int
    """The number of events of trials that the rate limit left out."""


class ExperimentFinished(LifecycleEvent):
    """The experiment is finished: no trial is left to train."""

    name: ClassVar[str] = "prefect-tune.experiment.finished"
    trials: Mapping[str, int]
    best: str | None
    """The trial with the best model."""
    untold: int


class ExperimentSuperseded(LifecycleEvent):
    """Another run has taken the experiment over, and this one ends."""

    name: ClassVar[str] = "prefect-tune.experiment.superseded"
    message: str


class ExperimentFailed(LifecycleEvent):
    """This run ended with an error; committed checkpoints are kept."""

    name: ClassVar[str] = "prefect-tune.experiment.failed"
    message: str


def lifecycle_events_of(
    event: Event, experiment: str, before: Trial | None, after: Trial
) -> Iterator[TrialLifecycleEvent]:
    """Yield the events to emit for a journal event of a trial, and for those that it absorbs; for most, there are none.

    Args:
        event: the journal's event.
        experiment: the experiment's name.
        before: the trial before it; None for a new one.
        after: the trial after it.
    """
    if isinstance(event, Absorbed):
        for each in event.events:
            yield from lifecycle_events_of(each, experiment, before, after)
        return
    phase = before.phase if before else Phase.PENDING
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
            yield from _ended(event, phase, after)
        case Paused() | Resumed() | Requeued():
            yield from _waits(event, phase, after)
        case _:
            pass


def _ended(event: AttemptEnded | GaveUp | Finished, phase: Phase, after: Trial) -> Iterator[TrialLifecycleEvent]:
    """Yield the event of an end once, where both the trial's journal and the experiment's record that end."""
    name, step, attempt = after.trial, after.step, after.attempt
    match event:
        case AttemptEnded(cause=cause, message=message):
            yield TrialAttemptEnded(trial=name, attempt=attempt, step=step, cause=cause, message=short(message))
        case GaveUp(cause=cause, message=message) if phase is not Phase.ERRORED:
            yield TrialErrored(trial=name, attempts=attempt, step=step, cause=cause, message=short(message))
        case Finished(reason=reason) if phase is not Phase.FINISHED:
            yield TrialFinished(
                trial=name,
                status=after.status,
                step=step,
                metrics=few(after.metrics),
                attempts=attempt,
                wasted_steps=after.wasted_steps,
                wasted_at_least=after.wasted_at_least,
                reason=short(reason),
            )
        case _:
            pass


def _waits(event: Paused | Resumed | Requeued, phase: Phase, after: Trial) -> Iterator[TrialLifecycleEvent]:
    match event:
        case Paused(reason=reason) if phase is not Phase.PAUSED:
            yield TrialPaused(trial=after.trial, step=after.step, reason=short(reason))
        case Resumed() if phase is Phase.PAUSED:
            yield TrialResumed(trial=after.trial, step=after.step)
        case Requeued(reason=reason) if phase in ENDED:
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


def _put_aside(event: Quarantined, before: Trial | None) -> TrialLifecycleEvent:
    known = before.checkpoints if before else ()
    step = next((each.step for each in known if each.sequence == event.sequence), None)
    kind = CheckpointQuarantined if event.kills else CheckpointCorruptFound
    return kind(trial=event.trial, sequence=event.sequence, step=step, reason=short(event.reason))


def short(text: str) -> str:
    """Return the first line of a text, cut to 500 characters."""
    line = first_line(text)
    return line if len(line) <= _TEXT else f"{line[: _TEXT - 1]}…"


def few(metrics: Metrics) -> Metrics:
    """Return the first 20 metrics, with texts made `short`."""
    found = islice(metrics.items(), _METRICS)
    return {name: short(value) if isinstance(value, str) else value for name, value in found}
