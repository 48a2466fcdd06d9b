"""Optuna's own TPE and pruners as its users run them: trials report each step and ask whether to prune."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, SuccessiveHalvingPruner

from benchmarks.quality.problems import Parameter, Problem
from benchmarks.quality.simulation import Answer, Start, Tuner

__all__ = ["OPTUNA"]


class OptunaTuner:
    """`study.optimize(..., n_jobs=slots)`, of which the threads are the simulation's slots."""

    def __init__(self, pruner: BasePruner, problem: Problem, seed: int) -> None:
        self._study = optuna.create_study(
            study_name=f"quality-{seed}", sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner
        )
        self._distributions = {name: _distribution(parameter) for name, parameter in problem.parameters.items()}
        self._max_t = problem.max_t
        self._trials: list[optuna.Trial] = []

    def start(self) -> Start:
        trial = self._study.ask(self._distributions)
        self._trials.append(trial)
        return Start(len(self._trials) - 1, trial.params)

    def report(self, trial: int, step: int, loss: float) -> Answer:
        optuna_trial = self._trials[trial]
        optuna_trial.report(loss, step)
        if optuna_trial.should_prune():
            self._study.tell(optuna_trial, state=optuna.trial.TrialState.PRUNED)
            return Answer.STOP
        if step >= self._max_t:
            self._study.tell(optuna_trial, loss)
        return Answer.CONTINUE


def _distribution(parameter: Parameter) -> BaseDistribution:
    if parameter.options:
        return CategoricalDistribution(list(parameter.options))
    is_log = parameter.scale == "log"
    if parameter.is_whole:
        return IntDistribution(int(parameter.low), int(parameter.high), log=is_log)
    return FloatDistribution(parameter.low, parameter.high, log=is_log)


def _tuner(pruner: Callable[[int], BasePruner]) -> Callable[[Problem, int], Tuner]:
    return lambda problem, seed: OptunaTuner(pruner(problem.max_t), problem, seed)


OPTUNA: Mapping[str, Callable[[Problem, int], Tuner]] = {
    "Optuna: TPE, MedianPruner": _tuner(lambda _: MedianPruner()),
    "Optuna: TPE, SuccessiveHalvingPruner": _tuner(lambda _: SuccessiveHalvingPruner()),
    "Optuna: TPE, HyperbandPruner": _tuner(
        lambda max_t: HyperbandPruner(min_resource=1, max_resource=max_t, reduction_factor=3)
    ),
}
