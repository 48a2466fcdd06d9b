"""The benchmark of search quality: functions as in the literature, steps in virtual time, and incumbents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from benchmarks.quality.ours import OURS
from benchmarks.quality.problems import Curve, Problem, functions_and_digits
from benchmarks.quality.regret import quartiles, trajectory
from benchmarks.quality.simulation import Answer, Report, Start, simulated

PROBLEMS: Mapping[str, Problem] = {each.name: each for each in functions_and_digits()}
OPTIMA: Mapping[str, Sequence[float]] = {
    "hartmann3": (0.114614, 0.555649, 0.852547),
    "hartmann6": (0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573),
    "branin": (3.14159265, 2.275),
}


@pytest.mark.parametrize("name", OPTIMA)
def test_a_function_is_least_where_the_literature_says_and_misleads_before_the_last_step(name: str) -> None:
    problem = PROBLEMS[name]
    optimum = dict(zip(problem.parameters, OPTIMA[name], strict=True))
    curve = problem.train(optimum, 0)
    assert curve.losses[-1] == pytest.approx(problem.least, abs=1e-4)
    assert curve.losses[0] > curve.losses[-1] + 1e-3
    assert problem.train(optimum, 0) == curve


def test_a_recorded_configuration_trains_as_it_was_recorded() -> None:
    config = {"lr": 0.0038507289666094634, "width": 32, "depth": 3, "alpha": 1.6576302183788922e-05, "batch": 69}
    curve = PROBLEMS["digits"].train({**config, "act": "tanh", "solver": "adam"}, 0)
    assert (curve.losses[:2], curve.losses[-1]) == ([0.3384, 0.1347], 0.0269)


class InTurn:
    """Starts one trial after another, and pauses each after its first step until the next one has paused."""

    def __init__(self) -> None:
        self.paused: list[int] = []
        self.count = 0

    def start(self) -> Start:
        if len(self.paused) > 1:
            return Start(self.paused.pop(0), {})
        self.count += 1
        return Start(self.count - 1, {})

    def report(self, trial: int, step: int, loss: float) -> Answer:
        del loss
        if step == 1:
            self.paused.append(trial)
            return Answer.PAUSE
        return Answer.CONTINUE


def test_steps_take_their_time_in_every_slot_and_a_paused_trial_goes_on_where_it_was() -> None:
    problem = Problem("toy", "Toy", {}, 3, lambda *_: Curve([3.0, 2.0, 1.0], 2.0), 6.0, 1.0)
    reports = simulated(InTurn(), problem, seed=0, slots=1, seconds=10.0)
    assert [(each.seconds, each.trial, each.step) for each in reports] == [
        (2.0, 0, 1),
        (4.0, 1, 1),
        (6.0, 0, 2),
        (8.0, 0, 3),
        (10.0, 2, 1),
    ]
    assert [each.seconds for each in simulated(InTurn(), problem, seed=0, slots=2, seconds=8.0)] == [4.0, 4.0, 8.0, 8.0]


def test_the_incumbent_is_the_best_of_those_that_trained_the_furthest_and_counts_by_its_final_loss() -> None:
    def report(second: float, trial: int, step: int, loss: float) -> Report:
        return Report(second, trial, step, loss, final=float(trial))

    reports = [report(1, 7, 1, 0.1), report(2, 5, 1, 0.2), report(3, 5, 2, 0.9), report(4, 6, 2, 0.8)]
    found = trajectory(reports)
    assert found == [(1, 7.0), (3, 5.0), (4, 6.0)]
    assert quartiles([found], 3.5, least=1.0) == (4.0, 4.0, 4.0)
    assert quartiles([found], 0.5, least=1.0) is None
    assert quartiles([[(0, each)] for each in (1.0, 2.0, 3.0, 4.0, 5.0)], 1, least=0.0) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize("name", ["ours: random, Hyperband", "ours: OptunaSearch, ASHA promotion"])
def test_the_same_seed_finds_the_same(name: str) -> None:
    problem = PROBLEMS["branin"]
    once, again, other = (
        simulated(OURS[name](problem, seed), problem, seed, slots=4, seconds=4 * problem.full_seconds)
        for seed in (0, 0, 1)
    )
    assert once == again != other
    assert len({each.trial for each in once}) > 8
