"""A trial: its state as a frozen value, queries on this state, and its transitions.

`NEXT_PHASE` is the table of the legal changes of phase; `apply_trial_event` is the pure function that applies an event.
Snapshots store the phase. Tables, HTML reports and Prefect events show a `Status`, mostly in words of Optuna or Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeAlias, assert_never

from pydantic import Field

from prefect_tune.core.display_text import first_line, shorten
from prefect_tune.core.errors import IllegalTransition
from prefect_tune.core.journal_events import (
    AnyTrialEvent,
    AttemptEnded,
    AttemptLaunched,
    AttemptStarted,
    Cause,
    CheckpointCloned,
    CheckpointCommitted,
    CheckpointOrigin,
    CheckpointQuarantined,
    CheckpointRef,
    CheckpointsAdopted,
    CheckpointsRetired,
    DecisionMade,
    ExperimentForked,
    FinishKind,
    ForkedTrial,
    OutboxClosed,
    Owner,
    PostReceived,
    QuarantinedCheckpoint,
    SlotFreed,
    StepReported,
    TrialErrored,
    TrialFinished,
    TrialPaused,
    TrialRequeued,
    TrialResumed,
    Writer,
)
from prefect_tune.core.reasons import AnyReason, make_reason
from prefect_tune.core.renamed import RenamedMembers
from prefect_tune.core.schedulers.base import Decision, Exploit
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.usage_records import AttemptRecord, PhaseSeconds, record_slot_freed
from prefect_tune.core.values import StepReport, TrialId, Value


class Phase(StrEnum):
    """The phase of a trial, which changes as `NEXT_PHASE` says. Snapshots store these values."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    ERRORED = "errored"


ENDED_PHASES = frozenset({Phase.FINISHED, Phase.ERRORED})


class Status(StrEnum):
    """The status of a trial. Tables and counts list the statuses in this order."""

    COMPLETED = "completed"
    """It met its stop criterion or reached the `max_t` of the scheduler, or its trainable returned."""
    PRUNED = "pruned"
    """The scheduler ended it early."""
    INTERRUPTED = "interrupted"
    """It ended early, but its scheduler did not end it: its run was stopped, suspended or killed; its attempt failed
    and will be retried; or a stop request ended it. A resume continues the trial, except after a stop request."""
    ERRORED = "errored"
    """It failed and will not be retried: its retries are spent, or its failure is of a kind that is never retried."""
    RUNNING = "running"
    """It is training."""
    PAUSED = "paused"
    """It gave up its slot, and waits until the scheduler resumes or ends it."""
    PENDING = "pending"
    """It waits for a slot."""


_STATUS_OF_FINISH_KIND: Mapping[FinishKind | None, Status] = {
    FinishKind.PRUNED: Status.PRUNED,
    FinishKind.STOPPED: Status.INTERRUPTED,
}


class ReplayEvent(Value):
    """An event that a resume replays to the search and the scheduler; `order` is its number among all such events."""

    order: int
    kind: Literal["added", "decided", "resumed", "ended"]
    report: StepReport | None = None
    """With "decided", the report that the decision is about; with "ended", the last report."""
    decision: Decision | None = None
    failed: bool = False
    """With "ended", whether the trial errored."""
    stopped: bool = False
    """With "ended", whether the scheduler pruned the trial (in the glossary, *stopped* has another meaning)."""


class Clone(Value):
    """A clone of this trial's checkpoint (`step`, `sequence`), in another trial or in this one; see `Trial.clones`."""

    step: int
    sequence: int
    trial: TrialId
    """The trial that has the clone."""
    clone_sequence: int
    """The sequence of the clone in that trial."""


