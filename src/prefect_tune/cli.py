"""The command line: `prefect-tune`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, InvalidInput, TuneError

if TYPE_CHECKING:
    from rich.table import Table

    from prefect_tune.core.experiment import Experiment
    from prefect_tune.core.layout import CheckpointKey
    from prefect_tune.core.store import ObjectStore
    from prefect_tune.core.trial import Trial

__all__ = ["app", "main"]

_TIMEOUT = timedelta(minutes=30)

app = typer.Typer(
    name="prefect-tune",
    help="Durable training as Prefect flows. TARGET is a URI (s3://bucket/prefix), a path, or a block's 'type/name'.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
blocks = typer.Typer(help="The blocks that say where bytes live.", no_args_is_help=True)
app.add_typer(blocks, name="blocks")

Target = Annotated[str, typer.Argument(metavar="TARGET", show_default=False)]
ExperimentName = Annotated[str, typer.Argument(metavar="EXPERIMENT", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line; what prefect-tune raises on purpose is one message, without a traceback."""
    try:
        app()
    except TuneError as error:
        print(f"prefect-tune: {error}", file=sys.stderr)
        sys.exit(1)


# --------------------------------------------------------------------------------------------- the commands


@app.command()
def demo(
    target: Annotated[str | None, typer.Option(help="Where to keep the bytes. Default: a temporary folder.")] = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps of training in each run.")] = 24,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what was written.")] = False,
) -> None:
    """Train, be killed in the middle of an upload, resume, and compare, bit for bit."""
    from rich.console import Console

    from prefect_tune.demo.story import DemoOptions, run_demo

    os.environ.setdefault("DO_NOT_TRACK", "1")  # a demo sends nothing to anybody, and Prefect need not announce it
    if not run_demo(DemoOptions(target=target, steps=steps, keep=keep), Console(highlight=False)):
        raise typer.Exit(1)


@blocks.command("register")
def register_blocks() -> None:
    """Make the blocks known to your Prefect server, so that they can be filled in in its UI."""
    import httpx

    from prefect_tune import blocks as room

    kinds = (room.LocalTarget, room.S3Target, room.GcsTarget, room.AzureTarget, room.FsspecTarget, room.SyncConfig)
    try:
        for kind in kinds:
            kind.register_type_and_schema()
            print(kind.get_block_type_slug())
    except httpx.HTTPError as error:
        raise TuneError(f"the Prefect server did not answer: {error}") from error


@blocks.command("check")
def check_target(target: Target) -> None:
    """Write, read back, list and delete a probe, and say in one line whether TARGET can be trusted."""
    from prefect_tune.blocks import resolve_target

    found = resolve_target(target).check()
    print(found.message, file=sys.stdout if found.ok else sys.stderr)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def checkpoints(target: Target, experiment: ExperimentName, as_json: AsJson = False) -> None:
    """List an experiment's checkpoints."""
    with _opened(target, experiment) as (store, state):
        rows = [_row(store, *each) for each in _keys(store, state)]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _show(_checkpoint_table(rows))


@app.command()
def show(target: Target, experiment: ExperimentName, as_json: AsJson = False) -> None:
    """Show how an experiment's trial stands."""
    with _opened(target, experiment) as (_, state):
        found = {"experiment": state.name, "epoch": state.epoch, "owner": str(state.owner or ""), **_facts(state)}
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(_facts_table(found))


@app.command()
def verify(target: Target, experiment: ExperimentName, as_json: AsJson = False) -> None:
    """Read every byte of every live checkpoint, and check it."""
    found: list[_Verified] = []
    with _opened(target, experiment) as (store, state):
        for each in _verified(store, state):
            found.append(each)
            if not as_json:
                print(each, file=sys.stderr if each.damage else sys.stdout)
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    if any(each.damage for each in found):
        raise typer.Exit(1)


@app.command()
def export(
    target: Target,
    experiment: ExperimentName,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Which checkpoint. Default: the newest.", show_default=False)] = None,
) -> None:
    """Write a checkpoint to DIRECTORY, which must be new or empty: its files, as the trainable saved them."""
    from prefect_tune.blocks import resolve_target

    with _opened(target, experiment) as (_, state):
        key = _chosen(state, step)
    resolve_target(target).checkpoint(key).to_directory(directory)
    print(f"step {key.step}: in {directory}")


# ------------------------------------------------------------------------------------------ what lies there


@contextmanager
def _opened(target: str, experiment: str) -> Iterator[tuple[ObjectStore, Experiment]]:
    """Open a target to look at an experiment: nothing is written, not even a missing folder."""
    from prefect_tune.blocks import LocalTarget, resolve_target
    from prefect_tune.core.journal import load
    from prefect_tune.stores.staging import side_by_side

    place = resolve_target(target)
    if isinstance(place, LocalTarget):
        place = place.model_copy(update={"must_exist": True})
    with place.open(timeout=_TIMEOUT) as store, side_by_side() as transfers:
        state = load(store, experiment, side_by_side=transfers)
        if not state.trials:
            raise InvalidInput(f"{place.uri}: there is no experiment {experiment!r}")
        yield store, state


