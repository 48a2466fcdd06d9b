"""What the terminal shows while a search runs, and what the log shows without a terminal."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.core.experiment.experiment import apply_event, make_empty_experiment
from prefect_tune.core.experiment.trial_transitions import make_clone_ref
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointCloned,
    CheckpointCommitted,
    CheckpointRef,
    DecisionMade,
    Event,
    FinishKind,
    StepReported,
    TrialAdded,
    TrialErrored,
    TrialFinished,
    TrialPaused,
    TrialResumed,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import Stop
from prefect_tune.core.search.objective import Mode, make_objective
from prefect_tune.core.values import StepReport
from prefect_tune.monitoring.progress import ProgressObserver, SearchLog, showing_progress
from prefect_tune.monitoring.search_observer import SearchRecorder
from prefect_tune.terminal.progress_view import SearchExtent, collect_progress_facts, render_progress_line
from prefect_tune.tuner.search_policy import make_finish_event
from tests.fakes.checkpoints import first_generation
from tests.fakes.outcomes import make_failure
from tests.fakes.searches.experiments import apply_events
from tests.fakes.searches.tracked_progress import TrackedProgress
from tests.trainables.moody import train

LOG = logging.getLogger("a flow run")


@pytest.fixture(autouse=True)
def _info_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOG.name)


class RunningSearch:
    """The progress of an experiment with one running trial, whose lines are due at once."""

    def __init__(self, extent: SearchExtent | None = None, period: timedelta = timedelta(0)) -> None:
        events = [TrialAdded(trial="0", config={}), AttemptStarted(trial="0", attempt=1, from_step=0)]
        self._state = apply_events(make_empty_experiment(first_generation("e")), events)
        self._view = TrackedProgress(self._state, extent or SearchExtent("e"), 0.0, datetime.now(UTC))
        self.progress = ProgressObserver(self._view, LOG, log_period=period)

    def report(self, step: int) -> None:
        event = StepReported(trial="0", report=StepReport(step=step, metrics={"loss": 0.5}))
        self._view.apply_event(event, self._state)
        self.progress.on_event(event, self._state)


def test_where_nobody_sees_it_the_log_has_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    rarely, often = RunningSearch(period=timedelta(minutes=1)), RunningSearch()
    for step in range(1, 100):
        rarely.report(step)
    assert caplog.messages == []
    often.report(1)
    assert caplog.messages[0].startswith("e: 1 running after ")
    often.progress.is_shown = True
    often.report(2)
    assert len(caplog.messages) == 1
    often.progress.on_display_error(OSError("hung up"))
    often.report(3)
    assert caplog.messages[1] == "the live table failed; the search continues: OSError: hung up"
    assert len(caplog.messages) == 3


def test_a_single_training_logs_its_metrics_now_and_then_and_its_end_only_after_a_display(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = RunningSearch(SearchExtent("e", None, 1, 80, is_training=True))
    search.report(7)
    (message,) = caplog.messages
    assert message.startswith("e: step 7 of 80, loss 0.5 after ")
    for is_shown, count in ((False, 1), (True, 2)):
        search.progress.is_shown = is_shown
        search.progress.log_final_progress()
        assert len(caplog.messages) == count


def test_in_the_end_there_is_one_line_unless_the_search_broke_and_a_warning_of_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nothing, extent = make_empty_experiment(first_generation("e")), SearchExtent("e", trial_count=3)
    error = TrialErrored(trial="0", cause=Cause.TRAINABLE, reason="no")
    for state in (nothing, apply_events(nothing, [TrialAdded(trial="0", config={}), error])):
        with showing_progress(SearchRecorder(state), extent, (), LOG, threading.Event(), in_terminal=True):
            pass
    broken = showing_progress(SearchRecorder(nothing), extent, (), LOG, threading.Event(), in_terminal=True)
    with pytest.raises(ZeroDivisionError), broken:
        raise ZeroDivisionError
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "e: none of 3 after 0 s"),
        ("WARNING", "e: 1 errored of 3 after 0 s; see results.errors, or prefect-tune show TARGET e"),
    ]


@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_that_is_not_in_a_terminal_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pt.tune(train, {"x": 1}, target=str(tmp_path), experiment="e", metric="loss", num_samples=1)
    assert capfd.readouterr().out == ""


_SEARCH = """
import sys, prefect_tune as pt
from tests.trainables.digits_table import DigitsTable
print("begun", flush=True)
results = pt.tune(
    DigitsTable, {"row": pt.grid_search([1, 2, 3]), "step_seconds": 0.4}, target=sys.argv[1], experiment="digits",
    metric="error", num_samples=1, stop={"step": 9}, max_concurrent_trials=2,
    scheduler=pt.ASHA(max_t=9, variant="stopping"),
)
print("best", results.best.id, flush=True)
"""


def start_search(server: str, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a search in a pseudo terminal; return its process and the terminal's other end."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _SEARCH, str(folder)],
        env={**os.environ, "PREFECT_API_URL": server, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    os.close(slave)
    return process, master


@pytest.mark.long
def test_a_search_in_a_terminal_is_a_table_that_is_gone_in_the_end(prefect_server: str, tmp_path: Path) -> None:
    process, master = start_search(prefect_server, tmp_path)
    output = read_terminal(master)
    assert process.wait(120) == 0
    assert "digits" in output
    assert "2 running" in output
    assert "at step 1" in output
    assert output.rstrip().endswith(f"best {pt.load_results(tmp_path, 'digits', metric='error').best.id}")


def read_terminal(master: int) -> str:
    output = bytearray()
    try:
        while data := os.read(master, 65536):
            output += data
    except OSError:  # the last process closed the terminal
        pass
    os.close(master)
    return output.decode()


# The lines that a search logs about its trials.

T = "00003"
ADDED = TrialAdded(trial=T, config={"lr": 0.01, "net": {"layers": 2}}, proposed_by_search=True)
AT_2 = StepReport(step=2, metrics={"loss": 0.5, "time": 3})
SAVED = CheckpointRef(step=2, sequence=4, metrics=AT_2.metrics)
AT = "at step 2, loss 0.5 (best so far)"
SAVED_AT = "checkpoint of step 2: s3://bucket/runs/e/1/trials/00003/checkpoints/"


def start_attempt(attempt: int = 1, ref: CheckpointRef | None = None, *, trial: str = T) -> AttemptStarted:
    step, sequence = (ref.step, ref.sequence) if ref else (0, None)
    return AttemptStarted(trial=trial, attempt=attempt, from_step=step, from_sequence=sequence)


REPORTED, COMMITTED = StepReported(trial=T, report=AT_2), CheckpointCommitted(trial=T, checkpoint=SAVED)
TRAINED: Sequence[Event] = (start_attempt(), REPORTED, COMMITTED)


class LoggedSearch:
    """A search, and the log that follows it."""

    def __init__(self, metric: str | None = "loss", mode: Mode = "min") -> None:
        settings = {"metric": metric, "mode": mode} if metric else {}
        self.state = make_empty_experiment(first_generation("e")).model_copy(update={"settings": settings})
        self.objective = make_objective(metric, mode)
        self.begin_run()

    def begin_run(self) -> None:
        self.recorder = SearchRecorder(self.state)
        self.log = SearchLog(self.recorder, self.objective, "s3://bucket/runs", LOG)

    def apply(self, *events: Event) -> None:
        for event in events:
            state = apply_event(self.state, event, self.state.entry_count + 1)
            self.state = state.model_copy(update={"entry_count": state.entry_count + 1})
            self.recorder.on_event(event, self.state)
            self.log.on_event(event, self.state)


VANISHED = AttemptEnded(trial=T, cause=Cause.MACHINE, reason=make_reason("owner-vanished"))
PREEMPTED = AttemptEnded(trial=T, cause=Cause.PREEMPTED, reason="saved, as requested")
STOPPED = TrialFinished(trial=T, reason="stopped by me", kind=FinishKind.STOPPED)
COMPLETED, PAUSED = TrialFinished(trial=T, reason="step 2 of 2"), TrialPaused(trial=T, reason="rung")
PRUNED = make_finish_event(T, Stop(reason="rung", early=True))
FAILED = make_failure("too large", trial=T, type="ValueError", traceback="Traceback (most recent call last):")
SPENT = make_reason("max-failures", failures=1, limit=0, error=FAILED.reason)
ERROR_TEXT = "failure 1 of the trainable (max_failures=0): ValueError: too large"
EARLIER = CheckpointRef(step=1, sequence=2, metrics={"loss": 0.5})
STEP_1, STEP_3 = (StepReported(trial=T, report=StepReport(step=step, metrics={"loss": 0.5})) for step in (1, 3))
LINES: dict[str, tuple[Sequence[Event], str]] = {
    "its configuration": ([start_attempt()], "begins: lr 0.01, net/layers 2"),
    "metric, reason and checkpoint": ([*TRAINED, COMPLETED], f"completed {AT}: step 2 of 2; {SAVED_AT}"),
    "nothing resumes a pruned trial": (
        [*TRAINED, DecisionMade(trial=T, report=AT_2, decision=Stop(reason="rung", early=True)), PRUNED],
        f"pruned {AT}: rung",
    ),
    "asked to stop": ([*TRAINED, STOPPED], f"interrupted {AT}: stopped by me; {SAVED_AT}"),
    "a resume": ([*TRAINED, PAUSED, TrialResumed(trial=T), start_attempt(2, SAVED)], "resumes from step 2 (attempt 2)"),
    "repeated steps": (
        [*TRAINED, STEP_3, VANISHED, start_attempt(2, SAVED)],
        "resumes from step 2 (attempt 2; 1 step trained again)",
    ),
    "another checkpoint is as good": (
        [start_attempt(), STEP_1, CheckpointCommitted(trial=T, checkpoint=EARLIER), *TRAINED[1:], COMPLETED],
        f"completed {AT}: step 2 of 2; {SAVED_AT}",
    ),
    "again without one": (
        [*TRAINED[:2], PREEMPTED, start_attempt(2)],
        "begins again without a checkpoint (attempt 2; 2 steps trained again)",
    ),
    "killed": ([*TRAINED, VANISHED], "crashed in attempt 1: the run that trained it was killed"),
    "an error": (
        [*TRAINED, FAILED, TrialErrored(trial=T, cause=Cause.TRAINABLE, reason=SPENT)],
        f"errored {AT}: {ERROR_TEXT}; {SAVED_AT}",
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_the_log_has_a_line_for_what_happens_to_a_trial(case: str, caplog: pytest.LogCaptureFixture) -> None:
    events, line = LINES[case]
    LoggedSearch().apply(ADDED, *events)
    assert caplog.messages[-1] in (f"trial 00003 {line}", f"trial 00003 {line}0000000002-0000000004")
    levels = {"killed": "WARNING", "an error": "ERROR"}
    assert caplog.records[-1].levelname == levels.get(case, "INFO")


def test_log_table_and_results_compare_last_reports(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    search = LoggedSearch("accuracy", "max")
    for trial in ("00001", "00002"):
        search.apply(TrialAdded(trial=trial, config={}, proposed_by_search=True), start_attempt(trial=trial))
    for step, accuracy in ((1, 0.95), (2, 0.9)):
        search.apply(StepReported(trial="00001", report=StepReport(step=step, metrics={"accuracy": accuracy})))
        ref = CheckpointRef(step=step, sequence=step, metrics={"accuracy": accuracy})
        search.apply(CheckpointCommitted(trial="00001", checkpoint=ref))
    search.apply(TrialFinished(trial="00001", reason="asked", kind=FinishKind.STOPPED))
    for step, accuracy in ((1, 0.97), (2, 0.8)):
        search.apply(StepReported(trial="00002", report=StepReport(step=step, metrics={"accuracy": accuracy})))
    search.apply(TrialFinished(trial="00002", reason="enough"))
    first, second = (message for message in caplog.messages if " at step 2" in message)
    assert "accuracy 0.9 (best so far): " in first
    assert "; checkpoint of step 2 (the best one is of step 1, accuracy 0.95): s3://" in first
    assert "accuracy 0.8 (best: 0.9, trial 00001): " in second
    extent = SearchExtent("e", make_objective("accuracy", "max"))
    tracker = TrackedProgress(search.state, extent, 0.0, datetime.now(UTC))
    assert "; best: trial 00001, accuracy 0.9" in render_progress_line(tracker.read_state(1.0))
    results = pt.Results(search.state, pt.LocalTarget(path=str(tmp_path)), extent.objective)
    assert results.best.id == "00001"


def test_the_best_is_the_trial_that_made_the_report_and_not_its_clone(caplog: pytest.LogCaptureFixture) -> None:
    search = LoggedSearch()
    for trial in ("00001", T, "00004"):
        search.apply(TrialAdded(trial=trial, config={"lr": 0.5}, proposed_by_search=True), start_attempt(trial=trial))
    search.apply(*TRAINED[1:], TrialPaused(trial="00001", reason="turn"))
    copy = make_clone_ref(search.state.trial("00001"), SAVED, T)
    search.apply(CheckpointCloned(trial="00001", checkpoint=copy, source=T, config={"lr": 0.6}, reason="behind"))
    others = StepReported(trial="00004", report=StepReport(step=2, metrics={"loss": 0.7}))
    search.apply(others, TrialPaused(trial="00004", reason="turn"))
    assert "loss 0.7 (best: 0.5, trial 00003): turn" in caplog.messages[-1]
    tracker = TrackedProgress(search.state, SearchExtent("e", make_objective("loss", "min")), 0.0, datetime.now(UTC))
    assert "best: trial 00003, loss 0.5" in render_progress_line(tracker.read_state(1.0))
    worse = StepReported(trial=T, report=StepReport(step=3, metrics={"loss": 0.9}))
    search.apply(worse)
    tracker.apply_event(worse, search.state)
    best = collect_progress_facts(tracker.read_state(3.0))["best"]
    assert best == "trial 00001, loss 0.5 at step 2, inherited from a cloned checkpoint"


def test_a_running_trial_counts_with_its_newest_report_until_its_attempt_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = LoggedSearch()
    search.apply(TrialAdded(trial="00001", config={}, proposed_by_search=True), start_attempt(trial="00001"))
    search.apply(StepReported(trial="00001", report=StepReport(step=9, metrics={"loss": 0.1})))
    search.apply(ADDED, *TRAINED, PAUSED)
    assert caplog.messages[-1].endswith("loss 0.5 (best: 0.1, trial 00001): rung")
    search.apply(VANISHED.model_copy(update={"trial": "00001"}), start_attempt(2, trial="00001"))
    search.apply(TrialResumed(trial=T), start_attempt(2, SAVED), TrialPaused(trial=T, reason="rung 2"))
    assert caplog.messages[-1].endswith("loss 0.5 (best so far): rung 2")


def test_a_lost_attempt_is_logged_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    search = LoggedSearch(metric=None)
    search.apply(TrialAdded(trial=T, config={}, proposed_by_search=True), *TRAINED)
    caplog.clear()
    search.log.on_attempt_lost(search.state.trial(T), "StoreUnavailable: s3://bucket: timed out\nTraceback")
    search.apply(VANISHED, start_attempt(2, SAVED), VANISHED)
    assert caplog.messages == [
        "trial 00003 crashed in attempt 1: StoreUnavailable: s3://bucket: timed out",
        "trial 00003 resumes from step 2 (attempt 2)",
        "trial 00003 crashed in attempt 2: the run that trained it was killed",
    ]


def list_notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that a live table does not hide, although they are no warnings."""
    return [record.message for record in caplog.records if hasattr(record, "is_notice")]


def test_a_table_does_not_hide_that_trials_of_an_earlier_run_resume(caplog: pytest.LogCaptureFixture) -> None:
    search = LoggedSearch()
    search.apply(ADDED, *TRAINED, PREEMPTED)
    assert list_notices(caplog) == []
    search.begin_run()
    search.apply(start_attempt(2, SAVED))
    assert list_notices(caplog) == ["trial 00003 resumes from step 2 (attempt 2)"]
    search.apply(TrialPaused(trial=T, reason="rung 2"), TrialResumed(trial=T), start_attempt(3, SAVED))
    assert len(list_notices(caplog)) == 1, "what a scheduler pauses and resumes is in the table"