class Trial(RenamedMembers, Value):
    """A configuration and its training, up to the journal's last entry.

    Fields for users: the name `id`, the `config` and `status`, the `metrics` of the newest `step`, the `checkpoints`
    (`results.checkpoint` opens the newest), the `reason` of the end, the number of attempts (`attempt`), and
    `trained_seconds`. prefect-tune itself needs the other fields, for example to continue the trial.
    """

    _renamed: ClassVar[Mapping[str, str]] = {"trial": "id", "wasted_steps": "recomputed_steps"}

    id: TrialId
    config: Mapping[str, Any]
    fingerprint: Mapping[str, str] = Field(default_factory=dict)
    proposed_by_search: bool = False
    """Whether a search proposed the trial; False for a single training and in the user's own flow."""
    phase: Phase = Phase.PENDING
    """The phase, from which `status` is made."""
    attempt: int = 0
    """The number of the last attempt that has begun; a launched attempt counts only after its `AttemptStarted`."""
    step: int = 0
    """The newest reported step. The start of an attempt resets it to the step of the restored checkpoint, or to 0."""
    metrics: Mapping[str, Any] = Field(default_factory=dict)
    """The metrics of `step`."""
    trained_seconds: float = 0.0
    """The training time up to `step`, in seconds; also 0 if it was not measured."""
    checkpoints: tuple[CheckpointRef, ...] = ()
    """The live checkpoints, oldest first."""
    quarantined_sequences: tuple[int, ...] = ()
    """Sequences of checkpoints that must not be used."""
    quarantined_checkpoints: tuple[QuarantinedCheckpoint, ...] = ()
    """The quarantined checkpoints that were committed and are not retired; they can still be reinstated."""
    lost_checkpoint_count: int = 0
    """How many checkpoints were quarantined and not reinstated. If it is not 0, no attempt starts from scratch."""
    next_sequence: int = 1
    """The sequence of the next save. Saves, retries, and events that invalidate running saves increase it."""
    adopted_up_to: int = 1
    """From now on, no save with a sequence below this number becomes a checkpoint."""
    collected_up_to: int = 0
    """The first sequence after the last retirement. Older blobs are reused only if the newest checkpoint uses them."""
    clones: tuple[Clone, ...] = ()
    """The clones of its checkpoints, in all trials. Their bytes stay, even if this trial retires the checkpoints."""
    trainable_failures: int = 0
    """Failures of the user's code since the trial was added or requeued."""
    machine_failures: int = 0
    """Failures of the machine since the last commit."""
    consecutive_start_failures: int = 0
    """How many attempts in a row crashed before their first step, all from the same checkpoint or all from scratch."""
    quarantined_since_commit: int = 0
    """The number of checkpoints that were quarantined since the last commit because they crash the trainable."""
    restored_sequence: int | None = None
    """The sequence of the checkpoint that the last attempt restored; None if it restored none."""
    last_clone_sequence: int | None = None
    """The sequence of the last clone from which the trial continued."""
    recomputed_steps: int = 0
    """The number of steps known to have been trained again."""
    recomputed_is_lower_bound: bool = False
    """Whether `recomputed_steps` may be too low, because an owner vanished together with an attempt's last reports."""
    last_known_step: int | None = None
    """The last step that the attempt of a vanished owner is known to have trained; used for `recomputed_steps`."""
    last_known_seconds: float = 0.0
    """The training time up to `last_known_step`; 0 if unknown. Only the cost depends on this time."""
    is_owner_lost: bool = False
    """Whether the owner of its last attempt vanished."""
    end_reason: AnyReason = ""
    """Why the trial or its last attempt ended; empty while it runs. `reason` is its text."""
    cause: Cause | None = None
    """The cause of the last `AttemptEnded`, kept until a pause or a requeue, even while the next attempt runs."""
    finish_kind: FinishKind | None = None
    """How the trial finished; None if it has not finished."""
    outbox: int | None = None
    """The number of the open outbox, to which an attempt on another machine posts; None if no outbox is open."""
    outbox_count: int = 0
    """The number of outboxes so far, which is also the number of the last outbox, open or closed."""
    last_post: int = 0
    """The number of the newest journaled post of the last outbox; 0 if there is none."""
    launch_term: int = 0
    """The term of the owner that launched the attempt of the last outbox."""
    supervisor: Owner | None = None
    """The process on another machine that supervises its last attempt; None if the journal's owner supervises it."""
    original_config: Mapping[str, object] | None = None
    """The configuration with which the trial was added; None if the trial has never continued from a clone."""
    pending_exploit: Exploit | None = None
    """An exploit that the scheduler decided and the trial has not carried out yet."""
    policy_events: tuple[ReplayEvent, ...] = ()
    """The events that a resume replays to the search and the scheduler, oldest first."""
    attempt_records: tuple[AttemptRecord, ...] = ()
    """The time and resources of each attempt, oldest first; see `cost.compute_cost`."""

    @property
    def status(self) -> Status:
        """Its status: completed, pruned, interrupted, errored, running, paused or pending."""
        if self.phase is Phase.FINISHED:
            return _STATUS_OF_FINISH_KIND.get(self.finish_kind, Status.COMPLETED)
        if self.retry_cause is not None:
            return Status.INTERRUPTED
        return Status(self.phase.value)

    @property
    def retry_cause(self) -> Cause | None:
        """The cause of the last attempt's end, while the trial waits for its next attempt; None at other times."""
        return self.cause if self.phase is Phase.PENDING else None

    @property
    def reason(self) -> str:
        """Why the trial or its last attempt ended, with the traceback of an error; empty while it runs."""
        return str(self.end_reason)

    @property
    def has_inherited_report(self) -> bool:
        """Whether the last report came with a cloned checkpoint: the trial has not reported a step after the clone."""
        newest = newest_checkpoint(self)
        return newest is not None and (newest.sequence, newest.step) == (self.last_clone_sequence, self.step)

    @property
    def recomputed_steps_text(self) -> str:
        """The number of its recomputed steps: `3`, `at least 3`, or `none known`."""
        if self.recomputed_is_lower_bound and not self.recomputed_steps:
            return "none known"
        return f"{'at least ' * self.recomputed_is_lower_bound}{self.recomputed_steps}"

    @property
    def measured_seconds(self) -> float | None:
        """The training time in seconds; None if it was not measured (measuring is optional in the user's own flow)."""
        return None if self.step and not self.trained_seconds else self.trained_seconds

    def __repr__(self) -> str:
        """Return what users want to know about a trial, on one line."""
        facts = {"trial": self.id, "status": str(self.status), "step": self.step}
        facts |= {"metrics": dict(self.metrics), "config": dict(self.config)}
        if self.status is Status.ERRORED:
            facts["reason"] = first_line(self.reason)
        fields = (f"{name}={shorten(repr(value), 400)}" for name, value in facts.items())
        return f"Trial({', '.join(fields)})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the trial for a notebook, with its history, its newest checkpoint and its whole error."""
        from prefect_tune.core.experiment.summary import format_trial_html  # imported late, to avoid an import cycle

        return format_trial_html(self)


