"""The command `ls`: the experiments on a target."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from rich.table import Table

from prefect_tune.cli.shared.app import AsJson, Target, command
from prefect_tune.cli.shared.nearby_targets import experiments_nearby
from prefect_tune.cli.shared.open_target import existing_place, looked_at, written_at
from prefect_tune.core.errors import JournalCorrupt, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import best_of, counted, kind_of, named, objective_in
from prefect_tune.core.journal.journal import load
from prefect_tune.core.messages.live_status import view_of
from prefect_tune.core.models import metric_in
from prefect_tune.core.storage.experiment_listing import names_among
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.terminal.data_age import UNKNOWN, Freshness, freshness_of
from prefect_tune.terminal.formatting import (
    borderless_table,
    format_counts,
    format_value,
    plain_cells,
    print_parts,
)


@command
def list_experiments(target: Target, as_json: AsJson = False) -> None:
    """List the experiments on TARGET: their trials, the best trial, and the time and age of what is shown."""
    with looked_at(target) as store:
        paths = [each.path for each in store.list("")]
        rows = list(_experiments(store, names_among(paths)))
        nearby = "" if rows or as_json else experiments_nearby(existing_place(target), paths)
    if as_json:
        print(json.dumps([{**asdict(row), **fresh.fields()} for row, fresh in rows], indent=2))
    elif rows:
        print_parts(_experiments_table(rows))
        _show_stale(rows)
    else:
        print(f"{target}: no experiments{nearby}")


@dataclass(frozen=True)
class _Listed:
    """A row of the output for one experiment."""

    experiment: str
    kind: str
    trials: Mapping[str, int] = field(default_factory=dict)
    best: Mapping[str, object] | None = None
    best_trial: str | None = None
    best_status: str | None = None
    written_at: str = ""
    """The time of the last journal entry."""
    damage: str | None = None


def _experiments(store: ObjectStore, names: Sequence[str]) -> Iterator[tuple[_Listed, Freshness]]:
    """Yield the row of each experiment, and how old it is."""
    with transfer_pool() as transfers:
        for name in names:
            try:
                yield _listed(store, load(store, name, side_by_side=transfers))
            except (JournalCorrupt, UnknownVersion) as error:
                yield _Listed(name, "damaged", damage=str(error)), UNKNOWN


def _listed(store: ObjectStore, loaded: Experiment) -> tuple[_Listed, Freshness]:
    last = written_at(store, loaded)
    view = view_of(store, loaded, last)
    state, fresh = view.experiment, freshness_of(view, datetime.now(UTC))
    best, objective = best_of(state), objective_in(state.settings)
    metrics = objective.metrics if objective else ()
    row = _Listed(
        state.name,
        kind_of(state),
        trials=counted(state),
        best={name: metric_in(best.metrics, name) for name in metrics} if best else None,
        best_trial=best.trial if best else None,
        best_status=str(best.status) if best else None,
        written_at=last,
    )
    return row, fresh


def _show_stale(rows: Sequence[tuple[_Listed, Freshness]]) -> None:
    stale = [row.experiment for row, fresh in rows if fresh.is_stale]
    if stale:
        print_parts("", f"no updates for a while; the process has probably ended: {', '.join(stale)}")


def _experiments_table(rows: Sequence[tuple[_Listed, Freshness]]) -> Table:
    table = borderless_table("experiment", "kind", "trials", "best by last report", "as of (UTC)")
    for row, fresh in rows:
        best = f"{format_value(row.best)} ({named(str(row.best_trial), str(row.best_status))})" if row.best else ""
        trials = row.damage or format_counts(row.trials)
        cells = (row.experiment, row.kind, trials, best, fresh.short())
        table.add_row(*plain_cells(cells), style="red" if row.damage else "dim" if fresh.is_stale else "")
    return table
