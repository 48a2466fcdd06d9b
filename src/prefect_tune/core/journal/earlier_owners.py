"""The owners of a journal's earlier terms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

from prefect_tune.core.checkpoints.commit import ParallelMap
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.read_entries import decode_entry, read_listed
from prefect_tune.core.journal_events.experiment_events import Opened, Owner
from prefect_tune.core.journal_events.journal_entry import Entry
from prefect_tune.core.storage.object_store import ObjectStore

__all__ = ["earlier_owners"]


def earlier_owners(store: ObjectStore, experiment: Experiment, *, side_by_side: ParallelMap) -> Sequence[Owner]:
    """Return the owners before the present one, oldest first.

    Terms increase along the journal, so each is found by bisection: some log(entries) reads for each earlier term.

    Raises:
        JournalCorrupt: an entry is missing or altered.
    """
    key = experiment.key

    @cache
    def entry(number: int) -> Entry:
        path = key.entry_path(number)
        return decode_entry(read_listed(store, path), path)

    def owner_of(epoch: int) -> Owner | None:
        before = range(1, experiment.opened_at)
        opening = entry(before[bisect_left(before, epoch, key=lambda number: entry(number).epoch)])
        return next((event.owner for event in opening.events if isinstance(event, Opened)), None)

    return [owner for owner in side_by_side(owner_of, range(1, experiment.epoch)) if owner is not None]
