"""What can happen to a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from prefect_tune.core.layout import CheckpointKey
from prefect_tune.core.particulars import Cause, CheckpointRef, Claim
from prefect_tune.core.schedulers.scheduler import Decision
from prefect_tune.core.texts import Message
from prefect_tune.core.values import StepReport, TrialId, Value, without_none, without_unset

__all__ = [
    "AttemptEnded",
    "Claimed",
    "Cloned",
    "Committed",
    "Decided",
    "Finished",
    "GaveUp",
    "GuestsEvent",
    "Inherited",
    "OneTrialsEvent",
    "Paused",
    "Pinned",
    "Pruned",
    "PutAside",
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
    """Whether the trial has a journal of its own, which this one takes in."""


class Started(TrialEvent):
    """An attempt begins, from a checkpoint or from nothing. Steps reported beyond it are redone."""

    type: Literal["started"] = "started"
    attempt: int
    from_step: int
    from_sequence: int | None = None


class Reported(TrialEvent):
    """A step was trained."""

    type: Literal["reported"] = "reported"
    report: StepReport
    asks: bool = False
    """Whether the trial waits to be told by whoever reads it here whether to go on."""

    @model_serializer(mode="wrap")
    def _asks_or_says_nothing_of_it(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Most reports ask nothing, and are written as they were before any did."""
        return without_unset(dump(self), "asks")


class Committed(TrialEvent):
    """A checkpoint's manifest was created, and its owner was still the owner afterwards.

    `retires` names the sequences of checkpoints that are none from now on; only then are their bytes deleted.
    """

    type: Literal["committed"] = "committed"
    checkpoint: CheckpointRef
    retires: tuple[int, ...] = ()
    sent_bytes: int | None = None
    """What of it was not on the target yet; None where that is not known."""
    upload_seconds: float | None = None
    """How long publishing it took; None where that is not known."""

    @model_serializer(mode="wrap")
    def _says_what_is_known(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Without the cost it is written as it was before there was any."""
        return without_none(dump(self), "sent_bytes", "upload_seconds")


class Retired(TrialEvent):
    """These checkpoints (by sequence) are none from now on; only then are their bytes deleted.

    Without any it still draws the line: what was begun before this entry, and is no checkpoint, never
    becomes one and is not reused, so that it can be deleted.
    """

    type: Literal["retired"] = "retired"
    retires: tuple[int, ...]


class Quarantined(TrialEvent):
    """A checkpoint is not used any more: its bytes are damaged, or it kills whoever loads it."""

    type: Literal["quarantined"] = "quarantined"
    sequence: int
    reason: Message
    kills: bool = False
    """Whether it is put aside for what it does to the trainable; its bytes are as they were committed."""


class Pinned(TrialEvent):
    """Retention leaves the checkpoint alone, or no longer does."""

    type: Literal["pinned"] = "pinned"
    sequence: int
    pinned: bool = True


class Cloned(TrialEvent):
    """The trial goes on from a copy of another one's checkpoint, and with `config` where that is given.

    The copy is its newest checkpoint from now on; its manifest was created before, and refers to the bytes
    of the other trial.
    """

    type: Literal["cloned"] = "cloned"
    checkpoint: CheckpointRef
    source: CheckpointKey
    config: Mapping[str, object] | None = None
    reason: Message


class Rebased(TrialEvent):
    """What comes before happened in the experiment that this is a fork of; the trial goes on from here.

    It has these checkpoints, and nobody else's claims; a running one waits.
    """

    type: Literal["rebased"] = "rebased"
    checkpoints: tuple[CheckpointRef, ...] = ()
    absorbed: int = 0
    """The last entry of its own journal that is in what comes before."""


class Inherited(TrialEvent):
    """A checkpoint that the trial had in the experiment that this is a fork of: from now on its newest one here.

    Its manifest was created before, and refers to the bytes there.
    """

    type: Literal["inherited"] = "inherited"
    checkpoint: CheckpointRef
    source: CheckpointKey


class Claimed(TrialEvent):
    """Somebody is about to clone a checkpoint of the trial. Written as a guest: the owner goes on after it."""

    type: Literal["claimed"] = "claimed"
    claim: Claim


class Released(TrialEvent):
    """A clone is no checkpoint any more, or never will be one. Written as a guest, as `Claimed`."""

    type: Literal["released"] = "released"
    clone: CheckpointKey


class PutAside(TrialEvent):
    """As `Quarantined`, for damage that somebody else than the owner found. Written as a guest, as `Claimed`.

    It draws no line: a save that is under way, and reuses bytes of this checkpoint, still becomes one.
    """

    type: Literal["put-aside"] = "put-aside"
    sequence: int
    reason: Message


class Reinstated(TrialEvent):
    """A checkpoint that was put aside, or quarantined, is one again. Written as a guest, as `Claimed`."""

    type: Literal["reinstated"] = "reinstated"
    sequence: int


class Pruned(TrialEvent):
    """As `Retired`, of a trial that has ended, so that no save is under way. Written as a guest, as `Claimed`."""

    type: Literal["pruned"] = "pruned"
    retires: tuple[int, ...] = ()


class Questioned(TrialEvent):
    """The trial asks a person, and its attempt is about to end: it goes on when it has an answer."""

    type: Literal["questioned"] = "questioned"
    key: Message
    question: Message
    fields: Mapping[str, object]
    """What is asked for, by name: each with its default, or with the choices, the first of which is that."""


class AttemptEnded(TrialEvent):
    """The attempt is over and the trial is not: it waits to be started again."""

    type: Literal["attempt-ended"] = "attempt-ended"
    cause: Cause
    message: Message
    at_start: bool = False
    """Whether it died by itself before its first step, so that what it restored may be to blame."""


class GaveUp(TrialEvent):
    """The retry budget of this cause is spent."""

    type: Literal["gave-up"] = "gave-up"
    cause: Cause
    message: Message


class Finished(TrialEvent):
    """The trial is done: a stop criterion was met, or the trainable returned."""

    type: Literal["finished"] = "finished"
    reason: Message
    returned: bool = False
    """Whether the trainable ended by itself, so that no larger budget makes it go on."""
    left: bool = False
    """Whether the scheduler, or whoever was asked, ended it; no larger budget makes it go on either."""


class Requeued(TrialEvent):
    """A trial that had ended goes on: more steps, or another try."""

    type: Literal["requeued"] = "requeued"
    reason: Message


class Paused(TrialEvent):
    """The scheduler wants the slot for others: the trial saved what it could, and waits to be resumed."""

    type: Literal["paused"] = "paused"
    reason: Message


class Resumed(TrialEvent):
    """The scheduler gives a paused trial a slot again."""

    type: Literal["resumed"] = "resumed"


class Decided(TrialEvent):
    """The scheduler was asked at a milestone, and this is its answer: written before it is acted on."""

    type: Literal["decided"] = "decided"
    report: StepReport
    decision: Decision


GuestsEvent: TypeAlias = Claimed | Released | PutAside | Reinstated | Pruned
"""What others than the owner write: an entry of nothing else supersedes nobody."""
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
    | GuestsEvent
    | AttemptEnded
    | GaveUp
    | Finished
    | Requeued
    | Paused
    | Resumed
    | Decided
)
