"""The events in journal entries: events of a trial, events of an experiment, and the entry itself.

`TrialFinished`, `TrialPaused` and `AttemptEnded` are also the outcomes of an attempt (`Outcome`). The attempt's process
sends the outcome, the supervisor completes and returns it, the journal stores it, and the outcome determines the
state of the Prefect run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from prefect_tune.core.reasons import AnyReason, Reason
from prefect_tune.core.reasons import Cause as Cause  # noqa: PLC0414 - re-exported with the events
from prefect_tune.core.reasons import FinishKind as FinishKind  # noqa: PLC0414 - the same
from prefect_tune.core.schedulers.base import Decision
from prefect_tune.core.storage.documents import Document
from prefect_tune.core.storage.layout import CheckpointOrigin as CheckpointOrigin  # noqa: PLC0414 - the same
from prefect_tune.core.storage.layout import Generation, JournalKey
from prefect_tune.core.usage_records import AnyUsage, PhaseSeconds, Seconds
from prefect_tune.core.values import Digest, ExperimentName, Message, StepReport, TrialId, Value

# Values in events: owners, checkpoint references, causes, fork origins, warm-start trials.


class Owner(Value):
    """The process that owns a journal. If an earlier owner writes, it gets a `Superseded` error with the new owner."""

    name: str
    host: str
    pid: int
    flow_run: str | None = None
    task_run: str | None = None
    """The id of the task run in which the process runs an attempt; None if there is no such task run."""
    is_manual: bool = False
    """Whether the user resumed this run; if so, its start does not count as a restart after a crash."""
    attempt: int = 0
    """In a user's own flow, the number of times that the flow run was started; 0 elsewhere."""
    slots: int | None = None
    """The number of trials that this run trains in parallel; None if unlimited."""

    @property
    def identity(self) -> str:
        """An id shared by all tasks of one start of a flow run, or, without a flow run, by all owners of one name."""
        return f"{self.flow_run}/{self.attempt}" if self.flow_run else self.name

    def __str__(self) -> str:
        run = f", flow run {self.flow_run}" if self.flow_run else ""
        return f"{self.name} (pid {self.pid} on {self.host}{run})"


class CheckpointRef(Value):
    """A checkpoint as the journal records it: step and sequence (together its name on the target), report, and size.

    `make_checkpoint_ref` in `core/restore.py` makes the reference from the manifest of a save.
    """

    step: int
    sequence: int
    metrics: Mapping[str, Any] = Field(default_factory=dict)
    trained_seconds: float = 0.0
    size_bytes: int = 0
    origin: CheckpointOrigin | None = None
    """For a clone, the cloned checkpoint; None for a checkpoint with its own manifest."""

    @property
    def report(self) -> StepReport:
        """The report of the checkpoint's step."""
        return StepReport(step=self.step, metrics=self.metrics, trained_seconds=self.trained_seconds)


class QuarantinedCheckpoint(Value):
    """A quarantined checkpoint. It is not used, but its bytes are kept, so that it can be released later."""

    checkpoint: CheckpointRef
    since: int
    """The sequence of the first save after the quarantine; earlier saves may share the damage."""
    reason: AnyReason


class ForkOrigin(Value):
    """The entry of another experiment's journal from which a fork continues."""

    experiment: ExperimentName
    generation: Generation
    number: int
    digest: Digest

    @property
    def key(self) -> JournalKey:
        """The key of the other experiment's journal."""
        return JournalKey(experiment=self.experiment, generation=self.generation)

    def __str__(self) -> str:
        return f"experiment {self.experiment!r} as of entry {self.number}"


class PriorTrial(Value):
    """A finished trial of another experiment, for the warm start of a search; it is not trained again."""

    trial: TrialId
    config: Mapping[str, object]
    report: StepReport
    """The trial's last report."""
    stopped: bool = False
    """Whether a scheduler ended the trial early."""


class WarmStart(Value):
    """An experiment from which a search warm-starts, with copies of its trials, in case the experiment is deleted."""

    source: str
    """The experiment as the user named it: by its name, or `target/name`."""
    location: str | None = None
    """The experiment's location, as events and assets name it: normalized, without secrets; None if unknown."""
    trials: tuple[PriorTrial, ...]


