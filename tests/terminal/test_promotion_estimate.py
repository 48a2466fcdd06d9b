"""The estimated training left in a promotion search equals what its scheduler then requests."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from prefect_tune.core.models import StepReport
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import Continue, Pause, TrialReport
from prefect_tune.core.schedulers.fifo import FIFO
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.objective import Objective
from prefect_tune.terminal.time_left import Promotions, TrialStanding, promotions_of, resumes_paused

LOSS = Objective(metrics=("loss",), modes=("min",))
NINE = Promotions(rungs=(1, 3, 9), reduction_factor=3, most=27)


def standing(*steps: int, ended: int = 0) -> list[TrialStanding]:
    """Trials at these steps, of which the last ones have ended."""
    return [TrialStanding(step, is_ended=place >= len(steps) - ended) for place, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("standings", "steps", "starts"),
    [
        (standing(), 9 * 1 + 4 * 2 + 2 * 6 + 1 * 18, 9 + 4 + 2 + 1),
        (standing(1, 1, 1, 1), 5 * 1 + 4 * 2 + 2 * 6 + 18, 5 + 4 + 2 + 1),
        (standing(*[1] * 9), 4 * 2 + 2 * 6 + 18, 4 + 2 + 1),
        (standing(*[1] * 6, 2, 3, 3), 2 + 1 + 2 * 6 + 18, 1 + 2 + 1),
        (standing(*[1] * 5, 3, 3, 4, 20), 5 + 7, 0),
        (standing(*[1] * 9, 27, ended=10), 0, 0),
        (standing(*[1] * 3, 3, 3, 3, 3, 3, 9, 9, 9), 18, 1),  # more were promoted than are expected
        (standing(*[0] * 9, ended=9), 0, 0),
        (standing(1, *[0] * 8, ended=8), 2 + 6 + 18, 3),  # it is promoted although the others errored
    ],
)
def test_the_steps_and_starts_that_are_left(standings: list[TrialStanding], steps: int, starts: int) -> None:
    assert NINE.left(9, standings) == (steps, starts)


@pytest.mark.parametrize(
    ("standings", "steps"),
    [
        (standing(), 0),
        (standing(1, 1), 26),
        (standing(1, 12, 27, ended=1), 15),
        (standing(1, 1, 27, ended=1), 0),
        (standing(2, 81), 1),  # the search was resumed with a lower end
        (standing(81), 0),
    ],
)
def test_the_steps_of_the_trial_that_trains_longest(standings: list[TrialStanding], steps: int) -> None:
    assert NINE.alone(standings) == steps


@pytest.mark.parametrize(
    ("trials", "max_t", "factor"), [(9, 27, 3), (40, 27, 3), (200, 81, 3), (64, 64, 4), (30, 16, 2)]
)
def test_the_scheduler_asks_for_as_many_steps_on_average(trials: int, max_t: int, factor: int) -> None:
    asha = ASHA(max_t=max_t, reduction_factor=factor, variant="promotion")
    promotions = promotions_of(asha, None)
    assert promotions is not None
    first, half = [], []
    for seed in range(20):
        draw = random.Random(seed)
        trained, estimates = _simulated(asha, promotions, [draw.random() for _ in range(trials)])
        errors = [(at + left - trained) / trained for at, left in estimates]
        first.append(errors[0])
        half.append(errors[len(errors) // 2])
    assert abs(fmean(first)) < 0.25
    assert abs(fmean(half)) < 0.25


def _simulated(asha: ASHA, promotions: Promotions, losses: list[float]) -> tuple[int, list[tuple[int, int]]]:
    """Train one trial after the other; return all steps, and the steps and the estimate at each decision."""
    schedule, steps, ended = asha.begin(LOSS, 0), dict.fromkeys(range(0), 0), set[int]()
    estimates = []
    while True:
        while (stopped := schedule.stop_next()) is not None:
            schedule.ended(stopped[0])
            ended.add(int(stopped[0]))
        if (resumed := schedule.resume_next()) is not None:
            schedule.resumed(resumed)
            trial = int(resumed)
        elif len(steps) < len(losses):
            trial = len(steps)
            steps[trial] = 0
            schedule.added(str(trial), {})
        else:
            return sum(steps.values()), estimates
        decision: object = Continue()
        while isinstance(decision, Continue):
            steps[trial] = schedule.milestone(str(trial), steps[trial]) or 0
            report = StepReport(step=steps[trial], metrics={"loss": losses[trial]})
            decision = schedule.decide(TrialReport(str(trial), report))
        if not isinstance(decision, Pause):
            schedule.ended(str(trial))
            ended.add(trial)
        if len(steps) == len(losses):
            schedule.exhausted()
        standings = [TrialStanding(step, trial in ended) for trial, step in steps.items()]
        estimates.append((sum(steps.values()), promotions.left(len(losses), standings)[0]))


def test_a_population_resumes_all_whom_it_pauses_and_rungs_do_not() -> None:
    assert resumes_paused(PBT(4, {"lr": [0.1, 0.2]}))
    assert not any(map(resumes_paused, (ASHA(max_t=27, variant="promotion"), Hyperband(max_t=27), None)))


def test_only_a_single_ladder_of_asha_says_how_many_are_promoted() -> None:
    assert promotions_of(ASHA(max_t=27, variant="promotion"), 20) == Promotions((1, 3, 9), 3, 20)
    assert promotions_of(ASHA(max_t=27, variant="promotion", brackets=2), None) is None
    assert promotions_of(ASHA(max_t=27), None) is None
    assert promotions_of(Hyperband(max_t=27), None) is None
    assert promotions_of(FIFO(), None) is None
    assert promotions_of(None, None) is None
