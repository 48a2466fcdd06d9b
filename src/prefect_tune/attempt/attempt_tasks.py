"""What an attempt does through the tasks of `tasks/`, each with retries, a timeout and a task run to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from prefect_tune.core.checkpoints.commit import PartsOfSave, Reverification, Save
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.storage.layout import CheckpointKey


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
    ) -> Save:
        """Publish `directory` as the checkpoint `key`; `before` is the trial's state, whose blobs can be reused.

        Raises:
            PartMissing: a node did not add its part, of those that `parts` names.
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