# ------------------------------------------------------------------------------------------- queries on its checkpoints


def newest_checkpoint(trial: Trial) -> CheckpointRef | None:
    """Return the checkpoint from which to resume: the newest live checkpoint; None if there is none."""
    return trial.checkpoints[-1] if trial.checkpoints else None


def newest_checkpoint_key(folder: TrialKey, trial: Trial) -> CheckpointKey | None:
    """Return the key of the newest checkpoint; None if there is none."""
    newest = newest_checkpoint(trial)
    return folder.checkpoint_key(newest) if newest else None


def compute_unsaved_seconds(trial: Trial, trained_seconds: float) -> float:
    """Return how much of the training time `trained_seconds` was spent after the newest checkpoint."""
    newest = newest_checkpoint(trial)
    return max(0.0, trained_seconds - (newest.trained_seconds if newest else 0.0))


def find_clonable_checkpoint(trial: Trial, max_steps: int | None = None) -> CheckpointRef | None:
    """Return the newest checkpoint from which a clone can train at least one more step; None if there is none.

    `max_steps` is the maximum step of a trial; None if unknown.
    """
    limits = [] if max_steps is None else [max_steps]
    if trial.status is Status.COMPLETED:
        limits.append(trial.step)
    return next((ref for ref in reversed(trial.checkpoints) if all(ref.step < limit for limit in limits)), None)


def make_clone_ref(trial: Trial, ref: CheckpointRef, source: str) -> CheckpointRef:
    """Return the reference for `trial`'s next checkpoint, a clone of the checkpoint `ref` of the trial `source`."""
    origin = ref.origin or CheckpointOrigin(trial=source, step=ref.step, sequence=ref.sequence)
    return ref.model_copy(update={"sequence": trial.next_sequence, "origin": origin})


def list_live_checkpoint_keys(folder: TrialKey, trial: Trial) -> list[CheckpointKey]:
    """Return the keys of all live checkpoints, oldest first."""
    return [folder.checkpoint_key(ref) for ref in trial.checkpoints]


def is_live_checkpoint(trial: Trial, key: CheckpointKey) -> bool:
    """Return whether `key` is a live checkpoint of `trial`, or the origin of one of the trial's live clones."""
    return any(_is_stored_as(trial, ref, key) for ref in trial.checkpoints)


