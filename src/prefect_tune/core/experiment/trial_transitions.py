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
    Claim,
    Claimed,
    Cloned,
    Committed,
    Decided,
    Event,
    Finished,
    Forked,
    ForkedTrial,
    GaveUp,
    OneTrialsEvent,
    Paused,
    Pinned,
    Quarantined,
    QuarantinedCheckpoint,
    Reported,
    Requeued,
    Resumed,
    Retired,
    SlotFreed,
    Started,
    Writer,
)
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
    (Phase.PENDING, Requeued): Phase.PENDING,  # the experiment's journal records it before the trial's own
    (Phase.RUNNING, Paused): Phase.PAUSED,
    (Phase.PAUSED, Resumed): Phase.PENDING,
    (Phase.PAUSED, Started): Phase.RUNNING,
    (Phase.PAUSED, Finished): Phase.FINISHED,
    # The experiment's journal absorbs starts and ends after it has journaled its decisions.
    (Phase.PENDING, Paused): Phase.PAUSED,
    (Phase.PENDING, Resumed): Phase.PENDING,
    (Phase.RUNNING, Resumed): Phase.RUNNING,
    # In a fork no process trains it.
    (Phase.RUNNING, Forked): Phase.PENDING,
}
_ONLY_WHILE_RUNNING = (Reported, Committed)
_FRESH_BUDGETS = {"cause": None, "blamed_checkpoints": 0, "user_failures": 0, "machine_failures": 0, "same_start": 0}
_OfCheckpoints: TypeAlias = Committed | Retired | Quarantined | Pinned | Claimed
_CHANGES_PHASE = frozenset(event for _, event in NEXT)


def with_adopted(trial: Trial, event: Adopted, *, has_own_journal: bool = False) -> Trial:
    """Return the trial with what a new owner found, and the old one had not journaled: checkpoints, and its last step.

    Args:
        trial: the trial, in the journal of `event` or in that of its experiment.
        event: the first event of the new owner.
        has_own_journal: whether the trial's attempts write a journal other than that of `event`, and may still run.

    Raises:
        IllegalTransition: one of them is not acceptable (see `is_acceptable`).
    """
    for checkpoint in event.checkpoints.get(trial.trial, ()):
        trial = _with_checkpoint(trial, checkpoint)
    if (reached := event.reached.get(trial.trial)) is not None:
        known = {"reached": max(reached, trial.reached or 0), "vanished": trial.vanished or not has_own_journal}
        seconds = {"reached_seconds": max(trial.reached_seconds, event.trained_seconds.get(trial.trial, 0.0))}
        trial = trial.model_copy(update={**known, **seconds})
    return trial


def with_fork(trial: Trial, forked: ForkedTrial) -> Trial:
    """Return the trial of a fork: all that refers to objects on the target is replaced, and the rest stays."""
    return trial.model_copy(
        update={
            "phase": NEXT.get((trial.phase, Forked), trial.phase),
            "checkpoints": forked.checkpoints,
            "cloned": None,
            "absorbed": forked.absorbed,
            "quarantined": (),
            "quarantined_checkpoints": (),
            "lost_checkpoints": 0,
            "claims": (),
            "collected_up_to": 0,
            "started_from": None,
            "records": (),
        }
    )


def after(trial: Trial, event: OneTrialsEvent, number: int, writer: Writer = "owner") -> Trial:
    """Return the trial after `event`, which `writer` has written to the journal's entry `number`.

    Raises:
        IllegalTransition: the event cannot happen to a trial in this phase.
    """
    phase = _next_phase(trial, event)
    return _apply_to_trial(trial, event, number, writer).model_copy(update={"phase": phase})


def _next_phase(trial: Trial, event: OneTrialsEvent) -> Phase:
    misplaced = (isinstance(event, _ONLY_WHILE_RUNNING) and trial.phase is not Phase.RUNNING) or (
        isinstance(event, Cloned) and not event.inherited and trial.phase not in (Phase.PENDING, Phase.PAUSED)
    )
    phase = NEXT.get((trial.phase, type(event)))
    if misplaced or (phase is None and type(event) in _CHANGES_PHASE):
        raise IllegalTransition(f"trial {trial.trial!r} is {trial.phase}: {event.type!r} cannot happen to it")
    return phase or trial.phase


def _apply_to_trial(trial: Trial, event: OneTrialsEvent, number: int, writer: Writer) -> Trial:
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
        case _:
            return _apply_checkpoint_event(trial, event, number, writer)


def _apply_checkpoint_event(trial: Trial, event: _OfCheckpoints, number: int, writer: Writer) -> Trial:
    match event:
        case Committed():
            return _committed(trial, event, number)
        case Retired():
            return _retired(trial, event.retires, number)
        case Quarantined(quarantined=False):
            return _reinstated(trial, event.sequence)
        case Quarantined():
            return _quarantined(trial, event, number, writer)
        case Pinned():
            return _pinned(trial, event)
        case Claimed():
            return trial.model_copy(update={"claims": _claims(trial, event)})
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


