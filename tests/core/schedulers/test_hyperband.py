"""Hyperband: the brackets of Li et al. 2018, with synchronous halving."""

from __future__ import annotations

import pytest

from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import Continue, Pause, Stop
from prefect_tune.core.schedulers.hyperband import Hyperband
from tests.core.schedulers.asking import SCORE, ScheduleDriver
from tests.fakes.searches.virtual_driver import Table, VirtualRun, World

NINE = [f"t{number}" for number in range(9)]


def fill_first_bracket(max_t: int = 9) -> ScheduleDriver:
    """Nine trials of Hyperband(9): at rung 1 the best three continue, at rung 3 the best one."""
    return ScheduleDriver(Hyperband(max_t), *NINE)


def report_losses(driver: ScheduleDriver, step: int, losses: dict[str, float]) -> dict[str, str]:
    return {trial: driver.decide(trial, step, loss) for trial, loss in losses.items()}


@pytest.mark.parametrize(
    ("max_t", "factor", "expected"),
    [
        (1, 3, [(1, 1)]),
        (2, 3, [(1, 2)]),
        (27, 3, [(27, 1), (12, 3), (6, 9), (4, 27)]),
        (16, 4, [(16, 1), (6, 4), (3, 16)]),
        (243, 3, [(243, 1), (98, 3), (41, 9), (18, 27), (9, 81), (6, 243)]),  # log(243) / log(3) is below 5
        (100, 3, [(81, 1), (34, 3), (15, 11), (8, 33), (5, 100)]),
        (10, 2.5, [(7, 1), (4, 4), (3, 10)]),
    ],
)
def test_any_max_t_and_factor_give_brackets_that_grow_into_max_t(
    max_t: int, factor: float, expected: list[tuple[int, int]]
) -> None:
    assert Hyperband(max_t, factor).brackets == expected


def test_each_bracket_keeps_as_many_at_each_rung_as_in_the_paper() -> None:
    kept = {81: [81, 27, 9, 3, 1], 34: [34, 11, 3, 1], 15: [15, 5, 1], 8: [8, 2], 5: [5]}
    schedule = Hyperband(81).begin(SCORE, 0)
    table = Table([[float(row)] for row in range(sum(kept))], metric="score")
    outcome = VirtualRun(schedule, table, ({"row": row} for row in range(sum(kept))), World(slots=5)).run()
    first = 0
    for (size, step), trials in zip(Hyperband(81).brackets, kept.values(), strict=True):
        members = {f"t{number}" for number in range(first, first + size)}
        assert [len(outcome.trials_reaching(step * 3**rung) & members) for rung in range(len(trials))] == trials
        first += size


def test_everybody_waits_for_the_last_of_the_bracket() -> None:
    driver = fill_first_bracket()
    assert set(report_losses(driver, 1, dict.fromkeys(NINE[:8], 0.5)).values()) == {"pause"}
    assert driver.report("t0", 1, 0.5) == Pause(reason=make_reason("waits-for-others", step=1, others=1))
    assert (driver.resume_all(), driver.stop_all()) == ([], [])
    assert driver.decide("t8", 1, 0.9) == "stop"
    assert driver.resume_all() == ["t0", "t1", "t2"]  # the first of equal trials
    assert driver.stop_all() == ["t3", "t4", "t5", "t6", "t7"]


def test_the_last_one_goes_on_without_a_pause_if_it_is_the_best_and_stops_at_once_if_it_is_not_good_enough() -> None:
    best = fill_first_bracket()
    report_losses(best, 1, dict.fromkeys(NINE[:8], 0.5))
    assert best.decide("t8", 1, 0.1) == "continue"
    assert best.resume_all() == ["t0", "t1"]
    second = fill_first_bracket()
    report_losses(second, 1, dict.fromkeys(NINE[:8], 0.5) | {"t0": 0.1})
    pause = second.report("t8", 1, 0.2)
    assert pause == Pause(reason=make_reason("waits-for-slot", step=3))
    assert str(pause.reason) == "continues to step 3 once a slot is free"
    assert second.resume_all() == ["t0", "t8", "t1"]
    worst = fill_first_bracket()
    report_losses(worst, 1, dict.fromkeys(NINE[:8], 0.5))
    reason = make_reason("rank-continued", metric="loss", value=0.9, step=1, rank=9, ranked=9, quota=3)
    assert worst.report("t8", 1, 0.9) == Stop(reason=reason)


def test_a_bracket_is_halved_down_to_one_that_trains_to_max_t() -> None:
    driver = fill_first_bracket()
    report_losses(driver, 1, {trial: number / 10 for number, trial in enumerate(NINE)})
    assert driver.resume_all() == ["t0", "t1", "t2"]
    assert [driver.schedule.next_milestone(trial, 1) for trial in NINE[:3]] == [3, 3, 3]
    assert report_losses(driver, 3, {"t0": 0.3, "t1": 0.1, "t2": 0.2}) == {"t0": "pause", "t1": "pause", "t2": "stop"}
    assert driver.resume_all() == ["t1"]
    assert driver.schedule.next_milestone("t1", 3) == 9
    assert driver.report("t1", 9, 0.1) == Stop(reason=make_reason("step-limit", step=9, limit=9), early=False)


