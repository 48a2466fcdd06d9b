"""Trial transitions: the table of legal changes of phase, and the pure function that applies an event to a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, assert_never

from prefect_tune.core.errors import IllegalTransition
from prefect_tune.core.experiment.trial import (
    ENDED,
    PastEvent,
    Phase,
    Status,
    Trial,
    is_acceptable,
    is_collectable,
    is_held,
    is_live,
    is_overtaken,
    is_quarantined,
    live_keys,
    newest_checkpoint,
    newest_key,
    parent_of_next,
    reused_from,
    with_report,
)
from prefect_tune.core.journal_events import (
    Adopted,
    AttemptEnded,
    Cause,
    CheckpointRef,
    Cloned,
    Committed,
    Decided,
    Finished,
    Forked,
    ForkedTrial,
    GaveUp,
    Launched,
    OneTrialsEvent,
    OutboxClosed,
    Paused,
    Pinned,
    Quarantined,
    QuarantinedCheckpoint,
    Received,
    Reported,
    Requeued,
    Resumed,
    Retired,
    SlotFreed,
    Started,
    Writer,
)
from prefect_tune.core.reasons import AnyReason, make_reason
from prefect_tune.core.schedulers.base import Exploit
from prefect_tune.core.usage_records import AttemptRecord, AttemptUse, PhaseSeconds, slot_freed
from prefect_tune.core.values import StepReport

__all__ = [
    "ENDED",
    "NEXT",
    "PastEvent",
    "Phase",
    "Status",
    "Trial",
    "after",
    "is_acceptable",
    "is_collectable",
    "is_held",
    "is_live",
    "is_overtaken",
    "is_quarantined",
    "live_keys",
    "newest_checkpoint",
    "newest_key",
    "parent_of_next",
    "reused_from",
    "with_adopted",
    "with_fork",
    "with_report",
]

# The only place where phases change. An event that is not here changes none.
NEXT: Mapping[tuple[Phase, type[OneTrialsEvent | Forked]], Phase] = {
    (Phase.PENDING, Started): Phase.RUNNING,
    (Phase.RUNNING, AttemptEnded): Phase.PENDING,
    (Phase.RUNNING, Finished): Phase.FINISHED,
    (Phase.PENDING, Finished): Phase.FINISHED,
    (Phase.RUNNING, GaveUp): Phase.ERRORED,
    (Phase.PENDING, GaveUp): Phase.ERRORED,
    (Phase.FINISHED, GaveUp): Phase.ERRORED,  # it ended before its reports were found to be unusable
    (Phase.PAUSED, GaveUp): Phase.ERRORED,  # it ended because they were found unusable
    (Phase.ERRORED, Requeued): Phase.PENDING,
    (Phase.FINISHED, Requeued): Phase.PENDING,
    (Phase.PENDING, Requeued): Phase.PENDING,  # with fresh budgets
    (Phase.RUNNING, Paused): Phase.PAUSED,
    (Phase.PAUSED, Resumed): Phase.PENDING,
    (Phase.PAUSED, Finished): Phase.FINISHED,
    # The scheduler decides about a milestone that was reported before the attempt ended, or goes on at once.
    (Phase.PENDING, Paused): Phase.PAUSED,
    (Phase.PENDING, Resumed): Phase.PENDING,
    (Phase.RUNNING, Resumed): Phase.RUNNING,
    # In a fork no process trains it.
    (Phase.RUNNING, Forked): Phase.PENDING,
}
_ONLY_WHILE_RUNNING = (Reported, Committed)
_FRESH_BUDGETS = {"cause": None, "blamed_checkpoints": 0, "user_failures": 0, "machine_failures": 0, "same_start": 0}
_OfCheckpoints: TypeAlias = Committed | Retired | Quarantined | Pinned
_CHANGES_PHASE = frozenset(event for _, event in NEXT)


def with_adopted(trial: Trial, event: Adopted) -> Trial:
    """Return the trial with what its owner found, and its attempt had not journaled: checkpoints, and its last step.

    An attempt with an open outbox may still run, so that its saves are not settled.

    Raises:
        IllegalTransition: one of them is not acceptable (see `is_acceptable`).
    """
    for checkpoint in event.checkpoints.get(trial.trial, ()):
        trial = _with_checkpoint(trial, checkpoint)
    if (reached := event.reached.get(trial.trial)) is not None:
        trial = trial.model_copy(
            update={
                "reached": max(reached, trial.reached or 0),
                "reached_seconds": max(trial.reached_seconds, event.trained_seconds.get(trial.trial, 0.0)),
            }
        )
        if trial.outbox is None:
            settled = trial.next_sequence + 1
            trial = trial.model_copy(update={"vanished": True, "next_sequence": settled, "settled_from": settled})
    return trial


def with_fork(trial: Trial, forked: ForkedTrial) -> Trial:
    """Return the trial of a fork, which has no other objects on the target than its checkpoints and their clones.

    Its sequences are counted on. The entry is a limit as a retirement is: no save of the origin goes on in the fork.
    """
    return trial.model_copy(
        update={
            "phase": NEXT.get((trial.phase, Forked), trial.phase),
            "checkpoints": forked.checkpoints,
            "cloned": None,
            "outbox": None,
            "quarantined": (),
            "quarantined_checkpoints": (),
            "lost_checkpoints": 0,
            "settled_from": trial.next_sequence,
            "collected_up_to": trial.next_sequence,
            "started_from": None,
            "records": (),
        }
    )


def after(trial: Trial, event: OneTrialsEvent, writer: Writer = "owner") -> Trial:
    """Return the trial after `event`, which `writer` has journaled.

    Raises:
        IllegalTransition: the event cannot happen to a trial in this phase.
    """
    phase = _next_phase(trial, event)
    has_ended = trial.phase is Phase.RUNNING and phase is not Phase.RUNNING
    ends = {"outbox": None} if has_ended else {}  # an attempt posts nothing after its end
    return _apply_to_trial(trial, event, writer).model_copy(update={"phase": phase, **ends})


def _next_phase(trial: Trial, event: OneTrialsEvent) -> Phase:
    misplaced = (isinstance(event, _ONLY_WHILE_RUNNING) and trial.phase is not Phase.RUNNING) or (
        isinstance(event, Cloned) and trial.phase not in (Phase.PENDING, Phase.PAUSED)
    )
    phase = NEXT.get((trial.phase, type(event)))
    if misplaced or (phase is None and type(event) in _CHANGES_PHASE):
        raise IllegalTransition(f"trial {trial.trial!r} is {trial.phase}: {event.type!r} cannot happen to it")
    return phase or trial.phase


def _apply_to_trial(trial: Trial, event: OneTrialsEvent, writer: Writer) -> Trial:
    match event:
        case Started():
            return _started(trial, event)
        case Reported():
            return _reported(trial, event.report)
        case AttemptEnded() | GaveUp():
            return _failed(trial, event)
        case Cloned():
            return _cloned(trial, event)
        case Finished() | Paused() | Requeued() | Resumed() | Decided():
            return _apply_reason(trial, event)
        case SlotFreed(attempt=attempt, since=since, seconds=seconds):
            return trial.model_copy(update={"records": slot_freed(trial.records, attempt, since, seconds)})
        case Launched() | Received() | OutboxClosed():
            return _apply_outbox_event(trial, event)
        case _:
            return _apply_checkpoint_event(trial, event, writer)


def _apply_outbox_event(trial: Trial, event: Launched | Received | OutboxClosed) -> Trial:
    match event:
        case Launched(outbox=outbox) if trial.outbox is None and outbox == trial.outbox_count + 1:
            return trial.model_copy(update={"outbox": outbox, "outbox_count": outbox, "post": 0})
        case Received(post=post) if trial.outbox is not None and post == trial.post + 1:
            return trial.model_copy(update={"post": post})
        case OutboxClosed() if trial.outbox is not None:
            return trial.model_copy(update={"outbox": None})
        case _:
            raise IllegalTransition(
                f"trial {trial.trial!r}: {event!r} cannot follow outbox {trial.outbox}, the last one being "
                f"{trial.outbox_count}, and post {trial.post}"
            )


def _apply_checkpoint_event(trial: Trial, event: _OfCheckpoints, writer: Writer) -> Trial:
    match event:
        case Committed():
            return _committed(trial, event)
        case Retired():
            return _retired(trial, event.retires, trial.next_sequence + 1)
        case Quarantined(quarantined=False):
            return _reinstated(trial, event.sequence)
        case Quarantined():
            return _quarantined(trial, event, writer)
        case Pinned():
            return _pinned(trial, event)
        case _:
            assert_never(event)


def _apply_reason(trial: Trial, event: Finished | Paused | Requeued | Resumed | Decided) -> Trial:
    match event:
        case Finished():
            ends = {"end_reason": event.reason, "finish_kind": event.kind}
            return trial.model_copy(update={**ends, "records": _ended_record(trial, event.use, is_lost=False)})
        case Paused():
            records = _ended_record(trial, event.use, is_lost=False)
            return trial.model_copy(update={"end_reason": event.reason, "cause": None, "records": records})
        case Requeued():
            return trial.model_copy(update={"end_reason": event.reason, "finish_kind": None, **_FRESH_BUDGETS})
        case Decided(decision=Exploit() as exploit):
            return trial.model_copy(update={"exploits": exploit})
        case Resumed() | Decided():
            return trial  # the experiment keeps them in `past`
        case _:
            assert_never(event)


def _reported(trial: Trial, report: StepReport) -> Trial:
    if report.step <= trial.step:
        raise IllegalTransition(f"trial {trial.trial!r}: step {report.step} is reported after step {trial.step}")
    update = {"step": report.step, "metrics": report.metrics, "trained_seconds": report.trained_seconds}
    return trial.model_copy(update=update)


def _started(trial: Trial, event: Started) -> Trial:
    unknown = (each.checkpoint for each in trial.quarantined_checkpoints if each.since > trial.collected_up_to)
    known = (*trial.checkpoints, *unknown)  # a guest may have quarantined it since it was restored
    start = next((each for each in known if each.sequence == event.from_sequence), None)
    _require_lawful(trial, event, start)
    again = event.from_sequence == trial.started_from
    # An earlier attempt may still save, if its process was only believed dead: its saves have lower sequences.
    sequence = trial.next_sequence + (trial.attempt > 0)
    wasted_steps = max(0, max(trial.step, trial.reached or 0) - event.from_step)
    return trial.model_copy(
        update={
            "attempt": event.attempt,
            "step": event.from_step,
            "metrics": start.metrics if start else {},
            "trained_seconds": start.trained_seconds if start else 0.0,
            "wasted_steps": trial.wasted_steps + wasted_steps,
            "wasted_at_least": trial.wasted_at_least or trial.vanished,
            "reached": None,
            "reached_seconds": 0.0,
            "vanished": False,
            "same_start": trial.same_start if again else 0,
            "started_from": event.from_sequence,
            "end_reason": "",
            "next_sequence": sequence,
            "settled_from": sequence if trial.attempt else trial.settled_from,
            "supervisor": event.supervisor,
            "records": _started_records(trial, event, has_lost_steps=wasted_steps > 0),
        }
    )


def _started_records(trial: Trial, event: Started, *, has_lost_steps: bool) -> tuple[AttemptRecord, ...]:
    """Return the records with that of a new attempt, whose slot may be known already."""
    records, begun = trial.records, {"attempt": event.attempt, "began_at": event.at}
    if records and records[-1].attempt == event.attempt:
        return (*records[:-1], records[-1].model_copy(update=begun))
    if records and has_lost_steps:
        records = (*records[:-1], records[-1].model_copy(update={"is_lost": True}))
    return (*records, AttemptRecord(**begun))


def _ended_record(trial: Trial, use: AttemptUse | None, *, is_lost: bool) -> tuple[AttemptRecord, ...]:
    """Return the records after the end of the last attempt; unchanged if it is over already."""
    if not trial.records or trial.records[-1].is_over:
        return trial.records
    newest = newest_checkpoint(trial)
    trained_seconds = max(trial.trained_seconds, trial.reached_seconds)
    unsaved_seconds = max(0.0, trained_seconds - (newest.trained_seconds if newest else 0.0))
    return (*trial.records[:-1], trial.records[-1].ended(use, unsaved_seconds, is_lost=is_lost))


def _require_lawful(trial: Trial, event: Started, start: CheckpointRef | None) -> None:
    """A trial that has a checkpoint never starts from nothing."""
    nothing = start is None and event.from_sequence is None and not trial.checkpoints
    if event.from_step != (start.step if start else 0) or not (start or nothing):
        raise IllegalTransition(
            f"trial {trial.trial!r}: cannot start from step {event.from_step} of {event.from_sequence}; "
            f"its checkpoints (step, sequence): {[(each.step, each.sequence) for each in trial.checkpoints]}"
        )
    if event.attempt != trial.attempt + 1:
        raise IllegalTransition(f"trial {trial.trial!r}: attempt {event.attempt} after {trial.attempt}")


def _committed(trial: Trial, event: Committed) -> Trial:
    """Add the checkpoint, and retire those that it replaces.

    A checkpoint that was quarantined meanwhile may share damaged blobs with the new one. So the new one is quarantined
    too, for its supervisor to save it again. An attempt on another machine does not hear of it, and trains on: until
    its next attempt has restored and so verified a checkpoint, none is retired.
    """
    sequence = event.checkpoint.sequence
    committed = _with_checkpoint(trial, event.checkpoint, event.seconds)
    if is_overtaken(trial, sequence):
        since = max(each.since for each in trial.quarantined_checkpoints)
        return _with_quarantined(committed, sequence, make_reason("save-overtaken"), since)
    if event.retires and not (trial.outbox is not None and is_overtaken(trial, trial.settled_from)):
        return _retired(committed, event.retires, sequence + 1)
    return committed


def _cloned(trial: Trial, event: Cloned) -> Trial:
    """Continue from the clone; the trial's own steps count neither as wasted nor as its history. Budgets stay."""
    copy = event.checkpoint
    _require_acceptable(trial, copy)
    return trial.model_copy(
        update={
            "checkpoints": (*trial.checkpoints, copy),
            "next_sequence": _next_after(trial, copy),
            "cloned": copy.sequence,
            "step": copy.step,
            "metrics": copy.metrics,
            "trained_seconds": copy.trained_seconds,
            "config": trial.config if event.config is None else event.config,
            "proposed": trial.proposed or trial.config,
            "exploits": None,
            "end_reason": event.reason,
            "reached": None,
            "reached_seconds": 0.0,
            "vanished": False,
        }
    )


