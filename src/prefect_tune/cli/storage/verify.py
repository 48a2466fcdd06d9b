"""The command `verify`: read live checkpoints byte by byte, or release a quarantined one that is whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console

from prefect_tune.cli.shared.app import AsJson, ExperimentName, Target, TrialName, command
from prefect_tune.cli.shared.open_target import chosen_trials, live_checkpoints, opened, trial_key, trials_today
from prefect_tune.core.errors import CheckpointNotFound, InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import is_search
from prefect_tune.core.experiment.trial_transitions import Trial, is_aside
from prefect_tune.core.models import plural, shown_size
from prefect_tune.core.operations.quarantine import reinstate
from prefect_tune.core.operations.scrub import DailyShare, inspect_one, read_one, share_of
from prefect_tune.core.recovery.stale_reads import current_trial
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.texts import visible
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.terminal.formatting import format_steps


@command
def verify(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    release: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="Reinstate a quarantined checkpoint if it is whole.", show_default=False),
    ] = None,
    share: Annotated[
        str, typer.Option(metavar="1/N", help="Read one part of the checkpoints: another one each day, all in N days.")
    ] = "1",
    as_json: AsJson = False,
) -> None:
    """Read every live checkpoint, and verify every byte."""
    part = share_of(share, datetime.now(UTC).date())
    found: list[_Verified] = []
    with opened(target, experiment) as (store, state):
        trials = trials_today(store, state, chosen_trials(state, trial))
        checks = _verified(store, state, trials, part) if release is None else _released(store, state, trials, release)
        for name, of_trial in groupby(checks, key=lambda each: each.trial):
            named = f"{name} " if is_search(state) else ""
            found += (verified := _with_progress(name, of_trial, damaged=None if as_json else f"{named}step"))
            if not as_json:
                _print_whole(named, verified)
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    elif not found:
        which = "no checkpoint is live" if part.parts == 1 else "no live checkpoint is in today's part"
        print(f"{experiment}: {which}, so there is nothing to verify")
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


def _verified(store: ObjectStore, state: Experiment, trials: Sequence[Trial], part: DailyShare) -> Iterator[_Verified]:
    with transfer_pool() as transfers:
        for key in (key for trial in trials for key in live_checkpoints(state, trial) if part.has(key)):
            for each in inspect_one(store, key, side_by_side=transfers):
                yield _Verified(key.trial.trial, key.step, each.size_bytes, each.file_count, each.damage)


def _released(store: ObjectStore, state: Experiment, trials: Sequence[Trial], step: int) -> Iterator[_Verified]:
    """Verify the quarantined checkpoint of `step`, and reinstate it only if it is whole."""
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
        trial_key(state, trial).checkpoint_key(each.checkpoint)
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
