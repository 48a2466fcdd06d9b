"""The events of an experiment; with those of `trial_events`, all that journal entries hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from prefect_tune.core.journal_events.trial_events import (
    AttemptEnded,
    Cause,
    CheckpointRef,
    Claim,
    Claimed,
    Cloned,
    Committed,
    Decided,
    ExternallyQuarantined,
    ExternalWriterEvent,
    Finished,
    ForkOrigin,
    GaveUp,
    Inherited,
    Lesson,
    OneTrialsEvent,
    Owner,
    Paused,
    Pinned,
    Pruned,
    Quarantined,
    QuarantinedCheckpoint,
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
from prefect_tune.core.models import ExperimentName, Message, TrialId, Value
from prefect_tune.core.storage.documents import Document
from prefect_tune.core.storage.layout import Generation

__all__ = [
    "Absorbed",
    "Adopted",
    "Answered",
    "AttemptEnded",
    "Cause",
    "CheckpointRef",
    "Claim",
    "Claimed",
    "Cloned",
    "Committed",
    "Decided",
    "Described",
    "Entry",
    "Event",
    "Extended",
    "ExternalWriterEvent",
    "ExternallyQuarantined",
    "Finished",
    "ForkBegun",
    "ForkOrigin",
    "Forked",
    "GaveUp",
    "Inherited",
    "Learned",
    "Lesson",
    "OneTrialsEvent",
    "Opened",
    "Owner",
    "Paused",
    "Pinned",
    "Pruned",
    "Quarantined",
    "QuarantinedCheckpoint",
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
    "events_in",
]


class Opened(Value):
    """A new owner begins a new term; every older owner's next write fails."""

    type: Literal["opened"] = "opened"
    experiment: ExperimentName
    generation: Generation
    trial: TrialId | None = None
    """The trial whose own journal is opened; None for the experiment's journal."""
    epoch: int
    owner: Owner


class Adopted(Value):
    """The new owner adopts these checkpoints: their manifests exist, and the last owner did not journal them.

    A manifest of an earlier term that is neither listed here nor journaled as committed was never a commit.
    """

    type: Literal["adopted"] = "adopted"
    checkpoints: Mapping[str, tuple[CheckpointRef, ...]] = Field(default_factory=dict)
    reached: Mapping[str, int] = Field(default_factory=dict)
    """By running trial, the last step that its lost attempt is known to have trained; 0 if none is known."""


class Described(Value):
    """The parameters of the experiment as JSON, for a resume by name."""

    type: Literal["described"] = "described"
    settings: Mapping[str, object]


class Extended(Value):
    """A run of the search has added samples to the planned ones; recorded once, however often the run starts."""

    type: Literal["extended"] = "extended"
    run: str
    """A name that a restart of the run keeps: its id, or its place in the run that called it."""
    samples: int


class StopAsked(Value):
    """A trial, or the whole experiment, is asked to save and end; journaled before it is carried out.

    A stopped trial is finished. A stopped experiment ends for its present owner; the next owner continues it.
    """

    type: Literal["stop-asked"] = "stop-asked"
    reason: Message
    trial: TrialId | None = None
    """None for the whole experiment."""
    request: str | None = None
    """The write id of the request on the target; None where a stopper or a limit of the experiment asks."""
    refused: Message = ""
    """Why the request is ignored; empty where it is carried out."""


class Answered(Value):
    """A person has answered a question; the same entry holds what follows from that for the experiment."""

    type: Literal["answered"] = "answered"
    key: Message
    """The key of the question, which is answered once."""
    answer: Mapping[str, object]
    trial: TrialId | None = None
    """The trial that asked; None for a suspended run that asked how to continue."""
    flow_run: str | None = None
    """The id of that suspended run: the answer holds for it from then on, however often it is restarted."""


class ForkBegun(Value):
    """The experiment becomes a fork of `origin`; until `Forked` it cannot be used."""

    type: Literal["fork-begun"] = "fork-begun"
    origin: ForkOrigin


class Forked(Value):
    """The fork is complete: the same entry holds all events of the origin up to the forked entry."""

    type: Literal["forked"] = "forked"


class RemovalBegun(Value):
    """The whole experiment is about to be deleted: it cannot be resumed, and its checkpoints cannot be cloned.

    Written to the experiment's journal, and to its trials' own journals.
    """

    type: Literal["removal-begun"] = "removal-begun"


class RemovalGivenUp(Value):
    """The deletion was cancelled, because a fork needs the experiment. Nothing was deleted; it can be resumed."""

    type: Literal["removal-given-up"] = "removal-given-up"


class Learned(Value):
    """The search warm-starts from another experiment's trials, copied here so that the other one may be deleted."""

    type: Literal["learned"] = "learned"
    source: str
    """The experiment as the user named it: by its name, or `target/name`."""
    place: str | None = None
    """Its place as events and assets name it: normalized, and without secrets; None where that is not known."""
    lessons: tuple[Lesson, ...]


_OwnEvent: TypeAlias = Annotated[
    Opened | Adopted | TrialAdded | Questioned | RemovalBegun | RemovalGivenUp | OneTrialsEvent,
    Field(discriminator="type"),
]


class Absorbed(TrialEvent):
    """An entry of the trial's own journal, copied unchanged into the experiment's journal."""

    type: Literal["absorbed"] = "absorbed"
    number: int
    """The entry's number in the trial's journal. Entries are absorbed in order, without gaps."""
    events: tuple[_OwnEvent, ...]
    at: str | None = None
    """When the entry was written, by its writer's clock; for people only."""


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


def events_in(event: Event) -> Sequence[Event]:
    """Return the events of a trial's own entry that `event` copies; for any other event, the event itself."""
    return event.events if isinstance(event, Absorbed) else (event,)


# `Entry`: the document that a journal stores for each group of events; `core/journal` writes and reads it.


class Entry(Document):
    """One numbered, immutable record of the journal: a group of events, chained to the entry before it."""

    format: Literal["prefect-tune/journal"] = "prefect-tune/journal"
    version: Literal[1] = 1
    number: int
    epoch: int
    write_id: str
    at: str
    previous: str
    events: tuple[Event, ...]
