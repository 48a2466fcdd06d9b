"""Delete a whole experiment: one retryable, timed act."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from prefect import task

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.events import Owner
from prefect_tune.core.removal import remove
from prefect_tune.core.values import Stamp, valid_name
from prefect_tune.stores.staging import side_by_side
from prefect_tune.tasks.stamp import new_stamp, this_owner
from prefect_tune.tasks.transient import RETRYING

__all__ = ["Removal", "remove_experiment"]


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What is deleted, and who asks: the same for every try."""

    experiment: str
    owner: Owner = field(default_factory=this_owner)
    stamp: Stamp = field(default_factory=new_stamp)


@task(name="remove-experiment", task_run_name="delete {removal.experiment}", **RETRYING)
def remove_experiment(target: StorageTarget, removal: Removal, *, timeout_seconds: float = 1800.0) -> int:
    """Delete an experiment, and return how many objects that were. Deleting twice is deleting once.

    Whoever runs it, or a trial of it, is superseded, and nobody opens or forks it any more. What it needed of the
    experiment that it is a fork of is let go of there.

    Raises:
        InvalidInput: other experiments need bytes of its checkpoints; nothing was deleted.
        JournalCorrupt: it cannot be read, or a trial of it; nothing was deleted.
        Superseded: somebody else deletes it, too.
        StoreUnavailable, CommitUnknown: the retries are spent.
    """
    name = valid_name(removal.experiment)
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        return remove(store, name, removal.owner, removal.stamp, side_by_side=transfers)
