"""What came out of an experiment: the best trial, all of them, and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefect_tune.blocks import StorageTarget
from prefect_tune.checkpoint import Checkpoint
from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.layout import TrialKey
from prefect_tune.core.objective import Objective
from prefect_tune.core.trial import Status, Trial, newest_key

__all__ = ["Results"]


@dataclass(frozen=True)
class Results:
    """An experiment as it stands."""

    experiment: Experiment
    target: StorageTarget
    objective: Objective | None

    @property
    def trials(self) -> Mapping[str, Trial]:
        """Every trial, in the order in which they were proposed."""
        return self.experiment.trials

    @property
    def errors(self) -> Mapping[str, str]:
        """Why trials errored, by trial."""
        return {each.trial: each.reason for each in self.trials.values() if each.status is Status.ERRORED}

    @property
    def best(self) -> Trial:
        """The trial whose last report is the best.

        Raises:
            InvalidInput: there is no metric to compare by, or no trial reported it.
        """
        losses = [(loss, each) for each in self.trials.values() if (loss := self._loss(each)) is not None]
        if not losses:
            raise InvalidInput(f"experiment {self.experiment.name!r}: no trial has reported what it is compared by")
        return min(losses, key=lambda pair: pair[0])[1]

    def checkpoint(self, trial: str) -> Checkpoint | None:
        """Return the newest committed checkpoint of a trial."""
        folder = TrialKey(experiment=self.experiment.name, trial=trial)
        key = newest_key(folder, self.experiment.trial(trial))
        return self.target.checkpoint(key) if key else None

    def _loss(self, trial: Trial) -> float | None:
        if self.objective is None or not trial.step:
            return None
        try:
            return self.objective.loss(trial.metrics, f"trial {trial.trial}")
        except BadMetric:
            return None
