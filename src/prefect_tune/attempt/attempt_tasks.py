"""What an attempt does through the tasks of `tasks/`, each with retries, a timeout and a task run to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.checkpoints.commit import Reverification
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.checkpoints.parts import PartsOfSave
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import CheckpointRef, Event
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.values import Stamp


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that was uploaded to the target, with the size of the upload."""

    key: CheckpointKey
    size_bytes: int
    file_count: int
    sent_bytes: int
    """Bytes that were uploaded; the rest was on the target already."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Damaged blobs of earlier checkpoints, by path, with the damage; this checkpoint does not refer to them."""


@dataclass(frozen=True, slots=True)
class ClonedCheckpoint:
    """A clone that is stored on the target; the event `Cloned` in its trial's journal makes it a checkpoint."""

    checkpoint: CheckpointRef
    source: CheckpointKey


class AttemptTasks(Protocol):
    """The tasks of one attempt. Each raises `StoreUnavailable` or `CommitUnknown` once its retries have failed."""

    def save(
        self,
        key: CheckpointKey,
        directory: Path,
        about: About,
        before: Trial,
        reverification: Reverification,
        parts: PartsOfSave | None = None,
    ) -> SavedCheckpoint:
        """Publish `directory` as the checkpoint `key`; `before` is the trial's state, whose blobs can be reused.

        Raises:
            PartMissing: a node did not add its part, of those that `parts` names.
        """
        ...

    def clone(self, source: TrialKey, into: Experiment, last_step: int | None) -> ClonedCheckpoint:
        """Clone the newest checkpoint of `source` that another step follows, for this trial.

        Raises:
            CheckpointNotFound: the source has none.
            CheckpointCorrupt: its manifest is damaged.
        """
        ...

    def restore(self, key: CheckpointKey, destination: Path) -> Path:
        """Download a checkpoint into the new directory `destination`, and verify every byte.

        Raises:
            CheckpointNotFound, CheckpointCorrupt: it cannot be restored.
        """
        ...

    def delete(self, state: Trial, retired: Sequence[CheckpointKey]) -> None:
        """Delete checkpoints that the journal has retired; `state` is the trial after the entry that retired them."""
        ...

    def journal(
        self, target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None
    ) -> Experiment:
        """Write the next entry of the experiment's journal, as a `Writer`."""
        ...
