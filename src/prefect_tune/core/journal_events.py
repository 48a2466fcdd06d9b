"""The events that journal entries hold: those of a trial, those of an experiment, and the entry itself.

`Finished`, `Paused` and `AttemptEnded` are also how an attempt says that it has ended (`Outcome`): its process sends
one of them, its supervisor completes and returns it, the journal holds it, and Prefect's state is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from prefect_tune.core.reasons import AnyReason, Reason
from prefect_tune.core.reasons import Cause as Cause  # noqa: PLC0414 - a part of these events, for all others
from prefect_tune.core.reasons import FinishKind as FinishKind  # noqa: PLC0414 - the same
from prefect_tune.core.schedulers.base import Decision
from prefect_tune.core.storage.documents import Document
from prefect_tune.core.storage.layout import CheckpointOrigin as CheckpointOrigin  # noqa: PLC0414 - the same
from prefect_tune.core.storage.layout import Generation, JournalKey
from prefect_tune.core.usage_records import PhaseSeconds, Seconds, Use
from prefect_tune.core.values import Digest, ExperimentName, Message, StepReport, TrialId, Value

# Values that events hold: owners, checkpoint references, causes, fork origins, warm-start trials.


class Owner(Value):
    """The process that opened a journal; messages of superseded owners name it."""

    name: str
    host: str
    pid: int
    flow_run: str | None = None
    task_run: str | None = None
    """The id of the task run, for an attempt that is one."""
    by_hand: bool = False
    """Whether a person resumed this run, so that it does not count as a restart after a crash."""
    attempt: int = 0
    """For a flow of one's own: how often its run was started."""
    slots: int | None = None
    """How many trials this run trains at a time; None if nothing limits them."""

    @property
    def identity(self) -> str:
        """The same for all tasks of one run of a flow, or, without a flow, for all owners of this name."""
        return f"{self.flow_run}/{self.attempt}" if self.flow_run else self.name

    def __str__(self) -> str:
        run = f", flow run {self.flow_run}" if self.flow_run else ""
        return f"{self.name} (pid {self.pid} on {self.host}{run})"


class CheckpointRef(Value):
    """A checkpoint in the journal: step and sequence, which name it on the target, and the input of retention.

    `ref_of` in `core/restore.py` makes it of the manifest of a save.
    """

    step: int
    sequence: int
    metrics: Mapping[str, Any] = Field(default_factory=dict)
    trained_seconds: float = 0.0
    size_bytes: int = 0
    pinned: bool = False
    origin: CheckpointOrigin | None = None
    """For a clone, the checkpoint that it is a clone of; None for a checkpoint with a manifest of its own."""

    @property
    def report(self) -> StepReport:
        """The report of its step."""
        return StepReport(step=self.step, metrics=self.metrics, trained_seconds=self.trained_seconds)


class QuarantinedCheckpoint(Value):
    """A checkpoint that is quarantined: not used, its bytes are kept; it can be reinstated or retired."""

    checkpoint: CheckpointRef
    since: int
    """The first sequence of a save that began after that: those before may share the damage."""
    reason: AnyReason


class ForkOrigin(Value):
    """The entry of another experiment's journal that a fork continues from."""

    experiment: ExperimentName
    generation: Generation
    number: int
    digest: Digest

    @property
    def key(self) -> JournalKey:
        """The key of that journal."""
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
    """Whether a scheduler ended it."""


class WarmStart(Value):
    """An experiment that a search warm-starts from, with its trials: it may be deleted after that."""

    source: str
    """The experiment as the user named it: by its name, or `target/name`."""
    place: str | None = None
    """Its place as events and assets name it: normalized, and without secrets; None where that is not known."""
    trials: tuple[PriorTrial, ...]


class TrialEvent(Value):
    """Something that happened to one trial."""

    trial: TrialId


class TrialAdded(TrialEvent):
    """The trial exists, with this configuration."""

    type: Literal["trial-added"] = "trial-added"
    config: Mapping[str, object]
    fingerprint: Mapping[str, str] = Field(default_factory=dict)
    of_search: bool = False
    """Whether a search proposed it; False for a single training, and in a flow of one's own."""


class Started(TrialEvent):
    """An attempt begins, from a checkpoint or from nothing. Steps reported after that checkpoint are trained again."""

    type: Literal["started"] = "started"
    attempt: int
    from_step: int
    from_sequence: int | None = None
    at: str | None = None
    """When the attempt began, by the clock of its machine; for the cost only."""
    supervisor: Owner | None = None
    """The process that supervises the attempt, on another machine; None where that is the journal's owner."""
    task_run: str | None = None
    """The task run of an attempt that the journal's owner supervises, for people."""


class Reported(TrialEvent):
    """A step was trained."""

    type: Literal["reported"] = "reported"
    report: StepReport
    asks: bool = False
    """Whether the trial waits for the search to answer whether it continues."""


