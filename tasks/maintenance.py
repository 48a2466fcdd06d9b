"""The maintenance tasks: verify, quarantine, prune and collect the garbage of one experiment, also while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from prefect import task

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, UnknownVersion
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.summary import best_of, objective_in
from prefect_tune.core.experiment.trial_transitions import ENDED
from prefect_tune.core.journal.journal import load
from prefect_tune.core.operations.scrub import (
    EVERYTHING,
    DailyShare,
    Inspection,
    ScrubLimits,
    Unreadable,
    inspect,
    quarantine,
    unless_unreadable,
)
from prefect_tune.core.operations.trial_gc import Collected, collect_from, look_for_garbage, look_for_prunable, prune
from prefect_tune.core.prefect_events import best_checkpoints
from prefect_tune.core.restore import read_manifest, verify
from prefect_tune.core.storage.generations import delete_objects_before, objects_before
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import Listed, ObjectStore, ParallelMap
from prefect_tune.journal_access import new_write_id
from prefect_tune.storage_retries import READ_TIMEOUT, RETRYING
from prefect_tune.stores.local.staging import transfer_pool

_TIMEOUT = timedelta(minutes=30)
_SHARE_FOR_BEGINNING = 0.8
"""The share of a try's timeout after which it starts no further item; the rest is for the item under way."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class CollectedTrials:
    """The deleted garbage of an experiment by trial, and the count of trials that were skipped for lack of time."""

    trials: tuple[Collected, ...]
    skipped_count: int = 0
    unreadable: tuple[Unreadable, ...] = ()
    dead: Sequence[Listed] = ()
    """Objects that deleted experiments of the same name have left."""


