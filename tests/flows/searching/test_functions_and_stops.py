"""Function trainables, and the stop conditions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.stoppers import MaxSteps, MaxTime, Plateau
from prefect_tune.core.experiment.trial_transitions import Status
from tests.flows.interruptions.trouble import Trouble
from tests.long_cases import long_after


def test_a_function_reports_saves_and_goes_on_from_its_checkpoint(trouble: Trouble) -> None:
    trouble.trainable = "tests.trainables.troublesome:count"
    assert trouble.run(steps=13).step == 13
    result = trouble.run(steps=22)
    assert (result.step, result.metrics["count"], result.wasted_steps) == (22, 22, 3)
    assert trouble.acts("loaded") == [10]


def test_what_a_function_returns_is_its_last_report_and_no_larger_budget_makes_it_go_on(trouble: Trouble) -> None:
    trouble.trainable = "tests.trainables.troublesome:count_and_return"
    trouble.config = {"score": 21}
    for _ in range(2):
        result = trouble.run(steps=None)
        assert (result.status, result.metrics) == (Status.COMPLETED, {"score": 42, "attempt": 1})
        assert result.reason == "the trainable returned"


def test_a_function_of_the_script_itself_is_taken_along(trouble: Trouble) -> None:
    factor = 3

    def scaled(config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"score": config["score"] * factor}

    trouble.trainable = scaled
    trouble.config = {"score": 2}
    assert trouble.run(steps=None).metrics == {"score": 6}


def _seventh(metrics: Mapping[str, object]) -> bool:
    return metrics["count"] == 7


@pytest.mark.parametrize(
    ("stop", "step"),
    long_after(
        1,
        [
            ([{"step": 50}, MaxSteps(9) | Plateau("loss", std=0.02, reports=3)], 8),
            ({"count": 6, "step": 9}, 6),
            (_seventh, 7),
            ("tests.flows.searching.test_functions_and_stops:_seventh", 7),
        ],
    ),
)
def test_a_trial_stops_when_its_criterion_is_met_and_saves_that_step(trouble: Trouble, stop: Any, step: int) -> None:
    result = trouble.run(steps=None, stop=stop)
    assert (result.status, result.step) == (Status.COMPLETED, step)
    assert trouble.trial.checkpoints[-1].step == step


@pytest.mark.long
def test_a_stopper_that_looks_back_sees_what_was_reported_before_a_resume(trouble: Trouble) -> None:
    trouble.config |= {"fails": "raise", "at": 8}
    plateau = Plateau("loss", std=0.02, reports=3)
    result = trouble.run(steps=None, stop=plateau, failures=FailurePolicy(max_failures=1))
    assert (result.step, result.attempts) == (8, 2)


@pytest.mark.long
def test_training_time_counts_over_all_attempts(trouble: Trouble) -> None:
    trouble.config |= {"step_seconds": 0.1, "fails": "raise", "at": 8}
    stop = MaxTime(timedelta(seconds=1.5))
    result = trouble.run(steps=None, stop=stop, failures=FailurePolicy(max_failures=1))
    assert result.attempts == 2
    assert 9 <= result.step <= 15


def test_a_trainable_may_say_itself_that_it_is_done(trouble: Trouble) -> None:
    trouble.config["done_at"] = 6
    for _ in range(2):
        result = trouble.run(steps=None)
        assert (result.status, result.step, result.attempts) == (Status.COMPLETED, 6, 1)
    assert trouble.acts("begin") == list(range(1, 7))
