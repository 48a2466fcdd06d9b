"""When a running experiment needs a look, and that it is said once."""

from __future__ import annotations

import pytest

from prefect_tune.core.notifications.health import Allowance, Budget, Lookout, Patience
from prefect_tune.core.notifications.lifecycle_events import BudgetNearlySpent, Lagging, News, TrialStale

T = "00000"
MINUTE = 60.0


@pytest.fixture
def lookout() -> Lookout:
    made = Lookout(0.0)
    made.started(T, 0, 0.0)
    return made


def told(lookout: Lookout, now: float) -> list[News]:
    return list(lookout.look(now))


def test_a_trial_is_stale_after_five_times_its_longest_silence_and_that_is_said_once(lookout: Lookout) -> None:
    for minutes in (2, 4, 6):
        lookout.reported(T, minutes, minutes * MINUTE)
        lookout.journaled(T, minutes)
    assert told(lookout, 15 * MINUTE) == []
    assert told(lookout, 17 * MINUTE) == [TrialStale(trial=T, silent_seconds=660.0)]
    assert told(lookout, 18 * MINUTE) == []
    lookout.reported(T, 7, 19 * MINUTE)
    lookout.journaled(T, 7)
    assert told(lookout, 40 * MINUTE) == []  # it has been silent for 13 minutes before


def test_a_trial_of_fast_steps_is_not_stale_within_five_minutes(lookout: Lookout) -> None:
    lookout.reported(T, 1, 0.1)
    lookout.journaled(T, 1)
    assert told(lookout, 4.9 * MINUTE) == []
    assert told(lookout, 5.1 * MINUTE) == [TrialStale(trial=T, silent_seconds=305.9)]


def test_a_trial_has_half_an_hour_for_its_first_report(lookout: Lookout) -> None:
    assert told(lookout, 29 * MINUTE) == []
    assert told(lookout, 31 * MINUTE) == [TrialStale(trial=T, silent_seconds=1860.0)]


def test_an_attempt_that_has_ended_is_not_looked_at(lookout: Lookout) -> None:
    lookout.ended(T)
    lookout.ended(T)
    lookout.reported(T, 1, 1.0)
    lookout.journaled(T, 1)
    lookout.committed(T, 1.0)
    assert told(lookout, 100 * MINUTE) == []


def test_saves_lag_where_they_take_five_times_as_long_as_ever_while_the_trial_goes_on(lookout: Lookout) -> None:
    lookout.committed(T, 1 * MINUTE)
    lookout.reported(T, 1, 1.5 * MINUTE)
    assert told(lookout, 3 * MINUTE) == []  # one says nothing of how long it takes
    lookout.committed(T, 3 * MINUTE)
    assert told(lookout, 4 * MINUTE) == []  # nothing to save
    for minute in range(4, 15):
        lookout.reported(T, minute, minute * MINUTE)
        lookout.journaled(T, minute)
    assert told(lookout, 12.5 * MINUTE) == []
    assert told(lookout, 14 * MINUTE) == [Lagging(what="checkpoint", seconds=660.0, trial=T)]
    assert told(lookout, 14.5 * MINUTE) == []


def test_the_journal_of_a_trial_lags_where_what_it_reported_is_not_in_it(lookout: Lookout) -> None:
    lookout.reported(T, 1, 1 * MINUTE)
    lookout.journaled(T, 1)
    lookout.reported(T, 1, 1.5 * MINUTE)  # it was in the journal before it was told: a trial on another machine
    for minute in range(2, 10):
        lookout.reported(T, minute, minute * MINUTE)
    assert told(lookout, 8.9 * MINUTE) == []
    assert told(lookout, 9.1 * MINUTE) == [Lagging(what="journal", seconds=426.0, trial=T)]
    assert told(lookout, 9.2 * MINUTE) == []


def test_the_experiments_journal_lags_where_it_is_not_written(lookout: Lookout) -> None:
    lookout.happened(0.0)
    lookout.wrote()
    assert told(lookout, 10 * MINUTE) == []
    lookout.happened(11 * MINUTE)
    lookout.happened(12 * MINUTE)
    assert told(lookout, 18.1 * MINUTE) == [Lagging(what="journal", seconds=426.0, trial=None)]


def test_each_budget_is_told_of_once_at_eighty_percent() -> None:
    lookout = Lookout(100.0, [Budget("time", 10), Budget("training-time", 1000), Budget("trials", 5)])
    assert list(lookout.look(107.0, 790, 3)) == []
    assert list(lookout.look(108.0, 800, 4)) == [
        BudgetNearlySpent(what="time", spent=8.0, budget=10),
        BudgetNearlySpent(what="training-time", spent=800, budget=1000),
        BudgetNearlySpent(what="trials", spent=4, budget=5),
    ]
    assert list(lookout.look(109.0, 900, 5)) == []


def test_of_a_few_trials_none_says_that_they_are_nearly_done_when_all_have_ended() -> None:
    lookout = Lookout(0.0, [Budget("trials", 3)])
    assert [list(lookout.look(1.0, 0, ended)) for ended in (2, 3)] == [[], []]


def test_patience_grows_with_what_was_seen() -> None:
    assert [Patience().limit(each) for each in (None, 1.0, 100.0)] == [1800.0, 300.0, 500.0]


def test_an_allowance_is_spent_at_once_and_comes_back_with_time() -> None:
    allowance = Allowance(3, 2)
    assert [allowance.take(1, 10.0) for _ in range(4)] == [True, True, True, False]
    assert [allowance.take(1, 10.5), allowance.take(1, 10.6)] == [True, False]
    assert [allowance.take(1, 1000.0) for _ in range(4)] == [True, True, True, False]
    assert allowance.take(1, 999.0) is False  # time never goes back
    assert [allowance.take(2, 1000.5), allowance.take(2, 1001.0)] == [False, True]
