"""An Optuna storage and study of an experiment, in memory only: a resume rebuilds them from the journal."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.pruners import NopPruner
from optuna.samplers import RandomSampler
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from prefect_tune.core.models import Metrics
from prefect_tune.core.search.objective import Mode, Objective
from prefect_tune.integrations.optuna.distributions import Parameters


class StudyStorage(InMemoryStorage):
    """Optuna's storage in memory, whose trials can also be corrected."""

    def begin_study(self, name: str, modes: Sequence[Mode]) -> None:
        """Begin the one study there is."""
        directions = [StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE for mode in modes]
        with quiet():
            self._only_study = self.create_new_study(directions, name)

    def begin(self) -> FrozenTrial:
        """Add a running trial that knows nothing yet."""
        return self.get_trial(self.create_new_trial(self._only_study))

    def correct(self, trial: FrozenTrial, known: Parameters, notes: Mapping[str, Any]) -> FrozenTrial:
        """Have a trial know these parameters and the sampler's notes, and nothing else; return it."""
        corrected = copy.copy(trial)
        corrected.params = dict(known.values)
        corrected.distributions = dict(known.distributions)
        corrected.system_attrs = dict(notes)
        self._set_trial(trial._trial_id, corrected)  # noqa: SLF001 - its one name here
        return corrected

    def constrain(self, trial_id: int, values: Mapping[str, float]) -> None:
        """Have the trial know how far each constraint is from being met: met is 0 or less."""
        noted = create_trial(state=TrialState.RUNNING, constraints=dict(values)).system_attrs
        for key, value in noted.items():
            self.set_trial_system_attr(trial_id, key, value)

    def reopen(self, trial_id: int) -> bool:
        """Have a trial run that had ended; return whether it had."""
        trial = copy.copy(self.get_trial(trial_id))
        if not trial.state.is_finished():
            return False
        trial.state, trial.values, trial.datetime_complete = TrialState.RUNNING, None, None
        self._set_trial(trial_id, trial)
        return True


class Study(optuna.Study):
    """A study over `StudyStorage`, driven by asking and telling; its sampler is replaced before each use."""

    def __init__(self, name: str, modes: Sequence[Mode]) -> None:
        self.trials_stored = StudyStorage()
        self.trials_stored.begin_study(name, modes)
        super().__init__(name, self.trials_stored, RandomSampler(seed=0), NopPruner())
        self.is_stopped = False

    def stop(self) -> None:
        """Remember that there is nothing more to try. Optuna's own refuses outside of `optimize`."""
        self.is_stopped = True


def values_of(objective: Objective, metrics: Metrics, where: str) -> tuple[float, ...]:
    """Return the objective's metrics as reported, without turning them into losses, since a sampler may expect them so.

    Raises:
        BadMetric: as `Objective.losses` does.
    """
    losses = objective.losses(metrics, where)
    return tuple(loss if mode == "min" else -loss for loss, mode in zip(losses, objective.modes, strict=True))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna from logging what is no news here, and leave its verbosity as it was."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.ERROR))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
