"""Callbacks of a search: which events they receive, in which order, how often; a slow callback delays no trial."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointRef,
    StepReported,
    TrialErrored,
    TrialFinished,
)
from prefect_tune.core.reasons import get_reason_code
from prefect_tune.core.values import StepReport
from prefect_tune.monitoring.callback_runner import CallbackRunner, resolve_callbacks
from prefect_tune.stores.posix_store import PosixStore
from prefect_tune.testing import without_server
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import write_experiment
from tests.trainables.moody import Moody

LOG = logging.getLogger("prefect_tune.tests.callbacks")
TIMEOUT = timedelta(seconds=60)


class Recorder(pt.Callback):
    """Records every call; its stored state is the number of steps."""

    def __init__(self, name: str = "recorder") -> None:
        self._name = name
        self.events: list[tuple[Any, ...]] = []
        self.steps = 0

    @property
    def name(self) -> str:
        return self._name

    def setup(self, search: pt.SearchInfo) -> None:
        self.events.append(("setup", search))

    def on_trial_start(self, trial: Trial, started: AttemptStarted) -> None:
        self.events.append(("start", trial.id, started.from_step))

    def on_trial_restore(self, trial: Trial, started: AttemptStarted) -> None:
        self.events.append(("restore", trial.id, started.from_step))

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        self.steps += 1
        self.events.append(("result", trial.id, report.step, report.metrics))

    def on_trial_save(self, trial: Trial, checkpoint: CheckpointRef) -> None:
        self.events.append(("save", trial.id, checkpoint.step))

    def on_checkpoint(self, trial: Trial, checkpoint: CheckpointRef) -> None:
        self.events.append(("checkpoint", trial.id, checkpoint.step))

    def on_trial_recover(self, trial: Trial, ended: AttemptEnded) -> None:
        self.events.append(("recover", trial.id, ended.cause))

    def on_trial_complete(self, trial: Trial, finished: TrialFinished) -> None:
        self.events.append(("complete", trial.id, finished.reason))

    def on_trial_error(self, trial: Trial, gave_up: TrialErrored) -> None:
        self.events.append(("error", trial.id, gave_up.cause))

    def on_experiment_end(self, trials: Mapping[str, Trial]) -> None:
        self.events.append(("end", {name: str(trial.status) for name, trial in trials.items()}))

    def get_state(self) -> Mapping[str, object]:
        return {"steps": self.steps}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]

    def events_of(self, trial: str) -> list[tuple[Any, ...]]:
        return [(event[0], *event[2:3]) for event in self.events if event[1] == trial]


class Raises(Recorder):
    """Raises at the start and at each result of a trial."""

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        super().on_trial_result(trial, report)
        raise ValueError("a callback's own")

    def on_trial_start(self, trial: Trial, started: AttemptStarted) -> None:
        super().on_trial_start(trial, started)
        raise SystemExit


FIRST_STEP = [("result", 1), ("save", 1), ("checkpoint", 1)]
SECOND_STEP = [("result", 2), ("save", 2), ("checkpoint", 2)]
STATUSES = {"00000": "completed", "00001": "errored", "00002": "completed"}


Recorders: TypeAlias = Mapping[str, Recorder]


@pytest.fixture(scope="module")
def recorders(tmp_path_factory: pytest.TempPathFactory) -> Recorders:
    """Three trials: one that trains, one that raises at step 2, one that is killed there once; then a resume."""
    folder = tmp_path_factory.mktemp("callbacks")
    callbacks_by_name = {name: Recorder(name) for name in ("first", "second", "late")}
    callbacks_by_name |= {"same": Recorder("first"), "raises": Raises("raises")}

    def run_search(*names: str) -> None:
        space = {"fails": pt.grid_search(["not", "raise", "kill"]), "until": str(folder / "killed")}
        pt.tune(
            Moody,
            space,
            target=str(folder / "target"),
            experiment="e",
            metric="loss",
            stop={"step": 2},
            num_samples=1,
            checkpoint=pt.Cadence(every_steps=1),
            max_concurrent_trials=1,
            callbacks=[callbacks_by_name[name] for name in names],
        )

    with without_server():
        run_search("first", "raises")
        run_search("same", "late")
    return callbacks_by_name


class TestInASearch:
    """The calls that each callback recorded."""

    def test_it_is_set_up_first_and_receives_the_end_last(self, recorders: Recorders) -> None:
        (hook, search), *_, end = recorders["first"].events
        assert hook == "setup"
        assert (search.experiment, search.objective.metrics, search.objective.modes) == ("e", ("loss",), ("min",))
        assert search.target_uri.startswith("file://")
        assert end == ("end", STATUSES)

    def test_a_trial_that_trains_is_told_step_by_step(self, recorders: Recorders) -> None:
        callback = recorders["first"]
        *earlier, (last, reason) = callback.events_of("00000")
        assert earlier == [("start", 0), *FIRST_STEP, *SECOND_STEP]
        assert last == "complete"
        assert get_reason_code(reason) == "step-limit"
        metrics = [event[3] for event in callback.events if event[:2] == ("result", "00000")]
        assert metrics == [{"loss": 1.0}, {"loss": 0.5}]

    def test_a_trial_that_raises_is_told_to_have_errored(self, recorders: Recorders) -> None:
        last = [("recover", Cause.TRAINABLE), ("error", Cause.TRAINABLE)]
        assert recorders["first"].events_of("00001") == [("start", 0), *FIRST_STEP, *last]

    def test_a_trial_that_is_killed_is_told_to_recover_and_to_go_on_from_its_checkpoint(
        self, recorders: Recorders
    ) -> None:
        recovery = [("recover", Cause.MACHINE), ("restore", 1), ("start", 1)]
        expected = [("start", 0), *FIRST_STEP, *recovery, *SECOND_STEP]
        assert recorders["first"].events_of("00002")[:-1] == expected

    def test_one_that_raises_disturbs_neither_the_search_nor_the_others(self, recorders: Recorders) -> None:
        assert recorders["raises"].events == recorders["first"].events

    def test_on_a_resume_nothing_is_told_twice_and_its_state_is_there(self, recorders: Recorders) -> None:
        again = recorders["same"]
        assert [event[0] for event in again.events] == ["setup", "end"]
        assert again.steps == recorders["first"].steps == 5

    def test_who_joins_later_is_told_everything_from_the_beginning(self, recorders: Recorders) -> None:
        first, late = recorders["first"], recorders["late"]
        for trial in STATUSES:
            assert sorted(late.events_of(trial), key=str) == sorted(first.events_of(trial), key=str)
        assert late.events[-1] == ("end", STATUSES)


@pytest.fixture
def target(tmp_path: Path) -> LocalTarget:
    """A target with a finished experiment: one trial, two steps."""
    write_experiment(tmp_path / "target", "e", [1, 2])
    return LocalTarget(path=str(tmp_path / "target"))


def load_state(target: LocalTarget) -> Experiment:
    return load_experiment(PosixStore(Path(target.path)), first_generation("e"))


def run_callbacks(target: LocalTarget, *callbacks: pt.Callback, timeout: timedelta = TIMEOUT) -> None:
    """Run the callbacks over the stored experiment, like a search with nothing left to train."""
    runner = CallbackRunner(callbacks, target, pt.SearchInfo("e", target.uri, None), LOG)
    runner.start(load_state(target))
    runner.finish(load_state(target), timeout)


def hooks_of(callback: Recorder) -> list[str]:
    return [event[0] for event in callback.events]


ALL_HOOKS = ["start", "result", "save", "checkpoint", "result", "save", "checkpoint", "complete"]


def test_what_is_in_the_journal_is_told_once_over_all_runs(target: LocalTarget) -> None:
    first, again = Recorder(), Recorder()
    run_callbacks(target, first)
    run_callbacks(target, again)
    assert hooks_of(first) == ["setup", *ALL_HOOKS, "end"]
    assert hooks_of(again) == ["setup", "end"]
    assert (first.steps, again.steps) == (2, 2)


def test_a_report_is_delivered_once_and_a_repeated_step_again(target: LocalTarget) -> None:
    recorder, state = Recorder(), load_state(target)
    runner = CallbackRunner([recorder], target, pt.SearchInfo("e", target.uri, None), LOG)
    runner.start(state)
    again = AttemptStarted(trial="trial", attempt=2, from_step=1, from_sequence=3)
    report, end = StepReport(step=2, metrics={}), TrialFinished(trial="trial", reason="enough")
    for event in (again, StepReported(trial="trial", report=report), end):
        runner.threads[0].on_event(event, state)
    runner.finish(state, TIMEOUT)
    assert hooks_of(recorder) == ["setup", *ALL_HOOKS, "restore", "start", "result", "complete", "end"]


def test_who_cannot_use_its_state_is_told_everything_again(target: LocalTarget) -> None:
    class OnAnotherMachine(Recorder):
        def set_state(self, state: Mapping[str, Any]) -> bool:  # type: ignore[override]  # False: unusable state
            del state
            return False

    run_callbacks(target, Recorder())
    again = OnAnotherMachine()
    run_callbacks(target, again)
    assert hooks_of(again) == ["setup", *ALL_HOOKS, "end"]


def test_two_of_one_name_have_a_state_each(target: LocalTarget) -> None:
    run_callbacks(target, Recorder(), Recorder())
    assert {path.name for path in Path(target.path).glob("e/1/callbacks/*")} == {"recorder.json", "recorder-2.json"}


def test_a_hook_that_hangs_is_left_behind_and_told_in_the_next_run(target: LocalTarget) -> None:
    class Hangs(Recorder):
        def on_trial_result(self, trial: Trial, report: StepReport) -> None:
            super().on_trial_result(trial, report)
            if report.step == 1:
                free.wait(30)

    free, hung, successor = threading.Event(), Hangs(), Recorder()
    run_callbacks(target, hung, timeout=timedelta(seconds=0.5))
    run_callbacks(target, successor)
    free.set()
    assert "complete" not in hooks_of(hung)
    assert hooks_of(successor) == ["setup", *ALL_HOOKS, "end"]


def test_events_that_its_queue_has_no_room_for_are_read_from_the_journal(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefect_tune.monitoring.callback_runner._MAX_QUEUED_ITEMS", 3)
    slow, state = Recorder(), load_state(target)
    runner = CallbackRunner([slow], target, pt.SearchInfo("e", target.uri, None), LOG)
    for _ in range(5):
        runner.threads[0].on_event(AttemptStarted(trial="trial", attempt=9, from_step=0), state)
    runner.start(state)
    runner.finish(state, TIMEOUT)
    assert hooks_of(slow) == ["setup", *ALL_HOOKS, "end"]


def test_one_that_cannot_be_set_up_is_told_nothing_and_says_why(
    target: LocalTarget, caplog: pytest.LogCaptureFixture
) -> None:
    class Unready(Recorder):
        def setup(self, search: pt.SearchInfo) -> None:
            raise OSError(f"no room for {search.experiment}")

    unready, other = Unready("unready"), Recorder()
    run_callbacks(target, unready, other)
    assert unready.events == []
    assert hooks_of(other) == ["setup", *ALL_HOOKS, "end"]
    assert "callback unready: setup failed" in caplog.text
    assert "no room for e" in caplog.text


def test_what_a_hook_raises_is_logged_with_its_trace(target: LocalTarget, caplog: pytest.LogCaptureFixture) -> None:
    run_callbacks(target, Raises("raises"))
    assert "callback raises failed" in caplog.text
    assert "a callback's own" in caplog.text


def test_a_callback_is_given_as_an_object_a_class_or_a_name() -> None:
    callbacks = [Recorder(), Recorder, "tests.monitoring.test_callback_runner:Recorder", pt.FileLogger]
    types = [type(callback).__name__ for callback in resolve_callbacks(callbacks)]
    assert types == ["Recorder", "Recorder", "Recorder", "FileLogger"]
    assert resolve_callbacks(None) == []


def test_a_hook_that_nobody_calls_is_warned_of_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    class Misspelt(pt.Callback):
        def on_trial_finish(self, trial: Trial) -> None: ...

        def on_trial_complete(self, trial: Trial, finished: TrialFinished) -> None: ...

    logger = logging.getLogger("prefect.prefect_tune")
    logger.addHandler(caplog.handler)
    try:
        resolve_callbacks([Misspelt(), Recorder(), pt.FileLogger("logs")])
    finally:
        logger.removeHandler(caplog.handler)
    (message,) = {record.getMessage() for record in caplog.records}
    assert message.startswith("callback Misspelt: on_trial_finish is not a hook: did you mean 'on_trial_")


@pytest.mark.parametrize("nonsense", [3, "FileLogger", object, "tests.monitoring.test_callback_runner:ALL_HOOKS"])
def test_what_is_no_callback_is_refused(nonsense: object) -> None:
    with pytest.raises(pt.InvalidInput, match=r"expected a pt\.Callback"):
        resolve_callbacks([nonsense])
