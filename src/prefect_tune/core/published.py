"""Where the results of an experiment lie: Parquet files, one for each kind of rows, named by the journal's last entry.

They are derived: whoever has the journal can make them again. So the one with the highest number counts,
and those below it are deleted.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from prefect_tune.core.layout import number_in, numbered
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.values import valid_name

__all__ = ["Rows", "delete_older_results", "results_path"]

Rows: TypeAlias = Literal["trials", "reports"]


def results_path(experiment: str, rows: Rows, number: int) -> str:
    """Return the path of the results as they are after entry `number` of the journal."""
    return numbered(_folder(experiment, rows), number, "parquet")


def delete_older_results(store: ObjectStore, experiment: str, rows: Rows, number: int) -> None:
    """Delete the results as they were before entry `number`; what lies there else stays."""
    folder = _folder(experiment, rows)
    listed = [each.path for each in store.list(folder)]
    older = [path for path in listed if 0 < (number_in(folder, path, "parquet") or 0) < number]
    if older:
        store.delete(older)


def _folder(experiment: str, rows: Rows) -> str:
    return f"{valid_name(experiment)}/results/{rows}"
