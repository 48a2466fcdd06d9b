"""The commands `checkpoints`, `verify` and `export`, for a training and for the trials of a search."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_tune.cli.app import BYTES, AsJson, ExperimentName, Target, TrialName, app
from prefect_tune.cli.open_target import chosen_trials, opened
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, InvalidInput
from prefect_tune.core.experiment.summary import best_of, is_search
from prefect_tune.terminal.formatting import columns, plain, said, said_time, shown

if TYPE_CHECKING:
    from rich.table import Table

    from prefect_tune.core.experiment.experiment import Experiment
    from prefect_tune.core.experiment.trial_transitions import Trial
    from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
    from prefect_tune.core.storage.object_store import ObjectStore

__all__: list[str] = []


@app.command(rich_help_panel=BYTES)
def checkpoints(target: Target, experiment: ExperimentName, trial: TrialName = None, as_json: AsJson = False) -> None:
    """List an experiment's checkpoints, or those of one of its trials."""
    with opened(target, experiment) as (store, state):
        trials = _today(store, state, chosen_trials(state, trial))
        rows = [_row(store, *each) for known in trials for each in _keys(store, state, known)]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        shown(_table(rows, is_search(state)))


@app.command(rich_help_panel=BYTES)
def verify(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    release: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="Reinstate a quarantined checkpoint if it is whole.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every live checkpoint, and verify every byte."""
    found: list[_Verified] = []
    with opened(target, experiment) as (store, state):
        trials = _today(store, state, chosen_trials(state, trial))
        checks = _verified(store, state, trials) if release is None else _released(store, state, trials, release)
        for each in checks:
            found.append(each)
            if not as_json:
                named = f"{each.trial} {each}" if is_search(state) else str(each)
                print(named, file=sys.stderr if each.damage else sys.stdout)
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    elif not found:
        print(f"{experiment}: no checkpoint is live, so there is nothing to verify")
    if any(each.damage for each in found):
        raise typer.Exit(1)


@app.command(rich_help_panel=BYTES)
def export(
    target: Target,
    experiment: ExperimentName,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Which checkpoint. Default: the newest.", show_default=False)] = None,
    trial: Annotated[str | None, typer.Option(help="Trial. Default: the best one.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint to DIRECTORY, which must be new or empty: its files, as the trainable saved them."""
    from prefect_tune.blocks import resolve_target

    with opened(target, experiment) as (store, state):
        (whose,) = _today(store, state, [_whose(state, trial)])
        key = _chosen(state, whose, step)
    resolve_target(target).checkpoint(key).to_directory(directory)
    if as_json:
        print(json.dumps({"trial": key.trial.trial, "step": key.step, "directory": str(directory)}, indent=2))
        return
    named = f"{whose.trial}{' (errored)' * (whose.status == 'errored')} " if is_search(state) else ""
    print(f"{named}step {key.step}: in {directory}")


# ------------------------------------------------------------------------------------------------- selection


def _whose(state: Experiment, trial: str | None) -> Trial:
    trials = chosen_trials(state, trial)
    best = best_of(state) if trial is None and len(trials) > 1 else next(iter(trials), None)
    if best is None:
        raise InvalidInput(
            f"experiment {state.name!r}: its {len(trials)} trials have no best one; name a trial: --trial"
        )
    return best


def _today(store: ObjectStore, state: Experiment, trials: Sequence[Trial]) -> list[Trial]:
    """Read each trial's own journal: the experiment's journal may be minutes behind while a search runs."""
    from prefect_tune.core.journal.trial_journal import trial_today
    from prefect_tune.stores.local.staging import transfer_pool

    with transfer_pool() as transfers:
        return list(transfers(lambda known: trial_today(store, state.name, known, side_by_side=map), trials))


def _folder(state: Experiment, trial: Trial) -> TrialKey:
    from prefect_tune.core.storage.layout import TrialKey

    return TrialKey(experiment=state.name, trial=trial.trial)


def _live(state: Experiment, trial: Trial) -> list[CheckpointKey]:
    from prefect_tune.core.experiment.trial_transitions import live_keys

    return live_keys(_folder(state, trial), trial)


def _chosen(state: Experiment, trial: Trial, step: int | None) -> CheckpointKey:
    live = _live(state, trial)
    fitting = [key for key in live if step in (None, key.step)]
    if not fitting:
        steps = ", ".join(str(key.step) for key in live) or "none"
        wanted = "" if step is None else f" of step {step}"
        whose = f"experiment {state.name!r}" + (f", trial {trial.trial!r}" if is_search(state) else "")
        errored = ", which has errored" * (trial.status == "errored")
        raise CheckpointNotFound(f"{whose}{errored}: there is no checkpoint{wanted}; there are: {steps}")
    return fitting[-1]


def _keys(store: ObjectStore, state: Experiment, trial: Trial) -> list[tuple[CheckpointKey, str]]:
    """Return every checkpoint with "live" or "quarantined", oldest first; quarantined ones are listed on the target."""
    from prefect_tune.core.storage.layout import CheckpointKey

    live = [(key, "live") for key in _live(state, trial)]
    if not trial.quarantined:
        return live
    folder = _folder(state, trial)
    listed = (CheckpointKey.from_manifest_path(folder, each.path) for each in store.list(folder.checkpoints))
    aside = [(key, "quarantined") for key in listed if key and key.sequence in trial.quarantined]
    return sorted([*live, *aside], key=lambda each: each[0].sequence)


# -------------------------------------------------------------------------------------------------- output


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
    from prefect_tune.core.recovery.restore import read_manifest

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
    from prefect_tune.core.recovery.stale_reads import is_live_now

    if standing != "live":
        return standing
    return "damaged" if is_live_now(store, key, side_by_side=map) else "retired"


def _table(rows: Sequence[_Row], of_search: bool) -> Table:
    from prefect_tune.core.models import shown_size

    whose = ("trial",) if of_search else ()
    table = columns(*whose, "step", "when", "size", "metrics", "standing")
    for row in rows:
        size = "" if row.size_bytes is None else shown_size(row.size_bytes)
        cells = (str(row.step), said_time(row.created_at or ""), size, said(row.metrics), row.standing)
        of = (row.trial,) if of_search else ()
        table.add_row(*plain((*of, *cells)), style="" if row.standing == "live" else "red")
    return table


@dataclass(frozen=True)
class _Verified:
    """The result of verifying one checkpoint."""

    trial: str
    step: int
    size_bytes: int = 0
    file_count: int = 0
    damage: str | None = None

    def __str__(self) -> str:
        from prefect_tune.core.models import plural, shown_size

        if self.damage:
            return f"step {self.step}: DAMAGED: {self.damage}"
        return f"step {self.step}: {shown_size(self.size_bytes)} in {plural(self.file_count, 'file', 'files')}, whole"


def _verified(store: ObjectStore, state: Experiment, trials: Sequence[Trial]) -> Iterator[_Verified]:
    from prefect_tune.core.operations.scrub import inspect_one
    from prefect_tune.stores.local.staging import transfer_pool

    with transfer_pool() as transfers:
        for key in (key for trial in trials for key in _live(state, trial)):
            for each in inspect_one(store, key, side_by_side=transfers):
                yield _Verified(key.trial.trial, key.step, each.size_bytes, each.file_count, each.damage)


def _released(store: ObjectStore, state: Experiment, trials: Sequence[Trial], step: int) -> Iterator[_Verified]:
    """Verify the quarantined checkpoint of `step`, and reinstate it only if it is whole."""
    from prefect_tune.core.experiment.trial_transitions import is_aside
    from prefect_tune.core.operations.quarantine import reinstate
    from prefect_tune.core.operations.scrub import read_one
    from prefect_tune.core.recovery.stale_reads import current_trial
    from prefect_tune.stores.local.staging import transfer_pool
    from prefect_tune.supervisor.run_identity import new_write_id

    key = _aside(state, trials, step)
    with transfer_pool() as transfers:
        found = read_one(store, key, side_by_side=transfers)
        if found.damage is None:
            is_there = bool(reinstate(store, key.trial, [key], new_write_id(), side_by_side=transfers))
        else:
            is_there = is_aside(current_trial(store, key.trial, side_by_side=transfers), key)
        if not is_there:
            raise CheckpointNotFound(f"{key.folder}: the trial retired it meanwhile, so it cannot be released")
    yield _Verified(key.trial.trial, step, found.size_bytes, found.file_count, found.damage)


def _aside(state: Experiment, trials: Sequence[Trial], step: int) -> CheckpointKey:
    found = [
        _folder(state, trial).checkpoint_key(each.checkpoint)
        for trial in trials
        for each in trial.aside
        if each.checkpoint.step == step
    ]
    if not found:
        steps = {each.checkpoint.step for trial in trials for each in trial.aside}
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointNotFound(f"experiment {state.name!r}: step {step} is not quarantined; there are: {there}")
    if len({key.trial for key in found}) > 1:
        names = ", ".join(key.trial.trial for key in found)
        raise InvalidInput(f"experiment {state.name!r}: trials {names} have step {step} quarantined; name one: --trial")
    return found[-1]
