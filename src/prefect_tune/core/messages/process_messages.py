"""The messages between a trial's process and its supervisor. Each is one JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.journal_events import Finished, FinishKind, Outcome
from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.usage_records import PhaseSeconds
from prefect_tune.core.values import Message, PathName, StepReport, Value


class ProcessEnvironment(Value):
    """The environment that a forked or kept process adopts before it starts a trial."""

    type: Literal["process-environment"] = "process-environment"
    environment: Mapping[str, str]
    """All environment variables; each character is one byte (Latin-1)."""
    working_directory: str
    """In Latin-1, too; empty to keep the present one."""


FORK, IMPORT = b"fork", b"import"
"""Requests to a fork server: for a trial's process, or for a template."""
READY = "ready"
"""A template's answer when it has imported the trainable and can be forked; any other text is the reason why not."""


class ImportRequest(Value):
    """Import a trainable in a template."""

    trainable: str
    """As in `Start`."""
    import_path: tuple[PathName, ...]
    environment: ProcessEnvironment
    supervisor: int
    """The pid of the process that sends fork requests: the template ends with it."""


class Rank(Value):
    """The place of a process among those of its attempt; a single process is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    variables: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables that tell libraries the same, such as RANK and MASTER_ADDR."""


MetricsFrom: TypeAlias = Literal["rank 0", "mean"]
"""Whose metrics are those of a step of several ranks: those of rank 0, or the mean over all ranks."""


class Start(Value):
    """Start training: all inputs of an attempt."""

    type: Literal["start"] = "start"
    experiment: str
    trial: str
    attempt: int
    trainable: str
    """`module:name`, or a pickle in hexadecimal that the supervisor itself has just made."""
    stopper: str
    """In the same form as `trainable`."""
    import_path: tuple[PathName, ...]
    config: Mapping[str, object]
    directory: PathName
    """For the trial's own files (logs, plots): synced as artifacts."""
    staging: PathName
    """The folder in which checkpoint directories are passed to the supervisor."""
    restored: PathName | None = None
    from_step: int = 0
    trained_seconds: float = 0.0
    curve: tuple[StepReport, ...] = ()
    cadence: Cadence = Cadence()
    overlap: bool = False
    """Whether training continues while a checkpoint is uploaded."""
    milestone: int | None = None
    """The step at which the trial asks whether to continue, and waits for the answer; None for never."""
    saves_first: bool = False
    """Whether a class trainable saves at the milestone before it asks."""
    waits: bool = True
    """Whether the process may wait for another trial afterwards, if its trainable supports that."""
    rank: Rank = Field(default_factory=Rank)
    metrics_from: MetricsFrom = "rank 0"
    required_metrics: tuple[str, ...] = ()
    """The metrics of the search that each report of rank 0 has to have."""
    ranks_at: PathName = ""
    """The socket that ranks join which the trainable's own launcher starts; empty if none may."""


class CheckpointSaved(Value):
    """The checkpoint of this step is committed."""

    type: Literal["saved"] = "saved"
    step: int


class Join(Value):
    """The first message of a rank that the trainable's own launcher has started."""

    type: Literal["join"] = "join"
    rank: Rank
    pid: int


class Refused(Value):
    """The answer to a `Join` that cannot be."""

    type: Literal["refused"] = "refused"
    why: Message


class SaveFailed(Value):
    """The checkpoint of this step is not committed, since a rank did not do its part; training continues."""

    type: Literal["save-failed"] = "save-failed"
    step: int


class StopAndSave(Value):
    """End as soon as the state is saved."""

    type: Literal["stop-and-save"] = "stop-and-save"


class Proceed(Value):
    """The answer at a milestone: continue training, and ask again at the next one."""

    type: Literal["proceed"] = "proceed"
    milestone: int | None


AnyOutcome: TypeAlias = Annotated[Outcome, Field(discriminator="type")]


class Leave(Value):
    """End now: the answer at a milestone, or without having been asked."""

    type: Literal["leave"] = "leave"
    outcome: AnyOutcome
    """How the attempt is to end."""
    save: bool
    """Whether to save the state first, if the trainable can save it at any step."""


