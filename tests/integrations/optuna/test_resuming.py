"""40 seeded trials equal 20 + 20 and 8 * 5 trials, for every sampler, also if Optuna itself differs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna import samplers
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import FrozenTrial

from prefect_tune.core.search.domains import (
    choice,
    lograndint,
    loguniform,
    qloguniform,
    quniform,
    randint,
    randn,
    sample_from,
    uniform,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.integrations.optuna import OptunaSearch
from tests.integrations.optuna.experiments import LOSS, LOSS_AND_SCORE, Experiment
from tests.long_cases import long_after

pytestmark = pytest.mark.filterwarnings(
    "ignore::optuna.exceptions.ExperimentalWarning"
)  # half of Optuna is experimental

NUMBERS = {"x": uniform(-1, 2), "y": loguniform(1e-3, 1), "n": randint(0, 20), "q": quniform(0.1, 0.9, 0.1)}
FINITE = {"a": choice([1, 2, 3, 4]), "b": randint(0, 5), "c": quniform(0, 1, 0.5)}
CONDITIONAL = {
    "lr": loguniform(1e-4, 1),
    "model": choice(
        [
            {"kind": "mlp", "depth": randint(1, 5), "drop": choice([0, uniform(0, 0.5)])},
            {"kind": "cnn", "width": lograndint(8, 65), "noise": randn(0, 1)},
        ]
    ),
    "size": qloguniform(1, 4, 0.5),
    "twice": sample_from(lambda config: 2 * config["lr"]),
    "optimizer": choice(["adam", "sgd", None], weights=[2, 1, 0]),
    "fixed": 3,
}


class RunningSampler(samplers.BaseSampler):
    """A sampler of a user: three random generators, an attribute of the study, and state in memory."""

    def __init__(self) -> None:
        self.generators: list[Any] = [random.Random(), np.random.default_rng(), np.random.RandomState()]
        self.call_count = 0

    def infer_relative_search_space(self, *_: object) -> dict[str, BaseDistribution]:
        return {"x": FloatDistribution(-1, 2)}

    def sample_relative(self, study: optuna.Study, *_: object) -> dict[str, Any]:
        count = study._storage.get_study_system_attrs(study._study_id).get("count", 0)
        study._storage.set_study_system_attr(study._study_id, "count", count + 1)
        return {"x": -1 + count * 0.01 + self.generators[0].random() * 0.01}

    def sample_independent(self, _study: object, _trial: object, name: str, domain: Any) -> Any:
        self.call_count += 1
        shift = sum(generator.random() for generator in self.generators[1:]) / 2
        middle = domain.low + shift * (domain.high - domain.low) / self.call_count
        return int(middle) if name == "n" else round(middle, 1) if name == "q" else middle

    def after_trial(self, *_: object) -> None:
        self.call_count += 1


def make_nsga2(crossover: samplers.nsgaii.BaseCrossover) -> samplers.NSGAIISampler:
    return samplers.NSGAIISampler(population_size=6, crossover=crossover)


Case = tuple[Callable[[], samplers.BaseSampler | None], Mapping[str, object], Objective]
CASES: dict[str, Case] = {
    "TPE": (lambda: None, CONDITIONAL, LOSS),
    "TPE, grouped": (lambda: samplers.TPESampler(multivariate=True, group=True), CONDITIONAL, LOSS),
    "TPE, each parameter for itself": (lambda: samplers.TPESampler(multivariate=False), CONDITIONAL, LOSS),
    "TPE without a liar": (lambda: samplers.TPESampler(constant_liar=False, seed=3), NUMBERS, LOSS),
    "TPE, two metrics": (lambda: None, CONDITIONAL, LOSS_AND_SCORE),
    "random": (samplers.RandomSampler, CONDITIONAL, LOSS),
    "Sobol": (lambda: samplers.QMCSampler(scramble=True, warn_asynchronous_seeding=False), NUMBERS, LOSS),
    "Halton": (lambda: samplers.QMCSampler(qmc_type="halton"), CONDITIONAL, LOSS),
    "CMA-ES": (lambda: samplers.CmaEsSampler(popsize=5), NUMBERS, LOSS),
    "CMA-ES, some parameters for themselves": (
        lambda: samplers.CmaEsSampler(popsize=4, independent_sampler=samplers.TPESampler()),
        CONDITIONAL,
        LOSS,
    ),
    "CMA-ES, separable": (lambda: samplers.CmaEsSampler(popsize=5, use_separable_cma=True), NUMBERS, LOSS),
    "CMA-ES with margin": (lambda: samplers.CmaEsSampler(popsize=5, with_margin=True), NUMBERS, LOSS),
    "CMA-ES, pruned ones too": (
        lambda: samplers.CmaEsSampler(popsize=5, consider_pruned_trials=True, lr_adapt=True),
        NUMBERS,
        LOSS,
    ),
    "NSGA-II": (lambda: samplers.NSGAIISampler(population_size=6), CONDITIONAL, LOSS_AND_SCORE),
    "NSGA-II, simulated binary": (lambda: make_nsga2(samplers.nsgaii.SBXCrossover()), NUMBERS, LOSS),
    "NSGA-II, unimodal": (lambda: make_nsga2(samplers.nsgaii.UNDXCrossover()), NUMBERS, LOSS_AND_SCORE),
    "NSGA-III": (lambda: samplers.NSGAIIISampler(population_size=6), CONDITIONAL, LOSS_AND_SCORE),
    "some parameters fixed": (
        lambda: samplers.PartialFixedSampler({"optimizer": "sgd"}, samplers.TPESampler()),
        CONDITIONAL,
        LOSS,
    ),
    "some fixed for CMA-ES": (
        lambda: samplers.PartialFixedSampler({"y": 0.5}, samplers.CmaEsSampler(popsize=4)),
        NUMBERS,
        LOSS,
    ),
    "grid": (lambda: samplers.GridSampler({"a": [1, 2, 3, 4], "b": [0, 1, 2, 3, 4], "c": [0, 0.5, 1]}), FINITE, LOSS),
    "brute force": (samplers.BruteForceSampler, FINITE, LOSS),
    "a user's own": (RunningSampler, NUMBERS, LOSS),
}
GAUSS: dict[str, Case] = {
    "Gaussian process": (lambda: samplers.GPSampler(n_startup_trials=5), CONDITIONAL, LOSS),
    "Gaussian process, two metrics": (lambda: samplers.GPSampler(n_startup_trials=5), NUMBERS, LOSS_AND_SCORE),
}


def make_experiment(case: Case) -> Experiment:
    make, space, objective = case
    constraints = ["size"] if objective == LOSS_AND_SCORE else None
    return Experiment(OptunaSearch(make(), 40, constraints=constraints), space, objective)


@pytest.mark.parametrize("case", long_after(1, [(case,) for case in CASES.values()]), ids=CASES)
def test_forty_trials_are_twenty_and_twenty_and_eight_times_five(case: Case) -> None:
    whole = make_experiment(case).run(40)
    assert len(whole) == 40
    assert make_experiment(case).run(40, sessions=2) == whole
    assert make_experiment(case).run(40, sessions=8) == whole


@pytest.mark.deep
@pytest.mark.parametrize("case", GAUSS.values(), ids=GAUSS)
def test_forty_trials_of_a_gaussian_process_are_twenty_and_twenty_too(case: Case) -> None:
    pytest.importorskip("torch")
    whole = make_experiment(case).run(40)
    assert make_experiment(case).run(40, sessions=2) == whole
    assert make_experiment(case).run(40, sessions=8) == whole


def test_no_two_trials_share_their_chance() -> None:
    assert len({config["lr"] for config in make_experiment(CASES["random"]).run(40)}) == 40


@pytest.mark.parametrize("name", ["TPE", "CMA-ES", "NSGA-II", "NSGA-III", "some fixed for CMA-ES"])
def test_what_is_proposed_follows_from_what_was_reported(name: str) -> None:
    make, space, objective = CASES[name]
    opposite = Objective(metrics=objective.metrics, modes=("max", *objective.modes[1:]))
    assert make_experiment(CASES[name]).run(40) != make_experiment((make, space, opposite)).run(40)


ROOT = Path(__file__).resolve().parents[3]
PROPOSING = """
from tests.integrations.optuna.test_resuming import CASES, make_experiment
for name in ("TPE, grouped", "NSGA-III", "Sobol"):
    print(make_experiment(CASES[name]).run(40))
"""


@pytest.mark.long
def test_another_process_proposes_the_same() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROPOSING],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
            text=True,
            timeout=100,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_optuna_itself_differs_after_a_resume() -> None:
    def run_study(trials: list[FrozenTrial], count: int) -> list[FrozenTrial]:
        study = optuna.create_study(sampler=samplers.TPESampler(seed=7))
        study.add_trials(trials)
        study.optimize(lambda trial: (trial.suggest_float("x", -1, 2) - 0.5) ** 2, n_trials=count)
        return study.trials

    whole, resumed = run_study([], 40), run_study(run_study([], 20), 20)
    assert [trial.params for trial in whole[:20]] == [trial.params for trial in resumed[:20]]
    assert [trial.params for trial in whole[20:]] != [trial.params for trial in resumed[20:]]