class TrialEvent(Value):
    """An event of one trial."""

    trial: TrialId


class TrialAdded(TrialEvent):
    """The trial exists, with this configuration."""

    type: Literal["trial-added"] = "trial-added"
    config: Mapping[str, object]
    fingerprint: Mapping[str, str] = Field(default_factory=dict)
    proposed_by_search: bool = False
    """Whether a search proposed the trial; False for a single training, and in a user's own flow."""


class AttemptStarted(TrialEvent):
    """An attempt begins, from a checkpoint or from scratch. Steps reported after the checkpoint are trained again."""

    type: Literal["attempt-started"] = "attempt-started"
    attempt: int
    from_step: int
    from_sequence: int | None = None
    at: str | None = None
    """The time at which the attempt began, by the clock of its machine; used only for the cost."""
    supervisor: Owner | None = None
    """The process on another machine that supervises the attempt; None if the journal's owner supervises it."""
    task_run: str | None = None
    """The task run of an attempt that the journal's owner supervises, for display."""


class StepReported(TrialEvent):
    """A step was trained."""

    type: Literal["step-reported"] = "step-reported"
    report: StepReport
    awaits_decision: bool = False
    """Whether the trial waits for the scheduler's decision."""


class CheckpointCommitted(TrialEvent):
    """A checkpoint is committed: its manifest was created, and the journal still had the same owner afterwards.

    `retired_sequences` are the checkpoints that this entry retires; their bytes are deleted after the entry is written.
    """

    type: Literal["checkpoint-committed"] = "checkpoint-committed"
    checkpoint: CheckpointRef
    retired_sequences: tuple[int, ...] = ()
    sent_bytes: int | None = None
    """The number of bytes that were uploaded because they were not on the target yet; None if unknown."""
    upload_seconds: float | None = None
    """The duration of the upload; None if unknown."""
    seconds: PhaseSeconds | None = None
    """The time of the attempt up to the checkpoint's step, by phase; None if unknown."""


class CheckpointsRetired(TrialEvent):
    """These checkpoints (by sequence) are retired; their bytes are deleted only after this entry is written.

    Even without checkpoints, this event is a barrier: a save that began before it can no longer be committed. The blobs
    of such a save are not reused, so they can be deleted. A non-owner writes this event only for an ended trial, which
    has no running save.
    """

    type: Literal["checkpoints-retired"] = "checkpoints-retired"
    retired_sequences: tuple[int, ...]


class CheckpointQuarantined(TrialEvent):
    """A checkpoint is no longer used, because its bytes are damaged, or because every attempt that loads it crashes.

    With `quarantined=False`, the checkpoint is used again. A quarantine by the owner is a barrier for running saves,
    like `CheckpointsRetired`. A quarantine by a non-owner is no barrier: a save that began before the quarantine is
    committed, but then quarantined too, because it may share the damage.
    """

    type: Literal["checkpoint-quarantined"] = "checkpoint-quarantined"
    sequence: int
    reason: AnyReason = ""
    crashes_trainable: bool = False
    """Whether the checkpoint is quarantined because it crashes the trainable, although its bytes are undamaged."""
    quarantined: bool = True
    by_non_owner: bool = False
    """In a fork, whether the event was copied from an entry of the origin that a non-owner wrote; otherwise False."""


class CheckpointCloned(TrialEvent):
    """The trial continues from a clone of another trial's checkpoint; `config`, if given, replaces its configuration.

    The clone becomes the trial's newest checkpoint. It exists only in this entry, not on the target, and uses the
    original's manifest and bytes. Both stay as long as a trial has a clone of it, even if the original is retired.
    """

    type: Literal["checkpoint-cloned"] = "checkpoint-cloned"
    checkpoint: CheckpointRef
    source: TrialId
    """The trial whose checkpoint is cloned; the cloned checkpoint may itself be a clone."""
    config: Mapping[str, object] | None = None
    reason: AnyReason = ""


class AttemptLaunched(TrialEvent):
    """An attempt was requested on another machine. It posts its events to an outbox (see `core/journal/outbox`)."""

    type: Literal["attempt-launched"] = "attempt-launched"
    outbox: int
    """The number of the outbox, from 1. Each attempt has its own outbox."""


