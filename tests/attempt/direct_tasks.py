"""The tasks of an attempt as plain calls, without a server and without retries."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.core.checkpoints.commit import ExpectedParts, Reverification, SaveResult
from prefect_tune.core.checkpoints.manifest import CheckpointMetadata
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.tasks.checkpoints import delete_retired_checkpoints, download_checkpoint, publish_checkpoint


@dataclass(frozen=True)
class DirectTasks:
    spec: TrialSpec

    def save_checkpoint(
        self,
        key: CheckpointKey,
        directory: Path,
        metadata: CheckpointMetadata,
        before: Trial,
        reverification: Reverification,
        parts: ExpectedParts | None = None,
    ) -> SaveResult:
        location = (self.spec.target, key, directory)
        return publish_checkpoint.fn(*location, metadata, before, reverification=reverification, parts=parts)

    def restore_checkpoint(self, key: CheckpointKey, destination: Path) -> Path:
        return download_checkpoint.fn(self.spec.target, key, destination)

    def delete_checkpoints(self, state: Trial, retired: Sequence[CheckpointKey]) -> None:
        delete_retired_checkpoints.fn(self.spec.target, self.spec.trial, state, retired)