def _committed(trial: Trial, event: Committed, number: int) -> Trial:
    committed = _with_checkpoint(trial, event.checkpoint, event.seconds)
    return _retired(committed, event.retires, number) if event.retires else committed


def _cloned(trial: Trial, event: Cloned) -> Trial:
    """Continue from the clone; the trial's own steps count neither as wasted nor as its history. Budgets stay."""
    copy = event.checkpoint
    _require_acceptable(trial, copy)
    if event.inherited:
        return trial.model_copy(update={"checkpoints": (*trial.checkpoints, copy)})
    return trial.model_copy(
        update={
            "checkpoints": (*trial.checkpoints, copy),
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


def _claims(trial: Trial, event: Claimed) -> tuple[Claim, ...]:
    """Only a live or held checkpoint can be claimed: the deletion of any other may have begun."""
    claim = event.claim
    if event.released:
        return tuple(each for each in trial.claims if each.clone != claim.clone)
    if not (is_live(trial, claim) or is_held(trial, claim)):
        raise IllegalTransition(
            f"trial {trial.trial!r}: step {claim.step} ({claim.sequence}) is claimed by {claim.clone.folder}, but is "
            "no longer a checkpoint"
        )
    return trial.claims if claim in trial.claims else (*trial.claims, claim)


def _with_checkpoint(trial: Trial, checkpoint: CheckpointRef, seconds: PhaseSeconds | None = None) -> Trial:
    _require_acceptable(trial, checkpoint)
    newest, records = newest_checkpoint(trial), trial.records
    if records and not records[-1].is_over:
        trained_seconds = max(0.0, checkpoint.trained_seconds - (newest.trained_seconds if newest else 0.0))
        records = (*records[:-1], records[-1].saved(seconds, trained_seconds))
    since_then = {"machine_failures": 0, "same_start": 0, "blamed_checkpoints": 0}
    return trial.model_copy(update={"checkpoints": (*trial.checkpoints, checkpoint), "records": records, **since_then})


def _require_acceptable(trial: Trial, checkpoint: CheckpointRef) -> None:
    if not is_acceptable(trial, checkpoint.sequence):
        raise IllegalTransition(
            f"trial {trial.trial!r}: the checkpoint of step {checkpoint.step} was begun after entry "
            f"{checkpoint.sequence}, which is not after its checkpoints "
            f"{[each.sequence for each in trial.checkpoints]}, those quarantined {list(trial.quarantined)} "
            f"and the last retirement ({trial.collected_up_to})"
        )


def _retired(trial: Trial, sequences: tuple[int, ...], number: int) -> Trial:
    """Retire live and quarantined checkpoints: the latter cannot be reinstated then, and are deleted as any other."""
    left = tuple(each for each in trial.checkpoints if each.sequence not in sequences)
    gone = {each.checkpoint.sequence for each in trial.quarantined_checkpoints} & set(sequences)
    return trial.model_copy(
        update={
            "checkpoints": left,
            "quarantined_checkpoints": tuple(
                each for each in trial.quarantined_checkpoints if each.checkpoint.sequence not in gone
            ),
            "quarantined": tuple(each for each in trial.quarantined if each not in gone),
            "collected_up_to": number,
        }
    )


def _quarantined(trial: Trial, event: Quarantined, number: int, writer: Writer) -> Trial:
    """Quarantine a checkpoint; one that was never committed is only listed as quarantined: it cannot be reinstated.

    No later save reuses its blobs, of which one may be damaged; the owner's running save is not committed either.
    """
    found = [each for each in trial.checkpoints if each.sequence == event.sequence]
    kept = (QuarantinedCheckpoint(checkpoint=each, since=number, reason=event.reason) for each in found)
    known = trial.quarantined if event.sequence in trial.quarantined else (*trial.quarantined, event.sequence)
    return trial.model_copy(
        update={
            "checkpoints": tuple(each for each in trial.checkpoints if each not in found),
            "quarantined": known,
            "quarantined_checkpoints": (*trial.quarantined_checkpoints, *kept),
            "lost_checkpoints": trial.lost_checkpoints + len(found),
            "blamed_checkpoints": trial.blamed_checkpoints + event.kills,
            "collected_up_to": trial.collected_up_to if writer == "guest" else number,
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


def repeats(event: Event, trial: Trial | None) -> bool:
    """Whether the event is no news after those before it.

    A continuation is recorded by the experiment's journal, and then by the trial's own. No other event is in both: a
    trial that has ended cannot end again, see `NEXT`.
    """
    return isinstance(event, Requeued | Resumed) and trial is not None and trial.phase is Phase.PENDING
