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
    Finished,
    ForkOrigin,
    GaveUp,
    GuestEvent,
    OneTrialsEvent,
    Owner,
    Paused,
    Pinned,
    PriorTrial,
    Quarantined,
    QuarantinedCheckpoint,
    Question,
    Reported,
    Requeued,
    Resumed,
    Retired,
    Started,
    TrialAdded,
    TrialEvent,
    WarmStart,
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
    "Configured",
    "Decided",
    "Deletion",
    "Entry",
    "Event",
    "Finished",
    "ForkOrigin",
    "Forked",
    "ForkedTrial",
    "GaveUp",
    "GuestEvent",
    "OneTrialsEvent",
    "Opened",
    "Owner",
    "Paused",
    "Pinned",
    "PriorTrial",
    "Quarantined",
    "QuarantinedCheckpoint",
    "Question",
    "Reported",
    "Requeued",
    "Resumed",
    "Retired",
    "Started",
    "StopAsked",
    "TrialAdded",
    "TrialEvent",
    "WarmStart",
    "Writer",
    "events_in",
]


Writer: TypeAlias = Literal["owner", "guest"]
"""The writer of an entry: the journal's owner, or a guest, which writes `GuestEvent` and does not become the owner."""


class Opened(Value):
    """A new owner begins a new term; every older owner's next write fails."""

    type: Literal["opened"] = "opened"
    experiment: ExperimentName
    generation: Generation
    trial: TrialId | None = None
    """The trial whose own journal is opened; None for the experiment's journal."""
    term: int
    owner: Owner


class Adopted(Value):
    """The new owner adopts these checkpoints: their manifests exist, and the last owner did not journal them.

    A manifest of an earlier term that is neither listed here nor journaled as committed was never a commit.
    """

    type: Literal["adopted"] = "adopted"
    checkpoints: Mapping[str, tuple[CheckpointRef, ...]] = Field(default_factory=dict)
    reached: Mapping[str, int] = Field(default_factory=dict)
    """By running trial, the last step that its lost attempt is known to have trained; 0 if none is known."""


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


class ForkedTrial(Value):
    """A trial of a fork: all its earlier events happened in the origin; it continues from here, and is not running."""

    checkpoints: tuple[CheckpointRef, ...] = ()
    absorbed: int = 0
    """The last entry of the trial's own journal that those events include."""


class Forked(Value):
    """The experiment becomes a fork of `origin`; it cannot be used until an entry has its `trials`.

    That entry, which completes the fork, also holds all events of the origin up to the forked one. In a trial's own
    journal, `trials` has that trial.
    """

    type: Literal["forked"] = "forked"
    origin: ForkOrigin
    trials: Mapping[TrialId, ForkedTrial] | None = None


class Deletion(Value):
    """The whole experiment is about to be deleted: it cannot be resumed, and its checkpoints cannot be cloned.

    Written to the experiment's journal, and to its trials' own journals. `cancelled`: a fork needs the experiment;
    nothing was deleted, and it can be resumed.
    """

    type: Literal["deletion"] = "deletion"
    cancelled: bool = False


_OwnEvent: TypeAlias = Annotated[
    Opened | Adopted | TrialAdded | Deletion | OneTrialsEvent,
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
    writer: Writer = "owner"


Event: TypeAlias = Annotated[
    Opened | Adopted | Configured | StopAsked | Answered | Forked | Deletion | TrialAdded | OneTrialsEvent | Absorbed,
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
    term: int
    write_id: str
    at: str
    writer: Writer = "owner"
    previous: str
    events: tuple[Event, ...]
