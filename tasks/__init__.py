"""The Prefect tasks: run a trial; save, restore and delete a checkpoint; read and write the journal.

Each task is retried on transient errors and has a timeout. The tasks exported here are for users' own flows; the
modules also contain the engine's tasks, whose arguments are already checked. Both kinds call the same functions.
"""

from __future__ import annotations

from prefect_tune.task_values import CommittedCheckpoint, ExperimentState, RestoredCheckpoint, TrialState
from prefect_tune.tasks.checkpoints import delete_checkpoint, restore_checkpoint, save_checkpoint
from prefect_tune.tasks.experiments import restore_experiment_state, sync_experiment_state
from prefect_tune.tasks.trials import run_trial

__all__ = [
    "CommittedCheckpoint",
    "ExperimentState",
    "RestoredCheckpoint",
    "TrialState",
    "delete_checkpoint",
    "restore_checkpoint",
    "restore_experiment_state",
    "run_trial",
    "save_checkpoint",
    "sync_experiment_state",
]