def _with_checkpoint(trial: Trial, checkpoint: CheckpointRef, seconds: PhaseSeconds | None = None) -> Trial:
    _require_acceptable(trial, checkpoint)
    newest, records = newest_checkpoint(trial), trial.records
    if records and not records[-1].is_over:
        trained_seconds = max(0.0, checkpoint.trained_seconds - (newest.trained_seconds if newest else 0.0))
        records = (*records[:-1], records[-1].saved(seconds, trained_seconds))
    return trial.model_copy(
        update={
            "checkpoints": (*trial.checkpoints, checkpoint),
            "next_sequence": _next_after(trial, checkpoint),
            "records": records,
            "machine_failures": 0,
            "same_start": 0,
            "blamed_checkpoints": 0,
        }
    )


def _next_after(trial: Trial, checkpoint: CheckpointRef) -> int:
    """Return the sequence of the save after `checkpoint`, whose supervisor may not know of the last limits."""
    return max(trial.next_sequence, checkpoint.sequence + 1)


def _require_acceptable(trial: Trial, checkpoint: CheckpointRef) -> None:
    if not is_acceptable(trial, checkpoint.sequence):
        raise IllegalTransition(
            f"trial {trial.trial!r}: the checkpoint of step {checkpoint.step} has sequence {checkpoint.sequence}, "
            f"which is not after its checkpoints "
            f"{[each.sequence for each in trial.checkpoints]}, those quarantined {list(trial.quarantined)} "
            f"and the last retirement ({trial.collected_up_to})"
        )