def is_quarantined_checkpoint(trial: Trial, key: CheckpointKey) -> bool:
    """Return whether `key` is one of `trial.quarantined_checkpoints`, or the origin of a clone among these."""
    return any(_is_stored_as(trial, quarantined.checkpoint, key) for quarantined in trial.quarantined_checkpoints)


def _is_stored_as(trial: Trial, ref: CheckpointRef, key: CheckpointKey) -> bool:
    stored = ref.origin or ref
    name = ref.origin.trial if ref.origin is not None else trial.id
    return (stored.step, stored.sequence, name) == (key.step, key.sequence, key.trial.trial)


def is_kept_by_clones(trial: Trial, key: CheckpointKey) -> bool:
    """Return whether `key` is no longer live in `trial`, but a trial has a clone of it."""
    has_clone = any((clone.step, clone.sequence) == (key.step, key.sequence) for clone in trial.clones)
    return has_clone and not is_live_checkpoint(trial, key)


def is_deletable_checkpoint(state: Trial, key: CheckpointKey) -> bool:
    """Return whether the bytes of `key` may be deleted, now and at any later time.

    True if the checkpoint is not live, not quarantined and without clones, and its save began before the last
    retirement in `state`. Then neither this process nor one that takes over during the deletion can reuse or clone it.
    """
    in_use = is_quarantined_checkpoint(state, key) or is_live_checkpoint(state, key) or is_kept_by_clones(state, key)
    return not in_use and key.sequence < state.collected_up_to


def parent_of_next_save(folder: TrialKey, trial: Trial) -> CheckpointKey | None:
    """Return the newest checkpoint, whose bytes the next save may reuse; None if there is none.

    Also None if the newest checkpoint predates a quarantine: it may share the quarantined checkpoint's damaged blobs.
    """
    newest = newest_checkpoint_key(folder, trial)
    return None if newest is None or predates_quarantine(trial, newest.sequence) else newest


def predates_quarantine(trial: Trial, sequence: int) -> bool:
    """Return whether any checkpoint was quarantined after the save with this sequence had begun."""
    return any(sequence < quarantined.since for quarantined in trial.quarantined_checkpoints)


def min_reusable_sequence(trial: Trial) -> int:
    """Return the lowest sequence whose blobs the next save may reuse although no live checkpoint refers to them.

    Blobs of saves before the last retirement can vanish at any time; blobs older than a quarantine may be damaged.
    """
    return max((trial.collected_up_to, *(quarantined.since for quarantined in trial.quarantined_checkpoints)))


def can_commit_save(trial: Trial, sequence: int) -> bool:
    """Return whether the save with this sequence can still become a checkpoint of `trial`.

    False if the save began before the last retirement, because blobs that it reuses may have been deleted. Also False
    if this save is already journaled, or if the trial has continued without it: with a later save or another attempt.
    """
    last_sequence = max((*(ref.sequence for ref in trial.checkpoints), *trial.quarantined_sequences), default=0)
    return sequence > last_sequence and sequence >= max(trial.adopted_up_to, trial.collected_up_to)


# ------------------------------------------------------------------------------------------------------- transitions

