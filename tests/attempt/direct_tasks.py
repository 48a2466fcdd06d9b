"""The tasks of an attempt as plain calls: they need no server, and retry nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect_tune.attempt.attempt_tasks import ClonedCheckpoint, SavedCheckpoint
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.checkpoints.commit import Reverification
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.checkpoints.parts import PartsOfSave
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import Event
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.values import Stamp
from prefect_tune.journal_access import new_write_id, write_directly
from prefect_tune.tasks.checkpoints import (
    clone_checkpoint,
    delete_retired_checkpoints,
    download_checkpoint,
    publish_checkpoint,
)


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
    ) -> SavedCheckpoint:
        place = (self.spec.target, key, directory)
        return publish_checkpoint.fn(*place, about, before, reverification=reverification, parts=parts)

    def clone(self, source: TrialKey, into: Experiment, last_step: int | None) -> ClonedCheckpoint:
        trial = self.spec.trial.trial
        return clone_checkpoint.fn(self.spec.target, source, into, trial, new_write_id(), last_step=last_step)

    def restore(self, key: CheckpointKey, destination: Path) -> Path:
        return download_checkpoint.fn(self.spec.target, key, destination)

    def delete(self, state: Trial, retired: Sequence[CheckpointKey]) -> None:
        delete_retired_checkpoints.fn(self.spec.target, self.spec.trial, state, retired)

    def journal(
        self, target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None
    ) -> Experiment:
        return write_directly(target, experiment, events, stamp)
