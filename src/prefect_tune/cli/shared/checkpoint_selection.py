"""The present trials of an experiment and their live checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial, live_keys
from prefect_tune.core.journal.trial_journal import trial_today
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.local.staging import transfer_pool


def trials_today(store: ObjectStore, state: Experiment, trials: Sequence[Trial]) -> list[Trial]:
    """Read each trial's own journal: the experiment's journal may be minutes behind while a search runs."""
    with transfer_pool() as transfers:
        return list(transfers(lambda known: trial_today(store, state.name, known, side_by_side=map), trials))


def trial_key(state: Experiment, trial: Trial) -> TrialKey:
    """Return the trial's key on the target."""
    return TrialKey(experiment=state.name, trial=trial.trial)


def live_checkpoints(state: Experiment, trial: Trial) -> list[CheckpointKey]:
    """Return the keys of the trial's live checkpoints, oldest first."""
    return live_keys(trial_key(state, trial), trial)
