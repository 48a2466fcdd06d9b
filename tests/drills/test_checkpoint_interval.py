"""The best interval between saves, against the minimum of Daly's model of the time that a training takes."""

from __future__ import annotations

from math import exp

import pytest

from prefect_tune.drills.findings import best_interval, lost_share


def slowdown(interval: float, save: float, mean: float) -> float:
    """Return the wall-clock time per second of training, without restarts: Daly (2006), equation 13."""
    return mean * (exp((interval + save) / mean) - 1) / interval


@pytest.mark.parametrize("mean", [3600.0, 86_400.0])
@pytest.mark.parametrize("save", [0.1, 10.0, 300.0])
def test_no_other_interval_is_better_by_more_than_a_thousandth(save: float, mean: float) -> None:
    found = slowdown(best_interval(save, mean), save, mean)
    best = min(slowdown(1.05**power, save, mean) for power in range(-50, 300))
    assert found <= best * 1.001


def test_a_save_that_takes_as_long_as_two_failures_are_apart_is_made_once_in_between() -> None:
    assert best_interval(200.0, 100.0) == 100.0
    assert best_interval(1000.0, 100.0) == 100.0


def test_what_is_lost_is_least_at_the_best_interval() -> None:
    best = best_interval(10.0, 36_000.0)
    lost = [lost_share(best * factor, 10.0, 30.0, 36_000.0) for factor in (0.5, 1.0, 2.0)]
    assert min(lost) == lost[1]
    assert 0 < lost[1] < 0.03
