"""Put a damaged checkpoint aside, and reinstate one, in a journal that is somebody else's.

Only the owner of a trial quarantines a checkpoint, and only the owner finds damage when it restores one. Who
finds it at any other time writes it into the trial's journal as a guest, as a claim is written: that takes
nothing from the owner, who goes on after it, and who from then on neither restores the checkpoint nor
reuses its bytes, nor those of any that is as old: they may share what is damaged. A request that the owner
reads would need an owner that lives, and a document of its own would be a second truth beside the journal that
everybody who reads has to heed.

A save that is under way may reuse what the damaged checkpoint holds, and is not committed after the guest's entry
(`SaveOvertaken`): its owner makes it again. Nothing is deleted: the bytes stay until the trial retires the
checkpoint, so that it can be reinstated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from prefect_tune.core.commit import Mapper
from prefect_tune.core.events import GuestsEvent, PutAside, Reinstated
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.journal import append_as_guest
from prefect_tune.core.layout import CheckpointKey, TrialKey
from prefect_tune.core.stale_reads import journal_of
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.trial import is_aside, is_live
from prefect_tune.core.values import Stamp

__all__ = ["put_aside", "reinstate"]


def put_aside(
    store: ObjectStore, trial: TrialKey, damaged: Mapping[CheckpointKey, str], stamp: Stamp, *, side_by_side: Mapper
) -> Sequence[CheckpointKey]:
    """Have the checkpoints of `trial` not used any more, each for the reason given; return those that are aside now.

    One that was retired meanwhile is not among them. Done twice it is done once.

    Raises:
        JournalCorrupt, UnknownVersion: as `load`.
        StoreUnavailable, CommitUnknown: call again.
    """
    say = partial(_put_aside, trial=trial, damaged=damaged)
    after = append_as_guest(store, journal_of(store, trial), say, stamp, side_by_side=side_by_side)
    found = after.trials.get(trial.trial)
    return [key for key in damaged if found is not None and is_aside(found, key)]


def reinstate(
    store: ObjectStore, trial: TrialKey, keys: Collection[CheckpointKey], stamp: Stamp, *, side_by_side: Mapper
) -> Sequence[CheckpointKey]:
    """Make checkpoints of `trial` that were put aside what they were; return those that are checkpoints now.

    The caller has verified them. Where one is the trial's newest, its next attempt goes on from it.
    Raises as `put_aside`.
    """
    say = partial(_reinstated, trial=trial, keys=keys)
    after = append_as_guest(store, journal_of(store, trial), say, stamp, side_by_side=side_by_side)
    found = after.trials.get(trial.trial)
    return [key for key in keys if found is not None and is_live(found, key)]


def _put_aside(state: Experiment, *, trial: TrialKey, damaged: Mapping[CheckpointKey, str]) -> Sequence[GuestsEvent]:
    found = None if state.is_removed else state.trials.get(trial.trial)
    if found is None:
        return ()
    live = {key: reason for key, reason in damaged.items() if is_live(found, key)}
    return [PutAside(trial=trial.trial, sequence=key.sequence, reason=reason) for key, reason in live.items()]


def _reinstated(state: Experiment, *, trial: TrialKey, keys: Collection[CheckpointKey]) -> Sequence[GuestsEvent]:
    found = None if state.is_removed else state.trials.get(trial.trial)
    if found is None:
        return ()
    return [Reinstated(trial=trial.trial, sequence=key.sequence) for key in keys if is_aside(found, key)]
