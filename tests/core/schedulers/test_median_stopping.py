"""The median stopping rule."""

from __future__ import annotations

from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import Pause, Stop
from prefect_tune.core.schedulers.median_stopping import MedianStopping
from tests.core.schedulers.asking import ScheduleDriver


def report_three_others(scheduler: MedianStopping, steps: int = 4) -> ScheduleDriver:
    """Trials a, b and c, which reported 0.1, 0.2 and 0.3 at each step, and x, which has not begun."""
    driver = ScheduleDriver(scheduler, "a", "b", "c", "x")
    for step in range(1, steps + 1):
        for trial, loss in (("a", 0.1), ("b", 0.2), ("c", 0.3)):
            driver.report(trial, step, loss)
    return driver


def test_a_trial_is_asked_every_interval_and_at_the_end_of_the_grace_period() -> None:
    driver = ScheduleDriver(MedianStopping(grace_period=5, interval=3), "a")
    assert [driver.schedule.next_milestone("a", step) for step in (0, 2, 4, 5, 7, 8)] == [2, 5, 5, 8, 8, 11]


def test_who_is_worse_than_the_median_stops_and_who_equals_it_goes_on() -> None:
    assert report_three_others(MedianStopping()).decide("x", 1, 0.2) == "continue"
    stop = report_three_others(MedianStopping()).report("x", 1, 0.21)
    assert stop == Stop(reason=make_reason("median", metric="loss", best=0.21, median=0.2, step=1, count=3))
    assert str(stop.reason) == "its best loss by step 1 is 0.21; 3 other trials' averages have the median 0.2"


def test_what_an_ended_trial_showed_is_still_compared_with() -> None:
    driver = report_three_others(MedianStopping())
    driver.end("a", "b", "c")
    assert driver.decide("x", 1, 0.21) == "stop"


def test_a_late_report_counts_at_the_milestone_before_it() -> None:
    driver = ScheduleDriver(MedianStopping(interval=5, min_samples_required=1), "a", "x")
    driver.decide("a", 8, 0.5)
    assert driver.schedule.next_milestone("a", 8) == 11
    assert driver.decide("x", 6, 0.6) == "stop"


def test_steps_that_are_trained_again_are_not_counted_twice_and_answered_as_before() -> None:
    driver = report_three_others(MedianStopping())
    for step in (1, 2, 3, 4):
        assert driver.decide("a", step, 9.9) == "continue"
    assert driver.schedule.next_milestone("a", 1) == 5
    stop = driver.report("x", 1, 0.21)
    assert isinstance(stop, Stop)
    assert driver.report("x", 1, 0.0) == stop


def test_who_is_added_again_after_its_end_goes_on_though_it_was_stopped() -> None:
    driver = report_three_others(MedianStopping())
    driver.decide("x", 1, 0.21)
    driver.end("x")
    driver.add("x")
    assert driver.decide("x", 1, 0.21) == "continue"
    assert driver.decide("x", 2, 0.21) == "stop"


# Time slices.


SLICED = MedianStopping(min_time_slice=2, min_samples_required=2)


def test_who_has_too_few_to_be_compared_with_gives_its_slot_away_after_its_time_slice() -> None:
    driver = ScheduleDriver(SLICED, "a")
    assert driver.decide("a", 1, 0.5) == "continue"
    assert driver.report("a", 2, 0.5) == Pause(reason=make_reason("waits-for-others", step=2))
    assert driver.decide("a", 2, 0.5) == "pause"  # the trial died during its save
    assert driver.resume_all() == []


def test_who_has_given_its_slot_away_gets_one_when_there_are_enough_to_compare_it_with() -> None:
    driver = ScheduleDriver(SLICED, "a", "b", "c")
    assert [driver.decide(trial, 2, loss) for trial, loss in (("a", 0.3), ("b", 0.2))] == ["pause", "pause"]
    assert driver.resume_all() == []
    assert driver.decide("c", 2, 0.25) == "continue"
    assert driver.resume_all() == ["a", "b"]
    assert driver.decide("a", 3, 0.1) == "continue"  # its own time slice begins


def test_who_has_given_its_slot_away_gets_one_when_there_is_no_new_trial_the_least_trained_first() -> None:
    driver = ScheduleDriver(MedianStopping(min_time_slice=2, min_samples_required=4), "a", "b")
    driver.decide("a", 3, 0.1)
    driver.decide("b", 2, 0.1)
    driver.schedule.on_no_new_trial()
    assert driver.resume_all() == ["b", "a"]
    driver.decide("b", 4, 0.1)
    driver.add("c")
    assert driver.resume_all() == []
    driver.end("b", "a", "c")
    driver.schedule.on_no_new_trial()
    assert driver.resume_all() == []


def test_a_trial_that_trained_on_though_it_was_to_pause_has_its_slot() -> None:
    driver = ScheduleDriver(SLICED, "a")
    driver.decide("a", 2, 0.5)
    assert driver.decide("a", 3, 0.5) == "continue"
    driver.schedule.on_no_new_trial()
    assert driver.resume_all() == []
