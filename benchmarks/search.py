"""The regret of searches on test functions, and the cost of each proposal and of a resume (acceptance 2).

    python -m benchmarks.search [--write] [--seeds 20]

`tests/integrations/optuna/test_search.py` and `tests/core/schedulers/test_pbt.py` hold the results to their limits.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from statistics import median, quantiles

import optuna

from benchmarks.measuring.tables import circumstances, table, write
from prefect_tune.core.schedulers.base import FIFO, Scheduler
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.domains import uniform
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import UNLIMITED, RandomSearch
from prefect_tune.core.values import StepReport
from prefect_tune.integrations.optuna import OptunaSearch
from tests.core.schedulers.test_pbt import train_toy_population
from tests.fakes.searches.functions import BRANIN, HARTMANN, Problem, Regret, regret

TRIALS = 100
RECALLED = 1000
LIMITS = {"Branin": 0.05, "Hartmann6": 0.30}
TOY_LIMIT = 1.19
Run = Callable[[Problem, int], Regret]


def _ours(search: Search) -> Run:
    return lambda problem, seed: regret(search, problem, seed, TRIALS)


def _optunas(problem: Problem, seed: int) -> Regret:
    """Optuna's own TPE, driven the same way, by `ask` and `tell`."""
    best, spent, begun = math.inf, 0.0, time.process_time()
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    for _ in range(TRIALS):
        trial = study.ask()
        config = {name: trial.suggest_float(name, *problem.ends(name)) for name in problem.space}
        spent += time.process_time() - begun
        loss = problem.function(config)
        best, begun = min(best, loss), time.process_time()
        study.tell(trial, loss)
    return Regret(best - problem.least, spent + time.process_time() - begun)


def _row(name: str, run: Run, seeds: int, limits: Mapping[str, float]) -> list[str]:
    cells = [name]
    for problem in (BRANIN, HARTMANN):
        found = [run(problem, seed) for seed in range(seeds)]
        values = [each.value for each in found]
        low, middle, high = quantiles(values, n=4)
        limit = limits.get(problem.name)
        met = "" if limit is None else f" (≤ {limit:.2f}: {'yes' if middle <= limit else '**no**'})"
        cost = sum(each.cpu_seconds for each in found) / seeds / TRIALS * 1000
        cells += [f"{middle:.3f}{met}", f"{low:.3f} to {high:.3f}", f"{cost:.1f}"]
    return cells


def _recalled(name: str, search: Search) -> list[str]:
    """CPU seconds to recall a thousand trials, and to propose the next."""
    proposals = search.begin(HARTMANN.space, Objective(metrics=("loss",), modes=("min",)), 0)
    begun = time.process_time()
    for number in range(RECALLED):
        config = {name: number * (place + 1) / RECALLED % 1 for place, name in enumerate(HARTMANN.space)}
        proposals.restore_trial(number, config)
        proposals.on_trial_ended(number, StepReport(step=1, metrics={"loss": HARTMANN.function(config)}), failed=False)
    recalled = time.process_time()
    proposals.suggest(RECALLED)
    return [name, f"{recalled - begun:.2f}", f"{time.process_time() - recalled:.3f}"]


def _regrets(seeds: int) -> str:
    rows = [
        _row("random (`RandomSearch`)", _ours(RandomSearch(TRIALS)), seeds, {}),
        _row("TPE (`OptunaSearch`)", _ours(OptunaSearch(None, TRIALS)), seeds, LIMITS),
        _row("TPE, Optuna alone", _optunas, seeds, {}),
    ]
    columns = ("median regret", "quartiles", "CPU ms per trial")
    return table(["search", *(f"{name}: {column}" for name in LIMITS for column in columns)], rows)


def _resumes() -> str:
    names = ("TPESampler", "CmaEsSampler", "NSGAIISampler", "QMCSampler")
    searches: dict[str, Search] = {"RandomSearch": RandomSearch(UNLIMITED)}
    searches |= {name: OptunaSearch(getattr(optuna.samplers, name)(), UNLIMITED) for name in names}
    rows = [_recalled(f"`{name}`", search) for name, search in searches.items()]
    return table(["search", f"CPU s to recall {RECALLED:,} trials", "CPU s to propose the next"], rows)


def _toys(seeds: int) -> str:
    pbt = PBT(4, {"h0": uniform(0, 1), "h1": uniform(0, 1)})
    rows = [_toy("no exploiting (`FIFO`)", FIFO(), seeds), _toy("`PBT`", pbt, seeds, TOY_LIMIT)]
    return table(["PBT's toy: the best of two workers, of 1.2", "median", "worst"], rows)


def _toy(name: str, scheduler: Scheduler, seeds: int, limit: float | None = None) -> list[str]:
    found = [train_toy_population(scheduler, slots=2, seed=seed) for seed in range(seeds)]
    met = "" if limit is None else f" (≥ {limit}: {'yes' if min(found) >= limit else '**no**'})"
    return [name, f"{median(found):.4f}", f"{min(found):.4f}{met}"]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--seeds", type=int, default=20)
    asked = parser.parse_args()
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for package in ("cmaes", "scipy.stats.qmc"):  # which a sampler imports when it is first used
        import_module(package)
    note = f"{TRIALS} trials one after another, {asked.seeds} seeds. {circumstances('optuna', 'numpy')}"
    text = f"{_regrets(asked.seeds)}\n\n{_toys(asked.seeds)}\n\n{_resumes()}\n\n{note}"
    print(text)
    if asked.write:
        write("search", text)


if __name__ == "__main__":
    _main()
