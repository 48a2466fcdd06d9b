"""Convert an experiment to Arrow tables: one row per trial, or one row per report. Needs no Prefect."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from prefect_tune.core.errors import JournalCorrupt, ObjectNotFound
from prefect_tune.core.experiment.cost import Category, ExperimentCost
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import Curves
from prefect_tune.core.experiment.trial_transitions import Trial, newest_key
from prefect_tune.core.journal.journal import each_entry
from prefect_tune.core.metrics import is_finite
from prefect_tune.core.storage.documents import read_document
from prefect_tune.core.storage.layout import JournalKey, Rows, results_path
from prefect_tune.core.storage.object_store import Buffer, ObjectStore
from prefect_tune.core.values import StepReport, leaves

if TYPE_CHECKING:
    import pyarrow as pa

_INT64 = 2**63
_OF_A_REPORT = ("trial", "step", "trained_seconds")
COLUMNS_VERSIONS: Mapping[Rows, str] = {"trials": "1", "reports": "1"}
"""Of the columns: raised if one goes, changes its meaning, or is new among the reports, whose file is read back.

A file says its version as `prefect-tune/version`.
"""


def trials_as_arrow(experiment: Experiment) -> pa.Table:
    """Return one row per trial, in the order in which they were added.

    The columns: trial, status and step; `config/...`; the metrics of the last valid report; what the training took, its
    newest checkpoint, and why it ended. A metric with the name of another column becomes `metrics/...`.
    """
    import pyarrow as pa

    trials = list(experiment.trials.values())
    config = _spread((dict(leaves(each.config, "config/")) for each in trials), len(trials), ())
    metrics = _spread((dict(leaves(each.metrics)) for each in trials), len(trials), {*_FIRST, *_LAST, *config})

    def built(columns: _Columns) -> dict[str, pa.Array]:
        return {
            name: pa.array([value(experiment.key, each) for each in trials], kind)
            for name, (kind, value) in columns.items()
        }

    return pa.table({**built(_FIRST), **config, **metrics, **built(_LAST)})


def reports_as_arrow(curves: Iterable[tuple[str, Sequence[StepReport]]]) -> pa.Table:
    """Return one row per valid report: trial, step, training time up to it in seconds, and its metrics."""
    import pyarrow as pa

    rows = [(trial, report) for trial, curve in curves for report in curve]
    columns = {
        "trial": pa.array([trial for trial, _ in rows], "string"),
        "step": pa.array([report.step for _, report in rows], "int64"),
        "trained_seconds": pa.array([report.trained_seconds or None for _, report in rows], "float64"),
    }
    return pa.table({**columns, **_spread((dict(leaves(report.metrics)) for _, report in rows), len(rows), columns)})


def attempts_as_arrow(cost: ExperimentCost) -> pa.Table:
    """Return one row per attempt: its trial and number, when it began, its seconds by category, and what it used."""
    import pyarrow as pa

    uses = [each.use for each in cost.attempts]
    categories = [each for each in Category if each is not Category.IDLE]
    return pa.table(
        {
            "trial": pa.array([each.trial for each in cost.attempts], "string"),
            "attempt": pa.array([each.attempt for each in cost.attempts], "int64"),
            "began_at": pa.array([each.began_at for each in cost.attempts], pa.timestamp("ms", "UTC")),
            **{
                f"{name.key}_seconds": pa.array([each.seconds[name] for each in cost.attempts], "float64")
                for name in categories
            },
            **{name: pa.array([getattr(use, name, None) for use in uses], kind) for name, kind in _OF_A_USE.items()},
        }
    )


_OF_A_USE = {
    "cpu_seconds": "float64",
    "peak_memory_bytes": "int64",
    "mean_memory_bytes": "int64",
    "peak_gpu_memory_bytes": "int64",
    "mean_gpu_utilization": "float64",
}


def metric_columns(reports: pa.Table, metrics: Sequence[str]) -> Mapping[str, str]:
    """Return the column of each of `metrics` that a table of reports has."""
    columns = {name: f"metrics/{name}" if name in _OF_A_REPORT else name for name in metrics}
    return {name: column for name, column in columns.items() if column in reports.column_names}


def as_parquet(table: pa.Table, about: Mapping[str, str]) -> bytes:
    """Return `table` as a Parquet file; its schema metadata holds `about`, with keys prefixed `prefect-tune/`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    described = table.replace_schema_metadata({f"prefect-tune/{name}": value for name, value in about.items()})
    sink = pa.BufferOutputStream()
    pq.write_table(described, sink, compression="zstd")
    return bytes(sink.getvalue())