class PostReceived(TrialEvent):
    """The events of a post from the trial's outbox follow in this entry."""

    type: Literal["post-received"] = "post-received"
    post: int
    """The number of the post. Posts are received in order, without gaps."""


class OutboxClosed(TrialEvent):
    """The trial's outbox was closed: its attempt can post nothing more, and no more of its posts are received."""

    type: Literal["outbox-closed"] = "outbox-closed"


class AttemptEnded(TrialEvent):
    """The attempt has ended, but the trial has not; the trial waits for its next attempt."""

    type: Literal["attempt-ended"] = "attempt-ended"
    cause: Cause
    reason: AnyReason
    before_first_step: bool = False
    """Whether the attempt crashed before its first step, without a stop request; its checkpoint may be the cause."""
    usage: AnyUsage | None = None
    """The resource usage of the attempt; None if unknown."""


class TrialErrored(TrialEvent):
    """The trial errored: failures of this cause are never retried, or the retry budget for them is spent."""

    type: Literal["trial-errored"] = "trial-errored"
    cause: Cause
    reason: AnyReason


class TrialFinished(TrialEvent):
    """The trial is finished; `kind` says how: for example, a stop criterion was met, or the trainable returned."""

    type: Literal["trial-finished"] = "trial-finished"
    reason: AnyReason
    kind: FinishKind = FinishKind.CRITERION
    usage: AnyUsage | None = None
    """The resource usage of the ended attempt; None if unknown, or if no attempt trained."""


class TrialRequeued(TrialEvent):
    """An ended trial continues: it trains more steps, or is retried."""

    type: Literal["trial-requeued"] = "trial-requeued"
    reason: AnyReason


class TrialPaused(TrialEvent):
    """The scheduler gives this trial's slot to another trial. This trial saved, if possible, and waits to resume."""

    type: Literal["trial-paused"] = "trial-paused"
    reason: AnyReason
    usage: AnyUsage | None = None
    """The resource usage of the ended attempt; None if unknown, or if no attempt trained."""


class TrialResumed(TrialEvent):
    """The scheduler gives a paused trial a slot again."""

    type: Literal["trial-resumed"] = "trial-resumed"


class DecisionMade(TrialEvent):
    """The scheduler's decision on a trial at a milestone; journaled before it is carried out."""

    type: Literal["decision-made"] = "decision-made"
    report: StepReport
    decision: Decision


class SlotFreed(TrialEvent):
    """An attempt has ended, and its slot is free for another attempt; only the cost depends on this event."""

    type: Literal["slot-freed"] = "slot-freed"
    attempt: int
    """The number of the last attempt in the slot."""
    since: str
    """The time at which the trial got the slot, by the clock of the run."""
    seconds: Seconds
    """The time for which the trial held the slot."""


Outcome: TypeAlias = TrialFinished | TrialPaused | AttemptEnded
"""How an attempt ended."""
AttemptEvent: TypeAlias = (
    AttemptStarted
    | StepReported
    | CheckpointCommitted
    | CheckpointsRetired
    | CheckpointQuarantined
    | AttemptEnded
    | TrialFinished
    | TrialPaused
)
"""The events that an attempt journals."""
NonOwnerEvent: TypeAlias = CheckpointQuarantined | CheckpointsRetired
"""The events that a non-owner is allowed to write. A non-owner adds an entry without becoming the journal's owner."""
AnyTrialEvent: TypeAlias = (
    AttemptEvent
    | CheckpointCloned
    | TrialErrored
    | TrialRequeued
    | TrialResumed
    | DecisionMade
    | SlotFreed
    | AttemptLaunched
    | PostReceived
    | OutboxClosed
)


# The events of an experiment.

Writer: TypeAlias = Literal["owner", "non-owner"]
"""The writer of an entry: the journal's owner, or a non-owner, which is allowed to write only `NonOwnerEvent`."""


class OwnerChanged(Value):
    """A new owner begins a new term, so the next write of every earlier owner fails."""

    type: Literal["owner-changed"] = "owner-changed"
    experiment: ExperimentName
    generation: Generation
    term: int
    owner: Owner
    at: str | None = None
    """The time of the change, by the new owner's clock; used only for the cost."""


