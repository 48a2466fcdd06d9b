"""A trial: its state as a frozen value, queries on it, and its transitions.

`NEXT` is the table of the legal changes of phase, `after` the pure function that applies an event. A journal holds
phases; `Status` has the words of every table, report and event, which are Optuna's and Ray's.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, TypeAlias, assert_never

from pydantic import Field

from prefect_tune.core.errors import IllegalTransition
from prefect_tune.core.journal_events import (
    Adopted,
    AttemptEnded,
    Cause,
    CheckpointOrigin,
    CheckpointRef,
    Cloned,
    Committed,
    Decided,
    Finished,
    FinishKind,
    Forked,
    ForkedTrial,
    GaveUp,
    Launched,
    OneTrialsEvent,
    OutboxClosed,
    Owner,
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
from prefect_tune.core.schedulers.base import Decision, Exploit
from prefect_tune.core.shown_text import first_line, shorten
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.usage_records import AttemptRecord, PhaseSeconds, slot_freed
from prefect_tune.core.values import StepReport, TrialId, Value


class Phase(StrEnum):
    """What can happen to a trial next, see `NEXT`. Its values are on targets, in snapshots."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    ERRORED = "errored"


ENDED = frozenset({Phase.FINISHED, Phase.ERRORED})


class Status(StrEnum):
    """The status of a trial, in the order of tables and counts."""

    COMPLETED = "completed"
    """It met its stop criterion, trained all of the scheduler's steps, or its trainable returned."""
    PRUNED = "pruned"
    """The scheduler ended it early."""
    INTERRUPTED = "interrupted"
    """It ended before it was done, and not by its scheduler: its run was stopped, suspended or killed, its attempt
    failed and is to be repeated, or a stop request named it. A resume continues it, except after a stop request."""
    ERRORED = "errored"
    """It failed, and its retries are spent."""
    RUNNING = "running"
    """It trains."""
    PAUSED = "paused"
    """The scheduler gave its slot to another trial, and may resume it."""
    PENDING = "pending"
    """It waits for a slot."""


_STATUS_OF_FINISHED: Mapping[FinishKind | None, Status] = {
    FinishKind.PRUNED: Status.PRUNED,
    FinishKind.STOPPED: Status.INTERRUPTED,
}


class PastEvent(Value):
    """A fact that is replayed to search and scheduler; `order` counts over all trials of the experiment."""

    order: int
    what: Literal["added", "decided", "resumed", "ended"]
    report: StepReport | None = None
    """With "decided": the report that was decided on; with "ended": the last report."""
    decision: Decision | None = None
    failed: bool = False
    """With "ended": whether the trial errored."""
    stopped: bool = False
    """With "ended": whether the scheduler ended it early."""


class Clone(Value):
    """A clone that another trial has of one of the trial's checkpoints."""

    step: int
    sequence: int
    trial: TrialId
    """The trial that has the clone."""
    clone_sequence: int
    """The sequence of the clone there."""


