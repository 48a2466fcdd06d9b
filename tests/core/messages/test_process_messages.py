"""Messages between a trial's process and its supervisor survive serialization unchanged."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.journal_events import Cause, Finished, FinishKind, Paused
from prefect_tune.core.messages.process_messages import (
    CheckpointSaved,
    MeanMetrics,
    Part,
    RankMetrics,
    Start,
    StepDone,
    StopAndSave,
    TrainableLoaded,
    TrialEnded,
    from_trial,
    to_trial,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.values import StepReport, Value
from tests.fakes.outcomes import make_failure

REPORT = StepReport(step=3, metrics={"loss": 0.1, "note": "é\n"}, trained_seconds=1.5)
START = Start(
    experiment="e",
    trial="t",
    attempt=1,
    trainable="module:name",
    stopper="",
    import_path=("/a", "/b"),
    config={"width": 3, "nested": {"x": [1, None]}},
    directory="/d",
    staging="/s",
    temporary="/t",
    restored=None,
    from_step=0,
    trained_seconds=0.0,
    curve=(REPORT,),
    cadence=Cadence(every_steps=2),
    overlap=True,
)


@pytest.mark.parametrize(
    "said", [START, CheckpointSaved(step=3), StopAndSave(), MeanMetrics(step=3, metrics={"loss": 0.5})]
)
def test_the_trial_hears_what_the_supervisor_said(said: Value) -> None:
    assert to_trial.validate_json(said.model_dump_json()) == said


@pytest.mark.parametrize(
    "said",
    [
        TrainableLoaded(pid=7, code="abc"),
        StepDone(report=REPORT, checkpoint="/staging/3", moved=True),
        StepDone(report=REPORT),
        Part(step=3, directory="/staging/3"),
        RankMetrics(step=3, metrics={"loss": 0.5}),
        TrialEnded(outcome=Finished(trial="t", reason="enough", kind=FinishKind.RETURNED)),
        TrialEnded(outcome=Paused(trial="t", reason=make_reason("turn-over", step=3)), waits=True),
        TrialEnded(outcome=make_failure("x", Cause.USER, type="ValueError", traceback="..."), raised=True),
    ],
)
def test_the_supervisor_hears_what_the_trial_said(said: Value) -> None:
    assert from_trial.validate_json(said.model_dump_json()) == said


def test_a_nan_is_not_turned_into_a_null_on_the_way() -> None:
    said = StepDone(report=StepReport(step=1, metrics={"loss": math.nan}))
    received = from_trial.validate_json(said.model_dump_json())
    assert isinstance(received, StepDone)
    assert math.isnan(received.report.metrics["loss"])  # type: ignore[arg-type]  # a float, or the test fails


@pytest.mark.parametrize("said", [b"", b"{}", b'{"type":"unheard-of"}', b'{"type":"saved"}', b"\x80\x04."])
def test_what_neither_says_is_refused(said: bytes) -> None:
    for ear in (to_trial, from_trial):
        with pytest.raises(ValidationError):
            ear.validate_json(said)
