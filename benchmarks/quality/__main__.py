"""The quality of the configurations that searches find for their training time: ours, Optuna's and Ray Tune's.

    python -m benchmarks.quality [--peers PYTHON] [--yahpo FOLDER] [--write] [--seeds 30] [--only digits ...]

PYTHON is an interpreter with `ray[tune]` and Optuna, of which the searcher and the scheduler themselves are asked
(`ray_worker.py` says how); FOLDER is a copy of the repository `slds-lmu/yahpo_data`, and its surrogates need
`onnxruntime`. Without them, what needs them is left out; `--write` needs PYTHON. Nothing is trained: the clock is
virtual, four trials run at a time, and the same seeds give the same figures.

The regret of a search is the final loss of its incumbent, less the least final loss there is (where that is not known:
the least that any search of any seed had as its incumbent). The incumbent is the trial with the best loss among those
that have trained the furthest (`regret.py`). Seconds of training count in all slots, from the start, idle or not.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import optuna

from benchmarks.measuring.tables import README, circumstances, table, write
from benchmarks.quality.optuna_alone import OPTUNA
from benchmarks.quality.ours import OURS
from benchmarks.quality.picture import Panel, Point, drawn
from benchmarks.quality.problems import Problem, functions_and_digits, lcbench
from benchmarks.quality.ray_tune import ray_tuners
from benchmarks.quality.regret import Trajectory, quartiles, trajectory
from benchmarks.quality.simulation import Tuner, simulated

_SLOTS = 4
_BUDGETS = (5, 15)
"""In complete trainings, of average seconds."""
_TASKS = ("167168", "189906")
_PICTURE = README.parents[1] / "docs" / "quality.svg"
_POINTS, _FIRST = 80, 2.0
_SHOWN = (
    "ours: OptunaSearch, ASHA promotion",
    "Optuna: TPE, MedianPruner",
    "Ray: OptunaSearch, ASHAScheduler",
    "ours: random, Hyperband",
    "ours: no search or scheduler named",
)

Tuners = Mapping[str, Callable[[Problem, int], Tuner]]
Found = Mapping[str, Sequence[Trajectory]]


def _found(problem: Problem, tuners: Tuners, seeds: int) -> Found:
    """Return what each search found with each seed."""
    found: dict[str, Sequence[Trajectory]] = {}
    for name, begin in tuners.items():
        begun = time.process_time()
        seconds = _BUDGETS[-1] * problem.full_seconds
        found[name] = [
            trajectory(simulated(begin(problem, seed), problem, seed, _SLOTS, seconds)) for seed in range(seeds)
        ]
        spent = time.process_time() - begun
        print(f"{problem.name}, {name}: {spent:.1f} CPU s", file=sys.stderr, flush=True)
    return found


def _least(problem: Problem, found: Found) -> float:
    if problem.least is not None:
        return problem.least
    return min(final for each in found.values() for one in each for _, final in one)


def _tables(problems: Mapping[str, Problem], found: Mapping[str, Found], names: Sequence[str]) -> Iterator[str]:
    for budget in _BUDGETS:
        columns = [_column(problems[problem], found[problem], budget) for problem in problems]
        rows = [[name, *(column[name] for column in columns)] for name in names]
        title = f"**Regret after the seconds of {budget} trainings to the end**: median (quartiles)"
        yield f"{title}\n\n{table(['', *(each.title for each in problems.values())], rows)}"


def _column(problem: Problem, found: Found, budget: int) -> Mapping[str, str]:
    """Return the cells of a problem; the least median is bold."""
    least = _least(problem, found)
    reached = {name: quartiles(each, budget * problem.full_seconds, least) for name, each in found.items()}
    best = min(each[1] for each in reached.values() if each)
    return {name: _cell(each, best) for name, each in reached.items()}


def _cell(found: tuple[float, float, float] | None, best: float) -> str:
    if found is None:
        return ""
    low, middle, high = (f"{each:#.3g}" if each else "0" for each in found)
    return f"{f'**{middle}**' if found[1] == best else middle} ({low} to {high})"


def _panel(problem: Problem, found: Found) -> Panel:
    ratio = (_BUDGETS[-1] / _FIRST) ** (1 / (_POINTS - 1))
    shares = [_FIRST * ratio**point for point in range(_POINTS)]
    least = _least(problem, found)
    bands = {name: list(_band(found[name], problem, shares, least)) for name in _SHOWN if name in found}
    return Panel(problem.title, bands, problem.full_seconds)


def _band(found: Sequence[Trajectory], problem: Problem, shares: Sequence[float], least: float) -> Iterator[Point]:
    for share in shares:
        reached = quartiles(found, share * problem.full_seconds, least)
        if reached is not None:
            yield share, reached


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has Ray and Optuna")
    parser.add_argument("--yahpo", metavar="FOLDER", type=Path, help="a copy of the repository yahpo_data")
    parser.add_argument(
        "--write", action="store_true", help="put the tables into benchmarks/README.md, and the picture"
    )
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--only", nargs="+", metavar="PROBLEM", help="such as digits, hartmann3, branin")
    parser.add_argument("--searches", nargs="+", metavar="NAME", help="parts of the names of searches")
    asked = parser.parse_args()
    if asked.write and not asked.peers:
        parser.error("--write: expected --peers, too: without Ray the tables would lose their rows")
    return asked


def _main() -> None:
    asked = _arguments()
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tasks = [lcbench(asked.yahpo / "lcbench", task) for task in _TASKS] if asked.yahpo else []
    problems = {
        each.name: each for each in (*functions_and_digits(), *tasks) if each.name in (asked.only or [each.name])
    }
    with ExitStack() as stack:
        tuners: Tuners = {**OURS, **OPTUNA, **(stack.enter_context(ray_tuners(asked.peers)) if asked.peers else {})}
        tuners = {name: each for name, each in tuners.items() if any(part in name for part in asked.searches or [name])}
        found = {name: _found(each, tuners, asked.seeds) for name, each in problems.items()}
    note = f"{asked.seeds} seeds, {_SLOTS} trials at a time. {circumstances('optuna', 'numpy')}"
    text = "\n\n".join([*_tables(problems, found, list(tuners)), note])
    print(text)
    if asked.write:
        _PICTURE.write_text(drawn([_panel(each, found[name]) for name, each in problems.items()]) + "\n")
        write("quality", text)


if __name__ == "__main__":
    _main()
