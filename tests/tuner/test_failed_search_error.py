"""What the error of a failed search refers to."""

from __future__ import annotations

import logging

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import BadMetric
from prefect_tune.core.experiment.experiment import after_event, nothing_yet
from prefect_tune.core.experiment.failure_policy import error_in
from prefect_tune.core.journal_events import Cause, Event, GaveUp, Started, TrialAdded
from prefect_tune.core.metrics import storable
from prefect_tune.parameters.resume_compatibility import KEEPS_CONFIGURATIONS
from prefect_tune.results import Results
from prefect_tune.tuner.search_checks import MetricCheck, failure_of
from tests.fakes.checkpoints import first_generation

_TRACE = "ValueError: bad\nTraceback (most recent call last):\n  ..."


@pytest.mark.parametrize(
    ("reason", "ends"),
    [
        (_TRACE, "Traceback: prefect-tune show file:///runs e --trial 0"),
        ("the trial's process exited with code 3", KEEPS_CONFIGURATIONS),
    ],
)
def test_it_refers_to_a_traceback_if_there_is_one(reason: str, ends: str) -> None:
    state = nothing_yet(first_generation("e"))
    events: list[Event] = [TrialAdded(trial="0", config={}), Started(trial="0", attempt=1, from_step=0)]
    for number, event in enumerate([*events, GaveUp(trial="0", cause=Cause.USER, message=reason)], 1):
        state = after_event(state, event, number)
    error = failure_of(Results(state, LocalTarget(path="/runs"), None), None, MetricCheck(None, logging.getLogger()))
    assert error is not None
    assert str(error).endswith(ends)


def test_a_metric_that_is_nan_is_said_without_retries_and_with_how_a_bad_trial_ends() -> None:
    with pytest.raises(BadMetric) as refused:
        storable({"loss": float("nan")}, "metrics of step 1")
    assert error_in(f"bad-metric is not retried: BadMetric: {refused.value}") == (
        "BadMetric: metrics of step 1: 'loss': found nan; training has diverged, or the metric divides by zero. For a "
        "trial that counts as a bad one: report a bad finite value, such as 1e9 for a loss, and return"
    )
