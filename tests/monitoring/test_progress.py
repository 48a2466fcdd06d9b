"""What the terminal shows while a search runs, and what the log shows without a terminal."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.core.experiment.experiment import after_event, nothing_yet
from prefect_tune.core.experiment.trial_transitions import clone_for
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointRef,
    Cloned,
    Committed,
    Decided,
    Event,
    Finished,
    FinishKind,
    GaveUp,
    Launched,
    Opened,
    OutboxClosed,
    Owner,
    Paused,
    Received,
    Reported,
    Resumed,
    Started,
    TrialAdded,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import Stop
from prefect_tune.core.search.objective import Mode, objective_of
from prefect_tune.core.values import StepReport
from prefect_tune.monitoring.progress import Progress, SearchLog, progress
from prefect_tune.monitoring.search_observer import SearchRecorder
from prefect_tune.terminal.progress_view import SearchEstimate, head_facts, line
from prefect_tune.tuner.search_policy import finish_of
from tests.fakes.checkpoints import first_generation
from tests.fakes.outcomes import make_failure
from tests.fakes.searches.experiments import after
from tests.fakes.searches.tracked_progress import TrackedProgress
from tests.trainables.moody import train

LOG = logging.getLogger("a flow run")


@pytest.fixture(autouse=True)
def _says_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOG.name)


def running() -> tuple[Progress, Callable[[int], None]]:
    """The progress of a search of one trial, and a function that reports a step."""
    state = after(
        nothing_yet(first_generation("e")),
        [TrialAdded(trial="0", config={}), Started(trial="0", attempt=1, from_step=0)],
    )
    seen = Progress(TrackedProgress(state, SearchEstimate("e"), 0.0, datetime.now(UTC)), LOG, log_period=timedelta(0))
    return seen, lambda step: seen.applied(Reported(trial="0", report=StepReport(step=step, metrics={})), state)


def test_where_nobody_sees_it_the_log_has_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    seen, report = running()
    report(1)
    assert caplog.messages[0].startswith("e: 1 running after ")
    seen.is_shown = True
    report(2)
    assert len(caplog.messages) == 1


def test_a_single_training_without_a_display_logs_its_metrics_now_and_then_and_no_second_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = after(
        nothing_yet(first_generation("e")),
        [TrialAdded(trial="0", config={}), Started(trial="0", attempt=1, from_step=0)],
    )
    outlook = SearchEstimate("e", None, 1, 80, is_training=True)
    tracker = TrackedProgress(state, outlook, 0.0, datetime.now(UTC))
    seen, report = Progress(tracker, LOG, log_period=timedelta(0)), StepReport(step=7, metrics={"loss": 0.5})
    tracker.happens(Reported(trial="0", report=report), state)
    seen.applied(Reported(trial="0", report=report), state)
    (message,) = caplog.messages
    assert message.startswith("e: step 7 of 80, loss 0.5 after ")
    seen.conclude()
    assert caplog.messages == [message]
    seen.is_shown = True
    seen.conclude()
    assert len(caplog.messages) == 2


def test_no_line_comes_before_its_time(caplog: pytest.LogCaptureFixture) -> None:
    state = nothing_yet(first_generation("e"))
    seen = Progress(TrackedProgress(state, SearchEstimate("e"), 0.0, datetime.now(UTC)), LOG)
    for step in range(1, 100):
        seen.applied(Reported(trial="0", report=StepReport(step=step, metrics={})), state)
    assert caplog.messages == []


def test_a_table_that_breaks_is_told_once_and_the_lines_begin(caplog: pytest.LogCaptureFixture) -> None:
    seen, report = running()
    seen.is_shown = True
    seen.fall_back(OSError("hung up"))
    report(1)
    assert caplog.messages[0] == "the live table ends, and the search continues: OSError: hung up"
    assert len(caplog.messages) == 2


def test_in_the_end_there_is_one_line_unless_the_search_broke(caplog: pytest.LogCaptureFixture) -> None:
    with progress(
        SearchRecorder(nothing_yet(first_generation("e"))),
        SearchEstimate("e", trial_count=3),
        (),
        LOG,
        threading.Event(),
        in_terminal=True,
    ):
        pass
    assert caplog.messages == ["e: none of 3 after 0 s"]
    shown = progress(
        SearchRecorder(nothing_yet(first_generation("e"))),
        *(SearchEstimate("e"), (), LOG, threading.Event()),
        in_terminal=True,
    )
    with pytest.raises(ZeroDivisionError), shown:
        raise ZeroDivisionError
    assert len(caplog.messages) == 1


def test_the_last_line_warns_of_trials_that_errored_and_says_where_to_look(caplog: pytest.LogCaptureFixture) -> None:
    errored = GaveUp(trial="0", cause=Cause.USER, reason="no")
    state = after(nothing_yet(first_generation("e")), [TrialAdded(trial="0", config={}), errored])
    with progress(
        SearchRecorder(state), SearchEstimate("e", trial_count=1), (), LOG, threading.Event(), in_terminal=True
    ):
        pass
    (last,) = caplog.records
    assert last.levelname == "WARNING"
    assert last.message == "e: 1 errored of 1 after 0 s; why: results.errors, or prefect-tune show TARGET e"


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
print("best", results.best.trial, flush=True)
"""


