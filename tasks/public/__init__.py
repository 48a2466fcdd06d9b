"""The public tasks: plain arguments, resolved once, and then the functions that the engine's own tasks run."""

from __future__ import annotations

from prefect_tune.tasks.public.checkpoints import delete_checkpoint, restore_checkpoint, save_checkpoint
from prefect_tune.tasks.public.experiment_state import restore_experiment_state, sync_experiment_state
from prefect_tune.tasks.public.results import CommittedCheckpoint, ExperimentState, RestoredCheckpoint, TrialState
from prefect_tune.tasks.public.trials import run_trial

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