# All changes of phase. Events of other types do not change the phase.
NEXT_PHASE: Mapping[tuple[Phase, type[AnyTrialEvent | ExperimentForked]], Phase] = {
    (Phase.PENDING, AttemptStarted): Phase.RUNNING,
    (Phase.RUNNING, AttemptEnded): Phase.PENDING,
    (Phase.RUNNING, TrialFinished): Phase.FINISHED,
    (Phase.PENDING, TrialFinished): Phase.FINISHED,
    (Phase.RUNNING, TrialErrored): Phase.ERRORED,
    (Phase.PENDING, TrialErrored): Phase.ERRORED,
    (Phase.FINISHED, TrialErrored): Phase.ERRORED,  # after its end, its reports turned out to be unusable
    (Phase.PAUSED, TrialErrored): Phase.ERRORED,  # its reports turned out to be unusable
    (Phase.ERRORED, TrialRequeued): Phase.PENDING,
    (Phase.FINISHED, TrialRequeued): Phase.PENDING,
    (Phase.PENDING, TrialRequeued): Phase.PENDING,  # with fresh budgets
    (Phase.RUNNING, TrialPaused): Phase.PAUSED,
    (Phase.PAUSED, TrialResumed): Phase.PENDING,
    (Phase.PAUSED, TrialFinished): Phase.FINISHED,
    # The scheduler may pause a trial whose attempt has ended, or resume it at once if no other trial needs the slot.
    (Phase.PENDING, TrialPaused): Phase.PAUSED,
    (Phase.PENDING, TrialResumed): Phase.PENDING,
    (Phase.RUNNING, TrialResumed): Phase.RUNNING,
    # In a new fork, no process trains the trial, so it is pending.
    (Phase.RUNNING, ExperimentForked): Phase.PENDING,
}
_PHASE_CHANGING_EVENTS = frozenset(event for _, event in NEXT_PHASE)
_CLONABLE_PHASES = frozenset({Phase.PENDING, Phase.PAUSED})
_BUDGETS_AFTER_COMMIT = {"quarantined_since_commit": 0, "machine_failures": 0, "consecutive_start_failures": 0}
_FRESH_BUDGETS = {"cause": None, "trainable_failures": 0, **_BUDGETS_AFTER_COMMIT}
_CheckpointEvent: TypeAlias = CheckpointCommitted | CheckpointCloned | CheckpointsRetired | CheckpointQuarantined


def apply_trial_event(trial: Trial, event: AnyTrialEvent, writer: Writer = "owner") -> Trial:
    """Return the trial after `event`, which `writer` journaled.

    Raises:
        IllegalTransition: the event cannot occur in this state of the trial.
    """
    phase, is_running = NEXT_PHASE.get((trial.phase, type(event))), trial.phase is Phase.RUNNING
    if (
        (phase is None and type(event) in _PHASE_CHANGING_EVENTS)
        or (isinstance(event, StepReported | CheckpointCommitted) and not is_running)
        or (isinstance(event, CheckpointCloned) and trial.phase not in _CLONABLE_PHASES)
    ):
        raise IllegalTransition(f"trial {trial.id!r} is {trial.phase}: event {event.type!r} cannot occur")
    match event:
        case AttemptStarted():
            changed = _apply_attempt_start(trial, event)
        case StepReported(report=report):
            if (changed := apply_report(trial, report)) is trial:
                raise IllegalTransition(f"trial {trial.id!r}: step {report.step} cannot follow step {trial.step}")
        case AttemptEnded() | TrialErrored() | TrialFinished() | TrialPaused():
            changed = _apply_end(trial, event)
        case TrialRequeued(reason=reason):
            changed = trial.model_copy(update={"end_reason": reason, "finish_kind": None, **_FRESH_BUDGETS})
        case DecisionMade(decision=Exploit() as exploit):
            changed = trial.model_copy(update={"pending_exploit": exploit})
        case TrialResumed() | DecisionMade():
            changed = trial  # the caller adds the event to `policy_events`
        case SlotFreed(attempt=attempt, since=since, seconds=seconds):
            records = record_slot_freed(trial.attempt_records, attempt, since, seconds)
            changed = trial.model_copy(update={"attempt_records": records})
        case AttemptLaunched() | PostReceived() | OutboxClosed():
            changed = _apply_outbox_event(trial, event)
        case _:
            changed = _apply_checkpoint_event(trial, event, writer)
    if phase is None or phase is trial.phase:
        return changed
    closed = {"outbox": None} if is_running else {}  # the attempt has ended, so it posts nothing more
    return changed.model_copy(update={"phase": phase, **closed})


def apply_report(trial: Trial, report: StepReport | None) -> Trial:
    """Return the trial after `report`, which need not be journaled yet; an old report leaves the trial unchanged."""
    if report is None or report.step <= trial.step:
        return trial
    return trial.model_copy(update=dict(report))


def apply_adoption(trial: Trial, event: CheckpointsAdopted) -> Trial:
    """Return the trial with the unjournaled checkpoints and the last step that the new owner found on the target.

    An attempt with an open outbox may still be running, so its later saves can become checkpoints.

    Raises:
        IllegalTransition: one of the checkpoints is not acceptable (see `can_commit_save`).
    """
    for checkpoint in event.checkpoints.get(trial.id, ()):
        trial = _add_saved_checkpoint(trial, checkpoint, None)
    if (step := event.last_known_steps.get(trial.id)) is not None:
        seconds = max(trial.last_known_seconds, event.trained_seconds.get(trial.id, 0.0))
        changes = {"last_known_step": max(step, trial.last_known_step or 0), "last_known_seconds": seconds}
        if trial.outbox is None:
            limit = trial.next_sequence + 1
            changes |= {"is_owner_lost": True, "next_sequence": limit, "adopted_up_to": limit}
        trial = trial.model_copy(update=changes)
    return trial


