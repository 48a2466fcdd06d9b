"""Convert an experiment to Arrow tables with one row per trial, report or attempt; independent of Prefect."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from prefect_tune.core.errors import JournalCorrupt, ObjectNotFound
from prefect_tune.core.experiment.cost import CostCategory, ExperimentCost
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import LearningCurves
from prefect_tune.core.experiment.trial_transitions import Trial, newest_checkpoint_key
from prefect_tune.core.journal.journal import iter_entries
from prefect_tune.core.metrics import is_finite
from prefect_tune.core.storage.documents import read_document
from prefect_tune.core.storage.layout import JournalKey, ResultsTable, results_path
from prefect_tune.core.storage.object_store import Buffer, ObjectStore
from prefect_tune.core.values import StepReport, iter_leaves

if TYPE_CHECKING:
    import pyarrow as pa

_INT64_LIMIT = 2**63
_REPORT_COLUMNS = ("trial", "step", "trained_seconds")
COLUMN_VERSIONS: Mapping[ResultsTable, str] = {"trials": "2", "reports": "1"}
"""Increment a version if a column is removed or changes its meaning; for reports, also if a column is added.

A file holds its version in the metadata `prefect-tune/version`; `parse_reports` rejects reports of another version.
"""


def trials_to_arrow(experiment: Experiment) -> pa.Table:
    """Return one row per trial, in the order in which the trials were added.

    The columns are the trial, its status and step, the configuration as `config/...`, the metrics of the last valid
    report, the cost of the training, the newest checkpoint, and why the training ended. A metric with the name of
    another column becomes `metrics/...`.
    """
    import pyarrow as pa

    trials = list(experiment.trials.values())
    config = _make_columns((dict(iter_leaves(trial.config, "config/")) for trial in trials), len(trials), ())
    taken = {*_FIRST_COLUMNS, *_LAST_COLUMNS, *config}
    metrics = _make_columns((dict(iter_leaves(trial.metrics)) for trial in trials), len(trials), taken)

    def build_columns(columns: _Columns) -> dict[str, pa.Array]:
        return {
            name: pa.array([value(experiment.key, trial) for trial in trials], arrow_type)
            for name, (arrow_type, value) in columns.items()
        }

    return pa.table({**build_columns(_FIRST_COLUMNS), **config, **metrics, **build_columns(_LAST_COLUMNS)})


def reports_to_arrow(curves: Iterable[tuple[str, Sequence[StepReport]]]) -> pa.Table:
    """Return one row per valid report: trial, step, training time so far in seconds, and metrics."""
    import pyarrow as pa

    rows = [(trial, report) for trial, curve in curves for report in curve]
    columns = {
        "trial": pa.array([trial for trial, _ in rows], "string"),
        "step": pa.array([report.step for _, report in rows], "int64"),
        "trained_seconds": pa.array([report.trained_seconds or None for _, report in rows], "float64"),
    }
    metrics = (dict(iter_leaves(report.metrics)) for _, report in rows)
    return pa.table({**columns, **_make_columns(metrics, len(rows), columns)})


def attempts_to_arrow(cost: ExperimentCost) -> pa.Table:
    """Return one row per attempt: trial, number, start, seconds by category, and resource usage."""
    import pyarrow as pa

    attempts = cost.attempts
    columns = {
        "trial": pa.array([attempt.trial for attempt in attempts], "string"),
        "attempt": pa.array([attempt.attempt for attempt in attempts], "int64"),
        "began_at": pa.array([attempt.began_at for attempt in attempts], pa.timestamp("ms", "UTC")),
    }
    for category in CostCategory:
        if category is not CostCategory.IDLE:
            seconds = [attempt.seconds[category] for attempt in attempts]
            columns[f"{category.key}_seconds"] = pa.array(seconds, "float64")
    for name, arrow_type in _USAGE_COLUMNS.items():
        columns[name] = pa.array([getattr(attempt.usage, name, None) for attempt in attempts], arrow_type)
    return pa.table(columns)


_USAGE_COLUMNS = {
    "cpu_seconds": "float64",
    "peak_memory_bytes": "int64",
    "mean_memory_bytes": "int64",
    "peak_gpu_memory_bytes": "int64",
    "mean_gpu_utilization": "float64",
}


def find_metric_columns(reports: pa.Table, metrics: Sequence[str]) -> Mapping[str, str]:
    """Return the column names of `metrics` in a table of reports; omit metrics without a column."""
    columns = {name: f"metrics/{name}" if name in _REPORT_COLUMNS else name for name in metrics}
    return {name: column for name, column in columns.items() if column in reports.column_names}


def to_parquet(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """Return `table` as a Parquet file whose schema contains `metadata`, each key with the prefix `prefect-tune/`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    described_table = table.replace_schema_metadata({f"prefect-tune/{name}": value for name, value in metadata.items()})
    sink = pa.BufferOutputStream()
    pq.write_table(described_table, sink, compression="zstd")
    return bytes(sink.getvalue())