class Committed(TrialEvent):
    """A checkpoint is committed: its manifest was created, and its owner was still the owner afterwards.

    `retires` names the sequences of checkpoints that end with this entry; their bytes are deleted only after it.
    """

    type: Literal["committed"] = "committed"
    checkpoint: CheckpointRef
    retires: tuple[int, ...] = ()
    sent_bytes: int | None = None
    """The bytes that were not on the target yet; None where that is not known."""
    upload_seconds: float | None = None
    """How long publishing it took; None where that is not known."""
    seconds: PhaseSeconds | None = None
    """The seconds of its attempt up to its step; None where they are not known."""


class Retired(TrialEvent):
    """These checkpoints (by sequence) end with this entry; their bytes are deleted only after it.

    With or without any, this entry is a limit: a save that began before it and is no checkpoint never becomes
    one, and its blobs are not reused, so that they can be deleted. A guest writes it only for a trial that has ended,
    so that no save is running.
    """

    type: Literal["retired"] = "retired"
    retires: tuple[int, ...]


class Quarantined(TrialEvent):
    """A checkpoint is no longer used: its bytes are damaged, or every attempt that loads it dies.

    `quarantined=False`: it is used again. The owner's quarantine is a limit for running saves as `Retired` is; a
    guest's is none: a save that began before it is quarantined too, since it may share the damage.
    """

    type: Literal["quarantined"] = "quarantined"
    sequence: int
    reason: AnyReason = ""
    kills: bool = False
    """Whether it is quarantined because the trainable dies from it; its bytes are undamaged."""
    quarantined: bool = True
    by_guest: bool = False
    """In a fork, whose entry holds the origin's events: whether a guest of the origin has written this one."""


class Pinned(TrialEvent):
    """Retention keeps the checkpoint, or (`pinned=False`) no longer has to."""

    type: Literal["pinned"] = "pinned"
    sequence: int
    pinned: bool = True


class Cloned(TrialEvent):
    """The trial continues from a clone of another trial's checkpoint, with `config` where that is given.

    The clone is its newest checkpoint from now on. It is this entry, and no object on the target: it uses the manifest
    of its origin, whose bytes stay, retired or not, as long as a trial has a clone of it.
    """

    type: Literal["cloned"] = "cloned"
    checkpoint: CheckpointRef
    source: TrialId
    """The trial that it exploits; it may have the checkpoint as a clone itself."""
    config: Mapping[str, object] | None = None
    reason: AnyReason = ""


class Launched(TrialEvent):
    """An attempt was requested on another machine: it posts its events to an outbox (see `core/journal/outbox`)."""

    type: Literal["launched"] = "launched"
    outbox: int
    """The number of the outbox, from 1: each is used once."""


class Received(TrialEvent):
    """The entry holds the events of a post from the trial's outbox; they follow this event."""

    type: Literal["received"] = "received"
    post: int
    """The number of the post. Posts are received in order, without gaps."""


class OutboxClosed(TrialEvent):
    """The trial's outbox accepts no more posts, and every post is received: the attempt was fenced off."""

    type: Literal["outbox-closed"] = "outbox-closed"


class AttemptEnded(TrialEvent):
    """The attempt is over and the trial is not: it waits for its next attempt."""

    type: Literal["attempt-ended"] = "attempt-ended"
    cause: Cause
    reason: AnyReason
    at_start: bool = False
    """Whether it died before its first step, not being asked to end: the checkpoint it restored may be the cause."""
    use: Use | None = None
    """What the attempt used; None where that is not known."""


class GaveUp(TrialEvent):
    """The trial errored: the retry budget of this cause is spent."""

    type: Literal["gave-up"] = "gave-up"
    cause: Cause
    reason: AnyReason


class Finished(TrialEvent):
    """The trial is done: a stop criterion was met, or the trainable returned."""

    type: Literal["finished"] = "finished"
    reason: AnyReason
    kind: FinishKind = FinishKind.CRITERION
    use: Use | None = None
    """What its attempt used; None where that is not known, or where it did not train."""


class Requeued(TrialEvent):
    """A trial that had ended continues: it gets more steps, or another try."""

    type: Literal["requeued"] = "requeued"
    reason: AnyReason


class Paused(TrialEvent):
    """The scheduler gives the slot to another trial: this one has saved if it could, and waits to be resumed."""

    type: Literal["paused"] = "paused"
    reason: AnyReason
    use: Use | None = None
    """What its attempt used; None where that is not known, or where it did not train."""


class Resumed(TrialEvent):
    """The scheduler gives a paused trial a slot again."""

    type: Literal["resumed"] = "resumed"


class Decided(TrialEvent):
    """The scheduler's decision on a trial at a milestone; journaled before it is carried out."""

    type: Literal["decided"] = "decided"
    report: StepReport
    decision: Decision


class SlotFreed(TrialEvent):
    """An attempt has ended, and its slot is free for the next one; only the cost depends on it."""

    type: Literal["slot-freed"] = "slot-freed"
    attempt: int
    """The last attempt in the slot."""
    since: str
    """When it got the slot, by the clock of the search."""
    seconds: Seconds
    """How long it held the slot."""