def apply_fork(trial: Trial, forked: ForkedTrial) -> Trial:
    """Return the trial of a fork. Its only checkpoints are those in `forked`: copies, and clones of copied checkpoints.

    Its sequences continue those of the origin. A save that began in the origin is not committed in the fork.
    """
    return trial.model_copy(
        update={
            "phase": NEXT_PHASE.get((trial.phase, ExperimentForked), trial.phase),
            "checkpoints": forked.checkpoints,
            "last_clone_sequence": None,
            "outbox": None,
            "quarantined_sequences": (),
            "quarantined_checkpoints": (),
            "lost_checkpoint_count": 0,
            "adopted_up_to": trial.next_sequence,
            "collected_up_to": trial.next_sequence,
            "restored_sequence": None,
            "attempt_records": (),
        }
    )


def _apply_attempt_start(trial: Trial, event: AttemptStarted) -> Trial:
    """Start the next attempt. It may start from scratch only if the trial has no live checkpoints."""
    recent = (item.checkpoint for item in trial.quarantined_checkpoints if item.since > trial.collected_up_to)
    candidates = (*trial.checkpoints, *recent)  # the restored checkpoint may have been quarantined meanwhile
    start = next((ref for ref in candidates if ref.sequence == event.from_sequence), None)
    is_fresh = start is None and event.from_sequence is None and not trial.checkpoints
    if event.from_step != (start.step if start else 0) or not (start or is_fresh):
        keys = [(ref.step, ref.sequence) for ref in trial.checkpoints]
        raise IllegalTransition(
            f"trial {trial.id!r}: cannot start from step {event.from_step}, sequence {event.from_sequence}; "
            f"expected one of its checkpoints (step, sequence): {keys}"
        )
    if event.attempt != trial.attempt + 1:
        raise IllegalTransition(f"trial {trial.id!r}: attempt {event.attempt} cannot follow {trial.attempt}")
    # The process of an earlier attempt may still run and save, so the saves of this attempt get higher sequences.
    sequence = trial.next_sequence + (trial.attempt > 0)
    recomputed_steps = max(0, max(trial.step, trial.last_known_step or 0) - event.from_step)
    is_same_start = event.from_sequence == trial.restored_sequence
    records, beginning = trial.attempt_records, {"attempt": event.attempt, "began_at": event.at}
    if records and records[-1].attempt == event.attempt:  # `SlotFreed` was journaled first, and added the record
        records = (*records[:-1], records[-1].model_copy(update=beginning))
    else:
        if records and recomputed_steps:
            records = (*records[:-1], records[-1].model_copy(update={"is_lost": True}))
        records = (*records, AttemptRecord(**beginning))
    return trial.model_copy(
        update={
            "attempt": event.attempt,
            "step": event.from_step,
            "metrics": start.metrics if start else {},
            "trained_seconds": start.trained_seconds if start else 0.0,
            "recomputed_steps": trial.recomputed_steps + recomputed_steps,
            "recomputed_is_lower_bound": trial.recomputed_is_lower_bound or trial.is_owner_lost,
            "last_known_step": None,
            "last_known_seconds": 0.0,
            "is_owner_lost": False,
            "consecutive_start_failures": trial.consecutive_start_failures if is_same_start else 0,
            "restored_sequence": event.from_sequence,
            "end_reason": "",
            "next_sequence": sequence,
            "adopted_up_to": sequence if trial.attempt else trial.adopted_up_to,
            "supervisor": event.supervisor,
            "attempt_records": records,
        }
    )


