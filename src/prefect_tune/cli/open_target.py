"""Open a target and load an experiment for reading only; not even a missing folder is created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import trial_named
from prefect_tune.core.experiment.trial_transitions import Status, Trial, live_keys, with_report
from prefect_tune.core.journal.journal import load, next_entry, trial_today
from prefect_tune.core.messages.live_status import ExperimentView, view_of
from prefect_tune.core.storage.generations import current_journal, no_experiment
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.stores.open_location import LocalFolder, local_folder
from prefect_tune.terminal.freshness import freshness_of

if TYPE_CHECKING:
    from prefect_tune.blocks import StorageTarget


_TIMEOUT = timedelta(minutes=30)


def existing_place(target: str) -> StorageTarget | LocalFolder:
    """Return the target. A folder that exists needs no import of Prefect.

    Raises:
        InvalidInput: it is a folder of this machine that does not exist.
    """
    if folder := local_folder(target):
        return folder
    from prefect_tune.blocks import LocalTarget, resolve_existing

    place = resolve_existing(target)
    if isinstance(place, LocalTarget) and not place.may_hang and _is_missing(Path(place.path)):
        raise InvalidInput(f"{place.path}: there is no such folder")
    return place


def _is_missing(folder: Path) -> bool:
    try:
        return not folder.exists()
    except OSError:  # such as a folder above it that this user may not read: the first read says so
        return False


@contextmanager
def looked_at(target: str) -> Iterator[ObjectStore]:
    """Open a target for reading.

    Raises:
        InvalidInput: it is a folder of this machine that does not exist.
    """
    with existing_place(target).open(timeout=_TIMEOUT) as store:
        yield store


@contextmanager
def opened(target: str, experiment: str) -> Iterator[tuple[ObjectStore, Experiment]]:
    """Open a target for reading, and load an experiment.

    Raises:
        InvalidInput: there is no experiment of this name.
    """
    with looked_at(target) as store, transfer_pool() as transfers:
        state = load(store, current_journal(store, experiment), side_by_side=transfers)
        if not state.number:
            raise InvalidInput(no_experiment(store, experiment, existing_place(target).uri))
        yield store, state


def chosen_trials(state: Experiment, trial: str | None) -> Sequence[Trial]:
    """Return the trial that `trial` names (see `trial_named`), or all trials if it is None.

    Raises:
        InvalidInput: there is no trial of this name.
    """
    return list(state.trials.values()) if trial is None else [trial_named(state, trial)]


def trials_today(store: ObjectStore, state: Experiment, trials: Sequence[Trial]) -> list[Trial]:
    """Read each trial's own journal: the experiment's journal may be minutes behind while a search runs."""
    with transfer_pool() as transfers:
        return list(transfers(lambda known: trial_today(store, state.key, known, side_by_side=map), trials))


def trial_key(state: Experiment, trial: Trial) -> TrialKey:
    """Return the trial's key on the target."""
    return state.trial_key(trial.trial)


def live_checkpoints(state: Experiment, trial: Trial) -> list[CheckpointKey]:
    """Return the keys of the trial's live checkpoints, oldest first."""
    return live_keys(trial_key(state, trial), trial)


def written_at(store: ObjectStore, state: Experiment) -> str:
    """Return when the last entry of the journal was written."""
    last = next_entry(store, state.key, state.number - 1)
    return last.at if last else ""


def viewed(store: ObjectStore, state: Experiment) -> ExperimentView:
    """Return the experiment with the newest reports of its running trials, and the time of that.

    If its process has probably ended, its trials' own journals may be newer than its last live status: they are read.
    """
    view = view_of(store, state, written_at(store, state))
    if not freshness_of(view, datetime.now(UTC)).is_stale:
        return view
    trials = view.experiment.trials
    running = [each for each in trials.values() if each.status is Status.RUNNING]
    for known, today in zip(running, trials_today(store, state, running), strict=True):
        trials = trials.with_trial(caught_up(known, today))
    return replace(view, experiment=view.experiment.model_copy(update={"trials": trials}))


def caught_up(known: Trial, today: Trial) -> Trial:
    """Return a trial with the newest report and the checkpoints of `today`, its state in its own journal."""
    report = StepReport(step=today.step, metrics=today.metrics, trained_seconds=today.trained_seconds)
    found = {"checkpoints": today.checkpoints, "quarantined_checkpoints": today.quarantined_checkpoints}
    return with_report(known, report).model_copy(update=found)
