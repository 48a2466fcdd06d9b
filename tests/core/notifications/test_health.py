"""When a running experiment is reported as stale or lagging, and that it is reported once."""

from __future__ import annotations

import pytest

from prefect_tune.core.notifications.health import Allowance, Budget, HealthMonitor, HealthThresholds
from prefect_tune.core.notifications.prefect_events import BudgetNearlySpent, ExperimentEvent, SyncLagged, TrialStalled

T = "00000"
MINUTE = 60.0


@pytest.fixture
def health() -> HealthMonitor:
    made = HealthMonitor(0.0)
    made.started(T, 0, 0.0)
    return made


def events_at(health: HealthMonitor, now: float) -> list[ExperimentEvent]:
    return list(health.look(now))


def test_a_trial_is_stale_after_five_times_its_longest_silence_and_that_is_said_once(health: HealthMonitor) -> None:
    for minutes in (2, 4, 6):
        health.reported(T, minutes, minutes * MINUTE)
        health.journaled(T, minutes)
    assert events_at(health, 15 * MINUTE) == []
    assert events_at(health, 17 * MINUTE) == [TrialStalled(trial=T, silent_seconds=660.0)]
    assert events_at(health, 18 * MINUTE) == []
    health.reported(T, 7, 19 * MINUTE)
    health.journaled(T, 7)
    assert events_at(health, 40 * MINUTE) == []  # it was silent for 13 minutes before


def test_a_trial_of_fast_steps_is_not_stale_within_five_minutes(health: HealthMonitor) -> None:
    health.reported(T, 1, 0.1)
    health.journaled(T, 1)
    assert events_at(health, 4.9 * MINUTE) == []
    assert events_at(health, 5.1 * MINUTE) == [TrialStalled(trial=T, silent_seconds=305.9)]


def test_a_trial_has_half_an_hour_for_its_first_report(health: HealthMonitor) -> None:
    assert events_at(health, 29 * MINUTE) == []
    assert events_at(health, 31 * MINUTE) == [TrialStalled(trial=T, silent_seconds=1860.0)]


def test_an_attempt_that_has_ended_is_not_looked_at(health: HealthMonitor) -> None:
    health.ended(T)
    health.ended(T)
    health.reported(T, 1, 1.0)
    health.journaled(T, 1)
    health.committed(T, 1.0)
    assert events_at(health, 100 * MINUTE) == []


def test_saves_lag_where_they_take_five_times_as_long_as_ever_while_the_trial_goes_on(health: HealthMonitor) -> None:
    health.committed(T, 1 * MINUTE)
    health.reported(T, 1, 1.5 * MINUTE)
    assert events_at(health, 3 * MINUTE) == []  # one save yields no typical duration
    health.committed(T, 3 * MINUTE)
    assert events_at(health, 4 * MINUTE) == []  # nothing to save
    for minute in range(4, 15):
        health.reported(T, minute, minute * MINUTE)
        health.journaled(T, minute)
    assert events_at(health, 12.5 * MINUTE) == []
    assert events_at(health, 14 * MINUTE) == [SyncLagged(what="checkpoint", seconds=660.0, trial=T)]
    assert events_at(health, 14.5 * MINUTE) == []


def test_the_journal_of_a_trial_lags_where_what_it_reported_is_not_in_it(health: HealthMonitor) -> None:
    health.reported(T, 1, 1 * MINUTE)
    health.journaled(T, 1)
    health.reported(T, 1, 1.5 * MINUTE)  # journaled before its report arrived: a trial on another machine
    for minute in range(2, 10):
        health.reported(T, minute, minute * MINUTE)
    assert events_at(health, 8.9 * MINUTE) == []
    assert events_at(health, 9.1 * MINUTE) == [SyncLagged(what="journal", seconds=426.0, trial=T)]
    assert events_at(health, 9.2 * MINUTE) == []


def test_the_experiments_journal_lags_where_it_is_not_written(health: HealthMonitor) -> None:
    health.queued(0.0)
    health.wrote()
    assert events_at(health, 10 * MINUTE) == []
    health.queued(11 * MINUTE)
    health.queued(12 * MINUTE)
    assert events_at(health, 18.1 * MINUTE) == [SyncLagged(what="journal", seconds=426.0, trial=None)]


def test_each_budget_is_reported_once_at_eighty_percent() -> None:
    health = HealthMonitor(100.0, [Budget("time", 10), Budget("training-time", 1000), Budget("trials", 5)])
    assert list(health.look(107.0, 790, 3)) == []
    assert list(health.look(108.0, 800, 4)) == [
        BudgetNearlySpent(what="time", spent=8.0, budget=10),
        BudgetNearlySpent(what="training-time", spent=800, budget=1000),
        BudgetNearlySpent(what="trials", spent=4, budget=5),
    ]
    assert list(health.look(109.0, 900, 5)) == []


def test_of_a_few_trials_none_says_that_they_are_nearly_done_when_all_have_ended() -> None:
    health = HealthMonitor(0.0, [Budget("trials", 3)])
    assert [list(health.look(1.0, 0, ended)) for ended in (2, 3)] == [[], []]


def test_patience_grows_with_what_was_seen() -> None:
    assert [HealthThresholds().limit(each) for each in (None, 1.0, 100.0)] == [1800.0, 300.0, 500.0]


def test_an_allowance_is_spent_at_once_and_comes_back_with_time() -> None:
    allowance = Allowance(3, 2)
    assert [allowance.take(1, 10.0) for _ in range(4)] == [True, True, True, False]
    assert [allowance.take(1, 10.5), allowance.take(1, 10.6)] == [True, False]
    assert [allowance.take(1, 1000.0) for _ in range(4)] == [True, True, True, False]
    assert allowance.take(1, 999.0) is False  # time never goes back
    assert [allowance.take(2, 1000.5), allowance.take(2, 1001.0)] == [False, True]