def _apply_end(trial: Trial, event: AttemptEnded | TrialErrored | TrialFinished | TrialPaused) -> Trial:
    """End the trial or its attempt. If the attempt has already ended, its record stays unchanged."""
    is_lost, changes, records = False, dict[str, object](), trial.attempt_records
    match event:
        case TrialFinished():
            changes["finish_kind"] = event.kind
        case TrialPaused():
            changes["cause"] = None
        case TrialErrored():
            is_lost = True
        case AttemptEnded():
            newest, is_failure = newest_checkpoint(trial), event.cause is not Cause.PREEMPTED
            is_lost = is_failure or trial.step > (newest.step if newest else 0)
            is_machine_failure = event.cause is Cause.MACHINE
            changes = {
                "cause": event.cause,
                "machine_failures": trial.machine_failures + is_machine_failure,
                "trainable_failures": trial.trainable_failures + (is_failure and not is_machine_failure),
                "consecutive_start_failures": trial.consecutive_start_failures + 1 if event.before_first_step else 0,
            }
    if records and not records[-1].has_ended:
        usage = None if isinstance(event, TrialErrored) else event.usage
        unsaved = compute_unsaved_seconds(trial, max(trial.trained_seconds, trial.last_known_seconds))
        records = (*records[:-1], records[-1].with_end(usage, unsaved, is_lost=is_lost))
    return trial.model_copy(update={"end_reason": event.reason, "attempt_records": records, **changes})


def _apply_outbox_event(trial: Trial, event: AttemptLaunched | PostReceived | OutboxClosed) -> Trial:
    match event:
        case AttemptLaunched(outbox=outbox) if trial.outbox is None and outbox == trial.outbox_count + 1:
            return trial.model_copy(update={"outbox": outbox, "outbox_count": outbox, "last_post": 0})
        case PostReceived(post=post) if trial.outbox is not None and post == trial.last_post + 1:
            return trial.model_copy(update={"last_post": post})
        case OutboxClosed() if trial.outbox is not None:
            return trial.model_copy(update={"outbox": None})
        case _:
            raise IllegalTransition(
                f"trial {trial.id!r}: {event!r} cannot follow post {trial.last_post} of outbox {trial.outbox}; "
                f"the last outbox is {trial.outbox_count}"
            )


def _apply_checkpoint_event(trial: Trial, event: _CheckpointEvent, writer: Writer) -> Trial:
    match event:
        case CheckpointCommitted():
            return _apply_commit(trial, event)
        case CheckpointCloned():
            return _apply_clone(trial, event)
        case CheckpointsRetired():
            return _retire_checkpoints(trial, event.retired_sequences, trial.next_sequence + 1)
        case CheckpointQuarantined(quarantined=False):
            return _reinstate_checkpoint(trial, event.sequence)
        case CheckpointQuarantined():
            # Older blobs may be damaged, so no later save reuses them. An owner's quarantine invalidates running saves.
            limit = trial.next_sequence + 1
            changes = {"quarantined_since_commit": trial.quarantined_since_commit + event.crashes_trainable}
            if writer == "owner" and not event.by_non_owner:
                changes |= {"collected_up_to": limit, "next_sequence": limit}
            return _quarantine_checkpoint(trial, event.sequence, event.reason, limit).model_copy(update=changes)
        case _:
            assert_never(event)


def _apply_commit(trial: Trial, event: CheckpointCommitted) -> Trial:
    """Add the checkpoint, and retire the checkpoints that it replaces.

    If a checkpoint was quarantined during the save, the new checkpoint may share its damaged blobs. So the new one is
    quarantined too, and the supervisor saves again. An attempt on another machine does not learn of the quarantine, and
    may reuse damaged blobs, so its later commits retire nothing. The next attempt verifies first, so it retires again.
    """
    sequence = event.checkpoint.sequence
    committed = _add_saved_checkpoint(trial, event.checkpoint, event.seconds)
    if predates_quarantine(trial, sequence):
        since = max(quarantined.since for quarantined in trial.quarantined_checkpoints)
        return _quarantine_checkpoint(committed, sequence, make_reason("save-overtaken"), since)
    if event.retired_sequences and not (trial.outbox is not None and predates_quarantine(trial, trial.adopted_up_to)):
        return _retire_checkpoints(committed, event.retired_sequences, sequence + 1)
    return committed