def _retired(trial: Trial, sequences: tuple[int, ...], limit: int) -> Trial:
    """Retire live and quarantined checkpoints: the latter cannot be reinstated then, and are deleted as any other.

    `limit` is the first sequence of the saves that begin after that.
    """
    left = tuple(each for each in trial.checkpoints if each.sequence not in sequences)
    gone = {each.checkpoint.sequence for each in trial.quarantined_checkpoints} & set(sequences)
    return trial.model_copy(
        update={
            "checkpoints": left,
            "quarantined_checkpoints": tuple(
                each for each in trial.quarantined_checkpoints if each.checkpoint.sequence not in gone
            ),
            "quarantined": tuple(each for each in trial.quarantined if each not in gone),
            "collected_up_to": limit,
            "next_sequence": max(trial.next_sequence, limit),
        }
    )


def _quarantined(trial: Trial, event: Quarantined, writer: Writer) -> Trial:
    """Quarantine a checkpoint; one that was never committed is only listed as quarantined: it cannot be reinstated.

    No later save reuses its blobs, of which one may be damaged; the owner's running save is not committed either.
    """
    limit = trial.next_sequence + 1
    quarantined = _with_quarantined(trial, event.sequence, event.reason, limit)
    update: dict[str, int] = {"blamed_checkpoints": trial.blamed_checkpoints + event.kills}
    if writer == "owner" and not event.by_guest:
        update |= {"collected_up_to": limit, "next_sequence": limit}
    return quarantined.model_copy(update=update)


