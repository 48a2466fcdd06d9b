"""Open a target and load an experiment for reading only; not even a missing folder is created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import trial_named
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import load, next_entry
from prefect_tune.core.messages.live_status import ExperimentView, view_of
from prefect_tune.core.storage.generations import current_journal, no_experiment
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.stores.open_location import LocalFolder, local_folder

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
    if isinstance(place, LocalTarget) and not place.may_hang:
        with suppress(OSError):  # such as a folder above it that this user may not read: the first read says so
            if not Path(place.path).exists():
                raise InvalidInput(f"{place.path}: there is no such folder")
    return place


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


def written_at(store: ObjectStore, state: Experiment) -> str:
    """Return when the last entry of the journal was written."""
    last = next_entry(store, state.key, state.number - 1)
    return last.at if last else ""


def viewed(store: ObjectStore, state: Experiment) -> ExperimentView:
    """Return the experiment with the newest reports of its running trials, and the time of that."""
    return view_of(store, state, written_at(store, state))
