"""Delete a whole experiment.

    taken over, with a `Deletion` ──► marker of the next generation ──► first entry ──► the rest

The deletion opens the journal as a new owner: the old owner's next write fails, and the experiment cannot be opened any
more. Then it ends the generation (`generations`): from then on the name is free, and everything below that generation
is garbage, which any deletion of the name, or maintenance, collects. An attempt on another machine is refused at its
next post, since the first entry is gone. No other experiment refers to objects of this one.

A deletion is bound to the generation that it found. If it is paused, finished by another one, and continues after the
name was used again, it meets the marker or the missing first entry of its generation, and deletes garbage only.
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

_ROUNDS = 16


def remove(store: ObjectStore, experiment: JournalKey, owner: Owner, stamp: Stamp) -> int:
    """Delete a generation of an experiment, and what is left of those before; a process that runs it is superseded.

    Returns the number of deleted objects. If it is killed at any time, a second call finishes the deletion. What stays
    is the marker of the next generation, which takes 300 bytes, and some 40 for each run that owned it.

    Raises:
        JournalCorrupt: its journal is corrupt; nothing was deleted.
        Superseded: another process deletes it, too.
        StoreUnavailable, CommitUnknown: call again, with the same stamp.
    """
    if not is_deleted(store, experiment):
        known = load(store, experiment)
        if not known.number:
            return 0
        state = take_over(store, experiment, owner, stamp, also=lambda _: [Deletion()], known=known)
        writers = _writers(store, state, owner)
        end_generation(store, experiment, at=stamp.at, by=str(owner), writers=writers)
    deleted = 0
    for _ in range(_ROUNDS):  # superseded processes may write meanwhile
        if not (found := delete_objects_before(store, experiment.experiment, experiment.generation + 1)):
            return deleted
        deleted += len(found)
    raise StoreUnavailable(f"{experiment}: new objects appeared after each of {_ROUNDS} deletions; try again")


def generation_to_delete(store: ObjectStore, experiment: str) -> JournalKey | None:
    """Return the generation that a deletion of the name would delete; None if there is nothing to delete.

    That is the current one, or, if that has no experiment, the one before it whose deletion has left objects.

    Raises:
        UnknownVersion: as `current_journal`.
    """
    current = current_journal(store, experiment)
    if store.list(current.entries):
        return current
    if objects_before(store, experiment, current.generation):
        return JournalKey(experiment=experiment, generation=current.generation - 1)
    return None


def _writers(store: ObjectStore, state: Experiment, by: Owner) -> Sequence[str]:
    """Return the identities of the experiment's owners, without those of the run that deletes it: it knows of it."""
    try:
        owners = earlier_owners(store, state)
    except JournalCorrupt:  # an entry of old that a snapshot stands for is damaged, and must not make it undeletable
        return ()
    others = (owner for owner in owners if (owner.host, owner.pid) != (by.host, by.pid))
    return [owner.identity for owner in others if owner.flow_run is None or owner.flow_run != by.flow_run]
