"""What a trial's process and its supervisor tell each other. One JSON document a message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from prefect_tune.core.cadence import Cadence
from prefect_tune.core.events import Cause
from prefect_tune.core.texts import Message, PathName
from prefect_tune.core.values import StepReport, Value

__all__ = [
    "Asked",
    "Broke",
    "FromTrial",
    "GoOn",
    "Leave",
    "Loaded",
    "Question",
    "Saved",
    "Start",
    "StateSaved",
    "StepDone",
    "StopAndSave",
    "Surroundings",
    "ToTrial",
    "TrialEnded",
    "from_trial",
    "to_trial",
]


class Surroundings(Value):
    """What a process that was forked, or has served another trial, makes its own before it starts."""

    type: Literal["surroundings"] = "surroundings"
    environment: Mapping[str, str]
    """The whole of it; each character stands for a byte (Latin-1)."""
    working_directory: str
    """Likewise; empty to stay where the process is."""


class Start(Value):
    """Train: everything that an attempt begins with."""

    type: Literal["start"] = "start"
    experiment: str
    trial: str
    attempt: int
    trainable: str
    """`module:name`, or a pickle in hexadecimal, made by the supervisor itself a moment ago."""
    stopper: str
    """Likewise."""
    import_path: tuple[PathName, ...]
    config: Mapping[str, object]
    directory: PathName
    """For the trial's own files (logs, plots): synced as artifacts."""
    staging: PathName
    """Where checkpoint directories are handed over."""
    temporary: PathName
    """Where the trial's temporary files go."""
    restored: PathName | None
    from_step: int
    trained_seconds: float
    curve: tuple[StepReport, ...]
    cadence: Cadence
    overlap: bool
    """Whether training goes on while a checkpoint is uploaded."""
    milestone: int | None = None
    """The step at which the trial asks whether to go on, and waits for the answer; None for never."""
    saves_first: bool = False
    """Whether a class trainable saves there before it asks."""
    answers: Mapping[str, Mapping[str, object]] = Field(default_factory=dict)
    """What persons have answered the trial, by the keys of its questions."""
    waits: bool = True
    """Whether the process may wait for another trial afterwards, where its trainable can become that."""


class Saved(Value):
    """The checkpoint of this step is committed."""

    type: Literal["saved"] = "saved"
    step: int


class StopAndSave(Value):
    """End as soon as the state is saved."""

    type: Literal["stop-and-save"] = "stop-and-save"


class GoOn(Value):
    """The answer at a milestone: train on, and ask again at the next."""

    type: Literal["go-on"] = "go-on"
    milestone: int | None


class Leave(Value):
    """End now: the answer at a milestone, or without having been asked."""

    type: Literal["leave"] = "leave"
    reason: Message
    save: bool
    """Whether the state is wanted, where the trainable can save it at any step."""
    for_good: bool
    """Whether the trial is done, or waits for a slot."""


class Loaded(Value):
    """The trainable is imported and set up; next it loads its checkpoint, if there is one, and trains."""

    type: Literal["loaded"] = "loaded"
    pid: int
    code: str
    """A digest of the trainable's source; empty where the source cannot be had."""


class StepDone(Value):
    """A step was trained; where `checkpoint` names a directory, it is to be committed."""

    type: Literal["step-done"] = "step-done"
    report: StepReport
    checkpoint: PathName | None = None
    handed_over: bool = False
    """Whether the directory is the supervisor's now, to be removed once it is committed."""
    asks: bool = False
    """Whether the trial waits to be told whether to go on."""
    over: Message = ""
    """Why the trial is done with this step, where nobody has to be asked: it can be journaled with the checkpoint."""


class Asked(Value):
    """Before the first step: whether to go on from where the checkpoint stands, which is a milestone already."""

    type: Literal["asked"] = "asked"
    report: StepReport


class StateSaved(Value):
    """The state after a step that was told before, to be committed; the directory is the supervisor's."""

    type: Literal["state-saved"] = "state-saved"
    report: StepReport
    checkpoint: PathName


class Question(Value):
    """What the trial asks a person: it goes on when it has an answer."""

    key: Message
    question: Message
    fields: Mapping[str, object]


class TrialEnded(Value):
    """Nothing more will come: the trial is done, or (`interrupted`) it saved as it was asked to."""

    type: Literal["trial-ended"] = "trial-ended"
    reason: Message
    returned: bool = False
    left: bool = False
    """Whether it ended because it was told to leave for good."""
    interrupted: bool = False
    paused: bool = False
    """Whether it only gave its slot away, as it was told to."""
    question: Question | None = None
    """What it has to be told before it can go on."""
    waits: bool = False
    """Whether the process, and the trainable in it, wait to become another trial."""


class Broke(Value):
    """The trainable raised."""

    type: Literal["broke"] = "broke"
    cause: Cause
    message: Message
    traceback: Message


ToTrial: TypeAlias = Annotated[Surroundings | Start | Saved | StopAndSave | GoOn | Leave, Field(discriminator="type")]
FromTrial: TypeAlias = Annotated[
    Asked | Loaded | StepDone | StateSaved | TrialEnded | Broke, Field(discriminator="type")
]
to_trial: TypeAdapter[Surroundings | Start | Saved | StopAndSave | GoOn | Leave] = TypeAdapter(ToTrial)
from_trial: TypeAdapter[Asked | Loaded | StepDone | StateSaved | TrialEnded | Broke] = TypeAdapter(FromTrial)
