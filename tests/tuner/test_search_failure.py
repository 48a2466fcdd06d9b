"""What a failed search says."""

from __future__ import annotations

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import BadMetric
from prefect_tune.core.experiment.experiment import after_event, nothing_yet
from prefect_tune.core.journal_events import Cause, Event, GaveUp, Started, TrialAdded
from prefect_tune.core.metrics import storable
from prefect_tune.core.reasons import Reason, format_error, make_reason
from prefect_tune.parameters.plan_checks import KEEPS_CONFIGURATIONS
from prefect_tune.results import Results
from prefect_tune.tuner.search_failure import failure_of
from tests.fakes.checkpoints import first_generation

_BAD = make_reason("raised", type="ValueError", text="bad", traceback="Traceback (most recent call last):\n  ...")


@pytest.mark.parametrize(
    ("reason", "ends"),
    [
        (
            make_reason("max-failures", failures=1, limit=0, error=_BAD),
            "Traceback: prefect-tune show file:///runs e --trial 0",
        ),
        (make_reason("process-ended", exit_code=3), KEEPS_CONFIGURATIONS),
    ],
)
def test_it_refers_to_a_traceback_if_there_is_one(reason: Reason, ends: str) -> None:
    state = nothing_yet(first_generation("e"))
    events: list[Event] = [TrialAdded(trial="0", config={}), Started(trial="0", attempt=1, from_step=0)]
    for number, event in enumerate([*events, GaveUp(trial="0", cause=Cause.USER, reason=reason)], 1):
        state = after_event(state, event, number)
    error = failure_of(Results(state, LocalTarget(path="/runs"), None), None)
    assert error is not None
    assert str(error).endswith(ends)
    again = "run the search again: pass experiment='e' and rerun_errored=True; a retried"
    assert again in str(error), "no command finds the function of a script"


def test_a_metric_that_is_nan_is_said_without_retries_and_with_how_a_bad_trial_ends() -> None:
    with pytest.raises(BadMetric) as refused:
        storable({"loss": float("nan")}, "metrics of step 1")
    error = make_reason("raised", type="BadMetric", text=str(refused.value))
    assert format_error(make_reason("not-retried", cause="bad-metric", error=error)) == (
        "BadMetric: metrics of step 1: 'loss': found nan; training has diverged, or the metric divides by zero. For a "
        "trial that counts as a bad one: report a bad finite value, such as 1e9 for a loss, and return"
    )
