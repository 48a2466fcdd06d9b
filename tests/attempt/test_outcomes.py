"""The final state of an attempt's task run: its name, color and message in Prefect's UI."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType

from prefect_tune.attempt.outcomes import Asking, Done, Failed, Outcome, Yielded, log_failure, state_of
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.journal_events import Cause, Question
from prefect_tune.core.storage.layout import TrialKey

_TRACE = "ValueError: lr is too large\nTraceback (most recent call last):\n  ..."


@pytest.mark.parametrize(
    ("outcome", "kind", "name", "message"),
    [
        (Done("step 9 of 9", returned=False), StateType.COMPLETED, "Completed", "step 9 of 9"),
        (Done("rung 3", returned=False, ended_early=True, end="pruned"), StateType.COMPLETED, "Pruned", "rung 3"),
        (
            Done("stopped by me", returned=False, ended_early=True, end="interrupted"),
            StateType.CANCELLED,
            "Interrupted",
            None,
        ),
        (Yielded("rung 3"), StateType.COMPLETED, "Paused", "rung 3"),
        (
            Asking(Question(key="k", question="continue?", fields={})),
            StateType.COMPLETED,
            "Paused",
            "it asks: continue?",
        ),
        (Failed(Cause.PREEMPTED, "saved, as requested", at_start=False), StateType.CANCELLED, "Interrupted", None),
        (Failed(Cause.USER, _TRACE, at_start=False), StateType.FAILED, "Failed", "ValueError: lr is too large"),
        (Failed(Cause.MACHINE, "SIGKILL", at_start=False), StateType.FAILED, "Failed", "SIGKILL"),
    ],
)
def test_each_end_of_an_attempt_has_a_state_that_names_it_and_gives_the_reason_in_one_line(
    outcome: Outcome, kind: StateType, name: str, message: str | None
) -> None:
    state = state_of(outcome, "00003")
    assert (state.type, state.name) == (kind, name)
    assert state.message == (message or outcome_reason(outcome))


def outcome_reason(outcome: Outcome) -> str:
    assert isinstance(outcome, Done | Failed)
    return outcome.reason if isinstance(outcome, Done) else outcome.message


def test_the_result_of_a_failed_attempt_is_its_error() -> None:
    data = state_of(Failed(Cause.USER, _TRACE, at_start=False), "00003").data
    assert isinstance(data, TrialFailed)
    assert str(data) == "trial 00003: ValueError: lr is too large"


def test_an_error_of_a_deleted_experiment_is_no_reason_to_leave_out_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed = Failed(Cause.USER, _TRACE, at_start=False)
    for generation, trial in ((1, "00000"), (1, "00001"), (2, "00001"), (2, "00002")):
        key = TrialKey(experiment="used-again", generation=generation, trial=trial)
        spec: Any = SimpleNamespace(target=LocalTarget(path="/runs"), trial=key)
        log_failure(failed, 1, spec, 1, logging.getLogger("a run"))
    traced = ["Traceback" in each for each in caplog.messages]
    assert traced == [True, False, True, False]
    assert caplog.messages[3].endswith("the same error as that of trial 00001")
