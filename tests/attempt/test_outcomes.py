"""The final state of an attempt's task run: its name, color and message in Prefect's UI."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType

from prefect_tune.attempt.attempt import log_failure, state_of
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.journal_events import AttemptEnded, Cause, Finished, FinishKind, Outcome, Paused
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.storage.layout import TrialKey
from tests.fakes.outcomes import make_failure

ERROR = make_failure(
    "lr is too large", trial="00003", type="ValueError", traceback="Traceback (most recent call last):\n  ..."
)
STOPPED = AttemptEnded(trial="00003", cause=Cause.PREEMPTED, reason=make_reason("saved-as-requested"))


@pytest.mark.parametrize(
    ("outcome", "kind", "name", "message"),
    [
        (Finished(trial="00003", reason="step 9 of 9"), StateType.COMPLETED, "Completed", "step 9 of 9"),
        (
            Finished(trial="00003", reason="all steps", kind=FinishKind.ALL_STEPS),
            StateType.COMPLETED,
            "Completed",
            "all steps",
        ),
        (Finished(trial="00003", reason="rung 3", kind=FinishKind.PRUNED), StateType.COMPLETED, "Pruned", "rung 3"),
        (
            Finished(trial="00003", reason="stopped by me", kind=FinishKind.STOPPED),
            StateType.CANCELLED,
            "Interrupted",
            "stopped by me",
        ),
        (Paused(trial="00003", reason="rung 3"), StateType.COMPLETED, "Paused", "rung 3"),
        (STOPPED, StateType.CANCELLED, "Interrupted", "saved, as requested"),
        (ERROR, StateType.FAILED, "Failed", "ValueError: lr is too large"),
        (make_failure("SIGKILL", Cause.MACHINE), StateType.FAILED, "Failed", "SIGKILL"),
    ],
)
def test_each_end_of_an_attempt_has_a_state_that_names_it_and_gives_the_reason_in_one_line(
    outcome: Outcome, kind: StateType, name: str, message: str
) -> None:
    state = state_of(outcome)
    assert (state.type, state.name, state.message) == (kind, name, message)


def test_the_result_of_a_failed_attempt_is_its_error() -> None:
    data = state_of(ERROR).data
    assert isinstance(data, TrialFailed)
    assert str(data) == "trial 00003: ValueError: lr is too large"


def test_an_error_of_a_deleted_experiment_is_no_reason_to_leave_out_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for generation, trial in ((1, "00000"), (1, "00001"), (2, "00001"), (2, "00002")):
        key = TrialKey(experiment="used-again", generation=generation, trial=trial)
        spec: Any = SimpleNamespace(target=LocalTarget(path="/runs"), trial=key)
        log_failure(ERROR.model_copy(update={"trial": trial}), 1, spec, 1, logging.getLogger("a run"))
    traced = ["Traceback" in each for each in caplog.messages]
    assert traced == [True, False, True, False]
    assert caplog.messages[3].endswith("the same error as that of trial 00001")
