"""The tasks of an attempt as plain calls: they need no server, and retry nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.core.checkpoints.commit import PartsOfSave, Reverification, Save
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.tasks.checkpoints import delete_retired_checkpoints, download_checkpoint, publish_checkpoint


@dataclass(frozen=True)
class DirectTasks:
    spec: TrialSpec

    def save(
        self,
        key: CheckpointKey,
        directory: Path,
        about: About,
        before: Trial,
        reverification: Reverification,
        parts: PartsOfSave | None = None,
    ) -> Save:
        place = (self.spec.target, key, directory)
        return publish_checkpoint.fn(*place, about, before, reverification=reverification, parts=parts)

    def restore(self, key: CheckpointKey, destination: Path) -> Path:
        return download_checkpoint.fn(self.spec.target, key, destination)

    def delete(self, state: Trial, retired: Sequence[CheckpointKey]) -> None:
        delete_retired_checkpoints.fn(self.spec.target, self.spec.trial, state, retired)