@dataclass(frozen=True, slots=True)
class PrunedTrials:
    """How many checkpoints of an experiment were retired, and which of its trials cannot be read."""

    count: int
    unreadable: tuple[Unreadable, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """Which checkpoints of an experiment to read; see `scrub`."""

    share: DailyShare = EVERYTHING
    max_bytes: int | None = None
    until: datetime | None = None
    """The time after which no further checkpoint is read."""


@task(name="verify-checkpoints", task_run_name="verify {journal.experiment}", **RETRYING)
def verify_checkpoints(
    target: StorageTarget,
    journal: JournalKey,
    sample: Sample,
) -> Inspection:
    """Read the sampled live checkpoints of an experiment and check every byte; write nothing. See `scrub`.

    Raises:
        JournalCorrupt, UnknownVersion: the journal cannot be read.
        StoreUnavailable: all retries failed.
    """
    limits = ScrubLimits(sample.max_bytes, _has_time(sample.until))
    with target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        state = load(store, journal, side_by_side=transfers)
        return inspect(store, state, sample.share, limits, side_by_side=transfers)


@task(name="verify-checkpoint", task_run_name="verify {key.trial.trial} step {key.step}", **RETRYING)
def damage_of_checkpoint(target: StorageTarget, key: CheckpointKey) -> str:
    """Read every byte of the checkpoint `key` and return a description of its damage; empty if it can be restored.

    Raises:
        StoreRefused: credentials, permission or bucket; retried within `retrying_refusals`.
        StoreUnavailable: all retries failed.
    """
    with target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        try:
            verify(store, read_manifest(store, key), side_by_side=transfers)
        except (CheckpointCorrupt, CheckpointNotFound, UnknownVersion) as damaged:
            return str(damaged)
    return ""


@task(name="quarantine-checkpoints", task_run_name="quarantine of {journal.experiment}", **RETRYING)
def quarantine_checkpoints(
    target: StorageTarget,
    journal: JournalKey,  # noqa: ARG001  it names the task run
    damaged: Mapping[CheckpointKey, str],
) -> Sequence[CheckpointKey]:
    """Quarantine damaged checkpoints, also while another process owns the journal; return those now quarantined.

    Idempotent. See `quarantine`. Raises as `verify_checkpoints`, and `CommitUnknown`.
    """
    by_trial: dict[TrialKey, dict[CheckpointKey, str]] = {}
    for key, reason in damaged.items():
        by_trial.setdefault(key.trial, {})[key] = reason
    with target.open(timeout=READ_TIMEOUT) as store, transfer_pool() as transfers:

        def quarantined(trial: TrialKey) -> Sequence[CheckpointKey]:
            return quarantine(store, trial, by_trial[trial], new_write_id(), side_by_side=transfers)

        found, _ = _each(store, quarantined, by_trial)  # nothing is quarantined in an unreadable journal
        return [key for keys in found for key in keys]


@task(name="prune-checkpoints", task_run_name="prune {journal.experiment}", **RETRYING)
def prune_checkpoints(
    target: StorageTarget,
    journal: JournalKey,
    policy: Retention,
    *,
    dry_run: bool = False,
) -> PrunedTrials:
    """Retire the checkpoints of a finished experiment that `policy` does not keep; a dry run only counts them.

    Nothing is retired while any trial has not ended, nothing of the best trial, and not the best checkpoint of all.
    `collect_garbage` deletes the retired checkpoints. Raises as `quarantine_checkpoints`.
    """
    with target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        state = load(store, journal, side_by_side=transfers)
        if any(each.phase not in ENDED for each in state.trials.values()):
            return PrunedTrials(0)
        best, best_saved = best_of(state), best_checkpoints(state, objective_in(state.settings))
        keys = [state.trial_key(name) for name in state.trials if best is None or name != best.trial]

        def retired(key: TrialKey) -> Sequence[int]:
            known = state.trial(key.trial)
            needed = [best_saved[key.trial]] if key.trial in best_saved else []
            if dry_run:
                return look_for_prunable(store, key, policy, side_by_side=map, known=known, needed=needed)
            return prune(store, key, policy, new_write_id(), side_by_side=map, known=known, needed=needed)

        found, unreadable = _each(store, retired, keys, transfers)
        return PrunedTrials(sum(len(each) for each in found), unreadable)


@task(name="collect-garbage", task_run_name="collect {journal.experiment}", **RETRYING)
def collect_garbage(
    target: StorageTarget,
    journal: JournalKey,
    *,
    dry_run: bool = False,
    until: datetime | None = None,
) -> CollectedTrials:
    """Delete the objects of an experiment that nothing refers to, and return them by trial; see `trial_gc`.

    Args:
        dry_run: only list them; delete and write nothing.
        until: the time after which no further trial is started.

    Raises as `quarantine_checkpoints`.
    """
    has_time = _has_time(until)
    with target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        state = load(store, journal, side_by_side=transfers)
        keys = [state.trial_key(name) for name in state.trials]

        def tidy(key: TrialKey) -> Collected | None:
            known = state.trial(key.trial)
            if not has_time():
                return None
            if dry_run:
                return look_for_garbage(store, key, side_by_side=map, known=known)
            return collect_from(store, key, new_write_id(), side_by_side=map, known=known)

        found, unreadable = _each(store, tidy, keys, transfers)
        done = tuple(each for each in found if each is not None)
        look_for_dead = objects_before if dry_run else delete_objects_before
        dead = look_for_dead(store, journal.experiment, journal.generation)
        return CollectedTrials(done, len(found) - len(done), unreadable, dead)


def _each(
    store: ObjectStore,
    act: Callable[[TrialKey], _Result],
    trials: Iterable[TrialKey],
    transfers: ParallelMap = map,
) -> tuple[Sequence[_Result], tuple[Unreadable, ...]]:
    """Run `act` for each trial; return the results, and the trials whose objects cannot be read, without failing."""

    def done(trial: TrialKey) -> _Result | Unreadable:
        return unless_unreadable(store, trial.journal, trial.folder, lambda: act(trial))

    found = list(transfers(done, trials))
    unreadable = tuple(each for each in found if isinstance(each, Unreadable))
    return [each for each in found if not isinstance(each, Unreadable)], unreadable


def _has_time(until: datetime | None) -> Callable[[], bool]:
    """Return a check whether another item may start: `until` is not reached, nor 80 % of this try's timeout."""
    latest = datetime.now(UTC) + _SHARE_FOR_BEGINNING * _TIMEOUT
    return lambda: datetime.now(UTC) < (latest if until is None else min(latest, until))