def from_parquet(data: Buffer, digest: str) -> pa.Table | None:
    """Return the reports in a Parquet file; None if it was made from a journal state with another digest.

    None too if its columns are of another version than this release's, or if it is damaged: the journal has the
    reports. Nothing in such a file is executed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(pa.py_buffer(data)))
    except (pa.ArrowException, OSError):  # pyarrow's error of a damaged page is an OSError
        return None
    about = table.schema.metadata or {}
    is_of_this_release = about.get(b"prefect-tune/version") == COLUMNS_VERSIONS["reports"].encode()
    return table if is_of_this_release and about.get(b"prefect-tune/digest") == digest.encode() else None


# ---------------------------------------------------------------------------------------------- the columns


def _newest_path(experiment: JournalKey, trial: Trial) -> str | None:
    key = newest_key(experiment.trial_key(trial.trial), trial)
    return key.folder if key else None


_Columns: TypeAlias = Mapping[str, tuple[str, Callable[[JournalKey, Trial], object]]]
"""The type of each column that every experiment has, and its value for an experiment's key and a trial."""
_FIRST: _Columns = {
    "trial": ("string", lambda _, trial: trial.trial),
    "status": ("string", lambda _, trial: str(trial.status)),
    "step": ("int64", lambda _, trial: trial.step),
}
_LAST: _Columns = {
    "trained_seconds": ("float64", lambda _, trial: trial.measured_seconds),
    "attempts": ("int64", lambda _, trial: trial.attempt),
    "wasted_steps": ("int64", lambda _, trial: trial.wasted_steps),
    "wasted_at_least": ("bool", lambda _, trial: trial.wasted_at_least),
    "checkpoints": ("int64", lambda _, trial: len(trial.checkpoints)),
    "checkpoint": ("string", _newest_path),
    "cause": ("string", lambda _, trial: trial.cause and str(trial.cause)),
    "reason": ("string", lambda _, trial: trial.reason),
}


def _spread(rows: Iterable[Mapping[str, object]], count: int, taken: Collection[str]) -> dict[str, pa.Array]:
    """Return a column for each name in any of the rows; null in rows without it."""
    found: dict[str, list[Any]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            column = found.get(name)
            if column is None:
                column = found[name] = [None] * count
            column[index] = value
    return {f"metrics/{name}" if name in taken else name: _inferred(column) for name, column in found.items()}


def _inferred(column: list[Any]) -> pa.Array:
    """Return a column of one type; lists, mixed types, and integers beyond 64 bits or a float's range, become JSON."""
    import pyarrow as pa

    kinds = {type(value) for value in column if value is not None}
    if kinds == {int, float} and all(value is None or is_finite(value) for value in column):
        column = [None if value is None else float(value) for value in column]
    elif (
        len(kinds) > 1
        or kinds & {list, tuple}
        or (kinds == {int} and not all(value is None or -_INT64 <= value < _INT64 for value in column))
    ):
        column = [None if value is None else json.dumps(value) for value in column]
    return pa.array(column, pa.float64() if not kinds else None)


# Read the reports from a target.


def read_reports(store: ObjectStore, experiment: Experiment) -> pa.Table:
    """Return the valid reports, one per row: the published file of exactly this state, or else from the journal."""
    path = results_path(experiment.key, "reports", experiment.number)
    try:
        found = from_parquet(read_document(store, path, JournalCorrupt), experiment.digest)
    except (ObjectNotFound, JournalCorrupt):  # a file that is too large is not one of ours
        found = None
    if found is not None:
        return found
    return curves_as_arrow(experiment, read_curves(store, experiment))


def curves_as_arrow(experiment: Experiment, curves: Curves) -> pa.Table:
    """Return the valid reports of all trials, one per row."""
    return reports_as_arrow((trial, curves.of(trial)) for trial in experiment.trials)


def read_curves(store: ObjectStore, experiment: Experiment) -> Curves:
    """Return the curves of all trials up to the experiment's last entry."""
    return Curves(entry for entry, _ in each_entry(store, experiment.key) if entry.number <= experiment.number)