class Trial(Value):
    """One configuration being trained, as of the journal's last entry.

    For users: its name `trial`, its `config` and `status`, the `metrics` of its newest `step`, its `checkpoints`
    (`results.checkpoint` opens the newest), the `reason` of its end, `attempt`, the number of its attempts, and
    `trained_seconds`. The other fields are what the search needs to continue it.
    """

    trial: TrialId
    config: Mapping[str, Any]
    fingerprint: Mapping[str, str] = Field(default_factory=dict)
    of_search: bool = False
    """Whether a search proposed it; False for a single training, and in a flow of one's own."""
    phase: Phase = Phase.PENDING
    """What can happen to it next; its status is derived from it."""
    attempt: int = 0
    step: int = 0
    """The newest step reported in the present history (without steps that were lost)."""
    metrics: Mapping[str, Any] = Field(default_factory=dict)
    """The metrics of that step."""
    trained_seconds: float = 0.0
    """The training time up to that step, in seconds; 0 also if it was not measured."""
    checkpoints: tuple[CheckpointRef, ...] = ()
    """The live checkpoints, oldest first."""
    quarantined: tuple[int, ...] = ()
    """Sequences of checkpoints that must not be used."""
    quarantined_checkpoints: tuple[QuarantinedCheckpoint, ...] = ()
    """The quarantined checkpoints that were committed and are not retired: their bytes stay, for a reinstatement."""
    lost_checkpoints: int = 0
    """How many committed checkpoints were quarantined and not reinstated; with no other left, all progress is lost."""
    next_sequence: int = 1
    """The sequence of its next save. Each save, each attempt and each limit for running saves counts it up."""
    settled_from: int = 1
    """Manifests with lower sequences that the journal does not name are no checkpoints, and never become any."""
    collected_up_to: int = 0
    """The limit of the last retirement: blobs of earlier saves are reused only while a checkpoint refers to them."""
    clones: tuple[Clone, ...] = ()
    """The clones that other trials have of its live and retired checkpoints, whose bytes stay until then."""
    user_failures: int = 0
    """Failures of the user's code since the trial was added or requeued."""
    machine_failures: int = 0
    """Failures of the machine since the last commit."""
    same_start: int = 0
    """How many attempts in a row died before their first step, starting from the same checkpoint (or from nothing)."""
    blamed_checkpoints: int = 0
    """How many checkpoints were quarantined since the last commit because the trainable died from them."""
    started_from: int | None = None
    """The sequence that the last attempt restored; None for a start from nothing."""
    cloned: int | None = None
    """The sequence of the clone that it last continued from: of another trial's checkpoint."""
    wasted_steps: int = 0
    """Steps that are known to have been trained again."""
    wasted_at_least: bool = False
    """Whether they may be more: the owner of an attempt vanished, and its last reports with it."""
    reached: int | None = None
    """The last step that its last attempt is known to have trained, if its owner has vanished; for `wasted_steps`."""
    reached_seconds: float = 0.0
    """The training time up to that step; 0 where it is not known. Only the cost depends on it."""
    vanished: bool = False
    """Whether the owner of its last attempt vanished."""
    end_reason: AnyReason = ""
    """Why the trial ended, or why its last attempt did; empty while it runs. `reason` is the sentence."""
    cause: Cause | None = None
    """The cause of the last attempt's end; None if that attempt paused."""
    finish_kind: FinishKind | None = None
    """How it finished; None if it has not."""
    outbox: int | None = None
    """The number of the open outbox of an attempt on another machine; None where there is none."""
    outbox_count: int = 0
    """How many outboxes it has had; the next one has the next number."""
    post: int = 0
    """The last post of the open outbox that the journal has."""
    search_term: int = 0
    """The owner of the experiment that launched the attempt of the last outbox."""
    supervisor: Owner | None = None
    """The process that supervises its last attempt, on another machine; None where that is the journal's owner."""
    proposed: Mapping[str, object] | None = None
    """The configuration it was added with, if it has exploited another trial since."""
    exploits: Exploit | None = None
    """An exploit that the scheduler has decided and the trial has not carried out yet."""
    past: tuple[PastEvent, ...] = ()
    """The events that are replayed to search and scheduler when the experiment is resumed, oldest first."""
    records: tuple[AttemptRecord, ...] = ()
    """What each of its attempts used, the first one first; see `cost.cost_of`."""

    @property
    def status(self) -> Status:
        """Its status: completed, pruned, interrupted, errored, running, paused or pending."""
        if self.phase is Phase.FINISHED:
            return _STATUS_OF_FINISHED.get(self.finish_kind, Status.COMPLETED)
        if self.phase is Phase.PENDING and self.cause is not None:
            return Status.INTERRUPTED
        return Status(self.phase.value)

    @property
    def reason(self) -> str:
        """Why the trial ended, or why its last attempt did, with the traceback of an error; empty while it runs."""
        return str(self.end_reason)

    @property
    def inherits(self) -> bool:
        """Whether its last report is that of the trial whose checkpoint it continues from: it has made none since."""
        newest = newest_checkpoint(self)
        return newest is not None and (newest.sequence, newest.step) == (self.cloned, self.step)

    @property
    def wasted_count(self) -> str:
        """The number of its wasted steps: `3`, `at least 3`, or `none known`."""
        if self.wasted_at_least and not self.wasted_steps:
            return "none known"
        return f"{'at least ' * self.wasted_at_least}{self.wasted_steps}"

    @property
    def measured_seconds(self) -> float | None:
        """The training time in seconds; None if it was not measured: the saves of a flow of one's own need not say."""
        return None if self.step and not self.trained_seconds else self.trained_seconds

    def __repr__(self) -> str:
        """Return what a person asks of a trial, on one line."""
        facts = {"trial": self.trial, "status": str(self.status), "step": self.step}
        facts |= {"metrics": dict(self.metrics), "config": dict(self.config)}
        if self.status is Status.ERRORED:
            facts["reason"] = first_line(self.reason)
        shown = {name: repr(value) for name, value in facts.items()}
        cut = (f"{name}={shorten(text, 400)}" for name, text in shown.items())
        return f"Trial({', '.join(cut)})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the same for a notebook, with the trial's history, its newest checkpoint and its whole error."""
        from prefect_tune.core.experiment.summary import trial_html  # which is about trials

        return trial_html(self)