def parse_reports(data: Buffer, digest: str) -> pa.Table | None:
    """Return the reports in a Parquet file; None if it is damaged, or stores another version or digest.

    `digest` is the digest of the journal's last entry. If None is returned, the caller must read the journal instead.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(pa.py_buffer(data)))
    except (pa.ArrowException, OSError):  # pyarrow raises OSError for a damaged page
        return None
    about = table.schema.metadata or {}
    is_of_this_release = about.get(b"prefect-tune/version") == COLUMN_VERSIONS["reports"].encode()
    return table if is_of_this_release and about.get(b"prefect-tune/digest") == digest.encode() else None


# ---------------------------------------------------------------------------------------------- the columns


def _get_newest_checkpoint_path(experiment: JournalKey, trial: Trial) -> str | None:
    key = newest_checkpoint_key(experiment.trial_key(trial.id), trial)
    return key.folder if key else None


_Columns: TypeAlias = Mapping[str, tuple[str, Callable[[JournalKey, Trial], object]]]
"""Columns that every experiment has; for each name, the Arrow type and the function that returns a trial's value."""
_FIRST_COLUMNS: _Columns = {
    "trial": ("string", lambda _, trial: trial.id),
    "status": ("string", lambda _, trial: str(trial.status)),
    "step": ("int64", lambda _, trial: trial.step),
}
_LAST_COLUMNS: _Columns = {
    "trained_seconds": ("float64", lambda _, trial: trial.measured_seconds),
    "attempts": ("int64", lambda _, trial: trial.attempt),
    "recomputed_steps": ("int64", lambda _, trial: trial.recomputed_steps),
    "recomputed_is_lower_bound": ("bool", lambda _, trial: trial.recomputed_is_lower_bound),
    "checkpoints": ("int64", lambda _, trial: len(trial.checkpoints)),
    "checkpoint": ("string", _get_newest_checkpoint_path),
    "cause": ("string", lambda _, trial: trial.cause and str(trial.cause)),
    "reason": ("string", lambda _, trial: trial.reason),
}


def _make_columns(rows: Iterable[Mapping[str, object]], count: int, taken: Collection[str]) -> dict[str, pa.Array]:
    """Return a column for each name in `rows`; rows without it are null. A name in `taken` becomes `metrics/...`."""
    columns: dict[str, list[Any]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = [None] * count
            column[index] = value
    return {f"metrics/{name}" if name in taken else name: _make_column(values) for name, values in columns.items()}


def _make_column(column: list[Any]) -> pa.Array:
    """Return a column of one type. If some values are lists, or no type can hold all values, all become JSON."""
    import pyarrow as pa

    types = {type(value) for value in column if value is not None}
    if types == {int, float} and all(value is None or is_finite(value) for value in column):
        column = [None if value is None else float(value) for value in column]
    elif (
        len(types) > 1
        or types & {list, tuple}
        or (types == {int} and not all(value is None or -_INT64_LIMIT <= value < _INT64_LIMIT for value in column))
    ):
        column = [None if value is None else json.dumps(value) for value in column]
    return pa.array(column, pa.float64() if not types else None)


# Read the reports from a target.


def read_reports(store: ObjectStore, experiment: Experiment) -> pa.Table:
    """Return the valid reports, one per row, from the published file if it is current, otherwise from the journal."""
    path = results_path(experiment.key, "reports", experiment.entry_count)
    with suppress(ObjectNotFound, JournalCorrupt):  # JournalCorrupt: the file is too large to be from this package
        if (table := parse_reports(read_document(store, path, JournalCorrupt), experiment.digest)) is not None:
            return table
    return curves_to_arrow(experiment, read_curves(store, experiment))


def curves_to_arrow(experiment: Experiment, curves: LearningCurves) -> pa.Table:
    """Return the valid reports of all trials, one per row."""
    return reports_to_arrow((trial, curves.get_curve(trial)) for trial in experiment.trials)


def read_curves(store: ObjectStore, experiment: Experiment) -> LearningCurves:
    """Return the learning curves of all trials, up to the last entry of `experiment`."""
    return LearningCurves(
        entry for entry, _ in iter_entries(store, experiment.key) if entry.number <= experiment.entry_count
    )