class CheckpointsAdopted(Value):
    """The new owner adopts these checkpoints, because their manifests exist, but the last owner did not journal them.

    If no event up to this one lists a manifest of an earlier term, only a post of its attempt can make it a checkpoint.
    """

    type: Literal["checkpoints-adopted"] = "checkpoints-adopted"
    checkpoints: Mapping[str, tuple[CheckpointRef, ...]] = Field(default_factory=dict)
    last_known_steps: Mapping[str, int] = Field(default_factory=dict)
    """For each running trial, the last known step of its lost attempt; 0 if no step is known."""
    trained_seconds: Mapping[str, float] = Field(default_factory=dict)
    """For each running trial, the training time up to its last known step, if known; used only for the cost."""
    last_seen_at: str | None = None
    """The time of the last owner's live status, by that owner's clock; None if missing. Used only for the cost."""


class ExperimentConfigured(Value):
    """The experiment's parameters as JSON, the samples that a run adds, and the experiments for a warm start."""

    type: Literal["experiment-configured"] = "experiment-configured"
    settings: Mapping[str, object]
    """The parameters, for a resume by name."""
    extensions: Mapping[str, int] = Field(default_factory=dict)
    """For each run, the number of samples that it adds to the planned samples. A restart adds none.

    The key of a run is its id, or, if another run called it, that run's key and the call. A restart keeps the key.
    """
    warm_starts: tuple[WarmStart, ...] = ()
    """Experiments from which the search warm-starts from now on."""


class StopRequested(Value):
    """A trial, or the whole experiment, must save and end. The event is journaled before the stop is carried out.

    A stopped trial is finished. A stopped experiment ends for its present owner; the next owner continues it.
    """

    type: Literal["stop-requested"] = "stop-requested"
    reason: AnyReason
    trial: TrialId | None = None
    """The trial to stop; None for the whole experiment."""
    request: str | None = None
    """The write id of the request on the target; None if a stopper or a limit of the experiment is the cause."""
    refused: Reason | None = None
    """Why the request is ignored; None if it is carried out."""


class FormAnswered(Value):
    """The user has chosen how a suspended run continues; the same entry holds the resulting events."""

    type: Literal["form-answered"] = "form-answered"
    key: Message
    """The key of the form; each form is answered once."""
    answer: Mapping[str, object]
    flow_run: str | None = None
    """The id of the suspended run. The answer also applies after restarts of this run."""


class ForkedTrial(Value):
    """A trial of a fork. Up to the fork, it was trained in the origin; in the fork, it waits to be continued."""

    checkpoints: tuple[CheckpointRef, ...] = ()
    """The copied checkpoints, and clones of copied checkpoints, each with its step and sequence in the origin."""


class ExperimentForked(Value):
    """The experiment becomes a fork of `origin`. The fork cannot be used until a second such event lists its `trials`.

    The entry with the second event completes the fork, and also holds the origin's events up to the fork.
    """

    type: Literal["experiment-forked"] = "experiment-forked"
    origin: ForkOrigin
    trials: Mapping[TrialId, ForkedTrial] | None = None


class DeletionStarted(Value):
    """The whole experiment is about to be deleted, so a process can become its owner only to delete it."""

    type: Literal["deletion-started"] = "deletion-started"


Event: TypeAlias = Annotated[
    OwnerChanged
    | CheckpointsAdopted
    | ExperimentConfigured
    | StopRequested
    | FormAnswered
    | ExperimentForked
    | DeletionStarted
    | TrialAdded
    | AnyTrialEvent,
    Field(discriminator="type"),
]


# `Entry`: the document that a journal stores for each group of events; `core/journal` writes and reads it.


class Entry(Document):
    """One numbered, immutable record of the journal: a group of events, chained to the previous entry."""

    format: Literal["prefect-tune/journal"] = "prefect-tune/journal"
    version: Literal[5] = 5
    number: int
    term: int
    write_id: str
    at: str
    writer: Writer = "owner"
    previous: str
    events: tuple[Event, ...]