def _apply_clone(trial: Trial, event: CheckpointCloned) -> Trial:
    """Continue from the clone. Steps trained so far do not count as recomputed; the retry budgets do not change."""
    clone = event.checkpoint
    return _add_checkpoint(trial, clone).model_copy(
        update={
            "last_clone_sequence": clone.sequence,
            "step": clone.step,
            "metrics": clone.metrics,
            "trained_seconds": clone.trained_seconds,
            "config": trial.config if event.config is None else event.config,
            "original_config": trial.original_config or trial.config,
            "pending_exploit": None,
            "end_reason": event.reason,
            "last_known_step": None,
            "last_known_seconds": 0.0,
            "is_owner_lost": False,
        }
    )


def _add_saved_checkpoint(trial: Trial, checkpoint: CheckpointRef, seconds: PhaseSeconds | None) -> Trial:
    """Add a checkpoint that the trial has saved itself, and reset the budgets that a commit resets."""
    records = trial.attempt_records
    if records and not records[-1].has_ended:
        record = records[-1].with_commit(seconds, compute_unsaved_seconds(trial, checkpoint.trained_seconds))
        records = (*records[:-1], record)
    return _add_checkpoint(trial, checkpoint).model_copy(update={"attempt_records": records, **_BUDGETS_AFTER_COMMIT})


def _add_checkpoint(trial: Trial, checkpoint: CheckpointRef) -> Trial:
    if not can_commit_save(trial, checkpoint.sequence):
        raise IllegalTransition(
            f"trial {trial.id!r}: the checkpoint of step {checkpoint.step} has sequence {checkpoint.sequence}; "
            f"expected a sequence after its checkpoints {[ref.sequence for ref in trial.checkpoints]}, quarantined "
            f"checkpoints {list(trial.quarantined_sequences)}, the last retirement ({trial.collected_up_to}) and "
            f"earlier attempts ({trial.adopted_up_to})"
        )
    # `next_sequence` may already be higher, because a supervisor chose the save's sequence from an older state.
    next_sequence = max(trial.next_sequence, checkpoint.sequence + 1)
    return trial.model_copy(update={"checkpoints": (*trial.checkpoints, checkpoint), "next_sequence": next_sequence})


def _retire_checkpoints(trial: Trial, sequences: tuple[int, ...], limit: int) -> Trial:
    """Retire live or quarantined checkpoints, irreversibly; later saves get the sequence `limit` or higher ones."""
    quarantined = trial.quarantined_checkpoints
    unlisted = {item.checkpoint.sequence for item in quarantined} & set(sequences)
    return trial.model_copy(
        update={
            "checkpoints": tuple(ref for ref in trial.checkpoints if ref.sequence not in sequences),
            "quarantined_checkpoints": tuple(item for item in quarantined if item.checkpoint.sequence not in unlisted),
            "quarantined_sequences": tuple(old for old in trial.quarantined_sequences if old not in unlisted),
            "collected_up_to": limit,
            "next_sequence": max(trial.next_sequence, limit),
        }
    )


def _quarantine_checkpoint(trial: Trial, sequence: int, reason: AnyReason, since: int) -> Trial:
    """Quarantine a checkpoint. If it is not live, only its sequence is recorded, so it cannot be reinstated."""
    refs, sequences = [ref for ref in trial.checkpoints if ref.sequence == sequence], trial.quarantined_sequences
    quarantined = (QuarantinedCheckpoint(checkpoint=ref, since=since, reason=reason) for ref in refs)
    return trial.model_copy(
        update={
            "checkpoints": tuple(ref for ref in trial.checkpoints if ref not in refs),
            "quarantined_sequences": sequences if sequence in sequences else (*sequences, sequence),
            "quarantined_checkpoints": (*trial.quarantined_checkpoints, *quarantined),
            "lost_checkpoint_count": trial.lost_checkpoint_count + len(refs),
        }
    )


def _reinstate_checkpoint(trial: Trial, sequence: int) -> Trial:
    """Put a quarantined checkpoint back in its place. If it is then the newest one, the next attempt starts from it."""
    quarantined = trial.quarantined_checkpoints
    refs = [item.checkpoint for item in quarantined if item.checkpoint.sequence == sequence]
    return trial.model_copy(
        update={
            "checkpoints": tuple(sorted((*trial.checkpoints, *refs), key=lambda ref: ref.sequence)),
            "quarantined_sequences": tuple(old for old in trial.quarantined_sequences if not refs or old != sequence),
            "quarantined_checkpoints": tuple(item for item in quarantined if item.checkpoint.sequence != sequence),
            "lost_checkpoint_count": trial.lost_checkpoint_count - len(refs),
        }
    )
