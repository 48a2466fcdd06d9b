"""The maintenance tasks: verify, quarantine, prune and collect the garbage of one experiment, also while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from prefect import task

from prefect_tune.blocks import StorageTarget
from prefect_tune.clock import new_write_id
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, UnknownVersion
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.journal.journal import load
from prefect_tune.core.operations.scrub import EVERYTHING, DailyShare, Inspection, inspect, quarantine
from prefect_tune.core.operations.trial_gc import Garbage, collect_experiment, prune
from prefect_tune.core.restore import read_manifest, verify
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.storage_retries import READ_TIMEOUT, RETRYING

_TIMEOUT = timedelta(minutes=30)
_SHARE_FOR_BEGINNING = 0.8
"""The share of a try's timeout after which it starts no further item; the rest is for the item under way."""


@task(name="verify-checkpoints", task_run_name="verify {journal.experiment}", **RETRYING)
def verify_checkpoints(
    target: StorageTarget,
    journal: JournalKey,
    share: DailyShare = EVERYTHING,
    max_bytes: int | None = None,
    until: datetime | None = None,
) -> Inspection:
    """Read a share of the live checkpoints of an experiment and check every byte; write nothing. See `inspect`.

    Args:
        share: which checkpoints are read.
        max_bytes: the bytes after which no further checkpoint is read. None: no limit.
        until: the time after which no further checkpoint is read.

    Raises:
        JournalCorrupt, UnknownVersion: the journal cannot be read.
        StoreUnavailable: all retries failed.
    """
    has_time = _has_time(until)
    with target.open(timeout=_TIMEOUT) as store:
        state = load(store, journal)
        return inspect(store, state, share, max_bytes=math.inf if max_bytes is None else max_bytes, has_time=has_time)


@task(name="verify-checkpoint", task_run_name="verify {key.trial.trial} step {key.step}", **RETRYING)
def damage_of_checkpoint(target: StorageTarget, key: CheckpointKey) -> str:
    """Read every byte of the checkpoint `key` and return a description of its damage; empty if it can be restored.

    Raises:
        StoreRefused: credentials, permission or bucket; retried within `retrying_refusals`.
        StoreUnavailable: all retries failed.
    """
    with target.open(timeout=_TIMEOUT) as store:
        try:
            verify(store, read_manifest(store, key))
        except (CheckpointCorrupt, CheckpointNotFound, UnknownVersion) as damaged:
            return str(damaged)
    return ""


@task(name="quarantine-checkpoints", task_run_name="quarantine of {journal.experiment}", **RETRYING)
def quarantine_checkpoints(
    target: StorageTarget,
    journal: JournalKey,
    damaged: Mapping[CheckpointKey, str],
) -> Sequence[CheckpointKey]:
    """Quarantine damaged checkpoints, also while another process owns the journal; return those now quarantined.

    Idempotent. See `quarantine`. Raises as `verify_checkpoints`, and `CommitUnknown`.
    """
    with target.open(timeout=READ_TIMEOUT) as store:
        return quarantine(store, journal, damaged, new_write_id())


@task(name="prune-checkpoints", task_run_name="prune {journal.experiment}", **RETRYING)
def prune_checkpoints(
    target: StorageTarget,
    journal: JournalKey,
    policy: Retention,
    *,
    dry_run: bool = False,
) -> int:
    """Retire the checkpoints of a finished experiment that `policy` does not keep, and return their number.

    Nothing is retired while any trial has not ended, nothing of the best trial, and not the best checkpoint of all.
    A dry run only counts them. `collect_garbage` deletes the retired checkpoints. Raises as `quarantine_checkpoints`.
    """
    with target.open(timeout=_TIMEOUT) as store:
        retirements = prune(store, journal, policy, new_write_id(), dry_run=dry_run)
        return sum(len(retirement.retires) for retirement in retirements)


@task(name="collect-garbage", task_run_name="collect {journal.experiment}", **RETRYING)
def collect_garbage(
    target: StorageTarget,
    journal: JournalKey,
    *,
    dry_run: bool = False,
    until: datetime | None = None,
) -> Garbage:
    """Delete the objects of an experiment that nothing refers to, and return them; see `trial_gc`.

    Args:
        dry_run: only list them; delete and write nothing.
        until: the time after which no further trial is started.

    Raises as `quarantine_checkpoints`.
    """
    has_time = _has_time(until)
    with target.open(timeout=_TIMEOUT) as store:
        state = load(store, journal)
        return collect_experiment(store, state, new_write_id(), dry_run=dry_run, has_time=has_time)


def _has_time(until: datetime | None) -> Callable[[], bool]:
    """Return a check whether another item may start: `until` is not reached, nor 80 % of this try's timeout."""
    latest = datetime.now(UTC) + _SHARE_FOR_BEGINNING * _TIMEOUT
    return lambda: datetime.now(UTC) < (latest if until is None else min(latest, until))
