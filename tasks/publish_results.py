"""Publish the results of an experiment as Parquet files on its target, and read them back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from prefect import task

from prefect_tune.arrow_tables import COLUMNS_VERSIONS, as_parquet, from_parquet, reports_as_arrow, trials_as_arrow
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import AlreadyExists, JournalCorrupt, ObjectNotFound
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import Curves
from prefect_tune.core.journal.journal import history
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.storage.documents import read_document
from prefect_tune.core.storage.layout import Rows, delete_older_results, results_path
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.storage_retries import RETRYING
from prefect_tune.stores.local.staging import transfer_pool

if TYPE_CHECKING:
    import pyarrow as pa

_TIMEOUT = timedelta(minutes=5)


@task(name="publish-results", task_run_name="publish results {experiment.name}", **RETRYING)
def publish_results(
    target: StorageTarget,
    experiment: Experiment,
    objective: Objective | None = None,
    curves: Curves | None = None,
) -> Mapping[Rows, str]:
    """Write the experiment's trials and reports as Parquet files on `target`, and return their paths.

    Idempotent. Files of an earlier state of the experiment are deleted: the new ones include their rows.

    Args:
        curves: the learning curves, if the caller has read the journal already.

    Raises:
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with target.open(timeout=_TIMEOUT) as store:
        read = curves or read_curves(store, experiment)
        tables: Mapping[Rows, Callable[[], pa.Table]] = {
            "trials": lambda: trials_as_arrow(experiment),
            "reports": lambda: reports_as_arrow((trial, read.of(trial)) for trial in experiment.trials),
        }
        return {rows: _publish(store, experiment, objective, rows, table()) for rows, table in tables.items()}


def _publish(
    store: ObjectStore, experiment: Experiment, objective: Objective | None, rows: Rows, table: pa.Table
) -> str:
    path = results_path(experiment.key, rows, experiment.number)
    about = {
        "experiment": experiment.name,
        "entry": str(experiment.number),
        "digest": experiment.digest,
        "version": COLUMNS_VERSIONS[rows],
    }
    if objective is not None:
        about["objective"] = objective.model_dump_json()
    with suppress(AlreadyExists):  # the name holds the entry's number, and the entry decides the content
        store.create(path, as_parquet(table, about))
    delete_older_results(store, experiment.key, rows, experiment.number)
    return path


def read_reports(store: ObjectStore, experiment: Experiment) -> pa.Table:
    """Return the valid reports, one per row: the published file of exactly this state, or else from the journal."""
    path = results_path(experiment.key, "reports", experiment.number)
    try:
        found = from_parquet(read_document(store, path, JournalCorrupt), experiment.digest)
    except (ObjectNotFound, JournalCorrupt):  # a file that is too large is not one of ours
        found = None
    if found is not None:
        return found
    curves = read_curves(store, experiment)
    return reports_as_arrow((trial, curves.of(trial)) for trial in experiment.trials)


def read_curves(store: ObjectStore, experiment: Experiment) -> Curves:
    """Return the curves of all trials up to the experiment's last entry."""
    with transfer_pool() as transfers:
        entries = history(store, experiment.key, side_by_side=transfers)
    curves = Curves()
    for entry in entries:
        if entry.number <= experiment.number:
            curves.tell(entry)
    return curves