def searching(
    server: str, folder: Path, code: str = _SEARCH, *, with_log: bool = False
) -> tuple[subprocess.Popen[bytes], int]:
    """A process that searches in a pseudo terminal, to which its log goes too if asked, and that one's other end."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "PREFECT_API_URL": server, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave if with_log else subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    os.close(slave)
    return process, master


@pytest.mark.long
def test_a_search_in_a_terminal_is_a_table_that_is_gone_in_the_end(prefect_server: str, tmp_path: Path) -> None:
    process, master = searching(prefect_server, tmp_path)
    shown = _all_of(master)
    assert process.wait(120) == 0
    assert "digits" in shown
    assert "2 running" in shown
    assert "at step 1" in shown
    assert shown.rstrip().endswith(f"best {pt.load_results(tmp_path, 'digits', metric='error').best.trial}")


_TRAINING = """
import sys, prefect_tune as pt
from tests.trainables.digits_table import DigitsTable
config = {"row": 1, "step_seconds": 0.4}
print(pt.durable_trainable(DigitsTable, config, target=sys.argv[1], experiment="digits", stop={"step": 9}).step)
"""


@pytest.mark.long
def test_a_single_training_in_a_terminal_has_a_live_display_too(prefect_server: str, tmp_path: Path) -> None:
    process, master = searching(prefect_server, tmp_path, _TRAINING)
    shown = _all_of(master)
    assert process.wait(120) == 0
    assert " of 9" in shown
    assert "error 0." in shown
    assert shown.rstrip().endswith("9")


def _all_of(master: int) -> str:
    shown = bytearray()
    try:
        while data := os.read(master, 65536):
            shown += data
    except OSError:  # the last process closed the terminal
        pass
    os.close(master)
    return shown.decode()


# The lines that a search logs about its trials.

T = "00003"
CONFIG = {"lr": 0.01, "net": {"layers": 2}}
AT_2 = StepReport(step=2, metrics={"loss": 0.5, "time": 3})
SAVED = CheckpointRef(step=2, sequence=4, metrics=AT_2.metrics)
AT = "at step 2, loss 0.5 (best so far)"
SAVED_AT = "checkpoint of step 2: s3://bucket/runs/e/1/trials/00003/checkpoints/"


def started(attempt: int = 1, ref: CheckpointRef | None = None) -> Started:
    return Started(
        trial=T, attempt=attempt, from_step=ref.step if ref else 0, from_sequence=ref.sequence if ref else None
    )


TRAINED: Sequence[Event] = (started(), Reported(trial=T, report=AT_2), Committed(trial=T, checkpoint=SAVED))


def started_of(trial: str, attempt: int = 1) -> Started:
    return Started(trial=trial, attempt=attempt, from_step=0)


class LoggedSearch:
    """A search, and the log that follows it."""

    def __init__(self, metric: str | None = "loss", mode: Mode = "min") -> None:
        self.state = nothing_yet(first_generation("e"))
        self.objective = objective_of(metric, mode)
        self.state = self.state.model_copy(update={"settings": {"metric": metric, "mode": mode} if metric else {}})
        self.begins()

    def begins(self) -> None:
        """Begin a run."""
        self.recorder = SearchRecorder(self.state)
        self.log = SearchLog(self.recorder, self.objective, "s3://bucket/runs", LOG)

    def goes(self, *events: Event) -> None:
        for event in events:
            state = after_event(self.state, event, self.state.number + 1)
            self.state = state.model_copy(update={"number": state.number + 1})
            self.recorder.applied(event, self.state)
            self.log.applied(event, self.state)


def logged(caplog: pytest.LogCaptureFixture, *events: Event, of_search: bool = True) -> Sequence[str]:
    """The lines logged for these events of one trial."""
    LoggedSearch().goes(TrialAdded(trial=T, config=CONFIG, of_search=of_search), *events)
    return caplog.messages


def test_a_trial_begins_with_its_configuration_and_completes_with_metric_reason_and_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, last = logged(caplog, *TRAINED, Finished(trial=T, reason="step 2 of 2"))
    assert first == "trial 00003 begins: lr 0.01, net/layers 2"
    assert last.startswith(f"trial 00003 completed {AT}: step 2 of 2; {SAVED_AT}")


@pytest.mark.parametrize(("early", "end"), [(True, "pruned"), (False, "completed")])
def test_a_trial_that_the_scheduler_stops_was_pruned_unless_it_has_trained_all(
    caplog: pytest.LogCaptureFixture, end: str, *, early: bool
) -> None:
    stop = Stop(reason="rung", early=early)
    decided = Decided(trial=T, report=AT_2, decision=stop)
    *_, last = logged(caplog, *TRAINED, decided, finish_of(T, stop))
    assert last.startswith(f"trial 00003 {end} {AT}: rung")
    assert (SAVED_AT in last) is not early, "nothing resumes a pruned trial"


def test_a_trial_that_is_asked_to_stop_was_interrupted(caplog: pytest.LogCaptureFixture) -> None:
    *_, last = logged(caplog, *TRAINED, Finished(trial=T, reason="stopped by me", kind=FinishKind.STOPPED))
    assert last.startswith(f"trial 00003 interrupted {AT}: stopped by me; {SAVED_AT}")


def test_a_pause_and_its_resume_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    _, paused, resumed = logged(caplog, *TRAINED, Paused(trial=T, reason="rung"), Resumed(trial=T), started(2, SAVED))
    assert paused == f"trial 00003 paused {AT}: rung"
    assert resumed == "trial 00003 resumes from step 2 (attempt 2)"


def test_a_pause_says_rank_and_best_in_a_short_line_and_the_metric_once(caplog: pytest.LogCaptureFixture) -> None:
    search = LoggedSearch()
    for trial, loss, rank in (("00001", 0.5, 1), ("00002", 0.7, 2), ("00003", 0.25, 1)):
        reason = make_reason("rank-promoted", metric="loss", value=loss, step=2, rank=rank, ranked=3, quota=1)
        search.goes(
            TrialAdded(trial=trial, config={}, of_search=True),
            Started(trial=trial, attempt=1, from_step=0),
            Reported(trial=trial, report=StepReport(step=2, metrics={"loss": loss})),
            Committed(trial=trial, checkpoint=CheckpointRef(step=2, sequence=4)),
            Paused(trial=trial, reason=reason),
        )
    assert [each for each in caplog.messages if "paused" in each] == [
        "trial 00001 paused at step 2, loss 0.5 (best so far): rank 1 of 3, the best is promoted",
        ("trial 00002 paused at step 2, loss 0.7 (best: 0.5, trial 00001): rank 2 of 3, the best is promoted"),
        "trial 00003 paused at step 2, loss 0.25 (best so far): rank 1 of 3, the best is promoted",
    ]


def test_log_table_and_results_compare_last_reports(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    search = LoggedSearch("accuracy", "max")
    for trial in ("00001", "00002"):
        search.goes(TrialAdded(trial=trial, config={}, of_search=True), Started(trial=trial, attempt=1, from_step=0))
    for step, accuracy in ((1, 0.95), (2, 0.9)):
        search.goes(Reported(trial="00001", report=StepReport(step=step, metrics={"accuracy": accuracy})))
        search.goes(
            Committed(trial="00001", checkpoint=CheckpointRef(step=step, sequence=step, metrics={"accuracy": accuracy}))
        )
    search.goes(Finished(trial="00001", reason="asked", kind=FinishKind.STOPPED))
    for step, accuracy in ((1, 0.97), (2, 0.8)):
        search.goes(Reported(trial="00002", report=StepReport(step=step, metrics={"accuracy": accuracy})))
    search.goes(Finished(trial="00002", reason="enough"))
    first, second = (each for each in caplog.messages if " at step 2" in each)
    assert "accuracy 0.9 (best so far): " in first
    assert "; checkpoint of step 2 (the best one is of step 1, accuracy 0.95): s3://" in first
    assert "accuracy 0.8 (best: 0.9, trial 00001): " in second
    outlook = SearchEstimate("e", objective_of("accuracy", "max"))
    tracker = TrackedProgress(search.state, outlook, 0.0, datetime.now(UTC))
    assert "; best: trial 00001, accuracy 0.9" in line(tracker.state(1.0))
    results = pt.Results(search.state, pt.LocalTarget(path=str(tmp_path)), outlook.objective)
    assert results.best.trial == "00001"


def test_a_newest_checkpoint_that_is_as_good_as_any_is_the_only_one_named(caplog: pytest.LogCaptureFixture) -> None:
    earlier = CheckpointRef(step=1, sequence=2, metrics={"loss": 0.5})
    *_, last = logged(
        caplog, started(), Reported(trial=T, report=StepReport(step=1, metrics={"loss": 0.5})),
        Committed(trial=T, checkpoint=earlier), *TRAINED[1:], Finished(trial=T, reason="step 2 of 2"),
    )  # fmt: skip
    assert last.startswith(f"trial 00003 completed {AT}: step 2 of 2; {SAVED_AT}")


def test_the_best_is_the_trial_that_made_the_report_and_not_its_clone(caplog: pytest.LogCaptureFixture) -> None:
    search = LoggedSearch()
    for trial in ("00001", T, "00004"):
        search.goes(TrialAdded(trial=trial, config={"lr": 0.5}, of_search=True), started_of(trial))
    search.goes(*TRAINED[1:], Paused(trial="00001", reason="turn"))
    copy = clone_for(search.state.trial("00001"), SAVED, T)
    search.goes(Cloned(trial="00001", checkpoint=copy, source=T, config={"lr": 0.6}, reason="behind"))
    others = Reported(trial="00004", report=StepReport(step=2, metrics={"loss": 0.7}))
    search.goes(others, Paused(trial="00004", reason="turn"))
    assert "loss 0.7 (best: 0.5, trial 00003): turn" in caplog.messages[-1]
    tracker = TrackedProgress(search.state, SearchEstimate("e", objective_of("loss", "min")), 0.0, datetime.now(UTC))
    assert "best: trial 00003, loss 0.5" in line(tracker.state(1.0))
    worse = Reported(trial=T, report=StepReport(step=3, metrics={"loss": 0.9}))
    search.goes(worse)
    tracker.happens(worse, search.state)
    best = head_facts(tracker.state(3.0))["best"]
    assert best == "trial 00001, loss 0.5 at step 2, of the checkpoint that it continues from"


def test_a_running_trial_counts_with_its_newest_report_until_its_attempt_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = LoggedSearch()
    search.goes(TrialAdded(trial="00001", config={}, of_search=True), started_of("00001"))
    search.goes(Reported(trial="00001", report=StepReport(step=9, metrics={"loss": 0.1})))
    search.goes(TrialAdded(trial=T, config=CONFIG, of_search=True), *TRAINED, Paused(trial=T, reason="rung"))
    assert caplog.messages[-1].endswith("loss 0.5 (best: 0.1, trial 00001): rung")
    search.goes(
        AttemptEnded(trial="00001", cause=Cause.MACHINE, reason=make_reason("owner-vanished")), started_of("00001", 2)
    )
    search.goes(Resumed(trial=T), started(2, SAVED), Paused(trial=T, reason="rung 2"))
    assert caplog.messages[-1].endswith("loss 0.5 (best so far): rung 2")


def test_a_resume_says_how_many_steps_it_repeats(caplog: pytest.LogCaptureFixture) -> None:
    three = Reported(trial=T, report=StepReport(step=3, metrics={"loss": 0.4}))
    vanished = AttemptEnded(trial=T, cause=Cause.MACHINE, reason=make_reason("owner-vanished"))
    _, crashed, resumed = logged(caplog, *TRAINED, three, vanished, started(2, SAVED))
    assert crashed == "trial 00003 crashed in attempt 1: the run that trained it was killed"
    assert resumed == "trial 00003 resumes from step 2 (attempt 2; 1 step trained again)"
    assert caplog.records[-2].levelname == "WARNING"


def test_an_attempt_of_a_killed_run_began_in_an_earlier_run(caplog: pytest.LogCaptureFixture) -> None:
    search = LoggedSearch()
    owner = Owner(name="a run", host="here", pid=1)
    search.goes(Opened(experiment="e", generation=1, term=1, owner=owner))
    search.goes(TrialAdded(trial=T, config=CONFIG, of_search=True), Launched(trial=T, outbox=1))
    search.goes(Opened(experiment="e", generation=1, term=2, owner=owner), Received(trial=T, post=1), started())
    vanished = AttemptEnded(trial=T, cause=Cause.MACHINE, reason=make_reason("owner-vanished"))
    search.goes(OutboxClosed(trial=T), vanished, Launched(trial=T, outbox=2), Received(trial=T, post=1), started(2))
    assert caplog.messages == [
        "trial 00003 began attempt 1 in an earlier run: lr 0.01, net/layers 2",
        "trial 00003 crashed in attempt 1: the run that trained it was killed",
        "trial 00003 begins again without a checkpoint (attempt 2)",
    ]


def test_a_lost_attempt_is_logged_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    search = LoggedSearch(metric=None)
    vanished = AttemptEnded(trial=T, cause=Cause.MACHINE, reason=make_reason("owner-vanished"))
    search.goes(TrialAdded(trial=T, config={}, of_search=True), *TRAINED)
    caplog.clear()
    search.log.lost(search.state.trial(T), "StoreUnavailable: s3://bucket: timed out\nTraceback")
    search.goes(vanished, started(2, SAVED), vanished)
    assert caplog.messages == [
        "trial 00003 crashed in attempt 1: StoreUnavailable: s3://bucket: timed out",
        "trial 00003 resumes from step 2 (attempt 2)",
        "trial 00003 crashed in attempt 2: the run that trained it was killed",
    ]


def test_an_attempt_that_is_lost_before_it_began_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    search = LoggedSearch()
    search.goes(TrialAdded(trial=T, config={}, of_search=True))
    search.log.lost(search.state.trial(T), "KilledWorker: tcp://10.0.0.7")
    assert caplog.messages == ["trial 00003 crashed before attempt 1 began: KilledWorker: tcp://10.0.0.7"]


def test_a_trial_without_a_checkpoint_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    asked = AttemptEnded(trial=T, cause=Cause.PREEMPTED, reason="saved, as requested")
    _, interrupted, again = logged(caplog, started(), Reported(trial=T, report=AT_2), asked, started(2))
    assert interrupted == f"trial 00003 interrupted {AT}: saved, as requested; no checkpoint"
    assert again == "trial 00003 begins again without a checkpoint (attempt 2; 2 steps trained again)"


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that a live table does not hide, although they are no warnings."""
    return [record.message for record in caplog.records if hasattr(record, "is_notice")]


