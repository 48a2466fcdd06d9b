"""Quarantine a damaged checkpoint, or reinstate one, in a journal of another owner.

The owner of a trial quarantines a checkpoint when it finds damage during a restore. A process that finds damage
at any other time writes an entry to the trial's journal as an external writer, as for a claim: the owner stays the
owner. From then on it neither restores the checkpoint nor reuses its blobs, nor those of any checkpoint as old:
they may share the damaged ones. The alternatives are worse: a request to the owner needs a running owner, and a
document of its own would be a second source of truth that every reader has to check.

A running save may have reused blobs of the damaged checkpoint; it is not committed after the external entry
(`SaveOvertaken`), and its owner saves again. Nothing is deleted: the bytes stay until the trial retires the
checkpoint, so that it can be reinstated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from prefect_tune.core.checkpoints.commit import ParallelMap
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import is_aside, is_live
from prefect_tune.core.journal.journal import append_as_guest
from prefect_tune.core.journal_events.experiment_events import ExternallyQuarantined, ExternalWriterEvent, Reinstated
from prefect_tune.core.models import Stamp
from prefect_tune.core.recovery.stale_reads import journal_of, trial_in
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore


def quarantine(
    store: ObjectStore,
    trial: TrialKey,
    damaged: Mapping[CheckpointKey, str],
    stamp: Stamp,
    *,
    side_by_side: ParallelMap,
) -> Sequence[CheckpointKey]:
    """Quarantine checkpoints of `trial`, each for the reason given; return those that are quarantined now.

    One that was retired meanwhile is not among them. Idempotent.

    Raises:
        JournalCorrupt, UnknownVersion: as `load`.
        StoreUnavailable, CommitUnknown: call again.
    """

    def events(state: Experiment) -> Sequence[ExternalWriterEvent]:
        found = trial_in(state, trial)
        live = {key: reason for key, reason in damaged.items() if found and is_live(found, key)}
        return [ExternallyQuarantined(trial=trial.trial, sequence=key.sequence, reason=live[key]) for key in live]

    after = append_as_guest(store, journal_of(store, trial), events, stamp, side_by_side=side_by_side)
    found = after.trials.get(trial.trial)
    return [key for key in damaged if found and is_aside(found, key)]


def reinstate(
    store: ObjectStore, trial: TrialKey, keys: Collection[CheckpointKey], stamp: Stamp, *, side_by_side: ParallelMap
) -> Sequence[CheckpointKey]:
    """Reinstate quarantined checkpoints of `trial`; return those that are live now.

    The caller has verified them. If one is the trial's newest, its next attempt starts from it.
    Raises as `quarantine`.
    """

    def events(state: Experiment) -> Sequence[ExternalWriterEvent]:
        found = trial_in(state, trial)
        return [Reinstated(trial=trial.trial, sequence=key.sequence) for key in keys if found and is_aside(found, key)]

    after = append_as_guest(store, journal_of(store, trial), events, stamp, side_by_side=side_by_side)
    found = after.trials.get(trial.trial)
    return [key for key in keys if found and is_live(found, key)]
