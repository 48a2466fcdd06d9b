"""Open a target and load an experiment for reading only; not even a missing folder is created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from prefect_tune.core.errors import InvalidInput

if TYPE_CHECKING:
    from prefect_tune.blocks import StorageTarget
    from prefect_tune.core.experiment.experiment import Experiment
    from prefect_tune.core.experiment.trial_transitions import Trial
    from prefect_tune.core.messages.live_status import ExperimentView
    from prefect_tune.core.storage.object_store import ObjectStore
    from prefect_tune.stores.locations.local_folder import LocalFolder

_TIMEOUT = timedelta(minutes=30)


def place_at(target: str) -> StorageTarget | LocalFolder:
    """Return the target; it is not created if it is missing. A folder that exists needs no import of Prefect."""
    from prefect_tune.stores.locations.local_folder import local_folder

    if folder := local_folder(target):
        return folder
    from prefect_tune.blocks import resolve_existing

    return resolve_existing(target)


@contextmanager
def looked_at(target: str) -> Iterator[ObjectStore]:
    """Open a target for reading.

    Raises:
        InvalidInput: it is a folder of this machine that does not exist.
    """
    from prefect_tune.cli.shared.nearby_targets import require_folder

    place = place_at(target)
    require_folder(place)
    with place.open(timeout=_TIMEOUT) as store:
        yield store


@contextmanager
def opened(target: str, experiment: str) -> Iterator[tuple[ObjectStore, Experiment]]:
    """Open a target for reading, and load an experiment.

    Raises:
        InvalidInput: there is no experiment of this name.
    """
    from prefect_tune.core.journal.journal import load
    from prefect_tune.core.storage.experiment_listing import no_experiment
    from prefect_tune.stores.local.staging import transfer_pool

    with looked_at(target) as store, transfer_pool() as transfers:
        state = load(store, experiment, side_by_side=transfers)
        if not state.number:
            raise InvalidInput(no_experiment(store, experiment, place_at(target).uri))
        yield store, state


def chosen_trials(state: Experiment, trial: str | None) -> Sequence[Trial]:
    """Return the trial that `trial` names (see `trial_named`), or all trials if it is None.

    Raises:
        InvalidInput: there is no trial of this name.
    """
    from prefect_tune.core.experiment.summary import trial_named

    return list(state.trials.values()) if trial is None else [trial_named(state, trial)]


def written_at(store: ObjectStore, state: Experiment) -> str:
    """Return when the last entry of the journal was written."""
    from prefect_tune.core.journal.journal import next_entry

    last = next_entry(store, state.key, state.number - 1)
    return last.at if last else ""


def viewed(store: ObjectStore, state: Experiment) -> ExperimentView:
    """Return the experiment with the newest reports of its running trials, and the time of that."""
    from prefect_tune.core.messages.live_status import view_of

    return view_of(store, state, written_at(store, state))
