"""The tasks that check a target, open an experiment's journal and write its next entry, with retries and timeouts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from prefect import task
from prefect.logging import get_run_logger

from prefect_tune.blocks import StorageTarget, TargetCheck
from prefect_tune.core.errors import (
    StoreRefused,
    StoreUnavailable,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.core.journal_events import Event, Owner
from prefect_tune.core.models import Stamp
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.journal_access import Opening, append_entry, new_write_id, opened_journal
from prefect_tune.storage_retries import CHECKING, RETRYING, skip_prefect_introspection
from prefect_tune.stores.local.staging import transfer_pool

_TIMEOUT = timedelta(minutes=2)


@task(name="check-target", task_run_name="check {target.uri}", **CHECKING)
def check_target(target: StorageTarget) -> TargetCheck:
    """Test by writing and reading whether `target` can store checkpoints safely; an error says why not, in one line.

    Raises:
        StoreRefused: it cannot, or not with this configuration.
        StoreUnavailable: it did not answer, and all retries failed.
    """
    found = target.check(timeout=timedelta(seconds=30))
    if found.may_pass:
        raise StoreUnavailable(found.message)
    if not found.ok:
        raise StoreRefused(found.message)
    if not found.conditional_create:
        get_run_logger().warning("%s", found.message)
    return found


@task(name="restore-experiment-state", task_run_name="open {key.experiment}", **RETRYING)
def restore_experiment_state(
    target: StorageTarget,
    key: JournalKey,
    owner: Owner,
    stamp: Stamp,
    known: LoadedJournal | None = None,
) -> Experiment:
    """Open an experiment for `owner` and return its state; from now on every earlier owner's writes fail.

    A checkpoint whose save was killed between its manifest and its journal entry is adopted, and running trials
    become waiting ones. An experiment that does not exist yet is opened as an empty one.

    Args:
        target: the storage target.
        key: the experiment's journal, as `read_journal` found it.
        owner: the flow run and process that open it, named in messages of superseded owners.
        stamp: write id and time of the entry that records the opening.
        known: the experiment, if the caller has just read it; saves a second read.

    Raises:
        ResumeFailed: it exists and its journal is damaged or of an unknown version. Nothing was started.
        Superseded: other processes opened it first, again and again.
        StoreRefused: the target refuses access; retried within `retrying_refusals`.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        return opened_journal(store, key, target, Opening(owner, stamp, known=known), transfers)


@task(name="sync-experiment-state", task_run_name="journal {experiment.name}", **RETRYING)
def sync_experiment_state(
    target: StorageTarget,
    experiment: Experiment,
    events: Sequence[Event],
    stamp: Stamp,
) -> Experiment:
    """Write `events` as the next journal entry of `experiment` and return the state after it.

    On return the entry is durable, and this process was still the owner when it was written.

    Args:
        target: the storage target.
        experiment: the state after the previous entry.
        events: the events of the entry, in order.
        stamp: write id and time of the entry. A try with the same write id is the same entry.

    Raises:
        Superseded: another process owns the experiment now.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with target.open(timeout=_TIMEOUT) as store:
        return append_entry(store, experiment, events, stamp)


def write_entry(
    target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None = None
) -> Experiment:
    """Run `sync_experiment_state`, with a new stamp unless one is given. Raises as that task does."""
    return sync_experiment_state(
        target, skip_prefect_introspection(experiment), skip_prefect_introspection(events), stamp or new_write_id()
    )
