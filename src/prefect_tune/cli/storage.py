"""The commands of the panel *Checkpoints and storage*."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.console import Console

from prefect_tune.cli.app import (
    AsJson,
    ExperimentName,
    Target,
    TrialName,
    asks,
    chosen_trials,
    command,
    existing_place,
    opened,
    short_errors,
)
from prefect_tune.clock import new_write_id
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, DamageFound, InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import best_of, is_search
from prefect_tune.core.experiment.trial_transitions import Status, Trial, is_quarantined, live_keys
from prefect_tune.core.operations.scrub import Inspected, inspect_one, read_one, reinstate
from prefect_tune.core.operations.trial_gc import Garbage, collect_experiment
from prefect_tune.core.restore import current_trial, is_live_now, read_manifest
from prefect_tune.core.shown_text import plural, shown_size, visible
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.terminal.formatting import (
    borderless_table,
    format_steps,
    format_time,
    format_value,
    plain_cells,
    print_parts,
)

if TYPE_CHECKING:
    from prefect_tune.maintenance import MaintenanceReport


@command
def checkpoints(target: Target, experiment: ExperimentName, trial: TrialName = None, as_json: AsJson = False) -> None:
    """List an experiment's checkpoints, or those of one of its trials."""
    with opened(target, experiment) as (store, state):
        rows = [row for known in chosen_trials(state, trial) for row in _rows_of(store, state, known)]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    names = ["trial"] if is_search(state) else []
    table = borderless_table(*names, "step", "when", "size", "metrics", "status")
    for row in rows:
        size = "" if row.size_bytes is None else shown_size(row.size_bytes)
        cells = (str(row.step), format_time(row.created_at or ""), size, format_value(row.metrics), row.status)
        of = (row.trial,) if names else ()
        table.add_row(*plain_cells((*of, *cells)), style="" if row.status == "live" else "red")
    print_parts(table)


@dataclass(frozen=True)
class _Row:
    """A row of the output for one checkpoint."""

    trial: str
    step: int
    status: str
    created_at: str | None = None
    size_bytes: int | None = None
    file_count: int | None = None
    attempt: int | None = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    path: str = ""


def _rows_of(store: ObjectStore, state: Experiment, trial: Trial) -> Iterator[_Row]:
    """Yield the row of every checkpoint of a trial, live or quarantined, oldest first.

    Quarantined saves that were never committed are found on the target.
    """
    folder = state.trial_key(trial.trial)
    keys = {ref.sequence: (folder.checkpoint_key(ref), "live") for ref in trial.checkpoints}
    for ref in (quarantined.checkpoint for quarantined in trial.quarantined_checkpoints):
        keys[ref.sequence] = folder.checkpoint_key(ref), "quarantined"
    if missing := set(trial.quarantined) - set(keys):
        listed = (CheckpointKey.from_manifest_path(folder, each.path) for each in store.list(folder.checkpoints))
        keys |= {key.sequence: (key, "quarantined") for key in listed if key and key.sequence in missing}
    for _, (key, status) in sorted(keys.items()):
        try:
            manifest = read_manifest(store, key)
        except (CheckpointCorrupt, CheckpointNotFound):
            found = status
            if status == "live":  # a running trial may have retired it after the journal was read
                found = "damaged" if is_live_now(store, key) else "retired"
            yield _Row(trial.trial, key.step, found, path=key.folder)
            continue
        yield _Row(
            trial.trial,
            key.step,
            status,
            created_at=manifest.about.created_at,
            size_bytes=manifest.size_bytes,
            file_count=len(manifest.files),
            attempt=manifest.about.attempt,
            metrics=manifest.about.metrics,
            path=key.folder,
        )


