"""The command `checkpoints`: the checkpoints of a training, or of the trials of a search."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table

from prefect_tune.cli.shared.app import AsJson, ExperimentName, Target, TrialName, command
from prefect_tune.cli.shared.open_target import chosen_trials, live_checkpoints, opened, trial_key, trials_today
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import is_search
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.models import shown_size
from prefect_tune.core.recovery.restore import read_manifest
from prefect_tune.core.recovery.stale_reads import is_live_now
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.terminal.formatting import borderless_table, format_time, format_value, plain_cells, print_parts


@command
def checkpoints(target: Target, experiment: ExperimentName, trial: TrialName = None, as_json: AsJson = False) -> None:
    """List an experiment's checkpoints, or those of one of its trials."""
    with opened(target, experiment) as (store, state):
        trials = trials_today(store, state, chosen_trials(state, trial))
        rows = [_row(store, *each) for known in trials for each in _keys(store, state, known)]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_parts(_table(rows, is_search(state)))


def _keys(store: ObjectStore, state: Experiment, trial: Trial) -> list[tuple[CheckpointKey, str]]:
    """Return every checkpoint with "live" or "quarantined", oldest first; quarantined ones are listed on the target."""
    live = [(key, "live") for key in live_checkpoints(state, trial)]
    if not trial.quarantined:
        return live
    folder = trial_key(state, trial)
    listed = (CheckpointKey.from_manifest_path(folder, each.path) for each in store.list(folder.checkpoints))
    aside = [(key, "quarantined") for key in listed if key and key.sequence in trial.quarantined]
    return sorted([*live, *aside], key=lambda each: each[0].sequence)


@dataclass(frozen=True)
class _Row:
    """A row of the output for one checkpoint."""

    trial: str
    step: int
    standing: str
    created_at: str | None = None
    size_bytes: int | None = None
    file_count: int | None = None
    attempt: int | None = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    path: str = ""


def _row(store: ObjectStore, key: CheckpointKey, standing: str) -> _Row:
    trial = key.trial.trial
    try:
        manifest = read_manifest(store, key)
    except (CheckpointCorrupt, CheckpointNotFound):
        return _Row(trial, key.step, _standing_of_unreadable(store, key, standing), path=key.folder)
    return _Row(
        trial,
        key.step,
        standing,
        created_at=manifest.about.created_at,
        size_bytes=manifest.size_bytes,
        file_count=len(manifest.files),
        attempt=manifest.about.attempt,
        metrics=manifest.about.metrics,
        path=key.folder,
    )


def _standing_of_unreadable(store: ObjectStore, key: CheckpointKey, standing: str) -> str:
    """Return "damaged", or "retired" if a running trial retired it after the journal was read."""
    if standing != "live":
        return standing
    return "damaged" if is_live_now(store, key, side_by_side=map) else "retired"


def _table(rows: Sequence[_Row], of_search: bool) -> Table:
    trial_column = ("trial",) if of_search else ()
    table = borderless_table(*trial_column, "step", "when", "size", "metrics", "standing")
    for row in rows:
        size = "" if row.size_bytes is None else shown_size(row.size_bytes)
        cells = (str(row.step), format_time(row.created_at or ""), size, format_value(row.metrics), row.standing)
        of = (row.trial,) if of_search else ()
        table.add_row(*plain_cells((*of, *cells)), style="" if row.standing == "live" else "red")
    return table
