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

from benchmarks.measuring.tables import describe_setup, format_table, publish_section
from prefect_tune.core.schedulers.base import FIFO, Scheduler
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.domains import uniform
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import UNLIMITED, RandomSearch
from prefect_tune.core.values import StepReport
from prefect_tune.integrations.optuna import OptunaSearch
from tests.core.schedulers.test_pbt import train_toy_population
from tests.fakes.searches.functions import BRANIN, HARTMANN, Problem, Regret, measure_regret

TRIALS = 100
RECALL_COUNT = 1000
LIMITS = {"Branin": 0.05, "Hartmann6": 0.30}
TOY_LIMIT = 1.19
Run = Callable[[Problem, int], Regret]


def _ours(search: Search) -> Run:
    return lambda problem, seed: measure_regret(search, problem, seed, TRIALS)


def _run_optuna(problem: Problem, seed: int) -> Regret:
    """Optuna's own TPE, driven the same way, by `ask` and `tell`."""
    best, seconds, start = math.inf, 0.0, time.process_time()
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    for _ in range(TRIALS):
        trial = study.ask()
        config = {name: trial.suggest_float(name, *problem.bounds(name)) for name in problem.space}
        seconds += time.process_time() - start
        loss = problem.function(config)
        best, start = min(best, loss), time.process_time()
        study.tell(trial, loss)
    return Regret(best - problem.minimum, seconds + time.process_time() - start)


def _row(name: str, run: Run, seeds: int, limits: Mapping[str, float]) -> list[str]:
    cells = [name]
    for problem in (BRANIN, HARTMANN):
        regrets = [run(problem, seed) for seed in range(seeds)]
        values = [regret.value for regret in regrets]
        low, middle, high = quantiles(values, n=4)
        limit = limits.get(problem.name)
        met = "" if limit is None else f" (≤ {limit:.2f}: {'yes' if middle <= limit else '**no**'})"
        cost = sum(regret.cpu_seconds for regret in regrets) / seeds / TRIALS * 1000
        cells += [f"{middle:.3f}{met}", f"{low:.3f} to {high:.3f}", f"{cost:.1f}"]
    return cells


def _measure_recall(name: str, search: Search) -> list[str]:
    """CPU seconds to recall a thousand trials, and to propose the next."""
    proposals = search.begin(HARTMANN.space, Objective(metrics=("loss",), modes=("min",)), 0)
    start = time.process_time()
    for number in range(RECALL_COUNT):
        config = {name: number * (index + 1) / RECALL_COUNT % 1 for index, name in enumerate(HARTMANN.space)}
        proposals.restore_trial(number, config)
        proposals.on_trial_ended(number, StepReport(step=1, metrics={"loss": HARTMANN.function(config)}), failed=False)
    recalled_at = time.process_time()
    proposals.suggest(RECALL_COUNT)
    return [name, f"{recalled_at - start:.2f}", f"{time.process_time() - recalled_at:.3f}"]


def _regrets(seeds: int) -> str:
    rows = [
        _row("random (`RandomSearch`)", _ours(RandomSearch(TRIALS)), seeds, {}),
        _row("TPE (`OptunaSearch`)", _ours(OptunaSearch(None, TRIALS)), seeds, LIMITS),
        _row("TPE, Optuna alone", _run_optuna, seeds, {}),
    ]
    columns = ("median regret", "quartiles", "CPU ms per trial")
    return format_table(["search", *(f"{name}: {column}" for name in LIMITS for column in columns)], rows)


def _resumes() -> str:
    names = ("TPESampler", "CmaEsSampler", "NSGAIISampler", "QMCSampler")
    searches: dict[str, Search] = {"RandomSearch": RandomSearch(UNLIMITED)}
    searches |= {name: OptunaSearch(getattr(optuna.samplers, name)(), UNLIMITED) for name in names}
    rows = [_measure_recall(f"`{name}`", search) for name, search in searches.items()]
    return format_table(["search", f"CPU s to recall {RECALL_COUNT:,} trials", "CPU s to propose the next"], rows)


def _toys(seeds: int) -> str:
    pbt = PBT(4, {"h0": uniform(0, 1), "h1": uniform(0, 1)})
    rows = [_toy("no exploiting (`FIFO`)", FIFO(), seeds), _toy("`PBT`", pbt, seeds, TOY_LIMIT)]
    return format_table(["PBT's toy: the best of two workers, of 1.2", "median", "worst"], rows)


def _toy(name: str, scheduler: Scheduler, seeds: int, limit: float | None = None) -> list[str]:
    bests = [train_toy_population(scheduler, slots=2, seed=seed) for seed in range(seeds)]
    met = "" if limit is None else f" (≥ {limit}: {'yes' if min(bests) >= limit else '**no**'})"
    return [name, f"{median(bests):.4f}", f"{min(bests):.4f}{met}"]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for package in ("cmaes", "scipy.stats.qmc"):  # which a sampler imports when it is first used
        import_module(package)
    note = f"{TRIALS} trials one after another, {args.seeds} seeds. {describe_setup('optuna', 'numpy')}"
    text = f"{_regrets(args.seeds)}\n\n{_toys(args.seeds)}\n\n{_resumes()}\n\n{note}"
    publish_section("search", text, write=args.write)


if __name__ == "__main__":
    _main()
