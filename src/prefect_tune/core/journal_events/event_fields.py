"""Values that events hold: owners, checkpoint references, claims, causes, fork origins, warm-start trials."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field

from prefect_tune.core.models import Digest, ExperimentName, StepReport, TrialId, Value
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey

__all__ = ["Cause", "CheckpointRef", "Claim", "ForkOrigin", "Lesson", "Owner", "QuarantinedCheckpoint"]


class Cause(StrEnum):
    """Why an attempt ended without finishing; each cause counts against one retry budget, or against none."""

    MACHINE = "machine"
    """The machine, the worker or the target failed, not the trial."""
    PREEMPTED = "preempted"
    """The attempt was asked to stop, and stopped in order: no failure."""
    USER = "user"
    """The user's code raised."""
    IMPORT = "import"
    """The trainable could not be loaded: a retry does not help."""
    OUT_OF_MEMORY = "out-of-memory"
    """The kernel killed the process for using too much memory: a retry does not help."""
    BAD_METRIC = "bad-metric"
    """It reported a metric that cannot be stored, such as a NaN: a retry does not help."""
    BAD_STOP = "bad-stop"
    """The stop criterion needs a metric that it did not report: a retry does not help."""


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
    search_epoch: int = 0
    """For a trial's own journal: the experiment's term in which the search started this attempt."""
    attempt: int = 0
    """For a trial's own journal: the number of the attempt that the search started."""

    def is_behind(self, other: Owner) -> bool:
        """Return whether this attempt was started before `other`'s, by term and attempt; False if unknown."""
        mine, theirs = (self.search_epoch, self.attempt), (other.search_epoch, other.attempt)
        return self.search_epoch > 0 and mine < theirs

    def __str__(self) -> str:
        run = f", flow run {self.flow_run}" if self.flow_run else ""
        return f"{self.name} (pid {self.pid} on {self.host}{run})"


class CheckpointRef(Value):
    """A checkpoint in the journal: step and sequence, which name it on the target, and the input of retention."""

    step: int
    sequence: int
    metrics: Mapping[str, Any] = Field(default_factory=dict)
    trained_seconds: float = 0.0
    size_bytes: int = 0
    pinned: bool = False


class QuarantinedCheckpoint(Value):
    """A checkpoint that is quarantined: not used, its bytes are kept; it can be reinstated or retired."""

    checkpoint: CheckpointRef
    since: int
    """The number of the entry that quarantined it."""
    reason: str


class Claim(Value):
    """A clone's claim to the bytes of one of the trial's checkpoints: they stay, retired or not, until its release."""

    step: int
    sequence: int
    clone: CheckpointKey
    """The checkpoint whose manifest refers to the bytes."""
    journal: JournalKey
    """The journal that records the clone as a checkpoint; see `Cloned`."""
    epoch: int
    """That journal's term when the clone was begun: only the owner of that term can make it a checkpoint."""


class ForkOrigin(Value):
    """The entry of another experiment's journal that a fork continues from."""

    experiment: ExperimentName
    number: int
    digest: Digest

    def __str__(self) -> str:
        return f"experiment {self.experiment!r} as of entry {self.number}"


class Lesson(Value):
    """A finished trial of another experiment, for the warm start of a search; it is not trained again."""

    trial: TrialId
    config: Mapping[str, object]
    report: StepReport
    """The trial's last report."""
    stopped: bool = False
    """Whether a scheduler ended it."""