Outcome: TypeAlias = Finished | Paused | AttemptEnded
"""How an attempt ended."""
AttemptEvent: TypeAlias = Started | Reported | Committed | Retired | Quarantined | AttemptEnded | Finished | Paused
"""What an attempt journals."""
GuestEvent: TypeAlias = Quarantined | Retired
"""What a guest may write: a process that adds an entry to a journal, and does not become its owner."""
OneTrialsEvent: TypeAlias = (
    Started
    | Reported
    | Committed
    | Retired
    | Quarantined
    | Pinned
    | Cloned
    | AttemptEnded
    | GaveUp
    | Finished
    | Requeued
    | Paused
    | Resumed
    | Decided
    | SlotFreed
    | Launched
    | Received
    | OutboxClosed
)


# The events of an experiment.

Writer: TypeAlias = Literal["owner", "guest"]
"""The writer of an entry: the journal's owner, or a guest, which writes `GuestEvent` and does not become the owner."""


class Opened(Value):
    """A new owner begins a new term; every older owner's next write fails."""

    type: Literal["opened"] = "opened"
    experiment: ExperimentName
    generation: Generation
    term: int
    owner: Owner
    at: str | None = None
    """When that was, by the owner's clock; for the cost only."""


class Adopted(Value):
    """The new owner adopts these checkpoints: their manifests exist, and the last owner did not journal them.

    A manifest of an earlier term that is neither listed here nor journaled is no checkpoint, and never becomes one.
    """

    type: Literal["adopted"] = "adopted"
    checkpoints: Mapping[str, tuple[CheckpointRef, ...]] = Field(default_factory=dict)
    reached: Mapping[str, int] = Field(default_factory=dict)
    """By running trial, the last step that its lost attempt is known to have trained; 0 if none is known."""
    trained_seconds: Mapping[str, float] = Field(default_factory=dict)
    """By running trial, its training time up to that step, where it is known; for the cost only."""
    seen_at: str | None = None
    """The time of the last owner's live status, by its clock; None if it left none. For the cost only."""


class Configured(Value):
    """The parameters of the experiment as JSON, the samples that a run adds, and earlier experiments to start from."""

    type: Literal["configured"] = "configured"
    settings: Mapping[str, object]
    """The parameters, for a resume by name."""
    extensions: Mapping[str, int] = Field(default_factory=dict)
    """How many samples a run adds to the planned ones, once, however often it starts.

    The run is named by what a restart keeps: its id, or its place in the run that called it.
    """
    warm_starts: tuple[WarmStart, ...] = ()
    """Experiments that the search warm-starts from, from now on."""


class StopAsked(Value):
    """A trial, or the whole experiment, is asked to save and end; journaled before it is carried out.

    A stopped trial is finished. A stopped experiment ends for its present owner; the next owner continues it.
    """

    type: Literal["stop-asked"] = "stop-asked"
    reason: AnyReason
    trial: TrialId | None = None
    """None for the whole experiment."""
    request: str | None = None
    """The write id of the request on the target; None where a stopper or a limit of the experiment asks."""
    refused: Reason | None = None
    """Why the request is ignored; None where it is carried out."""


class Answered(Value):
    """A person has said how a suspended run continues; the same entry holds what follows from that."""

    type: Literal["answered"] = "answered"
    key: Message
    """The key of the form, which is answered once."""
    answer: Mapping[str, object]
    flow_run: str | None = None
    """The id of that suspended run: the answer holds for it from then on, however often it is restarted."""


class ForkedTrial(Value):
    """A trial of a fork: all its earlier events happened in the origin; it continues from here, and is not running."""

    checkpoints: tuple[CheckpointRef, ...] = ()
    """Those that were copied, and clones of them, with the steps and sequences that they have in the origin."""


class Forked(Value):
    """The experiment becomes a fork of `origin`; it cannot be used until an entry has its `trials`.

    That entry, which completes the fork, also holds all events of the origin up to the forked one.
    """

    type: Literal["forked"] = "forked"
    origin: ForkOrigin
    trials: Mapping[TrialId, ForkedTrial] | None = None


class Deletion(Value):
    """The whole experiment is about to be deleted: it cannot be opened any more, but for its deletion."""

    type: Literal["deletion"] = "deletion"


Event: TypeAlias = Annotated[
    Opened | Adopted | Configured | StopAsked | Answered | Forked | Deletion | TrialAdded | OneTrialsEvent,
    Field(discriminator="type"),
]


# `Entry`: the document that a journal stores for each group of events; `core/journal` writes and reads it.


class Entry(Document):
    """One numbered, immutable record of the journal: a group of events, chained to the entry before it."""

    format: Literal["prefect-tune/journal"] = "prefect-tune/journal"
    version: Literal[4] = 4
    number: int
    term: int
    write_id: str
    at: str
    writer: Writer = "owner"
    previous: str
    events: tuple[Event, ...]