@command
def verify(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    release: Annotated[
        int | None, asks("--release", "STEP", "Reinstate a quarantined checkpoint if it is whole.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every live checkpoint, and verify every byte."""
    found: list[tuple[str, Inspected]] = []
    with opened(target, experiment) as (store, state):
        trials = chosen_trials(state, trial)
        checks = _verified(store, state, trials) if release is None else _released(store, state, trials, release)
        for name, of_trial in groupby(checks, key=lambda check: check[0]):
            prefix, verified = f"{name} " if is_search(state) else "", list[Inspected]()
            with Console(stderr=True).status(f"{name}: reading") as status:
                for _, check in of_trial:
                    verified.append(check)
                    status.update(f"{name}: step {check.key.step} is read")
                    if check.damage and not as_json:  # at once: an error of the target may end the checks
                        print(f"{prefix}step {check.key.step}: DAMAGED: {visible(check.damage)}", file=sys.stderr)
            found += [(name, check) for check in verified]
            if not as_json and (whole := [check for check in verified if not check.damage]):
                steps = f"{'step' if len(whole) == 1 else 'steps'} {format_steps([each.key.step for each in whole])}"
                size = shown_size(sum(each.size_bytes for each in whole))
                files = plural(sum(each.file_count for each in whole), "file", "files")
                print(f"{prefix}{steps}: {size} in {files}, whole")
    if as_json:
        rows = [{"trial": name, "step": each.key.step, **asdict(each)} for name, each in found]
        print(json.dumps([{name: row[name] for name in row if name != "key"} for row in rows], indent=2))
    elif not found:
        print(f"{experiment}: no checkpoint is live, so there is nothing to verify")
    if any(each.damage for _, each in found):
        raise typer.Exit(1)


def _verified(store: ObjectStore, state: Experiment, trials: Sequence[Trial]) -> Iterator[tuple[str, Inspected]]:
    for trial in trials:
        for key in live_keys(state.trial_key(trial.trial), trial):
            yield from ((trial.trial, inspected) for inspected in inspect_one(store, key))


def _released(
    store: ObjectStore, state: Experiment, trials: Sequence[Trial], step: int
) -> Iterator[tuple[str, Inspected]]:
    """Verify the quarantined checkpoint of `step`, and reinstate it only if it is whole."""
    keys = {
        trial.trial: state.trial_key(trial.trial).checkpoint_key(each.checkpoint)
        for trial in trials
        for each in trial.quarantined_checkpoints
        if each.checkpoint.step == step
    }
    if not keys:
        steps = {each.checkpoint.step for trial in trials for each in trial.quarantined_checkpoints}
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointNotFound(f"experiment {state.name!r}: step {step} is not quarantined; there are: {there}")
    if len(set(keys.values())) > 1:
        names = ", ".join(keys)
        raise InvalidInput(f"experiment {state.name!r}: trials {names} have step {step} quarantined; name one: --trial")
    trial_name, key = next(iter(keys.items()))
    found = read_one(store, key)
    if found.damage is None:
        is_there = bool(reinstate(store, state.key, [key], new_write_id()))
    else:
        current = current_trial(store, state.trial_key(trial_name))
        is_there = is_quarantined(current, key)
    if not is_there:
        raise CheckpointNotFound(f"{key.folder}: the trial retired it meanwhile, so it cannot be released")
    yield trial_name, found


@command
def export(
    target: Target,
    experiment: ExperimentName,
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="New, empty, or with this checkpoint.", show_default=False)
    ],
    step: Annotated[int | None, asks("--step", "STEP", "Step of the checkpoint. Default: the newest.")] = None,
    trial: Annotated[str | None, asks("--trial", "TRIAL", "Trial. Default: the best one by its last report.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Only the files of the checkpoint.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint to DIRECTORY: its files, as the trainable saved them, its configuration and its metrics.

    The latter are in config.json and metrics.json; with a file of that name in the checkpoint, in
    trial-config.json or trial-metrics.json. --plain leaves them out.

    DIRECTORY must be new or empty, or hold this export and nothing else, as after an interrupted one.
    Without --trial it is the trial whose last report is the best, as in `show`.
    The best model that events and alerts announce may be another one:
    pass the trial and step of the event as --trial and --step.
    """
    from prefect_tune.blocks import resolve_existing
    from prefect_tune.results import export_checkpoint

    with opened(target, experiment) as (_, state):
        trials = chosen_trials(state, trial)
        chosen = best_of(state) if trial is None and len(trials) > 1 else next(iter(trials), None)
        if chosen is None:
            raise InvalidInput(
                f"experiment {state.name!r}: its {len(trials)} trials have no best one; name a trial: --trial"
            )
        live = live_keys(state.trial_key(chosen.trial), chosen)
        key = next((key for key in reversed(live) if step in (None, key.step)), None)
        if key is None:
            steps = ", ".join(str(each.step) for each in live) or "none"
            wanted = "" if step is None else f" of step {step}"
            searched = f"experiment {state.name!r}" + (f", trial {chosen.trial!r}" if is_search(state) else "")
            errored = ", which has errored" if chosen.status is Status.ERRORED else ""
            raise CheckpointNotFound(f"{searched}{errored}: there is no checkpoint{wanted}; there are: {steps}")
    names = export_checkpoint(resolve_existing(target), state, chosen, key, directory, plain=plain)
    for usual, name in names.items():
        if name != usual:
            print(f"{usual} is the checkpoint's own file; that of the trial is {name}", file=sys.stderr)
    if as_json:
        print(json.dumps({"trial": key.trial.trial, "step": key.step, "directory": str(directory)}, indent=2))
        return
    named = f"{chosen.trial}{' (errored)' if chosen.status is Status.ERRORED else ''} " if is_search(state) else ""
    print(f"{named}step {key.step} is in {directory}")


@command
def gc(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete. Default: only list.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the objects of an experiment that are not needed any more; with --delete, delete them.

    Retired checkpoints, blobs of interrupted saves, answers to attempts that have ended, and
    what is left of deleted experiments of this name.

    Objects that a checkpoint or a clone refers to are kept, and so are those that a
    running save may use: it is safe beside a running search.
    Quarantined checkpoints are kept until the trial retires them: they can be released.
    """
    with opened(target, experiment) as (store, state):
        only = None if trial is None else [each.trial for each in chosen_trials(state, trial)]
        garbage = collect_experiment(store, state, new_write_id(), only=only, dry_run=not delete)
    if as_json:
        left = {"object_count": len(garbage.dead), "size_bytes": sum(each.size_bytes for each in garbage.dead)}
        trials = [asdict(each) for each in garbage.trials]
        print(json.dumps({"deleted": delete, "trials": trials, "deleted_experiments": left}, indent=2))
    else:
        print_garbage(garbage, deleted=delete)
    if any(each.damage for each in garbage.trials):
        raise typer.Exit(1)


def print_garbage(garbage: Garbage, *, deleted: bool) -> None:
    """Print what a collection found, by trial, and the total."""
    table = borderless_table("trial", "checkpoints", "objects", "size", "")
    for each in garbage.trials:
        note = each.damage or each.kept or ""
        if note or each.object_count:
            counts = (format_steps(each.checkpoints), str(each.object_count), shown_size(each.orphan_bytes))
            table.add_row(*plain_cells((each.trial, *counts, note)), style="red" if each.damage else "")
    if table.rows:
        print_parts(table, "")
    if garbage.dead:
        print_parts(f"{plural(len(garbage.dead), 'object', 'objects')} of deleted experiments of this name", "")
    total = f"{plural(garbage.object_count, 'object', 'objects')}, {shown_size(garbage.size_bytes)}"
    if not garbage.object_count:
        print_parts(f"nothing to collect in {plural(len(garbage.trials), 'trial', 'trials')}")
    else:
        print_parts(f"deleted: {total}" if deleted else f"{total}; to delete them: --delete")


_DAMAGE = 4


@command
def maintain(
    target: Target,
    experiments: Annotated[
        list[str] | None,
        typer.Argument(metavar="EXPERIMENT", help="Names or patterns. Default: all.", show_default=False),
    ] = None,
    verify: Annotated[Literal["sample", "all", "none"], typer.Option(help="Which checkpoints to verify.")] = "sample",
    share: Annotated[
        str, typer.Option(metavar="1/N", help="The sample: another part each day, all in N days.")
    ] = "1/7",
    keep_last: Annotated[
        int | None, asks("--keep-last", "N", "Prune finished experiments to the last N.", at_least=1)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report only; change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify checkpoints, quarantine damaged ones, delete unneeded objects; safe beside running experiments.

    Exits with 4 if it found damage.
    """
    from prefect_tune.core.experiment.retention import Retention

    existing_place(target)
    with short_errors("stopped; run it again to maintain the rest"):
        from prefect_tune.flows.maintain import maintain as flow

        retention = None if keep_last is None else Retention(last=keep_last)
        alarm = ""
        try:
            report = flow(
                target, experiments=experiments, verify=verify, share=share, retention=retention, dry_run=dry_run
            )
        except DamageFound as found:
            alarm, report = str(found), cast("MaintenanceReport", found.report)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print(report.summary)
    if alarm:
        print(f"prefect-tune: {alarm}", file=sys.stderr)
        raise typer.Exit(_DAMAGE)


@command
def delete(
    target: Target,
    experiment: ExperimentName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask. Needed where there is no terminal.")] = False,
    even_if_running: Annotated[
        bool, typer.Option("--even-if-running", help="Delete it although a run may own it; that run then fails.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete an experiment for good: its journal, all checkpoints and results.

    A marker of some 300 bytes stays; the name can be used again.

    It asks first, and says what would be deleted. It refuses while a run owns it.
    """
    from prefect_tune.maintenance import delete_experiment

    if not yes and not sys.stdin.isatty():
        raise InvalidInput(
            f"delete {experiment}: there is no terminal to confirm it on: add --yes; nothing was deleted"
        )
    existing_place(target)
    contents = delete_experiment(experiment, target=target, even_if_running=even_if_running, dry_run=True)
    if not yes:
        question = f"Delete experiment {experiment!r} at {target} for good: {contents}?"
        if not typer.confirm(question, err=as_json):
            print("nothing was deleted", file=sys.stderr)
            raise typer.Exit(1)
    with Console(stderr=True).status(f"{experiment}: deleting {contents.object_count:,} objects"):
        delete_experiment(experiment, target=target, even_if_running=even_if_running)
    print(json.dumps(asdict(contents), indent=2) if as_json else f"deleted: {experiment}: {contents}")