def test_a_table_does_not_hide_that_trials_of_an_earlier_run_resume(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = AttemptEnded(trial=T, cause=Cause.PREEMPTED, reason="saved, as requested")
    search = LoggedSearch()
    search.goes(TrialAdded(trial=T, config=CONFIG, of_search=True), *TRAINED, asked)
    assert notices(caplog) == []
    search.begins()
    search.goes(started(2, SAVED))
    assert notices(caplog) == ["trial 00003 resumes from step 2 (attempt 2)"]
    search.goes(Paused(trial=T, reason="rung 2"), Resumed(trial=T), started(3, SAVED))
    assert len(notices(caplog)) == 1, "what a scheduler pauses and resumes is in the table"


_AGAIN = """
import sys, prefect_tune as pt
from tests.trainables.digits_table import DigitsTable
options = {"target": sys.argv[1], "experiment": "digits", "metric": "error", "stop": {"step": 2}}
space = {"row": pt.grid_search([1, 2])}
pt.tune(DigitsTable, space, num_samples=1, **options)
print("first ends", flush=True)
pt.tune(DigitsTable, space, num_samples=1, **options)
print("second ends", flush=True)
pt.resume("digits", target=sys.argv[1], fork="copy", num_samples=1)
print("fork ends", flush=True)
options |= {"experiment": "third", "stop": [pt.TrialBudget(1), {"step": 2}]}
pt.tune(DigitsTable, space, num_samples=1, **options)
print("third ends", flush=True)
pt.durable_trainable(DigitsTable, {"row": 1}, target=sys.argv[1], experiment="one", stop={"step": 2})
pt.durable_trainable(DigitsTable, {"row": 1}, target=sys.argv[1], experiment="one", stop={"step": 2})
pt.durable_trainable(DigitsTable, {"row": 1}, target=sys.argv[1], experiment="one", stop={"step": 4})
"""


@pytest.mark.long
def test_what_a_person_must_know_is_in_the_terminal_when_the_tables_are_gone(
    prefect_server: str, tmp_path: Path
) -> None:
    process, master = searching(prefect_server, tmp_path, _AGAIN, with_log=True)
    shown = re.sub(r"\s+", " ", _all_of(master))
    assert process.wait(120) == 0
    first, _, rest = shown.partition("first ends")
    second, _, rest = rest.partition("second ends")
    forked, _, rest = rest.partition("fork ends")
    third, _, rest = rest.partition("third ends")
    finished = "experiment 'digits' was finished already, and this run trained nothing"
    assert finished not in first
    assert "no more trials" not in first
    assert finished in second
    assert "copy: a fork of " in forked
    assert "no more trials: " in third
    assert "finished already, at step 2" in rest
    assert "resumes from step 2, after 1 attempt" in rest


def test_an_error_is_one_line_whatever_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    failed = make_failure("too large", trial=T, type="ValueError", traceback="Traceback (most recent call last):")
    spent = make_reason("max-failures", failures=1, limit=0, error=failed.reason)
    _, last = logged(caplog, *TRAINED, failed, GaveUp(trial=T, cause=Cause.USER, reason=spent))
    why = "failure 1 of the trainable (max_failures=0): ValueError: too large"
    assert last.startswith(f"trial 00003 errored {AT}: {why}; {SAVED_AT}")
    assert "\n" not in last
    assert caplog.records[-1].levelname == "ERROR"


def test_a_single_training_has_no_name(caplog: pytest.LogCaptureFixture) -> None:
    first, _ = logged(caplog, *TRAINED, Finished(trial=T, reason="step 2 of 2"), of_search=False)
    assert first == "the trial begins: lr 0.01, net/layers 2"
