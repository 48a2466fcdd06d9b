"""The results of the public tasks: frozen values that can be printed, pickled and stored as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status, Trial, newest_checkpoint
from prefect_tune.core.journal_events import CheckpointRef
from prefect_tune.core.models import Value
from prefect_tune.core.storage.layout import JournalKey, TrialKey, below

__all__ = ["CommittedCheckpoint", "ExperimentState", "RestoredCheckpoint", "TrialState"]


class CommittedCheckpoint(Value):
    """A committed checkpoint of a trial: complete, durable and listed in the experiment's journal."""

    experiment: str
    trial: str
    step: int
    metrics: Mapping[str, Any]
    """The metrics that it was saved with."""
    uri: str
    """Its location, without secrets: `pt.Checkpoint(uri)` reads it, with the credentials of the environment."""
    size_bytes: int
    """The size of the directory."""
    sent_bytes: int | None = None
    """The bytes that were uploaded: the others were on the target already; None where the save was an earlier one."""


class RestoredCheckpoint(Value):
    """A checkpoint whose verified files are in a local directory. It can be used as a path: `Path(restored, "x")`."""

    directory: Path
    """The directory with the files. It belongs to the caller, and nothing removes it."""
    experiment: str
    """The name of its experiment."""
    trial: str
    """The name of its trial."""
    step: int
    """The step after which training continues."""
    metrics: Mapping[str, Any]

    def __fspath__(self) -> str:
        return str(self.directory)


class TrialState(Value):
    """The state of a trial in the experiment's journal."""

    experiment: str
    trial: str
    status: Status
    """`completed`, `pruned`, `interrupted`, `errored`, `running`, `paused` or `pending`."""
    reason: str
    """Why it has this status, or why its last attempt ended; empty where nothing ended yet."""
    step: int
    """The newest step, each counted once."""
    metrics: Mapping[str, Any]
    """The metrics of that step."""
    checkpoint: CommittedCheckpoint | None
    """The newest committed checkpoint, from which the trial continues; None before the first."""
    checkpoint_steps: tuple[int, ...]
    """The steps of all its checkpoints, oldest first."""
    attempts: int
    """How many attempts have begun, over all flow runs."""
    wasted_steps: int
    """Steps that are known to have been trained again."""
    wasted_at_least: bool
    """Whether they may be more: a run vanished, and its last reports with it."""
    config: Mapping[str, Any]
    """Its configuration; empty if none was passed."""


class ExperimentState(Value):
    """The state of an experiment after one entry of its journal."""

    experiment: str
    uri: str
    """Its location, without secrets."""
    entry: int
    """The number of that entry."""
    owner: str
    """The run that owns the experiment, as messages name it."""
    trials: Mapping[str, TrialState] = Field(default_factory=dict)
    """The trials by name, in the order in which they were added."""


def committed_checkpoint(
    target: StorageTarget, folder: TrialKey, checkpoint: CheckpointRef, sent_bytes: int | None = None
) -> CommittedCheckpoint:
    """Return the public value of a checkpoint of the trial `folder`."""
    return CommittedCheckpoint(
        experiment=folder.experiment,
        trial=folder.trial,
        step=checkpoint.step,
        metrics=checkpoint.metrics,
        uri=below(target.uri, folder.checkpoint_key(checkpoint).folder),
        size_bytes=checkpoint.size_bytes,
        sent_bytes=sent_bytes,
    )


def trial_state(target: StorageTarget, experiment: JournalKey, trial: Trial) -> TrialState:
    """Return the public state of a trial."""
    folder, newest = experiment.trial_key(trial.trial), newest_checkpoint(trial)
    return TrialState(
        experiment=experiment.experiment,
        trial=trial.trial,
        status=trial.status,
        reason=trial.reason,
        step=trial.step,
        metrics=trial.metrics,
        checkpoint=committed_checkpoint(target, folder, newest) if newest else None,
        checkpoint_steps=tuple(each.step for each in trial.checkpoints),
        attempts=trial.attempt,
        wasted_steps=trial.wasted_steps,
        wasted_at_least=trial.wasted_at_least,
        config=trial.config,
    )


def experiment_state(target: StorageTarget, experiment: Experiment) -> ExperimentState:
    """Return the public state of an experiment."""
    return ExperimentState(
        experiment=experiment.name,
        uri=below(target.uri, experiment.name),
        entry=experiment.number,
        owner=str(experiment.owner or ""),
        trials={name: trial_state(target, experiment.key, each) for name, each in experiment.trials.items()},
    )