def test_the_next_trials_fill_the_next_bracket_while_the_one_before_is_decided_and_then_it_begins_over() -> None:
    driver = fill_first_bracket()
    more = [f"m{number}" for number in range(5 + 3 + 9)]
    driver.add(*more)
    first = [driver.schedule.next_milestone(trial, 0) for trial in [*NINE, *more]]
    assert first == [1] * 9 + [3] * 5 + [9] * 3 + [1] * 9


# Late and repeated reports, and trials that end early.


def test_who_died_before_a_rung_leaves_its_place_empty_and_is_waited_for_no_longer() -> None:
    driver = fill_first_bracket()
    report_losses(driver, 1, dict.fromkeys(NINE[:4], 0.5))
    driver.end("t4", "t5", "t6", "t7")
    assert driver.resume_all() == []
    driver.end("t8")
    assert driver.resume_all() == ["t0", "t1", "t2"]  # of nine places three continue
    assert driver.stop_all() == ["t3"]


def test_a_place_that_was_left_is_not_filled_again() -> None:
    driver = ScheduleDriver(Hyperband(9), *NINE[:8])
    driver.end("t0")
    driver.add("t8", "next")
    assert [driver.schedule.next_milestone(trial, 0) for trial in ("t8", "next")] == [1, 3]


def test_a_trial_that_was_promoted_and_ended_before_it_got_a_slot_is_forgotten() -> None:
    driver = fill_first_bracket()
    report_losses(driver, 1, dict.fromkeys(NINE, 0.5))
    driver.end("t0", "t3")
    assert driver.resume_all() == ["t1", "t2"]
    assert driver.stop_all() == ["t4", "t5", "t6", "t7"]


def test_a_report_beyond_several_rungs_counts_at_the_one_that_is_due_and_the_next_is_asked_at_the_next_report() -> None:
    trials = [f"t{number}" for number in range(27)]
    driver = ScheduleDriver(Hyperband(27), *trials)
    for number, trial in enumerate(trials):
        driver.report(trial, 10, float(number))
    assert driver.resume_all() == trials[:9]
    assert driver.schedule.next_milestone("t0", 10) == 11
    assert driver.decide("t0", 11, 0.0) == "pause"


def test_who_is_first_asked_beyond_max_t_stops_and_holds_up_nobody() -> None:
    driver = fill_first_bracket()
    assert driver.decide("t0", 10, 0.0) == "stop"
    report_losses(driver, 1, dict.fromkeys(NINE[1:], 0.5))
    assert driver.resume_all() == ["t1", "t2", "t3"]
    assert driver.decide("t0", 10, 0.0) == "stop"
    assert driver.schedule.next_milestone("t0", 10) == 11


def test_steps_that_are_trained_again_are_not_counted_twice_and_answered_as_before() -> None:
    driver = fill_first_bracket()
    driver.decide("t0", 1, 0.9)
    assert driver.decide("t0", 1, 0.0) == "pause"
    report_losses(driver, 1, {trial: number / 10 for number, trial in enumerate(NINE) if number})
    assert driver.decide("t0", 1, 0.0) == "stop"
    driver.end("t0")
    assert driver.decide("t2", 1, 0.9) == "pause"  # promoted, waits for a slot
    assert driver.resume_all() == ["t1", "t2", "t3"]
    assert driver.decide("t2", 1, 0.9) == "continue"


def test_a_report_before_the_rung_is_not_compared() -> None:
    driver = ScheduleDriver(Hyperband(9), *NINE, "next")
    assert driver.report("next", 2, 0.5) == Continue()


# No new trial is left.


def test_a_bracket_that_never_fills_is_decided_with_those_who_are_in_it() -> None:
    driver = ScheduleDriver(Hyperband(9), *NINE[:7])
    report_losses(driver, 1, {trial: 1 - number / 10 for number, trial in enumerate(NINE[:6])})
    driver.schedule.on_no_new_trial()
    assert driver.resume_all() == []  # the seventh trial is still running
    pause = driver.report("t6", 1, 2.0)
    assert pause == Pause(reason=make_reason("waits-for-others", step=1, others=2))
    assert str(pause.reason) == "waits at step 1 for 2 other trials to compare with"
    assert driver.stop_all() == []
    assert driver.resume_all() == ["t5", "t4"]
    assert driver.stop_all() == ["t3", "t2", "t1", "t0", "t6"]


def test_a_new_trial_takes_back_that_there_is_none_while_the_bracket_is_open() -> None:
    driver = ScheduleDriver(Hyperband(9), *NINE[:3])
    report_losses(driver, 1, dict.fromkeys(NINE[:3], 0.5))
    driver.schedule.on_no_new_trial()
    driver.add("t3")
    assert driver.resume_all() == []
    assert driver.schedule.next_milestone("t3", 0) == 1
    driver.end("t3")
    assert driver.resume_all() == []


def test_a_bracket_that_was_decided_early_takes_no_more_trials() -> None:
    driver = ScheduleDriver(Hyperband(9), *NINE[:3])
    report_losses(driver, 1, dict.fromkeys(NINE[:3], 0.5))
    driver.schedule.on_no_new_trial()
    assert driver.resume_all() == ["t0"]
    driver.add("t3")
    assert driver.schedule.next_milestone("t3", 0) == 3
