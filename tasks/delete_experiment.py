"""The task that deletes a whole experiment, with retries and a timeout."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from prefect import task

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.journal_events.experiment_events import Owner
from prefect_tune.core.models import Stamp, valid_name
from prefect_tune.core.operations.delete_experiment import remove
from prefect_tune.storage_retries import RETRYING
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.supervisor.run_identity import current_owner, new_write_id


@dataclass(frozen=True, kw_only=True)
class Removal:
    """The arguments of a deletion. Every try has the same owner and stamp, so that a retry is the same deletion."""

    experiment: str
    owner: Owner = field(default_factory=current_owner)
    stamp: Stamp = field(default_factory=new_write_id)


@task(name="remove-experiment", task_run_name="delete {removal.experiment}", **RETRYING)
def remove_experiment(target: StorageTarget, removal: Removal, *, timeout_seconds: float = 1800.0) -> int:
    """Delete an experiment and return the count of deleted objects. Idempotent.

    Processes that run it or one of its trials are superseded, and it can no longer be opened or forked. If it is a
    fork, its references to the origin's blobs are released.

    Raises:
        InvalidInput: other experiments need bytes of its checkpoints; nothing was deleted.
        JournalCorrupt: its journal, or a trial's, cannot be read; nothing was deleted.
        Superseded: another process deletes it at the same time.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    name = valid_name(removal.experiment)
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, transfer_pool() as transfers:
        return remove(store, name, removal.owner, removal.stamp, side_by_side=transfers)
