"""The Prefect tasks: run a trial; save, restore and delete a checkpoint; read and write the journal.

Each task is retried on transient errors and has a timeout.
"""

from __future__ import annotations

from prefect_tune.tasks.checkpoints import delete_checkpoint, restore_checkpoint, save_checkpoint
from prefect_tune.tasks.experiment_state import restore_experiment_state, sync_experiment_state
from prefect_tune.tasks.run_trial import run_trial

__all__ = [
    "delete_checkpoint",
    "restore_checkpoint",
    "restore_experiment_state",
    "run_trial",
    "save_checkpoint",
    "sync_experiment_state",
]
