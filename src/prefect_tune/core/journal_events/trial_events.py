"""The events of a trial, as journal entries hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from pydantic import Field

from prefect_tune.core.journal_events.event_fields import Cause, CheckpointRef, Claim
from prefect_tune.core.models import Message, StepReport, TrialId, Value
from prefect_tune.core.schedulers.base import Decision
from prefect_tune.core.storage.layout import CheckpointKey

__all__ = [
    "AttemptEnded",
    "Claimed",
    "Cloned",
    "Committed",
    "Decided",
    "ExternalWriterEvent",
    "ExternallyQuarantined",
    "Finished",
    "GaveUp",
    "Inherited",
    "OneTrialsEvent",
    "Paused",
    "Pinned",
    "Pruned",
    "Quarantined",
    "Questioned",
    "Rebased",
    "Reinstated",
    "Released",
    "Reported",
    "Requeued",
    "Resumed",
    "Retired",
    "Started",
    "TrialAdded",
    "TrialEvent",
]


class TrialEvent(Value):
    """Something that happened to one trial."""

    trial: TrialId


class TrialAdded(TrialEvent):
    """The trial exists, with this configuration."""

    type: Literal["trial-added"] = "trial-added"
    config: Mapping[str, object]
    fingerprint: Mapping[str, str] = Field(default_factory=dict)
    apart: bool = False
    """Whether the trial has its own journal, whose entries the experiment's journal absorbs."""


class Started(TrialEvent):
    """An attempt begins, from a checkpoint or from nothing. Steps reported after that checkpoint are trained again."""

    type: Literal["started"] = "started"
    attempt: int
    from_step: int
    from_sequence: int | None = None


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


class Retired(TrialEvent):
    """These checkpoints (by sequence) end with this entry; their bytes are deleted only after it.

    With or without any, this entry is a limit: a save that began before it and is no checkpoint never becomes
    one, and its blobs are not reused, so that they can be deleted.
    """

    type: Literal["retired"] = "retired"
    retires: tuple[int, ...]


class Quarantined(TrialEvent):
    """A checkpoint is no longer used: its bytes are damaged, or every attempt that loads it dies."""

    type: Literal["quarantined"] = "quarantined"
    sequence: int
    reason: Message
    kills: bool = False
    """Whether it is quarantined because the trainable dies from it; its bytes are undamaged."""


class Pinned(TrialEvent):
    """Retention keeps the checkpoint, or (`pinned=False`) no longer has to."""

    type: Literal["pinned"] = "pinned"
    sequence: int
    pinned: bool = True


class Cloned(TrialEvent):
    """The trial continues from a clone of another trial's checkpoint, with `config` where that is given.

    The clone is its newest checkpoint from now on; its manifest was created before this entry, and refers to
    the blobs of the other trial.
    """

    type: Literal["cloned"] = "cloned"
    checkpoint: CheckpointRef
    source: CheckpointKey
    config: Mapping[str, object] | None = None
    reason: Message


class Rebased(TrialEvent):
    """In a fork: the events before this one happened in the origin; the trial continues from here.

    It has these checkpoints and no claims; a running trial becomes pending.
    """

    type: Literal["rebased"] = "rebased"
    checkpoints: tuple[CheckpointRef, ...] = ()
    absorbed: int = 0
    """The last entry of the trial's own journal that those events include."""


class Inherited(TrialEvent):
    """In a fork: the trial's clone of a checkpoint that it had in the origin; its newest one from now on.

    The clone's manifest was created before this entry, and refers to the origin's blobs.
    """

    type: Literal["inherited"] = "inherited"
    checkpoint: CheckpointRef
    source: CheckpointKey


class Claimed(TrialEvent):
    """A clone of one of the trial's checkpoints is about to be made. Written by an external writer; no new owner."""

    type: Literal["claimed"] = "claimed"
    claim: Claim


class Released(TrialEvent):
    """A clone is no longer a checkpoint, or can never become one. Written by an external writer, as `Claimed`."""

    type: Literal["released"] = "released"
    clone: CheckpointKey


class ExternallyQuarantined(TrialEvent):
    """As `Quarantined`, for damage that another process than the owner found. By an external writer, as `Claimed`.

    Unlike `Retired` it is no limit for `is_acceptable`; a save that began before it is refused by `SaveOvertaken`.
    """

    type: Literal["put-aside"] = "put-aside"
    sequence: int
    reason: Message


class Reinstated(TrialEvent):
    """A checkpoint that was quarantined is used again. Written by an external writer, as `Claimed`."""

    type: Literal["reinstated"] = "reinstated"
    sequence: int


class Pruned(TrialEvent):
    """As `Retired`, for a trial that has ended, so that no save is running. By an external writer, as `Claimed`."""

    type: Literal["pruned"] = "pruned"
    retires: tuple[int, ...] = ()


class Questioned(TrialEvent):
    """The trial asks a person a question, and its attempt is about to end; it continues after the answer."""

    type: Literal["questioned"] = "questioned"
    key: Message
    question: Message
    fields: Mapping[str, object]
    """The fields of the form by name: each with its default, or its choices, of which the first is the default."""


class AttemptEnded(TrialEvent):
    """The attempt is over and the trial is not: it waits for its next attempt."""

    type: Literal["attempt-ended"] = "attempt-ended"
    cause: Cause
    message: Message
    at_start: bool = False
    """Whether it died before its first step, not being asked to end: the checkpoint it restored may be the cause."""


class GaveUp(TrialEvent):
    """The trial errored: the retry budget of this cause is spent."""

    type: Literal["gave-up"] = "gave-up"
    cause: Cause
    message: Message


class Finished(TrialEvent):
    """The trial is done: a stop criterion was met, or the trainable returned."""

    type: Literal["finished"] = "finished"
    reason: Message
    returned: bool = False
    """Whether the trainable returned by itself; a larger budget does not restart it."""
    left: bool = False
    """Whether the scheduler or a stop request ended it; a larger budget does not restart it either."""


class Requeued(TrialEvent):
    """A trial that had ended continues: it gets more steps, or another try."""

    type: Literal["requeued"] = "requeued"
    reason: Message


class Paused(TrialEvent):
    """The scheduler gives the slot to another trial: this one has saved if it could, and waits to be resumed."""

    type: Literal["paused"] = "paused"
    reason: Message


class Resumed(TrialEvent):
    """The scheduler gives a paused trial a slot again."""

    type: Literal["resumed"] = "resumed"


class Decided(TrialEvent):
    """The scheduler's decision on a trial at a milestone; journaled before it is carried out."""

    type: Literal["decided"] = "decided"
    report: StepReport
    decision: Decision


ExternalWriterEvent: TypeAlias = Claimed | Released | ExternallyQuarantined | Reinstated | Pruned
"""Events of external writers: an entry that holds only these does not supersede the owner."""
OneTrialsEvent: TypeAlias = (
    Started
    | Reported
    | Committed
    | Retired
    | Quarantined
    | Pinned
    | Cloned
    | Rebased
    | Inherited
    | ExternalWriterEvent
    | AttemptEnded
    | GaveUp
    | Finished
    | Requeued
    | Paused
    | Resumed
    | Decided
)