# ------------------------------------------------------------------------------------------- queries on its checkpoints


def newest_checkpoint(trial: Trial) -> CheckpointRef | None:
    """Return the checkpoint to resume from: the last one committed that is not quarantined."""
    return trial.checkpoints[-1] if trial.checkpoints else None


def newest_key(folder: TrialKey, trial: Trial) -> CheckpointKey | None:
    """Return the key of the newest checkpoint; None where there is none."""
    newest = newest_checkpoint(trial)
    return folder.checkpoint_key(newest) if newest else None


def unsaved_seconds(trial: Trial, trained_seconds: float) -> float:
    """Return how much of this training time is after the newest checkpoint."""
    newest = newest_checkpoint(trial)
    return max(0.0, trained_seconds - (newest.trained_seconds if newest else 0.0))


def clonable_checkpoint(trial: Trial, last_step: int | None = None) -> CheckpointRef | None:
    """Return the newest checkpoint from which a clone trains at least one more step; None if there is none.

    Args:
        trial: the trial that has the checkpoints.
        last_step: the step with which each trial ends at the latest; None if that is not known.
    """
    ends = [] if last_step is None else [last_step]
    if trial.status is Status.COMPLETED:
        ends.append(trial.step)
    return next((ref for ref in reversed(trial.checkpoints) if all(ref.step < end for end in ends)), None)


def clone_for(trial: Trial, ref: CheckpointRef, source: str) -> CheckpointRef:
    """Return the reference by which `trial` has a checkpoint of the trial `source` as its next one."""
    origin = ref.origin or CheckpointOrigin(trial=source, step=ref.step, sequence=ref.sequence)
    return ref.model_copy(update={"sequence": trial.next_sequence, "origin": origin, "pinned": False})


def live_keys(folder: TrialKey, trial: Trial) -> list[CheckpointKey]:
    """Return the keys of all live checkpoints, oldest first."""
    return [folder.checkpoint_key(each) for each in trial.checkpoints]


def is_live(trial: Trial, key: CheckpointKey) -> bool:
    """Return whether `key` is a live checkpoint of `trial`, or the origin of one."""
    return any(_has_key(trial, ref, key) for ref in trial.checkpoints)


def is_quarantined(trial: Trial, key: CheckpointKey) -> bool:
    """Return whether `key` is quarantined in `trial`: not used, but it can be reinstated."""
    return any(_has_key(trial, quarantined.checkpoint, key) for quarantined in trial.quarantined_checkpoints)


def _has_key(trial: Trial, ref: CheckpointRef, key: CheckpointKey) -> bool:
    at = ref.origin or ref
    name = ref.origin.trial if ref.origin is not None else trial.trial
    return (at.step, at.sequence, name) == (key.step, key.sequence, key.trial.trial)


def is_held(trial: Trial, key: CheckpointKey) -> bool:
    """Return whether `key` is no longer live in `trial`, and another trial has a clone of it."""
    has_clone = any((clone.step, clone.sequence) == (key.step, key.sequence) for clone in trial.clones)
    return has_clone and not is_live(trial, key)


def is_collectable(state: Trial, key: CheckpointKey) -> bool:
    """Return whether the bytes of `key` may be deleted, now and at any later time.

    True if it is not live, not quarantined, without a clone, and was begun before the last retirement in `state`.
    Then no later save reuses it, here or in a process that takes over during the deletion, and it is not cloned.
    """
    is_used = is_quarantined(state, key) or is_live(state, key) or is_held(state, key)
    return not is_used and key.sequence < state.collected_up_to


def parent_of_next(folder: TrialKey, trial: Trial) -> CheckpointKey | None:
    """Return the checkpoint whose bytes the next save may reuse: the newest one, or none.

    None where the newest one is older than one that was quarantined: they may share the damaged blobs.
    """
    newest = newest_key(folder, trial)
    return None if newest is None or is_overtaken(trial, newest.sequence) else newest


