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
    command,
    open_store_and_load_experiment,
    option_without_default,
    printing_short_errors,
    resolve_existing_target,
    select_trials,
)
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.display_text import format_size, make_visible, pluralize
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, DamageFound, InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import find_best_trial, may_have_several_trials
from prefect_tune.core.experiment.trial_transitions import (
    Status,
    Trial,
    is_quarantined_checkpoint,
    list_live_checkpoint_keys,
)
from prefect_tune.core.operations.scrub import (
    InspectedCheckpoint,
    inspect_checkpoint,
    inspect_live_checkpoint,
    reinstate_in_journal,
)
from prefect_tune.core.operations.trial_gc import ExperimentGarbage, collect_experiment_garbage
from prefect_tune.core.restore import is_checkpoint_live, load_current_trial, read_manifest
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.terminal.formatting import (
    format_steps,
    format_time,
    format_value,
    make_borderless_table,
    print_to_stdout,
    to_plain_cells,
)

if TYPE_CHECKING:
    from prefect_tune.maintenance import MaintenanceReport


@command
def checkpoints(target: Target, experiment: ExperimentName, trial: TrialName = None, as_json: AsJson = False) -> None:
    """List the checkpoints of an experiment or of one of its trials."""
    with open_store_and_load_experiment(target, experiment) as (store, state):
        rows = [row for chosen in select_trials(state, trial) for row in _read_checkpoint_rows(store, state, chosen)]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    names = ["trial"] if may_have_several_trials(state) else []
    table = make_borderless_table(*names, "step", "when", "size", "metrics", "status")
    for row in rows:
        size = "" if row.size_bytes is None else format_size(row.size_bytes)
        cells = (str(row.step), format_time(row.created_at or ""), size, format_value(row.metrics), row.status)
        trial_cells = (row.trial,) if names else ()
        table.add_row(*to_plain_cells((*trial_cells, *cells)), style="" if row.status == "live" else "red")
    print_to_stdout(table)


@dataclass(frozen=True)
class _CheckpointRow:
    """The row of a checkpoint in the output of `checkpoints`."""

    trial: str
    step: int
    status: str
    created_at: str | None = None
    size_bytes: int | None = None
    file_count: int | None = None
    attempt: int | None = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    path: str = ""


def _read_checkpoint_rows(store: ObjectStore, state: Experiment, trial: Trial) -> Iterator[_CheckpointRow]:
    """Yield a row for each live or quarantined checkpoint of a trial, oldest first."""
    folder = state.trial_key(trial.id)
    keys = {ref.sequence: (folder.checkpoint_key(ref), "live") for ref in trial.checkpoints}
    for ref in (quarantined.checkpoint for quarantined in trial.quarantined_checkpoints):
        keys[ref.sequence] = folder.checkpoint_key(ref), "quarantined"
    if missing := set(trial.quarantined_sequences) - set(keys):  # the journal names only their sequences
        paths = (stored.path for stored in store.list(folder.checkpoints_folder))
        listed = (CheckpointKey.from_manifest_path(folder, path) for path in paths)
        keys |= {key.sequence: (key, "quarantined") for key in listed if key and key.sequence in missing}
    for _, (key, status) in sorted(keys.items()):
        try:
            manifest = read_manifest(store, key)
        except (CheckpointCorrupt, CheckpointNotFound):
            row_status = status
            if status == "live":  # a running trial may have retired the checkpoint since the journal was read
                row_status = "damaged" if is_checkpoint_live(store, key) else "retired"
            yield _CheckpointRow(trial.id, key.step, row_status, path=key.folder)
            continue
        yield _CheckpointRow(
            trial.id,
            key.step,
            status,
            created_at=manifest.metadata.created_at,
            size_bytes=manifest.size_bytes,
            file_count=len(manifest.files),
            attempt=manifest.metadata.attempt,
            metrics=manifest.metadata.metrics,
            path=key.folder,
        )


