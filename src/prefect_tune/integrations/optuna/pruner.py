"""A scheduler that stops trials by any of Optuna's pruners."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    NopPruner,
    SuccessiveHalvingPruner,
    ThresholdPruner,
    WilcoxonPruner,
)
from optuna.trial import TrialState

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.models import TrialId
from prefect_tune.core.schedulers.base import Continue, Decision, Schedule, Scheduler, Stop, TrialReport
from prefect_tune.core.search.objective import Objective
from prefect_tune.integrations.optuna.study import Study, quiet, values_of


@dataclass(frozen=True, slots=True)
class OptunaPruner(Scheduler):
    """Stops a trial where a pruner of Optuna would prune it, by the first metric of the objective.

    Successive halving, Hyperband and thresholds are called at the steps that they compare, other pruners at every step.
    """

    pruner: BasePruner

    def __post_init__(self) -> None:
        given: object = self.pruner
        if not isinstance(given, BasePruner):
            found = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
            example = "pt.OptunaPruner(optuna.pruners.MedianPruner())"
            raise InvalidInput(f"OptunaPruner: expected a pruner of Optuna, as in {example}, found {found}")

    def begin(self, objective: Objective, seed: int) -> Schedule:
        if isinstance(self.pruner, WilcoxonPruner) and find_spec("scipy") is None:
            raise InvalidInput("WilcoxonPruner: it needs scipy: pip install scipy")
        return _OptunaSchedule(copy.deepcopy(self.pruner), objective, seed)


class _OptunaSchedule(Schedule):
    """An Optuna study with the reports of all trials. Pruners draw no random numbers."""

    def __init__(self, pruner: BasePruner, objective: Objective, seed: int) -> None:
        self._pruner = pruner
        self._objective = Objective(metrics=objective.metrics[:1], modes=objective.modes[:1])
        # By the name of its study and its number, Hyperband deals a trial to a bracket.
        self._study = Study(f"prefect-tune-{seed}", self._objective.modes)
        self._study.pruner = pruner
        self._trials = self._study.trials_stored
        self._ids: dict[TrialId, int] = {}
        self._stops: dict[TrialId, Stop] = {}

    def added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        del config
        if trial in self._ids:
            self._trials.reopen(self._ids[trial])
            self._stops.pop(trial, None)
        else:
            self._ids[trial] = self._trials.begin()._trial_id  # noqa: SLF001 - its one name in a storage

    def milestone(self, trial: TrialId, step: int) -> int | None:
        del trial
        return _next_look(self._pruner, step)

    def decide(self, report: TrialReport) -> Decision:
        trial_id, step = self._ids[report.trial], report.report.step
        last_step = self._trials.get_trial(trial_id).last_step
        if last_step is None or step > last_step:
            (value,) = values_of(self._objective, report.report.metrics, f"trial {report.trial!r}, step {step}")
            self._trials.set_trial_intermediate_value(trial_id, step, value)
            if self._prunes(trial_id):
                name = type(self._pruner).__name__
                self._stops[report.trial] = Stop(reason=f"{name} at {self._objective.metrics[0]} = {value:g}")
        return self._stops.get(report.trial) or Continue()

    def ended(self, trial: TrialId) -> None:
        frozen = self._trials.get_trial(self._ids[trial])
        if frozen.last_step is None:
            self._trials.set_trial_state_values(self._ids[trial], TrialState.FAIL)
            return
        state = TrialState.PRUNED if trial in self._stops else TrialState.COMPLETE
        self._trials.set_trial_state_values(self._ids[trial], state, [frozen.intermediate_values[frozen.last_step]])

    def _prunes(self, trial_id: int) -> bool:
        with quiet():
            return self._pruner.prune(self._study, self._trials.get_trial(trial_id))


def _next_look(pruner: BasePruner, step: int) -> int | None:
    """Return the first step after `step` whose value the pruner wants to know."""
    match pruner:
        case NopPruner():
            return None
        case SuccessiveHalvingPruner(_min_resource=int(first), _reduction_factor=factor, _min_early_stopping_rate=rate):
            return _next_rung(first * factor**rate, factor, step)
        case HyperbandPruner(_min_resource=first, _max_resource=int(), _reduction_factor=factor):
            return _next_rung(first, factor, step)  # of its brackets, taken together
        case ThresholdPruner(_n_warmup_steps=first, _interval_steps=interval):
            return max(first, first + ((step - first) // interval + 1) * interval)
        case _:
            return step + 1


def _next_rung(first: int, factor: int, step: int) -> int:
    rung = first
    while rung <= step:
        rung *= factor
    return rung
