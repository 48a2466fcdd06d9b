"""Read a trial's present state from its own journal, which the experiment's journal absorbs once a `sync_period`."""

from __future__ import annotations

from prefect_tune.core.checkpoints.commit import ParallelMap
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import load
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore

__all__ = ["trial_today"]


def trial_today(store: ObjectStore, experiment: str, known: Trial, *, side_by_side: ParallelMap) -> Trial:
    """Return the trial's state in its own journal; `known` where it has none, or none yet.

    Its `past` is that of `known`: decisions are in the experiment's journal.

    Raises:
        JournalCorrupt, UnknownVersion: as `load`.
    """
    if not known.apart:
        return known
    own = JournalKey(experiment=experiment, trial=known.trial)
    found = load(store, own, side_by_side=side_by_side).trials.get(known.trial, known)
    return found.model_copy(update={"past": known.past})
