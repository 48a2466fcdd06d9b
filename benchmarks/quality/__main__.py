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

from benchmarks.measuring.tables import README, describe_setup, format_table, write_section
from benchmarks.quality.optuna_alone import OPTUNA
from benchmarks.quality.ours import OURS
from benchmarks.quality.picture import Panel, Point, draw_panels
from benchmarks.quality.problems import Problem, functions_and_digits, lcbench
from benchmarks.quality.ray_tune import ray_tuners
from benchmarks.quality.regret import Trajectory, quartiles, trajectory
from benchmarks.quality.simulation import Tuner, simulate

_SLOTS = 4
_BUDGETS = (5, 15)
"""In complete trainings, of average seconds."""
_TASKS = ("167168", "189906")
_PICTURE = README.parents[1] / "docs" / "quality.svg"
_POINTS, _FIRST = 80, 2.0
_PICTURED = (
    "ours: OptunaSearch, ASHA promotion",
    "Optuna: TPE, MedianPruner",
    "Ray: OptunaSearch, ASHAScheduler",
    "ours: random, Hyperband",
    "ours: no search or scheduler named",
)

Problems = Mapping[str, Problem]
Tuners = Mapping[str, Callable[[Problem, int], Tuner]]
Trajectories = Mapping[str, Sequence[Trajectory]]


def _run_searches(problem: Problem, tuners: Tuners, seeds: int) -> Trajectories:
    """Return what each search found with each seed."""
    trajectories: dict[str, Sequence[Trajectory]] = {}
    for name, begin in tuners.items():
        start = time.process_time()
        seconds = _BUDGETS[-1] * problem.full_seconds
        trajectories[name] = [
            trajectory(simulate(begin(problem, seed), problem, seed, _SLOTS, seconds)) for seed in range(seeds)
        ]
        spent = time.process_time() - start
        print(f"{problem.name}, {name}: {spent:.1f} CPU s", file=sys.stderr, flush=True)
    return trajectories


def _least(problem: Problem, trajectories: Trajectories) -> float:
    if problem.least is not None:
        return problem.least
    return min(final for runs in trajectories.values() for run in runs for _, final in run)


def _tables(problems: Problems, trajectories: Mapping[str, Trajectories], names: Sequence[str]) -> Iterator[str]:
    for budget in _BUDGETS:
        columns = [_column(problem, trajectories[name], budget) for name, problem in problems.items()]
        rows = [[name, *(column[name] for column in columns)] for name in names]
        title = f"**Regret after the seconds of {budget} trainings to the end**: median (quartiles)"
        yield f"{title}\n\n{format_table(['', *(problem.title for problem in problems.values())], rows)}"


def _column(problem: Problem, trajectories: Trajectories, budget: int) -> Mapping[str, str]:
    """Return the cells of a problem; the least median is bold."""
    least = _least(problem, trajectories)
    reached = {name: quartiles(runs, budget * problem.full_seconds, least) for name, runs in trajectories.items()}
    best = min(regrets[1] for regrets in reached.values() if regrets)
    return {name: _cell(regrets, best) for name, regrets in reached.items()}


def _cell(regrets: tuple[float, float, float] | None, best: float) -> str:
    if regrets is None:
        return ""
    low, middle, high = (f"{regret:#.3g}" if regret else "0" for regret in regrets)
    return f"{f'**{middle}**' if regrets[1] == best else middle} ({low} to {high})"


def _panel(problem: Problem, trajectories: Trajectories) -> Panel:
    ratio = (_BUDGETS[-1] / _FIRST) ** (1 / (_POINTS - 1))
    shares = [_FIRST * ratio**point for point in range(_POINTS)]
    least = _least(problem, trajectories)
    pictured = [name for name in _PICTURED if name in trajectories]
    bands = {name: list(_band(trajectories[name], problem, shares, least)) for name in pictured}
    return Panel(problem.title, bands, problem.full_seconds)


def _band(runs: Sequence[Trajectory], problem: Problem, shares: Sequence[float], least: float) -> Iterator[Point]:
    for share in shares:
        reached = quartiles(runs, share * problem.full_seconds, least)
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
    args = parser.parse_args()
    if args.write and not args.peers:
        parser.error("--write: expected --peers, too: without Ray the tables would lose their rows")
    return args


def _main() -> None:
    args = _arguments()
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tasks = [lcbench(args.yahpo / "lcbench", task) for task in _TASKS] if args.yahpo else []
    problems = {problem.name: problem for problem in (*functions_and_digits(), *tasks)}
    problems = {name: problem for name, problem in problems.items() if name in (args.only or problems)}
    with ExitStack() as stack:
        tuners: Tuners = {**OURS, **OPTUNA, **(stack.enter_context(ray_tuners(args.peers)) if args.peers else {})}
        names = [name for name in tuners if any(part in name for part in args.searches or [name])]
        tuners = {name: tuners[name] for name in names}
        trajectories = {name: _run_searches(problem, tuners, args.seeds) for name, problem in problems.items()}
    note = f"{args.seeds} seeds, {_SLOTS} trials at a time. {describe_setup('optuna', 'numpy')}"
    text = "\n\n".join([*_tables(problems, trajectories, names), note])
    print(text)
    if args.write:
        panels = [_panel(problem, trajectories[name]) for name, problem in problems.items()]
        _PICTURE.write_text(draw_panels(panels) + "\n")
        write_section("quality", text)


if __name__ == "__main__":
    _main()
