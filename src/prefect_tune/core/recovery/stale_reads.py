"""Distinguish damage from a stale read or a deletion: the owner may have retired and deleted the missing objects.

Each deletion follows an entry of the trial's journal, and a reader may know an older state of that journal. So a
missing or altered manifest or blob is damage only if the journal, read again after that, still needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prefect_tune.core.checkpoints.commit import ParallelMap
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    JournalCorrupt,
    StoreRefused,
    Superseded,
    TuneError,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial, is_collectable, is_held, is_live
from prefect_tune.core.journal.journal import load
from prefect_tune.core.journal.read_entries import decode_entry, read_if_there
from prefect_tune.core.journal_events.experiment_events import RemovalBegun, RemovalGivenUp
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey, number_in
from prefect_tune.core.storage.object_store import ObjectStore

_TAIL = 64
"""How many of the last entries are searched: after a `RemovalBegun` come only few entries of external writers."""


class OutdatedStateError(TuneError):
    """Checkpoints that the given state of the trial needs were retired since: repeat with the `current` state."""

    def __init__(self, current: Trial) -> None:
        super().__init__(f"trial {current.trial!r}: its journal has retired checkpoints that this call needed")
        self.current = current


def journal_of(store: ObjectStore, trial: TrialKey) -> JournalKey:
    """Return the key of the trial's own journal if that exists, else of its experiment's."""
    own = JournalKey(experiment=trial.experiment, trial=trial.trial)
    has_own = store.size(own.entry_path(1)) is not None
    return own if has_own else JournalKey(experiment=trial.experiment)


def trial_in(state: Experiment, trial: TrialKey) -> Trial | None:
    """Return the trial if `state` is of the journal that records its checkpoints; else None."""
    found = state.trials.get(trial.trial)
    elsewhere = found is not None and found.apart and state.key.trial is None
    return None if elsewhere else found


def current_trial(store: ObjectStore, trial: TrialKey, *, side_by_side: ParallelMap) -> Trial:
    """Read the trial's journal, and return the trial's present state.

    Raises:
        Superseded: its experiment is being deleted, or was deleted.
        JournalCorrupt, UnknownVersion: as `load`.
    """
    key = journal_of(store, trial)
    try:
        state = load(store, key, side_by_side=side_by_side)
    except JournalCorrupt:
        if not is_deletion(store, key):
            raise
        found = None
    else:
        found = None if state.is_removed else trial_in(state, trial)
    if found is None:
        raise Superseded(f"{trial.folder}: its experiment is being deleted, or was deleted. Stop here")
    return found


def require_still_needed(
    store: ObjectStore, trial: TrialKey, bad: Mapping[CheckpointKey, CheckpointCorrupt], *, side_by_side: ParallelMap
) -> None:
    """Raise the damage of the first of the `bad` manifests that the trial's journal still needs.

    Raises:
        CheckpointCorrupt: that checkpoint is live, or a clone needs its bytes.
        OutdatedStateError: the journal no longer needs any of them.
        Superseded: the experiment is being deleted, or was deleted.
    """
    current = current_trial(store, trial, side_by_side=side_by_side)
    for key, damage in bad.items():
        if is_live(current, key) or is_held(current, key):
            raise damage
    raise OutdatedStateError(current)


def is_live_now(store: ObjectStore, key: CheckpointKey, *, side_by_side: ParallelMap) -> bool:
    """Return whether `key` is live in its trial's journal, read now. Raises `JournalCorrupt` as `load`."""
    try:
        return is_live(current_trial(store, key.trial, side_by_side=side_by_side), key)
    except Superseded:
        return False


@contextmanager
def unless_retired(store: ObjectStore, key: CheckpointKey) -> Iterator[None]:
    """When the block raises `CheckpointCorrupt` for `key`, check whether the checkpoint was deleted meanwhile.

    Raises:
        CheckpointNotFound: it was retired, or its experiment is being deleted.
        CheckpointCorrupt: it was not, or the caller may not read its journal: its bytes are damaged.
    """
    try:
        yield
    except CheckpointCorrupt as damage:
        if _was_retired(store, key):
            raise CheckpointNotFound(
                f"{key.folder}: deleted while it was read: its trial has retired it, or its experiment is being "
                "deleted; choose one that is listed"
            ) from damage
        raise


def _was_retired(store: ObjectStore, key: CheckpointKey) -> bool:
    try:
        return _is_retired(store, key)
    except (StoreRefused, UnknownVersion):  # the caller may read the checkpoint only: report the damage
        return False


def _is_retired(store: ObjectStore, key: CheckpointKey) -> bool:
    journal = journal_of(store, key.trial)
    try:
        state = load(store, journal, side_by_side=map)
    except JournalCorrupt:
        return is_deletion(store, journal)
    if not state.number:  # a copy without a journal, or a deleted experiment
        return store.size(key.manifest_path) is None
    found = trial_in(state, key.trial)
    return state.is_removed or (found is not None and is_collectable(found, key))


# ------------------------------------------------------------------------------------------------ deleted journals


def is_deletion(store: ObjectStore, key: JournalKey) -> bool:
    """Return whether a deletion explains the missing entries of the journal `key`.

    True if the newest remaining `RemovalBegun` or `RemovalGivenUp` is a `RemovalBegun`; or, without either, if no
    blob is left: then a late write has arrived after everything was deleted.
    """
    numbers = sorted(number for each in store.list(key.entries) if (number := number_in(key.entries, each.path)))
    for number in reversed(numbers[-_TAIL:]):
        said = _said_of_removal(store, key, number)
        if said is not None:
            return isinstance(said, RemovalBegun)
    return not any("/blobs/" in each.path for each in store.list(key.folder))


def _said_of_removal(store: ObjectStore, key: JournalKey, number: int) -> RemovalBegun | RemovalGivenUp | None:
    path = key.entry_path(number)
    try:
        entry = None if (data := read_if_there(store, path)) is None else decode_entry(data, path)
    except JournalCorrupt:
        return None
    said = [each for each in entry.events if isinstance(each, RemovalBegun | RemovalGivenUp)] if entry else []
    return said[-1] if said else None
