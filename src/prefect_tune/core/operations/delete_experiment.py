"""Delete a whole experiment.

    new owner, writes `Deletion` ──► marker of the next generation ──► first entry ──► all other objects

The deletion becomes the owner of the journal: the old owner's next write fails, and no other process can become the
owner. Then it ends the generation (`generations`): from then on the name is free, and everything in the folder of that
generation is garbage, which any deletion of the name, or maintenance, collects. An attempt on another machine is
refused at its next post, because the first entry is missing. No other experiment refers to objects of this one.

A deletion is bound to the generation that it found. If it is paused, another process finishes it, and the name is used
again, it continues with the marker or the missing first entry of its own generation, and deletes only garbage.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.errors import JournalCorrupt, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import earlier_owners, load, take_over
from prefect_tune.core.journal_events import Deletion, Owner
from prefect_tune.core.storage.generations import (
    current_journal,
    delete_objects_before,
    end_generation,
    is_deleted,
    objects_before,
)
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp

_MAX_ROUNDS = 16


def remove(store: ObjectStore, experiment: JournalKey, owner: Owner, stamp: Stamp) -> int:
    """Delete a generation of an experiment and the remains of earlier ones; a process that runs it is superseded.

    Returns the number of deleted objects. If this is killed at any time, a second call finishes the deletion. Only the
    marker of the next generation stays: 300 bytes, and about 40 for each run that owned the experiment.

    Raises:
        JournalCorrupt: the journal is corrupt; nothing was deleted.
        Superseded: another process is deleting the experiment, too.
        StoreUnavailable, CommitUnknown: call again with the same stamp.
    """
    if not is_deleted(store, experiment):
        current = load(store, experiment)
        if not current.number:
            return 0
        state = take_over(store, experiment, owner, stamp, also=lambda _: [Deletion()], known=current)
        writers = _list_other_writers(store, state, owner)
        end_generation(store, experiment, at=stamp.at, by=str(owner), writers=writers)
    deleted = 0
    for _ in range(_MAX_ROUNDS):  # superseded processes may write meanwhile
        if not (deleted_objects := delete_objects_before(store, experiment.experiment, experiment.generation + 1)):
            return deleted
        deleted += len(deleted_objects)
    raise StoreUnavailable(f"{experiment}: new objects appeared after each of {_MAX_ROUNDS} deletions; try again")


def generation_to_delete(store: ObjectStore, experiment: str) -> JournalKey | None:
    """Return the generation that a deletion of the name would delete; None if there is nothing to delete.

    This is the current generation or, if it is empty, the previous one if its deletion has left objects.

    Raises:
        UnknownVersion: see `current_journal`.
    """
    current = current_journal(store, experiment)
    if store.list(current.entries):
        return current
    if objects_before(store, experiment, current.generation):
        return JournalKey(experiment=experiment, generation=current.generation - 1)
    return None


def _list_other_writers(store: ObjectStore, state: Experiment, by: Owner) -> Sequence[str]:
    """Return the identities of the experiment's owners, except those of the run that deletes it."""
    try:
        owners = earlier_owners(store, state)
    except JournalCorrupt:  # an old entry, which a snapshot replaces, is damaged: this must not prevent the deletion
        return ()
    others = (owner for owner in owners if (owner.host, owner.pid) != (by.host, by.pid))
    return [owner.identity for owner in others if owner.flow_run is None or owner.flow_run != by.flow_run]
