"""The maintenance tasks of one experiment, which may be running: verify, quarantine, prune, collect garbage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from prefect import task

from prefect_tune.blocks import StorageTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, UnknownVersion
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.operations.scrub import (
    FULL_SHARE,
    DailyShare,
    Inspection,
    inspect_checkpoints,
    quarantine_in_journal,
)
from prefect_tune.core.operations.trial_gc import (
    ExperimentGarbage,
    collect_experiment_garbage,
    retire_unkept_checkpoints,
)
from prefect_tune.core.restore import read_manifest, verify_files
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.storage_retries import READ_TIMEOUT, TASK_RETRY_OPTIONS

_TIMEOUT = timedelta(minutes=30)
_MAX_START_FRACTION = 0.8
"""The fraction of a try's timeout after which the try starts no more items; the rest is for the current item."""


@task(name="verify-checkpoints", task_run_name="verify {journal.experiment}", **TASK_RETRY_OPTIONS)
def verify_checkpoints(
    target: StorageTarget,
    journal: JournalKey,
    share: DailyShare = FULL_SHARE,
    max_bytes: int | None = None,
    until: datetime | None = None,
) -> Inspection:
    """Read a share of the live checkpoints of an experiment and check every byte; see `inspect_checkpoints`.

    Args:
        share: which of the checkpoints to read.
        max_bytes: read no further checkpoint after this number of bytes. None: no limit.
        until: read no further checkpoint after this time.

    Raises:
        JournalCorrupt, UnknownVersion: the journal cannot be read.
        StoreUnavailable: all retries failed.
    """
    has_time, limit = _make_time_check(until), math.inf if max_bytes is None else max_bytes
    with target.open(timeout=_TIMEOUT) as store:
        return inspect_checkpoints(store, load_experiment(store, journal), share, max_bytes=limit, has_time=has_time)


@task(name="verify-checkpoint", task_run_name="verify {key.trial.trial} step {key.step}", **TASK_RETRY_OPTIONS)
def find_checkpoint_damage(target: StorageTarget, key: CheckpointKey) -> str:
    """Read every byte of the checkpoint `key`; return a description of its damage, or "" if it can be restored.

    Raises:
        StoreRefused: the target refuses access; retried within `retrying_refusals`.
        StoreUnavailable: all retries failed.
    """
    with target.open(timeout=_TIMEOUT) as store:
        try:
            verify_files(store, read_manifest(store, key))
        except (CheckpointCorrupt, CheckpointNotFound, UnknownVersion) as error:
            return str(error)
    return ""


@task(name="quarantine-checkpoints", task_run_name="quarantine of {journal.experiment}", **TASK_RETRY_OPTIONS)
def quarantine_checkpoints(
    target: StorageTarget, journal: JournalKey, damaged: Mapping[CheckpointKey, str]
) -> Sequence[CheckpointKey]:
    """Quarantine damaged checkpoints, even if another process owns the journal; return the quarantined checkpoints.

    Idempotent; see `quarantine_in_journal`. Raises the errors of `verify_checkpoints`, and `CommitUnknown`.
    """
    with target.open(timeout=READ_TIMEOUT) as store:
        return quarantine_in_journal(store, journal, damaged, new_write_stamp())


@task(name="prune-checkpoints", task_run_name="prune {journal.experiment}", **TASK_RETRY_OPTIONS)
def prune_checkpoints(target: StorageTarget, journal: JournalKey, policy: Retention, *, dry_run: bool = False) -> int:
    """In a finished experiment, retire the checkpoints that `policy` does not keep; return how many are retired.

    Nothing is retired until all trials have ended. The best checkpoint and all checkpoints of the best trial are kept.
    A dry run only counts. `collect_garbage` deletes retired checkpoints. Raises the errors of `quarantine_checkpoints`.
    """
    with target.open(timeout=_TIMEOUT) as store:
        retirements = retire_unkept_checkpoints(store, journal, policy, new_write_stamp(), dry_run=dry_run)
        return sum(len(retirement.retired_sequences) for retirement in retirements)


@task(name="collect-garbage", task_run_name="collect {journal.experiment}", **TASK_RETRY_OPTIONS)
def collect_garbage(
    target: StorageTarget, journal: JournalKey, *, dry_run: bool = False, until: datetime | None = None
) -> ExperimentGarbage:
    """Delete an experiment's objects to which nothing refers, and return them; see `trial_gc`.

    Args:
        dry_run: only list the objects; delete and write nothing.
        until: begin no further trial after this time.

    Raises the errors of `quarantine_checkpoints`.
    """
    has_time = _make_time_check(until)
    with target.open(timeout=_TIMEOUT) as store:
        state = load_experiment(store, journal)
        return collect_experiment_garbage(store, state, new_write_stamp(), dry_run=dry_run, has_time=has_time)


def _make_time_check(until: datetime | None) -> Callable[[], bool]:
    """Return a function that tells whether another item may start: none after `until` or after 80 % of the timeout."""
    deadline = datetime.now(UTC) + _MAX_START_FRACTION * _TIMEOUT
    return lambda: datetime.now(UTC) < (deadline if until is None else min(deadline, until))