@command
def verify(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    release: Annotated[
        int | None, option_without_default("--release", "STEP", "Reinstate a quarantined checkpoint if it is intact.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every live checkpoint, and verify each byte."""
    results: list[tuple[str, InspectedCheckpoint]] = []
    with open_store_and_load_experiment(target, experiment) as (store, state):
        trials = select_trials(state, trial)
        if release is not None:
            checks = _verify_and_release(store, state, trials, release)
        else:
            live = (
                (item.id, key) for item in trials for key in list_live_checkpoint_keys(state.trial_key(item.id), item)
            )
            checks = ((name, check) for name, key in live for check in inspect_live_checkpoint(store, key))
        for name, of_trial in groupby(checks, key=lambda check: check[0]):
            prefix, trial_checks = f"{name} " if may_have_several_trials(state) else "", list[InspectedCheckpoint]()
            with Console(stderr=True).status(f"{name}: reading") as status:
                for _, check in of_trial:
                    trial_checks.append(check)
                    status.update(f"{name}: step {check.key.step} was read")
                    if check.damage and not as_json:  # print at once, since an error of the target can end the checks
                        print(f"{prefix}step {check.key.step}: DAMAGED: {make_visible(check.damage)}", file=sys.stderr)
            results += [(name, check) for check in trial_checks]
            if not as_json and (intact := [check for check in trial_checks if not check.damage]):
                steps = f"step{'s' * (len(intact) > 1)} {format_steps([check.key.step for check in intact])}"
                size = format_size(sum(check.size_bytes for check in intact))
                files = pluralize(sum(check.file_count for check in intact), "file", "files")
                print(f"{prefix}{steps}: {size} in {files}, intact")
    if as_json:
        rows = [{"trial": name, "step": check.key.step, **asdict(check)} for name, check in results]
        print(json.dumps([{name: row[name] for name in row if name != "key"} for row in rows], indent=2))
    elif not results:
        print(f"{experiment}: there is no live checkpoint to verify")
    if any(check.damage for _, check in results):
        raise typer.Exit(1)


def _verify_and_release(
    store: ObjectStore, state: Experiment, trials: Sequence[Trial], step: int
) -> Iterator[tuple[str, InspectedCheckpoint]]:
    """Verify the quarantined checkpoint of `step`, and reinstate it only if it is intact."""
    keys = {
        trial.id: state.trial_key(trial.id).checkpoint_key(quarantined.checkpoint)
        for trial in trials
        for quarantined in trial.quarantined_checkpoints
        if quarantined.checkpoint.step == step
    }
    if not keys:
        steps = {quarantined.checkpoint.step for trial in trials for quarantined in trial.quarantined_checkpoints}
        available = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointNotFound(f"experiment {state.name!r}: step {step} is not quarantined; quarantined: {available}")
    if len(set(keys.values())) > 1:
        names = ", ".join(keys)
        raise InvalidInput(f"experiment {state.name!r}: step {step} is quarantined in {names}; choose one with --trial")
    trial_name, key = next(iter(keys.items()))
    check = inspect_checkpoint(store, key)
    if check.damage is None:
        is_kept = bool(reinstate_in_journal(store, state.key, [key], new_write_stamp()))
    else:
        is_kept = is_quarantined_checkpoint(load_current_trial(store, state.trial_key(trial_name)), key)
    if not is_kept:
        raise CheckpointNotFound(f"{key.folder}: the trial has retired this checkpoint, so it cannot be released")
    yield trial_name, check


@command
def export(
    target: Target,
    experiment: ExperimentName,
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="New or empty, or has only this export.", show_default=False)
    ],
    step: Annotated[
        int | None, option_without_default("--step", "STEP", "Step of the checkpoint. Default: the newest.")
    ] = None,
    trial: Annotated[
        str | None, option_without_default("--trial", "TRIAL", "Trial. Default: the best one by its last report.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Write only the files of the checkpoint.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint to DIRECTORY: the files that the trainable saved, the trial's configuration and the metrics.

    The configuration and metrics are in config.json and metrics.json; --plain omits these files.
    If the checkpoint has such a file itself, the export's is named trial-config.json or trial-metrics.json.

    DIRECTORY must be new or empty, or hold only this export, for example after an interruption.
    Without --trial, the command exports the trial with the best last report, which `show` lists first.
    If an event or alert names another best model, pass its trial and step as --trial and --step.
    """
    from prefect_tune.blocks import resolve_existing
    from prefect_tune.results import export_checkpoint

    with open_store_and_load_experiment(target, experiment) as (_, state):
        trials = select_trials(state, trial)
        chosen = find_best_trial(state) if trial is None and len(trials) > 1 else next(iter(trials), None)
        if chosen is None:
            raise InvalidInput(
                f"experiment {state.name!r}: none of its {len(trials)} trials is the best; choose one with --trial"
            )
        live = list_live_checkpoint_keys(state.trial_key(chosen.id), chosen)
        key = next((key for key in reversed(live) if step in (None, key.step)), None)
        if key is None:
            steps = ", ".join(str(key.step) for key in live) or "none"
            of_step = "" if step is None else f" of step {step}"
            where = f"experiment {state.name!r}" + (f", trial {chosen.id!r}" if may_have_several_trials(state) else "")
            errored = ", which has errored" if chosen.status is Status.ERRORED else ""
            raise CheckpointNotFound(f"{where}{errored}: there is no checkpoint{of_step}; available steps: {steps}")
    names = export_checkpoint(resolve_existing(target), state, chosen, key, directory, plain=plain)
    for standard_name, name in names.items():
        if name != standard_name:
            print(f"the checkpoint has its own {standard_name}; the trial's is in {name}", file=sys.stderr)
    if as_json:
        print(json.dumps({"trial": key.trial.trial, "step": key.step, "directory": str(directory)}, indent=2))
        return
    label = (
        f"{chosen.id}{' (errored)' if chosen.status is Status.ERRORED else ''} "
        if may_have_several_trials(state)
        else ""
    )
    print(f"{label}step {key.step} is in {directory}")


@command
def gc(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete. Default: only list.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the objects of an experiment that are no longer needed; with --delete, delete them.

    These are retired checkpoints, blobs of interrupted saves, answers to ended attempts, and
    remaining objects of deleted experiments of this name.

    The command is safe while a search is running,
    because it keeps objects that a checkpoint, a clone or a running save may use.
    It keeps quarantined checkpoints until the trial retires them, since they can be released.
    """
    with open_store_and_load_experiment(target, experiment) as (store, state):
        trial_names = None if trial is None else [trial.id for trial in select_trials(state, trial)]
        garbage = collect_experiment_garbage(store, state, new_write_stamp(), only=trial_names, dry_run=not delete)
    if as_json:
        size_bytes = sum(listed.size_bytes for listed in garbage.earlier_objects)
        leftovers = {"object_count": len(garbage.earlier_objects), "size_bytes": size_bytes}
        trials = [asdict(trial) for trial in garbage.trials]
        print(json.dumps({"deleted": delete, "trials": trials, "deleted_experiments": leftovers}, indent=2))
    else:
        _print_garbage(garbage, deleted=delete)
    if any(trial.damage for trial in garbage.trials):
        raise typer.Exit(1)


def _print_garbage(garbage: ExperimentGarbage, *, deleted: bool) -> None:
    """Print the garbage of each trial, and the total."""
    table = make_borderless_table("trial", "checkpoints", "objects", "size", "")
    for row in garbage.trials:
        note = row.damage or row.kept_reason or ""
        if note or row.object_count:
            counts = (format_steps(row.checkpoints), str(row.object_count), format_size(row.orphan_bytes))
            table.add_row(*to_plain_cells((row.trial, *counts, note)), style="red" if row.damage else "")
    if table.rows:
        print_to_stdout(table, "")
    if garbage.earlier_objects:
        leftovers = pluralize(len(garbage.earlier_objects), "object", "objects")
        print_to_stdout(f"{leftovers} of deleted experiments of this name", "")
    total = f"{pluralize(garbage.object_count, 'object', 'objects')}, {format_size(garbage.size_bytes)}"
    if not garbage.object_count:
        print_to_stdout(f"nothing to collect in {pluralize(len(garbage.trials), 'trial', 'trials')}")
    else:
        print_to_stdout(f"deleted: {total}" if deleted else f"{total}; to delete them: --delete")


_EXIT_DAMAGED = 4


@command
def maintain(
    target: Target,
    experiments: Annotated[
        list[str] | None,
        typer.Argument(metavar="EXPERIMENT", help="Names or patterns. Default: all.", show_default=False),
    ] = None,
    verify: Annotated[Literal["sample", "all", "none"], typer.Option(help="Which checkpoints to verify.")] = "sample",
    share: Annotated[
        str, typer.Option(metavar="1/N", help="Share of the checkpoints in a sample; N daily runs read all.")
    ] = "1/7",
    keep_last: Annotated[
        int | None,
        option_without_default("--keep-last", "N", "In finished experiments, keep the last N checkpoints.", at_least=1),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report only; change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify checkpoints, quarantine damaged ones, delete unneeded objects; safe while experiments are running.

    Exits with 4 if a checkpoint or a journal is damaged.
    """
    from prefect_tune.core.experiment.retention import Retention

    resolve_existing_target(target)
    with printing_short_errors("stopped; run the command again to maintain the rest"):
        from prefect_tune.flows.maintain import maintain as flow

        retention = None if keep_last is None else Retention(last=keep_last)
        alarm = ""
        try:
            report = flow(
                target, experiments=experiments, verify=verify, share=share, retention=retention, dry_run=dry_run
            )
        except DamageFound as damage:
            alarm, report = str(damage), cast("MaintenanceReport", damage.report)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print(make_visible(report.summary))
    if alarm:
        print(f"prefect-tune: {make_visible(alarm)}", file=sys.stderr)
        raise typer.Exit(_EXIT_DAMAGED)


@command
def delete(
    target: Target,
    experiment: ExperimentName,
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation. Required without a terminal.")] = False,
    even_if_running: Annotated[
        bool, typer.Option("--even-if-running", help="Delete even if a run owns the experiment; that run then fails.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete an experiment permanently: its journal, all checkpoints and results.

    A marker of about 300 bytes remains; the name can be used again.

    The command shows what it will delete, and asks for confirmation. It fails while a run owns the experiment.
    """
    from prefect_tune.maintenance import delete_experiment

    if not yes and not sys.stdin.isatty():
        raise InvalidInput(
            f"delete {experiment}: confirmation needs a terminal; without one, add --yes; nothing was deleted"
        )
    resolve_existing_target(target)
    contents = delete_experiment(experiment, target=target, even_if_running=even_if_running, dry_run=True)
    if not yes:
        question = f"Delete experiment {experiment!r} at {target} permanently: {contents}?"
        if not typer.confirm(question, err=as_json):
            print("nothing was deleted", file=sys.stderr)
            raise typer.Exit(1)
    with Console(stderr=True).status(f"{experiment}: deleting {contents.object_count:,} objects"):
        delete_experiment(experiment, target=target, even_if_running=even_if_running)
    print(json.dumps(asdict(contents), indent=2) if as_json else f"deleted: {experiment}: {contents}")
