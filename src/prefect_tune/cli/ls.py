"""The commands `ls` and `show`: the status of experiments and trials."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from prefect_tune.cli.app import LOOK, AsJson, ExperimentName, Target, TrialName, app
from prefect_tune.cli.open_target import chosen_trials, looked_at, opened, written_at
from prefect_tune.core.errors import JournalCorrupt, UnknownVersion
from prefect_tune.core.experiment.summary import (
    best_first,
    best_of,
    counted,
    is_search,
    named,
    objective_in,
    shown_settings,
)
from prefect_tune.core.models import first_line, metric_in
from prefect_tune.terminal.formatting import (
    columns,
    facts_table,
    plain,
    said,
    said_counts,
    said_time,
    shown,
)
from prefect_tune.terminal.trials_table import trials_table

if TYPE_CHECKING:
    from rich.table import Table

    from prefect_tune.core.experiment.experiment import Experiment
    from prefect_tune.core.experiment.trial_transitions import Trial
    from prefect_tune.core.storage.object_store import ObjectStore

__all__ = ["show_search"]

_TRIALS_SHOWN = 50
_ERRORS_SHOWN = 5


@app.command("ls", rich_help_panel=LOOK)
def list_experiments(target: Target, as_json: AsJson = False) -> None:
    """List the experiments on TARGET: their trials, the best trial, and the time of the last journal entry."""
    with looked_at(target) as store:
        rows = list(_experiments(store))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif rows:
        shown(_experiments_table(rows))
    else:
        print(f"{target}: no experiments")


@app.command(rich_help_panel=LOOK)
def show(target: Target, experiment: ExperimentName, trial: TrialName = None, as_json: AsJson = False) -> None:
    """Show the status of an experiment: its trials, the best one first; or all details of one trial."""
    with opened(target, experiment) as (_, state):
        pass
    if is_search(state) and trial is None:
        show_search(state, as_json=as_json)
        return
    about = {"experiment": state.name, "epoch": state.epoch, "owner": str(state.owner or "")}
    found = [about | _facts(each) for each in chosen_trials(state, trial)] or [about]
    if as_json:
        print(json.dumps(found[0], indent=2))
    else:
        shown(facts_table(found[0]))


# ------------------------------------------------------------------------------------------ many experiments


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
    damage: str | None = None


def _experiments(store: ObjectStore) -> Iterator[_Listed]:
    from prefect_tune.core.journal.journal import load
    from prefect_tune.core.storage.experiment_listing import experiment_names
    from prefect_tune.stores.local.staging import transfer_pool

    with transfer_pool() as transfers:
        for name in experiment_names(store):
            try:
                yield _listed(store, load(store, name, side_by_side=transfers))
            except (JournalCorrupt, UnknownVersion) as error:
                yield _Listed(name, "damaged", damage=str(error))


def _listed(store: ObjectStore, state: Experiment) -> _Listed:
    best, objective = best_of(state), objective_in(state.settings)
    metrics = objective.metrics if objective else ()
    return _Listed(
        state.name,
        "search" if is_search(state) else "training",
        trials=counted(state),
        best={name: metric_in(best.metrics, name) for name in metrics} if best else None,
        best_trial=best.trial if best else None,
        best_status=str(best.status) if best else None,
        written_at=written_at(store, state),
    )


def _experiments_table(rows: Sequence[_Listed]) -> Table:
    table = columns("experiment", "kind", "trials", "best", "written")
    for row in rows:
        best = f"{said(row.best)} ({named(str(row.best_trial), str(row.best_status))})" if row.best else ""
        trials = row.damage or said_counts(row.trials)
        cells = (row.experiment, row.kind, trials, best, said_time(row.written_at)[:16])
        table.add_row(*plain(cells), style="red" if row.damage else "")
    return table


# -------------------------------------------------------------------------------------------- one experiment


def show_search(state: Experiment, *, as_json: bool) -> None:
    """Print a search: its settings, and its trials, the best one first."""
    objective = objective_in(state.settings)
    trials = best_first(list(state.trials.values()), objective)
    about = {
        "experiment": state.name,
        "metric": list(objective.metrics) if objective else None,
        "mode": list(objective.modes) if objective else None,
        "trials_by_status": counted(state),
        "epoch": state.epoch,
        "owner": str(state.owner or ""),
    }
    if as_json:
        told = about | {"settings": shown_settings(state.settings), "trials": [_facts(each) for each in trials]}
        print(json.dumps(told, indent=2))
        return
    metrics = objective.metrics if objective else ()
    shown(facts_table(_head(state, about)), "", trials_table(trials[:_TRIALS_SHOWN], metrics))
    if len(trials) > _TRIALS_SHOWN:
        shown(f"and {len(trials) - _TRIALS_SHOWN} more; --json prints all")
    _show_errors(trials)


def _head(state: Experiment, about: Mapping[str, object]) -> Mapping[str, object]:
    """The lines above the table of trials."""
    objective = objective_in(state.settings)
    by = zip(objective.metrics, objective.modes, strict=True) if objective else ()
    return {
        "experiment": state.name,
        **({"by": ", ".join(f"{mode} {name}" for name, mode in by)} if objective else {}),
        "trials": said_counts(counted(state)),
        "owner": about["owner"],
    }


def _show_errors(trials: Sequence[Trial]) -> None:
    errored = [each for each in trials if each.status == "errored"]
    if errored:
        table = columns("errored", "because")
        for each in errored[:_ERRORS_SHOWN]:
            table.add_row(*plain((each.trial, first_line(each.reason))))
        shown("", table)
    if len(errored) > _ERRORS_SHOWN:
        shown(f"and {len(errored) - _ERRORS_SHOWN} more errored; --json prints all")


def _facts(trial: Trial) -> dict[str, object]:
    return {
        "trial": trial.trial,
        "status": str(trial.status),
        "reason": trial.reason,
        "step": trial.step,
        "metrics": dict(trial.metrics),
        "checkpoints": [each.step for each in trial.checkpoints],
        "quarantined": len(trial.quarantined),
        "attempts": trial.attempt,
        "wasted_steps": trial.wasted_steps,
        "trained_seconds": trial.trained_seconds,
        "config": dict(trial.config),
    }