def _trial(state: Experiment) -> Trial:
    """An experiment of `durable_trainable` has one."""
    (trial,) = state.trials.values()
    return trial


def _key(state: Experiment, step: int, sequence: int) -> CheckpointKey:
    from prefect_tune.core.layout import CheckpointKey, TrialKey

    trial = TrialKey(experiment=state.name, trial=_trial(state).trial)
    return CheckpointKey(trial=trial, step=step, sequence=sequence)


def _live(state: Experiment) -> list[CheckpointKey]:
    return [_key(state, each.step, each.sequence) for each in _trial(state).checkpoints]


def _chosen(state: Experiment, step: int | None) -> CheckpointKey:
    live = _live(state)
    fitting = [key for key in live if step in (None, key.step)]
    if not fitting:
        steps = ", ".join(str(key.step) for key in live) or "none"
        wanted = "" if step is None else f" of step {step}"
        raise CheckpointNotFound(f"experiment {state.name!r}: there is no checkpoint{wanted}; there are: {steps}")
    return fitting[-1]


def _keys(store: ObjectStore, state: Experiment) -> list[tuple[CheckpointKey, str]]:
    """Every checkpoint with its standing, oldest first; those put aside are found by their names on the target."""
    from prefect_tune.core.layout import CheckpointKey

    live = _live(state)
    aside = _trial(state).quarantined
    folder = _key(state, 0, 0).trial
    listed = (CheckpointKey.from_manifest_path(folder, each.path) for each in store.list(folder.checkpoints))
    found = [(key, "quarantined") for key in listed if key and key.sequence in aside]
    return sorted([*((key, "live") for key in live), *found], key=lambda each: each[0].sequence)


@dataclass(frozen=True)
class _Row:
    """One checkpoint, as it is printed."""

    step: int
    standing: str
    created_at: str | None = None
    size_bytes: int | None = None
    file_count: int | None = None
    attempt: int | None = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    path: str = ""


def _row(store: ObjectStore, key: CheckpointKey, standing: str) -> _Row:
    from prefect_tune.core.restore import read_manifest

    try:
        manifest = read_manifest(store, key)
    except (CheckpointCorrupt, CheckpointNotFound):
        return _Row(key.step, "damaged" if standing == "live" else standing, path=key.folder)
    return _Row(
        key.step,
        standing,
        created_at=manifest.about.created_at,
        size_bytes=manifest.size_bytes,
        file_count=len(manifest.files),
        attempt=manifest.about.attempt,
        metrics=manifest.about.metrics,
        path=key.folder,
    )


@dataclass(frozen=True)
class _Verified:
    """What reading a checkpoint found."""

    step: int
    size_bytes: int = 0
    file_count: int = 0
    damage: str | None = None

    def __str__(self) -> str:
        from prefect_tune.core.values import shown_size

        if self.damage:
            return f"step {self.step}: DAMAGED: {self.damage}"
        return f"step {self.step}: {shown_size(self.size_bytes)} in {self.file_count} files, whole"


def _verified(store: ObjectStore, state: Experiment) -> Iterator[_Verified]:
    from prefect_tune.core.restore import read_manifest, verify
    from prefect_tune.stores.staging import side_by_side

    with side_by_side() as transfers:
        for key in _live(state):
            try:
                manifest = read_manifest(store, key)
                verify(store, manifest, side_by_side=transfers)
            except (CheckpointCorrupt, CheckpointNotFound) as error:
                yield _Verified(key.step, damage=str(error))
            else:
                yield _Verified(key.step, manifest.size_bytes, len(manifest.files))


def _facts(state: Experiment) -> dict[str, object]:
    trial = _trial(state)
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


# ------------------------------------------------------------------------------------------------- printing


def _show(table: Table) -> None:
    from rich.console import Console

    Console(highlight=False).print(table)


def _checkpoint_table(rows: Sequence[_Row]) -> Table:
    from rich.table import Table

    from prefect_tune.core.values import shown_size

    table = Table("step", "when", "size", "metrics", "standing", box=None, header_style="dim")
    for row in rows:
        size = "" if row.size_bytes is None else shown_size(row.size_bytes)
        when = (row.created_at or "").replace("T", " ")[:19]
        style = "" if row.standing == "live" else "red"
        table.add_row(str(row.step), when, size, _said(row.metrics), row.standing, style=style)
    return table


def _facts_table(facts: Mapping[str, object]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(f"[dim]{name}[/]", _said(value))
    return table


def _said(value: object) -> str:
    match value:
        case Mapping():
            return ", ".join(f"{name} {_said(each)}" for name, each in value.items())
        case list():
            return ", ".join(_said(each) for each in value)
        case float():
            return f"{value:.6g}"
        case _:
            return str(value)
