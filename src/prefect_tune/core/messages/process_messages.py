"""The messages between a trial's process and its supervisor. Each is one JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.journal_events import FinishKind, Outcome, TrialFinished
from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.usage_records import PhaseSeconds
from prefect_tune.core.values import Message, PathName, StepReport, Value


class ProcessEnvironment(Value):
    """The environment that a forked or reused process adopts before it starts a trial."""

    type: Literal["process-environment"] = "process-environment"
    environment: Mapping[str, str]
    """All environment variables, decoded as Latin-1, so that each character is one byte."""
    working_directory: str
    """Like `environment`, it is decoded as Latin-1; if it is empty, the process keeps its current directory."""


FORK_REQUEST, IMPORT_REQUEST = b"fork", b"import"
"""Requests to a fork server: fork a process for a trial, or fork a template, which then imports a trainable."""
TEMPLATE_READY = "ready"
"""The reply of a template that can be forked; any other reply says why the template cannot be forked."""


class ImportRequest(Value):
    """Asks a template to import a trainable."""

    trainable: str
    """In the same form as `Start.trainable`."""
    import_path: tuple[PathName, ...]
    environment: ProcessEnvironment
    supervisor: int
    """The pid of the process that sends fork requests; the template exits when this process exits."""


class RankInfo(Value):
    """The rank of a process among the processes of its attempt; a single process is rank 0 of world size 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    variables: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables with the same information for libraries, such as RANK and MASTER_ADDR."""


MetricsSource: TypeAlias = Literal["rank 0", "mean"]
"""The source of a step's metrics if there are several ranks: rank 0, or the mean over all ranks."""


class Start(Value):
    """Starts the training of an attempt, and contains all its inputs."""

    type: Literal["start"] = "start"
    experiment: str
    trial: str
    attempt: int
    trainable: str
    """`module:name`, or a pickle in hexadecimal, which the supervisor itself has just created."""
    stopper: str
    """In the same form as `trainable`."""
    import_path: tuple[PathName, ...]
    config: Mapping[str, object]
    directory: PathName
    """The directory for the trial's own files (logs, plots), which are synced as artifacts."""
    staging: PathName
    """The folder in which the trial makes the checkpoint directories that it passes to the supervisor."""
    restored_directory: PathName | None = None
    from_step: int = 0
    trained_seconds: float = 0.0
    reports: tuple[StepReport, ...] = ()
    cadence: Cadence = Cadence()
    async_commit: bool = False
    """Whether training continues while a checkpoint is uploaded."""
    milestone: int | None = None
    """The next step at which the trial waits for the decision whether to continue; None if it never waits."""
    saves_first: bool = False
    """Whether a class trainable saves at `milestone` before it waits for the decision."""
    reusable: bool = True
    """Whether the process, if the trainable supports reuse, waits for another trial after this one."""
    rank: RankInfo = Field(default_factory=RankInfo)
    metrics_from: MetricsSource = "rank 0"
    required_metrics: tuple[str, ...] = ()
    """The metrics that the search needs in each report of rank 0."""
    rank_socket: PathName = ""
    """The socket to which the ranks of the trainable's own launcher connect; empty if no launcher is allowed."""


class CheckpointSaved(Value):
    """The checkpoint of this step is committed."""

    type: Literal["checkpoint-saved"] = "checkpoint-saved"
    step: int


class RankJoined(Value):
    """The first message of a rank that the trainable's own launcher started."""

    type: Literal["rank-joined"] = "rank-joined"
    rank: RankInfo
    pid: int


class JoinRejected(Value):
    """Rejects a rank that has sent `RankJoined`."""

    type: Literal["join-rejected"] = "join-rejected"
    reason: Message


class SaveFailed(Value):
    """The checkpoint of this step was not committed because a rank did not add its part; training continues."""

    type: Literal["save-failed"] = "save-failed"
    step: int


class CheckpointAndStop(Value):
    """Asks the trial to save its state and then to end the attempt, because the whole run stops."""

    type: Literal["checkpoint-and-stop"] = "checkpoint-and-stop"


class ContinueTraining(Value):
    """The decision at a milestone: continue training, and wait again at the next milestone."""

    type: Literal["continue-training"] = "continue-training"
    milestone: int | None


AnyOutcome: TypeAlias = Annotated[Outcome, Field(discriminator="type")]


class StopTrial(Value):
    """Ends the attempt now; the trial may continue later. Sent as the decision at a milestone, or at any other time."""

    type: Literal["stop-trial"] = "stop-trial"
    outcome: AnyOutcome
    """How the attempt must end."""
    save: bool
    """Whether to save the state first, if the trainable can save at any step."""


