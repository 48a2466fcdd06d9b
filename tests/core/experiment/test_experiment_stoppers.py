"""Stoppers of whole experiments: the same events in the same order give the same answer, also after a resume."""

from __future__ import annotations

from datetime import timedelta

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import (
    AnyOf,
    End,
    ExperimentPlateau,
    MaxFailures,
    MaxSteps,
    MaxTime,
    Never,
    NoMore,
    Tallies,
    Tally,
    TimeBudget,
    TrialBudget,
    of_experiment,
    of_trials,
)
from prefect_tune.core.reasons import code_of, make_reason
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport

LOSS = Objective(metrics=("loss",), modes=("min",))


def report(loss: float) -> StepReport:
    return StepReport(step=1, metrics={"loss": loss, "score": -loss})


def finish(tally: Tally, *losses: float, start: int = 0) -> None:
    for number, loss in enumerate(losses, start=start):
        tally.added(str(number))
        tally.ended(str(number), report(loss), failed=False)


def test_max_failures_counts_trials_that_are_errored_now() -> None:
    tally = MaxFailures(2).begin(None)
    for trial, failed in (("a", True), ("b", False), ("a", True)):
        tally.ended(trial, None, failed=failed)
    assert tally.verdict() is None
    tally.ended("c", None, failed=True)
    ended = tally.verdict()
    assert ended == End(make_reason("failed-trials", count=2, limit=2))
    assert str(ended.reason) == "2 trials have errored, of MaxFailures(2)"
    tally.added("a")  # the trial is retried
    assert tally.verdict() is None


def test_a_trial_budget_ends_no_trial_that_has_begun() -> None:
    tally = TrialBudget(2).begin(None)
    for trial in ("a", "a"):
        tally.added(trial)
    assert tally.verdict() is None
    tally.added("b")
    spent = tally.verdict()
    assert spent == NoMore(make_reason("trial-budget", limit=2))
    assert str(spent.reason) == "the trial budget of 2 is spent"


def test_a_time_budget_counts_what_counts_once() -> None:
    tally = TimeBudget(timedelta(seconds=10)).begin(None)
    for trial, seconds in (("a", 4.0), ("a", 5.0), ("b", 4.9), ("a", 3.0), ("a", 5.0)):
        tally.trained(trial, seconds)
    assert tally.verdict() is None
    tally.trained("b", 5.0)
    ended = tally.verdict()
    assert ended == End(make_reason("search-time-limit", seconds=10.0, limit=10.0))
    assert str(ended.reason) == "its trials have trained for 10 s, the limit is 10 s"


def test_a_plateau_is_when_the_best_trials_are_all_as_good_as_each_other() -> None:
    tally = ExperimentPlateau(top=3, std=0.01).begin(LOSS)
    finish(tally, 0.5, 0.2, 0.9)
    assert tally.verdict() is None
    finish(tally, 0.201, 0.8, start=3)
    assert tally.verdict() is None
    finish(tally, 0.202, start=5)
    ended = tally.verdict()
    assert isinstance(ended, End)
    assert code_of(ended.reason) == "search-plateau"
    assert str(ended.reason) == "loss of the best 3 trials has settled: ± 0.000816497"


def test_a_plateau_with_patience_waits_for_more_trials_that_do_not_change_it() -> None:
    tally = ExperimentPlateau(top=2, std=0.01, patience=2).begin(LOSS)
    finish(tally, 0.2, 0.2, 0.9)
    assert tally.verdict() is None
    finish(tally, 0.1, start=3)  # an improvement resets the count
    finish(tally, 0.1, 0.7, start=4)
    assert tally.verdict() is None
    finish(tally, 0.8, start=6)
    assert isinstance(tally.verdict(), End)


def test_a_plateau_passes_over_what_failed_or_reported_something_else_and_what_goes_on() -> None:
    tally = ExperimentPlateau(top=2, std=0.01).begin(LOSS)
    finish(tally, 0.2)
    tally.ended("failed", report(0.2), failed=True)
    tally.ended("silent", StepReport(step=1, metrics={"other": 1.0}), failed=False)
    tally.ended("nothing", None, failed=False)
    assert tally.verdict() is None
    tally.added("0")  # trial 0 was extended
    tally.ended("0", report(0.2), failed=False)
    assert tally.verdict() is None


def test_a_plateau_has_a_metric_of_its_own_or_that_of_the_search() -> None:
    own = ExperimentPlateau(metric="score", mode="max", top=2, std=0.01).begin(None)
    finish(own, 0.2, 5.0, 0.2)
    assert isinstance(own.verdict(), End)
    with pytest.raises(InvalidInput, match="expected a metric"):
        ExperimentPlateau().begin(None)


def test_stoppers_of_trials_and_of_the_experiment_are_combined_and_taken_apart() -> None:
    steps, time = MaxSteps(3), MaxTime(timedelta(seconds=1))
    whole = steps | MaxFailures(1) | time | TrialBudget(9)
    assert of_trials(whole) == AnyOf((steps, time))
    assert list(of_experiment(whole)) == [MaxFailures(1), TrialBudget(9)]
    assert (of_trials(TrialBudget(9) | steps), of_trials(TrialBudget(9))) == (steps, Never())
    assert (whole.why_stop([report(1)]), MaxFailures(1).why_stop([report(1)])) == (None, None)
    assert not MaxFailures(1).looks_back


def test_of_several_an_end_comes_before_the_end_of_new_trials() -> None:
    tally = Tallies([each.begin(None) for each in (TrialBudget(1), MaxFailures(1), TimeBudget(timedelta(days=1)))])
    assert tally.verdict() is None
    tally.added("a")
    assert isinstance(tally.verdict(), NoMore)
    tally.trained("a", 1.0)
    tally.ended("a", None, failed=True)
    assert tally.verdict() == End(make_reason("failed-trials", count=1, limit=1))
    assert Tallies([]).verdict() is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: MaxFailures(0),
        lambda: TrialBudget(0),
        lambda: TimeBudget(timedelta(0)),
        lambda: ExperimentPlateau(top=1),
        lambda: ExperimentPlateau(std=-1),
        lambda: ExperimentPlateau(patience=-1),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(InvalidInput, match="expected"):
        wrong()
