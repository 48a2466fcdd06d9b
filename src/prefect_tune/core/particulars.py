"""What events tell of: who owns an experiment, which checkpoint, why an attempt ended."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from prefect_tune.core.layout import CheckpointKey, JournalKey
from prefect_tune.core.values import Digest, ExperimentName, StepReport, TrialId, Value, without_none, without_unset

__all__ = ["Aside", "Cause", "CheckpointRef", "Claim", "ForkOrigin", "Lesson", "Owner"]


class Cause(StrEnum):
    """Why an attempt ended without finishing; each belongs to one retry budget, or to none."""

    MACHINE = "machine"
    """The machine, the worker or the target failed: the trial is not to blame."""
    PREEMPTED = "preempted"
    """Asked to stop, and stopped in order: nobody is to blame."""
    USER = "user"
    """The user's code raised."""
    IMPORT = "import"
    """The trainable could not be loaded: trying again changes nothing."""
    OUT_OF_MEMORY = "out-of-memory"
    """The kernel killed it for its memory: trying again changes nothing."""
    BAD_METRIC = "bad-metric"
    """It reported what cannot be stored, a NaN for one: trying again changes nothing."""


class Owner(Value):
    """Who opened the experiment, for the messages of whoever it supersedes."""

    name: str
    host: str
    pid: int
    flow_run: str | None = None
    task_run: str | None = None
    """Of an attempt that is a task run."""
    by_hand: bool = False
    """Whether a person had this run go on, so that it is no crash that came before it which counts."""
    search_epoch: int = 0
    """Of a trial's own journal: in which epoch of the experiment it was opened for its owner."""
    attempt: int = 0
    """Likewise: the attempt that was ordered last."""

    @model_serializer(mode="wrap")
    def _says_what_it_is(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Who is no task run, whom no person started and nobody gave orders to is written as before there were any."""
        return without_unset(without_none(dump(self), "task_run"), "by_hand", "search_epoch", "attempt")

    def is_behind(self, other: Owner) -> bool:
        """Return whether what it was ordered is older than what `other` was ordered, where both say what that is."""
        mine, theirs = (self.search_epoch, self.attempt), (other.search_epoch, other.attempt)
        return self.search_epoch > 0 and mine < theirs

    def __str__(self) -> str:
        run = f", flow run {self.flow_run}" if self.flow_run else ""
        return f"{self.name} (pid {self.pid} on {self.host}{run})"


class CheckpointRef(Value):
    """A checkpoint in the journal: its name on the target, and what retention decides by."""

    step: int
    sequence: int
    metrics: Mapping[str, object] = Field(default_factory=dict)
    trained_seconds: float = 0.0
    size_bytes: int = 0
    pinned: bool = False


class Aside(Value):
    """A checkpoint that is not used, and whose bytes stay: it can be reinstated, or retired for good."""

    checkpoint: CheckpointRef
    since: int
    """The entry that put it aside."""
    reason: str


class Claim(Value):
    """A clone needs the bytes of one of the trial's checkpoints: they stay, retired or not, until it is released."""

    step: int
    sequence: int
    clone: CheckpointKey
    """Whose manifest refers to them."""
    journal: JournalKey
    """In which the clone is told of; see `Cloned`."""
    epoch: int
    """Of that journal, when the clone was begun: its owner makes the clone a checkpoint, and nobody after it."""


class ForkOrigin(Value):
    """The entry of another experiment's journal that an experiment goes on from."""

    experiment: ExperimentName
    number: int
    digest: Digest

    def __str__(self) -> str:
        return f"experiment {self.experiment!r} as of entry {self.number}"


class Lesson(Value):
    """A finished trial of another experiment: what the search is told, and nothing that is trained."""

    trial: TrialId
    config: Mapping[str, object]
    report: StepReport
    """The last one."""
    stopped: bool = False
    """Whether a scheduler ended it."""