def is_overtaken(trial: Trial, sequence: int) -> bool:
    """Return whether a checkpoint was quarantined after the save with this sequence had begun."""
    return any(sequence < each.since for each in trial.quarantined_checkpoints)


def reused_from(trial: Trial) -> int:
    """Return the first sequence whose blobs the next save may reuse, if no live checkpoint refers to them.

    Blobs begun before the last retirement may be deleted at any time; those that existed when a checkpoint
    was quarantined may be the damaged ones.
    """
    return max((trial.collected_up_to, *(each.since for each in trial.quarantined_checkpoints)))


def is_acceptable(trial: Trial, sequence: int) -> bool:
    """Return whether the save with this sequence may still become a checkpoint of `trial`.

    Not if it began before the last retirement: blobs that it reused may have been deleted since. Not if its
    sequence is that of an earlier checkpoint in the journal, or of an earlier attempt: the trial went on without it.
    """
    known = max((*(each.sequence for each in trial.checkpoints), *trial.quarantined), default=0)
    return sequence > known and sequence >= max(trial.settled_from, trial.collected_up_to)


# ------------------------------------------------------------------------------------------------------- transitions

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
_CHANGES_PHASE = frozenset(event for _, event in NEXT)
_CLONES_IN = frozenset({Phase.PENDING, Phase.PAUSED})
_FRESH_BUDGETS = {"cause": None, "blamed_checkpoints": 0, "user_failures": 0, "machine_failures": 0, "same_start": 0}
_OfCheckpoints: TypeAlias = Committed | Cloned | Retired | Quarantined | Pinned


def after(trial: Trial, event: OneTrialsEvent, writer: Writer = "owner") -> Trial:
    """Return the trial after `event`, which `writer` has journaled.

    Raises:
        IllegalTransition: the event cannot happen to a trial in this phase.
    """
    phase, is_running = NEXT.get((trial.phase, type(event))), trial.phase is Phase.RUNNING
    if (
        (phase is None and type(event) in _CHANGES_PHASE)
        or (isinstance(event, Reported | Committed) and not is_running)
        or (isinstance(event, Cloned) and trial.phase not in _CLONES_IN)
    ):
        raise IllegalTransition(f"trial {trial.trial!r} is {trial.phase}: {event.type!r} cannot happen to it")
    match event:
        case Started():
            changed = _apply_started(trial, event)
        case Reported(report=report):
            if (changed := with_report(trial, report)) is trial:
                where = f"trial {trial.trial!r}"
                raise IllegalTransition(f"{where}: step {report.step} is reported after step {trial.step}")
        case AttemptEnded() | GaveUp() | Finished() | Paused():
            changed = _apply_end(trial, event)
        case Requeued(reason=reason):
            changed = trial.model_copy(update={"end_reason": reason, "finish_kind": None, **_FRESH_BUDGETS})
        case Decided(decision=Exploit() as exploit):
            changed = trial.model_copy(update={"exploits": exploit})
        case Resumed() | Decided():
            changed = trial  # the experiment keeps them in `past`
        case SlotFreed(attempt=attempt, since=since, seconds=seconds):
            changed = trial.model_copy(update={"records": slot_freed(trial.records, attempt, since, seconds)})
        case Launched() | Received() | OutboxClosed():
            changed = _apply_outbox_event(trial, event)
        case _:
            changed = _apply_checkpoint_event(trial, event, writer)
    if phase is None or phase is trial.phase:
        return changed
    closed = {"outbox": None} if is_running else {}  # an attempt posts nothing after its end
    return changed.model_copy(update={"phase": phase, **closed})


def with_report(trial: Trial, report: StepReport | None) -> Trial:
    """Return the trial updated to `report`, which may not be journaled yet; unchanged if it is not newer."""
    if report is None or report.step <= trial.step:
        return trial
    return trial.model_copy(update=dict(report))


def with_adopted(trial: Trial, event: Adopted) -> Trial:
    """Return the trial with what its owner found, and its attempt had not journaled: checkpoints, and its last step.

    An attempt with an open outbox may still run, so that its saves are not settled.

    Raises:
        IllegalTransition: one of them is not acceptable (see `is_acceptable`).
    """
    for checkpoint in event.checkpoints.get(trial.trial, ()):
        trial = _with_save(trial, checkpoint, None)
    if (reached := event.reached.get(trial.trial)) is not None:
        reached_seconds = max(trial.reached_seconds, event.trained_seconds.get(trial.trial, 0.0))
        changes = {"reached": max(reached, trial.reached or 0), "reached_seconds": reached_seconds}
        if trial.outbox is None:
            settled = trial.next_sequence + 1
            changes |= {"vanished": True, "next_sequence": settled, "settled_from": settled}
        trial = trial.model_copy(update=changes)
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


