"""ASHA with early stopping, like Ray's AsyncHyperBandScheduler."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers import asha
from prefect_tune.core.schedulers.base import Continue, Stop
from tests.core.schedulers.asking import ScheduleDriver

ASHA = partial(asha.ASHA, variant="stopping")


def test_the_first_at_a_rung_goes_on_a_worse_one_stops_and_an_equal_one_goes_on() -> None:
    driver = ScheduleDriver(ASHA(max_t=9), "a", "b", "c")
    assert driver.decide("a", 1, 0.5) == "continue"
    assert driver.decide("b", 1, 0.6) == "stop"
    assert driver.decide("c", 1, 0.5) == "continue"


def test_at_max_t_everybody_stops_however_good() -> None:
    driver = ScheduleDriver(ASHA(max_t=9), "a")
    assert driver.report("a", 9, 0.0) == Stop(reason=make_reason("step-limit", step=9, limit=9), early=False)
    assert driver.report("a", 12, 0.0) == Stop(reason=make_reason("step-limit", step=12, limit=9), early=False)
    assert driver.schedule.next_milestone("a", 9) == 10


def test_a_late_report_counts_at_the_highest_rung_that_it_has_passed_and_at_no_lower_one() -> None:
    driver = ScheduleDriver(ASHA(max_t=27), "late", "a", "b", "c")
    assert driver.decide("late", 5, 0.1) == "continue"
    assert driver.decide("a", 1, 0.9) == "continue"  # the first trial at rung 1
    assert driver.decide("b", 3, 0.2) == "stop"  # worse than "late" at rung 3
    assert driver.decide("c", 3, 0.05) == "continue"
    assert driver.schedule.next_milestone("late", 5) == 9


def test_steps_that_are_trained_again_are_not_asked_about_and_not_counted_twice() -> None:
    driver = ScheduleDriver(ASHA(max_t=27), "a", "b")
    driver.decide("a", 3, 0.5)
    assert driver.schedule.next_milestone("a", 0) == 9
    for step in (1, 2, 3, 8):
        assert driver.decide("a", step, 0.01) == "continue"
    assert driver.decide("b", 3, 0.4) == "continue"  # a counted 0.01 would have stopped it


def test_who_was_stopped_and_asks_again_is_stopped_again() -> None:
    driver = ScheduleDriver(ASHA(max_t=27), "a", "b")
    driver.decide("a", 1, 0.5)
    first = driver.report("b", 1, 0.6)
    assert isinstance(first, Stop)
    assert driver.report("b", 1, 0.1) == first


def test_who_is_added_again_after_its_end_goes_on_though_it_was_stopped() -> None:
    driver = ScheduleDriver(ASHA(max_t=27), "a", "b")
    driver.decide("a", 1, 0.5)
    assert driver.decide("b", 1, 0.6) == "stop"
    driver.end("b")
    driver.add("b")
    assert driver.decide("b", 2, 0.6) == "continue"
    assert driver.decide("b", 3, 0.6) == "continue"


def test_what_an_ended_trial_showed_is_still_compared_with() -> None:
    driver = ScheduleDriver(ASHA(max_t=27), "a", "b")
    driver.decide("a", 1, 0.5)
    driver.end("a")
    assert driver.decide("b", 1, 0.6) == "stop"


def test_brackets_begin_one_rung_higher_each_and_share_the_steps_as_in_hyperband() -> None:
    trials = [f"t{number}" for number in range(4_000)]
    driver = ScheduleDriver(ASHA(max_t=27, brackets=4), *trials, seed=3)
    first = Counter(driver.schedule.next_milestone(trial, 0) for trial in trials)
    weights = {1: 27 / 4, 3: 9 / 3, 9: 3 / 2, 27: 1 / 1}
    expected = {step: 4_000 * weight / sum(weights.values()) for step, weight in weights.items()}
    assert first == {step: pytest.approx(count, rel=0.15) for step, count in expected.items()}


def test_brackets_are_compared_apart() -> None:
    trials = [f"t{number}" for number in range(40)]
    driver = ScheduleDriver(ASHA(max_t=27, brackets=2), *trials)
    early = next(trial for trial in trials if driver.schedule.next_milestone(trial, 0) == 1)
    late = next(trial for trial in trials if driver.schedule.next_milestone(trial, 0) == 3)
    assert driver.decide(early, 3, 0.1) == "continue"
    assert driver.decide(late, 3, 0.9) == "continue"


def test_the_bracket_of_a_trial_is_a_function_of_the_seed() -> None:
    trials = [f"t{number}" for number in range(30)]

    def draw_milestones(seed: int) -> list[int | None]:
        driver = ScheduleDriver(ASHA(max_t=27, brackets=4), *trials, seed=seed)
        return [driver.schedule.next_milestone(trial, 0) for trial in trials]

    assert draw_milestones(1) == draw_milestones(1) != draw_milestones(2)


def test_with_a_grace_period_of_max_t_everybody_trains_to_the_end() -> None:
    driver = ScheduleDriver(ASHA(max_t=9, grace_period=9), "a")
    assert driver.schedule.next_milestone("a", 0) == 9
    assert driver.report("a", 5, 0.5) == Continue()
