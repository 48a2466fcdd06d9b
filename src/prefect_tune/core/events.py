"""What can happen to an experiment and its trials: the only things the journal holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from prefect_tune.core.particulars import Aside, Cause, CheckpointRef, Claim, ForkOrigin, Lesson, Owner
from prefect_tune.core.texts import Message
from prefect_tune.core.trial_events import (
    AttemptEnded,
    Claimed,
    Cloned,
    Committed,
    Decided,
    Finished,
    GaveUp,
    GuestsEvent,
    Inherited,
    OneTrialsEvent,
    Paused,
    Pinned,
    Pruned,
    PutAside,
    Quarantined,
    Questioned,
    Rebased,
    Reinstated,
    Released,
    Reported,
    Requeued,
    Resumed,
    Retired,
    Started,
    TrialAdded,
    TrialEvent,
)
from prefect_tune.core.values import ExperimentName, TrialId, Value, without_none

__all__ = [
    "Absorbed",
    "Adopted",
    "Answered",
    "Aside",
    "AttemptEnded",
    "Cause",
    "CheckpointRef",
    "Claim",
    "Claimed",
    "Cloned",
    "Committed",
    "Decided",
    "Described",
    "Event",
    "Extended",
    "Finished",
    "ForkBegun",
    "ForkOrigin",
    "Forked",
    "GaveUp",
    "GuestsEvent",
    "Inherited",
    "Learned",
    "Lesson",
    "OneTrialsEvent",
    "Opened",
    "Owner",
    "Paused",
    "Pinned",
    "Pruned",
    "PutAside",
    "Quarantined",
    "Questioned",
    "Rebased",
    "Reinstated",
    "Released",
    "RemovalBegun",
    "RemovalGivenUp",
    "Reported",
    "Requeued",
    "Resumed",
    "Retired",
    "Started",
    "StopAsked",
    "TrialAdded",
    "TrialEvent",
]


class Opened(Value):
    """A new owner begins a new epoch; every older owner's next write fails."""

    type: Literal["opened"] = "opened"
    experiment: ExperimentName
    trial: TrialId | None = None
    """Whose own journal is opened; None for the experiment's."""
    epoch: int
    owner: Owner


class Adopted(Value):
    """The owner has looked for manifests that the last one could not journal, and took these over.

    Manifests of earlier epochs that are not here, and not committed, were never commits.
    """

    type: Literal["adopted"] = "adopted"
    checkpoints: Mapping[str, tuple[CheckpointRef, ...]] = Field(default_factory=dict)


class Described(Value):
    """What the experiment was asked to be, as JSON: what a resume by name needs to know."""

    type: Literal["described"] = "described"
    settings: Mapping[str, object]


class Extended(Value):
    """A run of the search has added so many samples to those that there were to be; once, however often it starts."""

    type: Literal["extended"] = "extended"
    run: str
    """What stays the same when the run is started again: its id, or its place in the run that has called it."""
    samples: int


class StopAsked(Value):
    """A trial, or the whole experiment, is to save and end, and nobody has acted on it yet.

    A trial is finished then. The experiment ends for its present owner: whoever opens it next goes on.
    """

    type: Literal["stop-asked"] = "stop-asked"
    reason: Message
    trial: TrialId | None = None
    """None for the whole experiment."""
    request: str | None = None
    """The write id of the request on the target; None where a stopper or a limit of the experiment's own says so."""
    refused: Message = ""
    """Why nothing comes of it; empty where it is done."""


class Answered(Value):
    """A person has answered a question; the same entry holds what follows from that for the experiment."""

    type: Literal["answered"] = "answered"
    key: Message
    """Of the question, which is answered once."""
    answer: Mapping[str, object]
    trial: TrialId | None = None
    """Who has asked; None for a run that was suspended, and asked how to go on."""
    flow_run: str | None = None
    """Of that run: what was answered is what it does from then on, however often it is started again."""


class ForkBegun(Value):
    """The experiment is to be a fork; it is none, and nothing else either, before it is `Forked`."""

    type: Literal["fork-begun"] = "fork-begun"
    origin: ForkOrigin


class Forked(Value):
    """The same entry holds all that had happened to the origin, as far as its entry goes: from here on it goes on."""

    type: Literal["forked"] = "forked"


class RemovalBegun(Value):
    """All of the experiment is about to be deleted: nobody goes on with it, and nobody clones what is in it.

    It stands in the experiment's journal, and in those that its trials have for themselves.
    """

    type: Literal["removal-begun"] = "removal-begun"


class RemovalGivenUp(Value):
    """The experiment stays: a fork was faster. Nothing of it was deleted, and whoever opens it next goes on."""

    type: Literal["removal-given-up"] = "removal-given-up"


class Learned(Value):
    """The search begins with what another experiment found; kept here, so that it may be deleted there."""

    type: Literal["learned"] = "learned"
    source: str
    """As it was named: by its name, or `target/name`."""
    place: str | None = None
    """Where it is, as events and assets name it: always alike, and without secrets; None where that is not known."""
    lessons: tuple[Lesson, ...]

    @model_serializer(mode="wrap")
    def _says_what_is_known(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        return without_none(dump(self), "place")


_OwnEvent: TypeAlias = Annotated[
    Opened | Adopted | TrialAdded | Questioned | RemovalBegun | RemovalGivenUp | OneTrialsEvent,
    Field(discriminator="type"),
]


class Absorbed(TrialEvent):
    """An entry of the trial's own journal, taken into the experiment's: what its supervisor wrote, word for word."""

    type: Literal["absorbed"] = "absorbed"
    number: int
    """The entry's, there. None is left out."""
    events: tuple[_OwnEvent, ...]
    at: str | None = None
    """When it was written there, by the clock of whoever did; for people."""

    @model_serializer(mode="wrap")
    def _says_when_if_known(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Without the time it is written as before there was one."""
        return without_none(dump(self), "at")


Event: TypeAlias = Annotated[
    Opened
    | Adopted
    | Described
    | Extended
    | StopAsked
    | Answered
    | Questioned
    | ForkBegun
    | Forked
    | Learned
    | RemovalBegun
    | RemovalGivenUp
    | TrialAdded
    | OneTrialsEvent
    | Absorbed,
    Field(discriminator="type"),
]