def _apply_started(trial: Trial, event: Started) -> Trial:
    """Start the next attempt. A trial that has a checkpoint never starts from nothing."""
    unknown = (each.checkpoint for each in trial.quarantined_checkpoints if each.since > trial.collected_up_to)
    known = (*trial.checkpoints, *unknown)  # a guest may have quarantined it since it was restored
    start = next((each for each in known if each.sequence == event.from_sequence), None)
    is_fresh = start is None and event.from_sequence is None and not trial.checkpoints
    if event.from_step != (start.step if start else 0) or not (start or is_fresh):
        raise IllegalTransition(
            f"trial {trial.trial!r}: cannot start from step {event.from_step} of {event.from_sequence}; "
            f"its checkpoints (step, sequence): {[(each.step, each.sequence) for each in trial.checkpoints]}"
        )
    if event.attempt != trial.attempt + 1:
        raise IllegalTransition(f"trial {trial.trial!r}: attempt {event.attempt} after {trial.attempt}")
    # An earlier attempt may still save, if its process was only believed dead: its saves have lower sequences.
    sequence = trial.next_sequence + (trial.attempt > 0)
    wasted_steps = max(0, max(trial.step, trial.reached or 0) - event.from_step)
    records, begun = trial.records, {"attempt": event.attempt, "began_at": event.at}
    if records and records[-1].attempt == event.attempt:  # its slot is known already
        records = (*records[:-1], records[-1].model_copy(update=begun))
    else:
        if records and wasted_steps:
            records = (*records[:-1], records[-1].model_copy(update={"is_lost": True}))
        records = (*records, AttemptRecord(**begun))
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
            "same_start": trial.same_start if event.from_sequence == trial.started_from else 0,
            "started_from": event.from_sequence,
            "end_reason": "",
            "next_sequence": sequence,
            "settled_from": sequence if trial.attempt else trial.settled_from,
            "supervisor": event.supervisor,
            "records": records,
        }
    )


def _apply_end(trial: Trial, event: AttemptEnded | GaveUp | Finished | Paused) -> Trial:
    """End the trial, or its attempt; the record of an attempt that is over already stays."""
    is_lost, changes, records = False, dict[str, object](), trial.records
    match event:
        case Finished():
            changes["finish_kind"] = event.kind
        case Paused():
            changes["cause"] = None
        case GaveUp():
            is_lost = True
        case AttemptEnded():
            newest, is_failure = newest_checkpoint(trial), event.cause is not Cause.PREEMPTED
            is_lost = is_failure or trial.step > (newest.step if newest else 0)
            is_machines = event.cause is Cause.MACHINE
            changes = {
                "cause": event.cause,
                "machine_failures": trial.machine_failures + is_machines,
                "user_failures": trial.user_failures + (is_failure and not is_machines),
                "same_start": trial.same_start + 1 if event.at_start else 0,
            }
    if records and not records[-1].is_over:
        use = None if isinstance(event, GaveUp) else event.use
        unsaved = unsaved_seconds(trial, max(trial.trained_seconds, trial.reached_seconds))
        records = (*records[:-1], records[-1].ended(use, unsaved, is_lost=is_lost))
    return trial.model_copy(update={"end_reason": event.reason, "records": records, **changes})


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
            return _apply_committed(trial, event)
        case Cloned():
            return _apply_cloned(trial, event)
        case Retired():
            return _retire(trial, event.retires, trial.next_sequence + 1)
        case Quarantined(quarantined=False):
            return _reinstate(trial, event.sequence)
        case Quarantined():
            # No later save reuses its blobs, of which one may be damaged; the owner's running save is not committed.
            limit = trial.next_sequence + 1
            changes = {"blamed_checkpoints": trial.blamed_checkpoints + event.kills}
            if writer == "owner" and not event.by_guest:
                changes |= {"collected_up_to": limit, "next_sequence": limit}
            return _quarantine(trial, event.sequence, event.reason, limit).model_copy(update=changes)
        case Pinned():
            checkpoints = tuple(
                each.model_copy(update={"pinned": event.pinned}) if each.sequence == event.sequence else each
                for each in trial.checkpoints
            )
            return trial.model_copy(update={"checkpoints": checkpoints})
        case _:
            assert_never(event)