class StartReceived(Value):
    """The process has begun the attempt: from here on the time that passes is the trainable's, its import included."""

    type: Literal["start-received"] = "start-received"


class TrainableLoaded(Value):
    """The trainable is imported and set up; next it loads its checkpoint, if there is one, and trains."""

    type: Literal["loaded"] = "loaded"
    pid: int
    code: str
    """A digest of the trainable's source; empty where the source is not available."""


class StepDone(Value):
    """A step was trained; `checkpoint`, if given, is a directory to commit."""

    type: Literal["step-done"] = "step-done"
    report: StepReport
    checkpoint: PathName | None = None
    moved: bool = False
    """Whether the supervisor owns the directory now, and removes it after the commit."""
    is_reported: bool = False
    """Whether the step was reported before: only its checkpoint is new."""
    asks: bool = False
    """Whether the trial waits for an answer whether to continue."""
    finish_reason: AnyReason | None = None
    """Why the trial is finished with this step, if no decision is needed: journaled together with the checkpoint."""
    seconds: PhaseSeconds | None = None
    """The seconds since the trainable was loaded."""


class Part(Value):
    """What a rank other than the first adds to the checkpoint of a step; it reports each step with one."""

    type: Literal["part"] = "part"
    step: int
    directory: PathName | None
    """Its files; None if it adds none, or if another node holds them."""
    node: int = 0
    """The node that holds its files, if that is another one than the first."""


class RankMetrics(Value):
    """What a rank reports for a step, if the metrics of a step are the mean over all ranks."""

    type: Literal["rank-metrics"] = "rank-metrics"
    step: int
    metrics: Mapping[str, object]
    returned: bool = False
    """Whether the function returned them: the rank ends, and does not wait for rank 0."""


class MeanMetrics(Value):
    """The metrics of a step, for which rank 0 waits: those of all ranks have arrived."""

    type: Literal["mean-metrics"] = "mean-metrics"
    step: int
    metrics: Mapping[str, object]


class MilestoneReached(Value):
    """Asks before the first step whether to continue, because the restored checkpoint's step is a milestone."""

    type: Literal["asked"] = "asked"
    report: StepReport


class TrialEnded(Value):
    """The last message of an attempt."""

    type: Literal["trial-ended"] = "trial-ended"
    outcome: AnyOutcome
    raised: bool = False
    """Whether the trainable raised."""
    after_end: bool = False
    """Whether it raised once the trial was over for this process."""
    waits: bool = False
    """Whether the process waits to run another trial with the same trainable."""
    seconds: PhaseSeconds | None = None
    """The seconds since the trainable was loaded; None if it was not."""

    @property
    def has_returned(self) -> bool:
        """Whether the trainable returned by itself."""
        return isinstance(self.outcome, Finished) and self.outcome.kind is FinishKind.RETURNED


class Directive(Value):
    """What all ranks do at a step, as rank 0 decides it: it is sent to the others through the supervisor."""

    type: Literal["directive"] = "directive"
    step: int
    saves: bool = False
    """Whether they save their state now, and wait for another directive. A function decides this by itself."""
    stop: bool = False
    """Whether the trial is asked to stop, which a function reads as `should_checkpoint`."""
    over: AnyOutcome | None = None
    """How the trial ends with this step; None if it continues."""


_ToTrial: TypeAlias = (
    ProcessEnvironment
    | Start
    | Refused
    | CheckpointSaved
    | SaveFailed
    | StopAndSave
    | Proceed
    | Leave
    | Directive
    | MeanMetrics
)
_FromTrial: TypeAlias = (
    Join | MilestoneReached | TrainableLoaded | StepDone | Part | RankMetrics | Directive | TrialEnded
)
ToTrial: TypeAlias = Annotated[_ToTrial, Field(discriminator="type")]
FromTrial: TypeAlias = Annotated[_FromTrial, Field(discriminator="type")]
to_trial: TypeAdapter[_ToTrial] = TypeAdapter(ToTrial)
from_trial: TypeAdapter[_FromTrial | StartReceived] = TypeAdapter(
    Annotated[_FromTrial | StartReceived, Field(discriminator="type")]
)
