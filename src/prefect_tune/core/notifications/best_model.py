"""Track the best model of an experiment: the best of all commits, and of the last steps of ended trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.ranking import Losses, best_saved, losses_in
from prefect_tune.core.experiment.trial_transitions import ENDED, Trial, newest_checkpoint
from prefect_tune.core.models import Metrics, metric_in
from prefect_tune.core.notifications.prefect_events import BestImproved
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.storage.layout import TrialKey


class BestSoFar:
    """Compares each commit and each ended trial with the best before. Metrics are compared in order, as a tuple.

    Without an objective no result is better than another.
    """

    def __init__(self, objective: Objective | None, experiment: Experiment) -> None:
        """Args: experiment: its state before the first call of `committed` or `ended`, which sets the best so far."""
        self._objective = objective
        self._experiment = experiment.name
        known = [(losses, trial.trial) for trial in experiment.trials.values() for losses in self._all_of(trial)]
        best: tuple[Losses | None, str | None] = min(known, key=lambda each: each[0], default=(None, None))
        self._losses, self.trial = best
        """The trial of the best model; None where no trial can be compared."""

    def committed(self, trial: Trial) -> BestImproved | None:
        """Return the news if the trial's newest checkpoint is better than all models before; else None."""
        newest = newest_checkpoint(trial)
        if newest is None or not self._improves(trial.trial, newest.metrics):
            return None
        key = TrialKey(experiment=self._experiment, trial=trial.trial).checkpoint_key(newest)
        return self._improved(trial.trial, newest.step, newest.metrics, key.manifest_path)

    def ended(self, trial: Trial) -> BestImproved | None:
        """Return the news if the trial's last step, which may not be saved, is better than all before; else None."""
        if not self._improves(trial.trial, trial.metrics):
            return None
        return self._improved(trial.trial, trial.step, trial.metrics, None)

    def _all_of(self, trial: Trial) -> Iterator[Losses]:
        if self._objective is None:
            return
        reported = [each.metrics for each in trial.checkpoints] + ([trial.metrics] if trial.phase in ENDED else [])
        for metrics in reported:
            if (losses := losses_in(metrics, self._objective)) is not None:
                yield losses

    def _improves(self, trial: str, metrics: Metrics) -> bool:
        losses = None if self._objective is None else losses_in(metrics, self._objective)
        if losses is None or (self._losses is not None and losses >= self._losses):
            return False
        self._losses, self.trial = losses, trial
        return True

    def _improved(self, trial: str, step: int, metrics: Metrics, manifest: str | None) -> BestImproved:
        compared = () if self._objective is None else self._objective.metrics
        first = {name: metric_in(metrics, name) for name in compared}
        return BestImproved(trial=trial, step=step, metrics={**first, **metrics}, manifest=manifest)


def best_checkpoints(experiment: Experiment, objective: Objective | None) -> Mapping[str, int]:
    """Return the sequence of the best checkpoint of all, by its trial; of equally good ones each trial's first.

    The best model that `BestSoFar` announced last is among them, if it is saved. Empty without an objective.
    """
    if objective is None:
        return {}
    by_trial = {each.trial: best_saved(each.checkpoints, objective)[:1] for each in experiment.trials.values()}
    best = [(trial, ref, losses_in(ref.metrics, objective)) for trial, refs in by_trial.items() for ref in refs]
    least = min((losses for _, _, losses in best if losses is not None), default=None)
    return {trial: ref.sequence for trial, ref, losses in best if losses == least}