def _apply_committed(trial: Trial, event: Committed) -> Trial:
    """Add the checkpoint, and retire those that it replaces.

    A checkpoint that was quarantined meanwhile may share damaged blobs with the new one. So the new one is quarantined
    too, for its supervisor to save it again. An attempt on another machine does not hear of it, and trains on: until
    its next attempt has restored and so verified a checkpoint, none is retired.
    """
    sequence = event.checkpoint.sequence
    committed = _with_save(trial, event.checkpoint, event.seconds)
    if is_overtaken(trial, sequence):
        since = max(each.since for each in trial.quarantined_checkpoints)
        return _quarantine(committed, sequence, make_reason("save-overtaken"), since)
    if event.retires and not (trial.outbox is not None and is_overtaken(trial, trial.settled_from)):
        return _retire(committed, event.retires, sequence + 1)
    return committed


def _apply_cloned(trial: Trial, event: Cloned) -> Trial:
    """Continue from the clone; the trial's own steps count neither as wasted nor as its history. Budgets stay."""
    copy = event.checkpoint
    return _with_checkpoint(trial, copy).model_copy(
        update={
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


def _with_save(trial: Trial, checkpoint: CheckpointRef, seconds: PhaseSeconds | None) -> Trial:
    """Return the trial with a checkpoint of its own: the failures before it no longer count."""
    records = trial.records
    if records and not records[-1].is_over:
        saved = records[-1].saved(seconds, unsaved_seconds(trial, checkpoint.trained_seconds))
        records = (*records[:-1], saved)
    changes = {"records": records, "machine_failures": 0, "same_start": 0, "blamed_checkpoints": 0}
    return _with_checkpoint(trial, checkpoint).model_copy(update=changes)


def _with_checkpoint(trial: Trial, checkpoint: CheckpointRef) -> Trial:
    if not is_acceptable(trial, checkpoint.sequence):
        raise IllegalTransition(
            f"trial {trial.trial!r}: the checkpoint of step {checkpoint.step} has sequence {checkpoint.sequence}, "
            f"which is not after its checkpoints {[each.sequence for each in trial.checkpoints]}, those quarantined "
            f"{list(trial.quarantined)}, retirements ({trial.collected_up_to}), earlier attempts ({trial.settled_from})"
        )
    # The supervisor of the save may not know of the last limits.
    next_sequence = max(trial.next_sequence, checkpoint.sequence + 1)
    return trial.model_copy(update={"checkpoints": (*trial.checkpoints, checkpoint), "next_sequence": next_sequence})


def _retire(trial: Trial, sequences: tuple[int, ...], limit: int) -> Trial:
    """Retire live and quarantined checkpoints: the latter cannot be reinstated then, and are deleted as any other.

    `limit` is the first sequence of the saves that begin after that.
    """
    quarantined = trial.quarantined_checkpoints
    gone = {each.checkpoint.sequence for each in quarantined} & set(sequences)
    return trial.model_copy(
        update={
            "checkpoints": tuple(each for each in trial.checkpoints if each.sequence not in sequences),
            "quarantined_checkpoints": tuple(each for each in quarantined if each.checkpoint.sequence not in gone),
            "quarantined": tuple(each for each in trial.quarantined if each not in gone),
            "collected_up_to": limit,
            "next_sequence": max(trial.next_sequence, limit),
        }
    )


def _quarantine(trial: Trial, sequence: int, reason: AnyReason, since: int) -> Trial:
    """Quarantine a checkpoint; one that was never committed is only listed as quarantined: it cannot be reinstated."""
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


def _reinstate(trial: Trial, sequence: int) -> Trial:
    """Insert it at its old place; if it is the newest, the next attempt starts from it."""
    quarantined = trial.quarantined_checkpoints
    back = [each.checkpoint for each in quarantined if each.checkpoint.sequence == sequence]
    return trial.model_copy(
        update={
            "checkpoints": tuple(sorted((*trial.checkpoints, *back), key=lambda each: each.sequence)),
            "quarantined": tuple(each for each in trial.quarantined if not back or each != sequence),
            "quarantined_checkpoints": tuple(each for each in quarantined if each.checkpoint.sequence != sequence),
            "lost_checkpoints": trial.lost_checkpoints - len(back),
        }
    )
