"""Paths of an experiment's result files: Parquet, one for each kind of rows, named by the journal's last entry.

They are derived from the journal, and can be made again. So the file with the highest number counts, and those
with lower numbers are deleted.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from prefect_tune.core.models import valid_name
from prefect_tune.core.storage.layout import number_in, numbered
from prefect_tune.core.storage.object_store import ObjectStore

Rows: TypeAlias = Literal["trials", "reports"]


def results_path(experiment: str, rows: Rows, number: int) -> str:
    """Return the path of the results after entry `number` of the journal."""
    return numbered(_folder(experiment, rows), number, "parquet")


def delete_older_results(store: ObjectStore, experiment: str, rows: Rows, number: int) -> None:
    """Delete result files with a number below `number`; other files in the folder stay."""
    folder = _folder(experiment, rows)
    listed = [each.path for each in store.list(folder)]
    older = [path for path in listed if 0 < (number_in(folder, path, "parquet") or 0) < number]
    if older:
        store.delete(older)


def _folder(experiment: str, rows: Rows) -> str:
    return f"{valid_name(experiment)}/results/{rows}"
