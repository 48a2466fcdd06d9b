"""The commands of the panel *Checkpoints and storage*."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.console import Console
from rich.table import Table

from prefect_tune.cli.app import AsJson, ExperimentName, Target, TrialName, command, short_errors
from prefect_tune.cli.open_target import (
    chosen_trials,
    existing_place,
    live_checkpoints,
    opened,
    trial_key,
    trials_today,
)
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, DamageFound, InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import best_of, is_search
from prefect_tune.core.experiment.trial_transitions import Status, Trial, is_quarantined
from prefect_tune.core.operations.scrub import inspect_one, read_one, reinstate
from prefect_tune.core.operations.trial_gc import Collected, collect_from, look_for_garbage
from prefect_tune.core.restore import current_trial, is_live_now, read_manifest
from prefect_tune.core.shown_text import plural, shown_size, visible
from prefect_tune.core.storage.generations import delete_objects_before, objects_before
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import Listed, ObjectStore
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.terminal.formatting import (
    borderless_table,
    format_steps,
    format_time,
    format_value,
    plain_cells,
    print_parts,
)

if TYPE_CHECKING:
    from prefect_tune.maintenance import ExperimentContents, MaintenanceReport


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
    quarantined = [(key, "quarantined") for key in listed if key and key.sequence in trial.quarantined]
    return sorted([*live, *quarantined], key=lambda each: each[0].sequence)


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


def _row(store: ObjectStore, key: CheckpointKey, status: str) -> _Row:
    trial = key.trial.trial
    try:
        manifest = read_manifest(store, key)
    except (CheckpointCorrupt, CheckpointNotFound):
        return _Row(trial, key.step, _status_of_unreadable(store, key, status), path=key.folder)
    return _Row(
        trial,
        key.step,
        status,
        created_at=manifest.about.created_at,
        size_bytes=manifest.size_bytes,
        file_count=len(manifest.files),
        attempt=manifest.about.attempt,
        metrics=manifest.about.metrics,
        path=key.folder,
    )


def _status_of_unreadable(store: ObjectStore, key: CheckpointKey, status: str) -> str:
    """Return "damaged", or "retired" if a running trial retired it after the journal was read."""
    if status != "live":
        return status
    return "damaged" if is_live_now(store, key, side_by_side=map) else "retired"


def _table(rows: Sequence[_Row], of_search: bool) -> Table:
    trial_column = ("trial",) if of_search else ()
    table = borderless_table(*trial_column, "step", "when", "size", "metrics", "status")
    for row in rows:
        size = "" if row.size_bytes is None else shown_size(row.size_bytes)
        cells = (str(row.step), format_time(row.created_at or ""), size, format_value(row.metrics), row.status)
        of = (row.trial,) if of_search else ()
        table.add_row(*plain_cells((*of, *cells)), style="" if row.status == "live" else "red")
    return table


@command
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
        trials = trials_today(store, state, chosen_trials(state, trial))
        checks = _verified(store, state, trials) if release is None else _released(store, state, trials, release)
        for name, of_trial in groupby(checks, key=lambda each: each.trial):
            named = f"{name} " if is_search(state) else ""
            found += (verified := _with_progress(name, of_trial, damaged=None if as_json else f"{named}step"))
            if not as_json:
                _print_whole(named, verified)
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    elif not found:
        print(f"{experiment}: no checkpoint is live, so there is nothing to verify")
    if any(each.damage for each in found):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Verified:
    """The result of verifying one checkpoint."""

    trial: str
    step: int
    size_bytes: int = 0
    file_count: int = 0
    damage: str | None = None


def _with_progress(trial: str, checks: Iterable[_Verified], *, damaged: str | None) -> Sequence[_Verified]:
    """Return the checks of a trial; while they run, a terminal shows which step was read last.

    Args:
        damaged: begins the line that is printed as soon as a damaged checkpoint is found: an error of the target may
            end the checks. None if none is printed.
    """
    done = []
    with Console(stderr=True).status(f"{trial}: reading") as status:
        for each in checks:
            done.append(each)
            status.update(f"{trial}: step {each.step} is read")
            if each.damage and damaged:
                print(f"{damaged} {each.step}: DAMAGED: {visible(each.damage)}", file=sys.stderr)
    return done


def _print_whole(trial: str, verified: Sequence[_Verified]) -> None:
    """Print one line for all checkpoints of a trial that are whole."""
    if whole := [each for each in verified if not each.damage]:
        steps = f"{'step' if len(whole) == 1 else 'steps'} {format_steps([each.step for each in whole])}"
        size = shown_size(sum(each.size_bytes for each in whole))
        files = plural(sum(each.file_count for each in whole), "file", "files")
        print(f"{trial}{steps}: {size} in {files}, whole")


def _verified(store: ObjectStore, state: Experiment, trials: Sequence[Trial]) -> Iterator[_Verified]:
    with transfer_pool() as transfers:
        for key in (key for trial in trials for key in live_checkpoints(state, trial)):
            for each in inspect_one(store, key, side_by_side=transfers):
                yield _Verified(key.trial.trial, key.step, each.size_bytes, each.file_count, each.damage)


def _released(store: ObjectStore, state: Experiment, trials: Sequence[Trial], step: int) -> Iterator[_Verified]:
    """Verify the quarantined checkpoint of `step`, and reinstate it only if it is whole."""
    from prefect_tune.journal_access import new_write_id

    key = _quarantined_key(state, trials, step)
    with transfer_pool() as transfers:
        found = read_one(store, key, side_by_side=transfers)
        if found.damage is None:
            is_there = bool(reinstate(store, key.trial, [key], new_write_id(), side_by_side=transfers))
        else:
            is_there = is_quarantined(current_trial(store, key.trial, side_by_side=transfers), key)
        if not is_there:
            raise CheckpointNotFound(f"{key.folder}: the trial retired it meanwhile, so it cannot be released")
    yield _Verified(key.trial.trial, step, found.size_bytes, found.file_count, found.damage)


def _quarantined_key(state: Experiment, trials: Sequence[Trial], step: int) -> CheckpointKey:
    found = [
        trial_key(state, trial).checkpoint_key(each.checkpoint)
        for trial in trials
        for each in trial.quarantined_checkpoints
        if each.checkpoint.step == step
    ]
    if not found:
        steps = {each.checkpoint.step for trial in trials for each in trial.quarantined_checkpoints}
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointNotFound(f"experiment {state.name!r}: step {step} is not quarantined; there are: {there}")
    if len({key.trial for key in found}) > 1:
        names = ", ".join(key.trial.trial for key in found)
        raise InvalidInput(f"experiment {state.name!r}: trials {names} have step {step} quarantined; name one: --trial")
    return found[-1]


@command
def export(
    target: Target,
    experiment: ExperimentName,
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIRECTORY", help="A directory that is new, empty, or holds this checkpoint.", show_default=False
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="Step of the checkpoint. Default: the newest.", show_default=False),
    ] = None,
    trial: Annotated[
        str | None,
        typer.Option(metavar="TRIAL", help="Trial. Default: the best one by its last report.", show_default=False),
    ] = None,
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
    from prefect_tune.checkpoint_export import export_checkpoint

    with opened(target, experiment) as (store, state):
        (chosen,) = trials_today(store, state, [_trial(state, trial)])
        key = _checkpoint(state, chosen, step)
    names = export_checkpoint(resolve_existing(target), state, chosen, key, directory, plain=plain)
    for usual, name in names.items():
        if name != usual:
            print(f"{usual} is the checkpoint's own file; that of the trial is {name}", file=sys.stderr)
    if as_json:
        print(json.dumps({"trial": key.trial.trial, "step": key.step, "directory": str(directory)}, indent=2))
        return
    named = f"{chosen.trial}{' (errored)' * (chosen.status is Status.ERRORED)} " if is_search(state) else ""
    print(f"{named}step {key.step} is in {directory}")


def _trial(state: Experiment, trial: str | None) -> Trial:
    trials = chosen_trials(state, trial)
    best = best_of(state) if trial is None and len(trials) > 1 else next(iter(trials), None)
    if best is None:
        raise InvalidInput(
            f"experiment {state.name!r}: its {len(trials)} trials have no best one; name a trial: --trial"
        )
    return best


def _checkpoint(state: Experiment, trial: Trial, step: int | None) -> CheckpointKey:
    live = live_checkpoints(state, trial)
    fitting = [key for key in live if step in (None, key.step)]
    if not fitting:
        steps = ", ".join(str(key.step) for key in live) or "none"
        wanted = "" if step is None else f" of step {step}"
        searched = f"experiment {state.name!r}" + (f", trial {trial.trial!r}" if is_search(state) else "")
        errored = ", which has errored" * (trial.status is Status.ERRORED)
        raise CheckpointNotFound(f"{searched}{errored}: there is no checkpoint{wanted}; there are: {steps}")
    return fitting[-1]


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
        found = list(_found(store, state, chosen_trials(state, trial), deletes=delete))
        of_earlier = delete_objects_before if delete else objects_before
        earlier = of_earlier(store, state.name, state.key.generation) if trial is None else ()
    if as_json:
        left = {"object_count": len(earlier), "size_bytes": sum(each.size_bytes for each in earlier)}
        trials = [asdict(each) for each in found]
        print(json.dumps({"deleted": delete, "trials": trials, "deleted_experiments": left}, indent=2))
    else:
        _print(found, earlier, deleted=delete)
    if any(each.damage for each in found):
        raise typer.Exit(1)


def _found(store: ObjectStore, state: Experiment, trials: Sequence[Trial], *, deletes: bool) -> Iterator[Collected]:
    with transfer_pool() as transfers:
        for known in trials:
            key = trial_key(state, known)
            if deletes:
                from prefect_tune.journal_access import new_write_id

                yield collect_from(store, key, new_write_id(), side_by_side=transfers, known=known)
            else:
                yield look_for_garbage(store, key, side_by_side=transfers, known=known)


def _print(found: Sequence[Collected], earlier: Sequence[Listed], *, deleted: bool) -> None:
    table = borderless_table("trial", "checkpoints", "objects", "size", "")
    for garbage in found:
        note = garbage.damage or garbage.kept
        if note or _object_count(garbage):
            counts = (format_steps(garbage.checkpoints), str(_object_count(garbage)), shown_size(garbage.orphan_bytes))
            table.add_row(*plain_cells((garbage.trial, *counts, note or "")), style="red" if garbage.damage else "")
    if table.rows:
        print_parts(table, "")
    if earlier:
        print_parts(f"{plural(len(earlier), 'object', 'objects')} of deleted experiments of this name", "")
    size = shown_size(sum(each.orphan_bytes for each in found) + sum(each.size_bytes for each in earlier))
    count = len(earlier) + sum(map(_object_count, found))
    objects = plural(count, "object", "objects")
    if not count:
        print_parts(f"nothing to collect in {plural(len(found), 'trial', 'trials')}")
    elif deleted:
        print_parts(f"deleted: {objects}, {size}")
    else:
        print_parts(f"{objects}, {size}; to delete them: --delete")


def _object_count(garbage: Collected) -> int:
    return garbage.orphan_count + garbage.answer_count + len(garbage.checkpoints)


_DAMAGE = 4


@command
def maintain(
    target: Target,
    experiments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="EXPERIMENT", help="Names or patterns of experiments. Default: all.", show_default=False
        ),
    ] = None,
    verify: Annotated[Literal["sample", "all", "none"], typer.Option(help="Which checkpoints to verify.")] = "sample",
    share: Annotated[
        str, typer.Option(metavar="1/N", help="The sample: another part each day, all in N days.")
    ] = "1/7",
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Prune finished experiments to the last N.", show_default=False),
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

    It asks first, and says what would be deleted. It refuses while a run owns it,
    and while another experiment, such as a fork, needs its checkpoints.
    """
    from rich.console import Console

    from prefect_tune.maintenance import contents_of, delete_experiment

    if not yes and not sys.stdin.isatty():
        raise InvalidInput(
            f"delete {experiment}: there is no terminal to confirm it on: add --yes; nothing was deleted"
        )
    existing_place(target)
    found = contents_of(experiment, target=target, even_if_running=even_if_running)
    if not yes:
        question = f"Delete experiment {experiment!r} at {target} for good: {_said(found)}?"
        if not typer.confirm(question, err=as_json):
            print("nothing was deleted", file=sys.stderr)
            raise typer.Exit(1)
    with Console(stderr=True).status(f"{experiment}: deleting {found.object_count:,} objects"):
        count = delete_experiment(experiment, target=target, even_if_running=even_if_running)
    if as_json:
        print(json.dumps(_as_json(found, count), indent=2))
    else:
        print(f"deleted: {experiment}: {_said(found)}")


def _said(found: ExperimentContents) -> str:
    trials = plural(found.trial_count, "trial", "trials")
    checkpoints = plural(found.checkpoint_count, "checkpoint", "checkpoints")
    return (
        f"{trials}, {checkpoints}, {shown_size(found.size_bytes)} in {plural(found.object_count, 'object', 'objects')}"
    )


def _as_json(found: ExperimentContents, deleted_count: int) -> dict[str, object]:
    return {
        "experiment": found.experiment,
        "trial_count": found.trial_count,
        "checkpoint_count": found.checkpoint_count,
        "size_bytes": found.size_bytes,
        "deleted_count": deleted_count,
    }