class StartReceived(Value):
    """The process has begun the attempt. From now on, all time, even that of the import, counts as the trainable's."""

    type: Literal["start-received"] = "start-received"


class TrainableLoaded(Value):
    """The trainable is imported and set up. Next, it loads the restored checkpoint, if there is one, and trains."""

    type: Literal["trainable-loaded"] = "trainable-loaded"
    pid: int
    source_digest: str
    """A digest of the trainable's source; empty if the source is not available."""


class StepDone(Value):
    """A step was trained. If `checkpoint` is set, the supervisor commits this directory as the step's checkpoint."""

    type: Literal["step-done"] = "step-done"
    report: StepReport
    checkpoint: PathName | None = None
    is_owned_by_supervisor: bool = False
    """Whether the supervisor now owns the checkpoint's directory, and removes it after the commit."""
    is_reported: bool = False
    """Whether the step was already reported, and only its checkpoint is new."""
    awaits_decision: bool = False
    """Whether the trial waits for the decision whether to continue."""
    finish_reason: AnyReason | None = None
    """Why the trial finishes with this step; None if it awaits a decision or goes on. Journaled with the checkpoint."""
    seconds: PhaseSeconds | None = None
    """The seconds since the trainable was loaded, by phase."""


class CheckpointPart(Value):
    """The part that a rank other than rank 0 adds to a step's checkpoint. `pt.report` sends this for each step."""

    type: Literal["checkpoint-part"] = "checkpoint-part"
    step: int
    directory: PathName | None
    """The rank's files; None if the rank adds no files, or if its files are on another node."""
    node: int = 0
    """The number of the node that holds the files, from 0."""


class RankMetrics(Value):
    """The metrics that a rank reports for a step; sent only if a step's metrics are the mean over all ranks."""

    type: Literal["rank-metrics"] = "rank-metrics"
    step: int
    metrics: Mapping[str, object]
    returned: bool = False
    """Whether the function trainable returned these metrics. If so, the rank ends, and does not wait for rank 0."""


class MeanMetrics(Value):
    """The mean metrics of a step. Rank 0 waits for this message, which is sent once all ranks have reported."""

    type: Literal["mean-metrics"] = "mean-metrics"
    step: int
    metrics: Mapping[str, object]


class MilestoneReached(Value):
    """Requests a decision before the first step, because the step of the restored checkpoint is a milestone."""

    type: Literal["milestone-reached"] = "milestone-reached"
    report: StepReport


class TrainingEnded(Value):
    """The last message of a rank: how its training ended."""

    type: Literal["trial-ended"] = "trial-ended"
    outcome: AnyOutcome
    raised: bool = False
    """Whether the trainable raised an exception."""
    raised_after_end: bool = False
    """Whether the trainable raised the exception after this process had ended the trial."""
    awaits_reuse: bool = False
    """Whether the process waits to run another trial with the same trainable."""
    seconds: PhaseSeconds | None = None
    """The seconds since the trainable was loaded, by phase; None if it was not loaded."""

    @property
    def has_returned(self) -> bool:
        """Whether the trainable ended the trial by returning."""
        return isinstance(self.outcome, TrialFinished) and self.outcome.kind is FinishKind.RETURNED


class RankCommand(Value):
    """Rank 0 tells the other ranks, by way of the supervisor, what they do after this step: save, or go on."""

    type: Literal["rank-command"] = "rank-command"
    step: int
    save: bool = False
    """Whether the ranks save now, and then wait for another command; ranks that are in `pt.report` ignore this flag."""
    stop: bool = False
    """Whether a stop is requested; a function trainable reads this as `pt.get_trial().should_checkpoint`."""
    outcome: AnyOutcome | None = None
    """How the trial ends with this step; None if it continues."""


_StepReply: TypeAlias = CheckpointSaved | SaveFailed | ContinueTraining | StopTrial | MeanMetrics
_ToTrial: TypeAlias = ProcessEnvironment | Start | JoinRejected | CheckpointAndStop | RankCommand | _StepReply
_StepMessage: TypeAlias = StepDone | CheckpointPart | RankMetrics | RankCommand
_FromTrial: TypeAlias = RankJoined | MilestoneReached | TrainableLoaded | _StepMessage | TrainingEnded
ToTrial: TypeAlias = Annotated[_ToTrial, Field(discriminator="type")]
FromTrial: TypeAlias = Annotated[_FromTrial, Field(discriminator="type")]
to_trial_adapter: TypeAdapter[_ToTrial] = TypeAdapter(ToTrial)
from_trial_adapter: TypeAdapter[_FromTrial | StartReceived] = TypeAdapter(
    Annotated[_FromTrial | StartReceived, Field(discriminator="type")]
)
