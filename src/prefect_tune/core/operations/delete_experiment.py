"""Delete a whole experiment.

    new owner, writes `DeletionStarted` ──► marker of the next generation ──► first entry ──► all other objects

The deletion becomes the owner of the journal, so the old owner's next write fails, and only another deletion can become
the owner. Then the deletion ends the generation (see `generations`): the experiment's name is free, and the objects of
the generation are garbage. If this deletion does not remove them, maintenance or a later deletion does. An attempt on
another machine fails at its next post: the first entry is missing. No other experiment refers to the deleted objects.

A deletion is bound to the generation that it found. If its process hangs, another process may finish the deletion, and
the name may be used again. If the first process then goes on, it finds only garbage to delete.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.errors import JournalCorrupt, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import acquire_ownership, load_experiment, read_earlier_owners
from prefect_tune.core.journal_events import DeletionStarted, Owner
from prefect_tune.core.storage.generations import (
    delete_earlier_objects,
    end_generation,
    find_current_journal,
    is_generation_deleted,
    list_earlier_objects,
)
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import WriteStamp

_MAX_ROUNDS = 16


def delete_generation(store: ObjectStore, experiment: JournalKey, owner: Owner, stamp: WriteStamp) -> int:
    """Delete a generation of an experiment, and the remains of earlier generations; supersede the experiment's owner.

    Returns the number of deleted objects. If the process is killed, a second call finishes the deletion. Only the
    marker of the next generation stays: 300 bytes, plus about 40 bytes for each run that owned the experiment.

    Raises:
        JournalCorrupt: the journal is corrupt; nothing was deleted.
        Superseded: another process deletes the experiment, too.
        StoreUnavailable, CommitUnknown: call again with the same stamp.
    """
    if not is_generation_deleted(store, experiment):
        current = load_experiment(store, experiment)
        if not current.entry_count:
            return 0
        state = acquire_ownership(
            store, experiment, owner, stamp, events_for=lambda _: [DeletionStarted()], loaded=current
        )
        writers = _list_other_writers(store, state, owner)
        end_generation(store, experiment, at=stamp.at, by=str(owner), writers=writers)
    deleted = 0
    for _ in range(_MAX_ROUNDS):  # repeated, because processes of a superseded owner may still write
        if not (deleted_objects := delete_earlier_objects(store, experiment.experiment, experiment.generation + 1)):
            return deleted
        deleted += len(deleted_objects)
    raise StoreUnavailable(f"{experiment}: new objects appeared after each of {_MAX_ROUNDS} deletions; try again")


def find_generation_to_delete(store: ObjectStore, experiment: str) -> JournalKey | None:
    """Return the generation that a deletion of the name would delete; None if there is nothing to delete.

    This is the current generation if it has entries, or else the previous one if earlier generations left objects.

    Raises:
        UnknownVersion: see `find_current_journal`.
    """
    current = find_current_journal(store, experiment)
    if store.list(current.entries_folder):
        return current
    if list_earlier_objects(store, experiment, current.generation):
        return JournalKey(experiment=experiment, generation=current.generation - 1)
    return None


def _list_other_writers(store: ObjectStore, state: Experiment, by: Owner) -> Sequence[str]:
    """Return the identities of all owners that the experiment has had, except those in `by`'s flow run or process."""
    try:
        owners = read_earlier_owners(store, state)
    except JournalCorrupt:  # an entry older than the snapshot is damaged, so the earlier owners are unknown
        return ()
    others = (owner for owner in owners if (owner.host, owner.pid) != (by.host, by.pid))
    return [owner.identity for owner in others if owner.flow_run is None or owner.flow_run != by.flow_run]
