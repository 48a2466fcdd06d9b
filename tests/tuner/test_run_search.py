"""What a search logs when it opens its experiment, and its error if every trial errored."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from prefect_tune.blocks import LocalTarget, S3Target, StorageTarget
from prefect_tune.core.experiment.experiment import apply_event, make_empty_experiment
from prefect_tune.core.journal_events import (
    AttemptStarted,
    Cause,
    Event,
    ExperimentConfigured,
    FinishKind,
    Owner,
    OwnerChanged,
    StopRequested,
    TrialAdded,
    TrialErrored,
    TrialFinished,
)
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.executors.trial_executor import Slots
from prefect_tune.parameters.plan_checks import RETRY_KEEPS_CONFIGURATION
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.results import Results
from prefect_tune.tuner.run_search import (
    log_if_already_finished,
    log_search_start,
    search_failed_error,
    warn_of_takeover,
)
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import apply_events
from tests.fakes.trial_processes import LogRecorder, make_log

ME = Owner(name="me", host="here", pid=1)
OPENED = apply_events(
    make_empty_experiment(first_generation("e")), [OwnerChanged(experiment="e", generation=1, term=1, owner=ME)]
)
ADDED = apply_events(OPENED, [TrialAdded(trial="t", config={})])
STARTED = AttemptStarted(trial="t", attempt=1, from_step=0)


@pytest.mark.parametrize(("started", "lines"), [(0, 0), (1, 1)])
def test_a_takeover_names_the_run_that_may_be_alive(started: int, lines: int) -> None:
    recorder = LogRecorder()
    state = apply_events(ADDED, [STARTED] * started)
    warn_of_takeover(state, make_log(recorder))
    assert len(recorder.lines) == lines
    for line in recorder.lines:
        assert line.startswith(f"{state.owner} left 1 trial running, and this run takes over: ")


def test_a_run_that_is_started_again_is_not_said_to_take_over_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, state = LogRecorder(), apply_events(ADDED, [STARTED])
    owner = Owner(name="grey-lynx", host="gpu-1", pid=7, flow_run="0f5c")
    monkeypatch.setattr("prefect_tune.tuner.run_search.flow_run", SimpleNamespace(id="0f5c"))
    warn_of_takeover(state.model_copy(update={"owner": owner}), make_log(recorder))
    (line,) = recorder.lines
    assert line.startswith(
        "an earlier process of this run, pid 7 on gpu-1, left 1 trial running, and this process takes "
    )


@pytest.mark.parametrize(
    ("options", "events", "lines"),
    [({}, [], 1), ({"rerun_errored": "only"}, [], 0), ({}, [StopRequested(reason="time budget")], 0)],
    ids=["nothing was left", "only errored ones were wanted", "it ended early"],
)
def test_a_run_that_trains_nothing_of_a_finished_search_says_how_to_train_more(
    options: dict[str, object], events: list[Event], lines: int
) -> None:
    recorder = LogRecorder()
    before = apply_events(ADDED, [STARTED, TrialFinished(trial="t", reason="done", kind=FinishKind.RETURNED)])
    ended = apply_events(before, events)
    plan = SearchPlan(trainable=lambda _: None, target="/runs", experiment="e", **options)
    log_if_already_finished(plan, before, ended, make_log(recorder))
    assert len(recorder.lines) == lines


@pytest.mark.parametrize(
    ("processes", "cpu_count", "line"),
    [
        (1, 2, "slots: 2 trials at once on this machine"),
        (2, 4, "slots: 2 trials at once on this machine, each of 2 processes"),
        ((1, 8), 4, "slots: 2 trials at once on this machine, each of 1 to 8 processes"),
        (2, None, "slots: 2 trials at once on this machine, each of 2 processes"),
        (4, 2, "slots: 2 trials at once on this machine, each of 4 processes; 8 processes share 2 processors"),
    ],
)
def test_processes_that_share_processors_are_named(
    processes: int | tuple[int, int], cpu_count: int | None, line: str
) -> None:
    recorder = LogRecorder()
    plan = SearchPlan(trainable=print, target="/runs", experiment="e", processes_per_trial=processes)
    log_search_start(plan, OPENED, Slots(2, cpu_count=cpu_count), "on this machine", make_log(recorder))
    assert line in recorder.lines


# What a failed search says.


_BAD = make_reason("raised", type="ValueError", text="bad", traceback="Traceback (most recent call last):\n  ...")


@pytest.mark.parametrize(
    ("reason", "ending"),
    [
        (
            make_reason("max-failures", failures=1, limit=0, error=_BAD),
            "To see the traceback: prefect-tune show file:///runs e --trial 0",
        ),
        (make_reason("process-ended", exit_code=3), RETRY_KEEPS_CONFIGURATION),
    ],
)
def test_it_refers_to_a_traceback_if_there_is_one(reason: Reason, ending: str) -> None:
    error = _failure_text(reason, {}, LocalTarget(path="/runs"))
    assert error.endswith(ending)
    advice = "run the search again: pass experiment='e' and rerun_errored=True; a retried"
    assert advice in error, "no command finds the function of a script"


@pytest.mark.parametrize(
    ("block_name", "argument"), [(None, "'s3://bucket?endpoint_url=http://host&region=eu'"), ("prod", "s3-target/prod")]
)
def test_its_commands_can_be_typed_as_they_are(block_name: str | None, argument: str) -> None:
    target = S3Target(bucket="bucket", endpoint_url="http://host", region="eu", allow_http=True)
    target._block_document_name = block_name
    error = _failure_text(make_reason("max-failures", failures=1, limit=0, error=_BAD), {"trainable": "m:Net"}, target)
    assert f"(prefect-tune resume {argument} e --rerun-errored)" in error
    assert error.endswith(f"prefect-tune show {argument} e --trial 0")


def _failure_text(reason: Reason, settings: Mapping[str, object], target: StorageTarget) -> str:
    """Return the error of a search whose only trial has failed."""
    state = make_empty_experiment(first_generation("e"))
    events: list[Event] = [TrialAdded(trial="0", config={}), AttemptStarted(trial="0", attempt=1, from_step=0)]
    for number, event in enumerate(
        [
            ExperimentConfigured(settings=settings),
            *events,
            TrialErrored(trial="0", cause=Cause.TRAINABLE, reason=reason),
        ],
        1,
    ):
        state = apply_event(state, event, number)
    return str(search_failed_error(Results(state, target, None), None))