def _with_quarantined(trial: Trial, sequence: int, reason: AnyReason, since: int) -> Trial:
    found = [each for each in trial.checkpoints if each.sequence == sequence]
    kept = (QuarantinedCheckpoint(checkpoint=each, since=since, reason=reason) for each in found)
    return trial.model_copy(
        update={
            "checkpoints": tuple(each for each in trial.checkpoints if each not in found),
            "quarantined": trial.quarantined if sequence in trial.quarantined else (*trial.quarantined, sequence),
            "quarantined_checkpoints": (*trial.quarantined_checkpoints, *kept),
            "lost_checkpoints": trial.lost_checkpoints + len(found),
        }
    )


def _reinstated(trial: Trial, sequence: int) -> Trial:
    """Insert it at its old place; if it is the newest, the next attempt starts from it."""
    back = [each.checkpoint for each in trial.quarantined_checkpoints if each.checkpoint.sequence == sequence]
    return trial.model_copy(
        update={
            "checkpoints": tuple(sorted((*trial.checkpoints, *back), key=lambda each: each.sequence)),
            "quarantined": tuple(each for each in trial.quarantined if not back or each != sequence),
            "quarantined_checkpoints": tuple(
                each for each in trial.quarantined_checkpoints if each.checkpoint.sequence != sequence
            ),
            "lost_checkpoints": trial.lost_checkpoints - len(back),
        }
    )


def _pinned(trial: Trial, event: Pinned) -> Trial:
    checkpoints = tuple(
        each.model_copy(update={"pinned": event.pinned}) if each.sequence == event.sequence else each
        for each in trial.checkpoints
    )
    return trial.model_copy(update={"checkpoints": checkpoints})


def _failed(trial: Trial, event: AttemptEnded | GaveUp) -> Trial:
    if isinstance(event, GaveUp):
        return trial.model_copy(
            update={"end_reason": event.reason, "records": _ended_record(trial, None, is_lost=True)}
        )
    newest = newest_checkpoint(trial)
    is_lost = event.cause is not Cause.PREEMPTED or trial.step > (newest.step if newest else 0)
    machine = event.cause is Cause.MACHINE
    users = not machine and event.cause is not Cause.PREEMPTED
    return trial.model_copy(
        update={
            "end_reason": event.reason,
            "cause": event.cause,
            "machine_failures": trial.machine_failures + machine,
            "user_failures": trial.user_failures + users,
            "same_start": trial.same_start + 1 if event.at_start else 0,
            "records": _ended_record(trial, event.use, is_lost=is_lost),
        }
    )
