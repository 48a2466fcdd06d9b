"""The trial's side of a training, run in this process: all messages to the trial are sent before it begins."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.attempt.trial_spec import serialize_for_trial
from prefect_tune.core.display_text import first_line
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.stoppers import MaxSteps, Never, Stopper, as_stopper
from prefect_tune.core.journal_events import AttemptEnded, Cause, FinishKind, TrialFinished
from prefect_tune.core.messages.process_messages import (
    CheckpointAndStop,
    CheckpointSaved,
    FromTrial,
    StartReceived,
    StepDone,
    ToTrial,
    TrainableLoaded,
    TrialEnded,
    from_trial_adapter,
)
from prefect_tune.core.metrics import to_plain_metrics
from prefect_tune.core.reasons import get_reason_code, make_reason
from prefect_tune.core.values import StepReport
from prefect_tune.runtime.processes.trial_process import serve_one_attempt
from prefect_tune.runtime.trainable import StopTraining, require_trainable, save_last_step
from prefect_tune.runtime.trial_errors import failure_message
from tests.fakes.outcomes import require_failure, require_reason
from tests.fakes.trial_processes import drop_seconds, make_start

Config = Mapping[str, object]
Trains = Callable[[Config], Mapping[str, object] | None]
Trained = Callable[..., Sequence[FromTrial]]


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """Train in this process, with all unrequested messages sent first; return the trial's messages."""
    return partial(_trained, tmp_path)


def _trained(
    folder: Path,
    function: Trains,
    *said: ToTrial,
    stopper: Stopper | None = None,
    curve: tuple[StepReport, ...] = (),
    cadence: Cadence = Cadence(),  # noqa: B008  frozen: safe to share
) -> Sequence[FromTrial]:
    start = make_start(
        function,
        folder,
        import_path=(),
        stopper=serialize_for_trial(stopper or Never()),
        from_step=curve[-1].step if curve else 0,
        reports=curve,
        cadence=cadence,
    )
    ours, theirs = socket.socketpair()
    with closing(Connection(ours.detach())) as near, closing(Connection(theirs.detach())) as far:
        for message in (start, *said):
            near.send_bytes(message.model_dump_json().encode())
        received: list[FromTrial] = []
        receiver = threading.Thread(target=_receive, args=(near, received))
        receiver.start()
        # In a separate context, like a thread: the current trial does not leak into the next test.
        copy_context().run(serve_one_attempt, far)
        receiver.join()
        return received


def _receive(near: Connection, received: list[FromTrial]) -> None:
    """Receive all messages of the trial, and acknowledge its checkpoints."""
    while not (received and isinstance(received[-1], TrialEnded)):
        message = from_trial_adapter.validate_json(near.recv_bytes())
        if isinstance(message, StartReceived):
            continue
        received.append(message)
        if isinstance(received[-1], StepDone) and received[-1].checkpoint:
            near.send_bytes(CheckpointSaved(step=received[-1].report.step).model_dump_json().encode())


def _save() -> None:
    directory = pt.get_trial().new_checkpoint_dir()
    (directory / "weights").write_text("w")
    pt.report({"loss": 1.0}, checkpoint=pt.Checkpoint.from_directory(directory))


def _swallows(_config: Config) -> Config | None:
    try:
        _save()
    except BaseException:  # noqa: BLE001  what is tested
        return {"loss": 2.0}
    return None


def _trains_in_a_thread(_config: Config) -> None:
    def work() -> None:
        for _ in range(9):
            try:
                _save()
            except BaseException:  # noqa: BLE001  no test reads a thread's exception
                return

    thread = threading.Thread(target=copy_context().run, args=(work,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("trains", [_swallows, _trains_in_a_thread])
def test_a_function_that_never_saw_its_end_was_interrupted_and_has_not_returned(
    trained: Trained, trains: Trains
) -> None:
    loaded, step, ended = trained(trains, CheckpointAndStop())
    assert isinstance(loaded, TrainableLoaded)
    assert isinstance(step, StepDone)
    saved = AttemptEnded(trial="t", cause=Cause.PREEMPTED, reason=make_reason("saved-as-requested"))
    assert drop_seconds(ended) == TrialEnded(outcome=saved)


@pytest.mark.parametrize("trains", [_swallows, _trains_in_a_thread])
def test_a_function_that_never_saw_its_criterion_has_met_it(trained: Trained, trains: Trains) -> None:
    ended = trained(trains, stopper=MaxSteps(1))[-1]
    met = TrialFinished(trial="t", reason=make_reason("step-limit", step=1, limit=1), kind=FinishKind.CRITERION)
    assert drop_seconds(ended) == TrialEnded(outcome=met)


def test_a_trial_that_is_kept_says_what_is_true_now(trained: Trained) -> None:
    def looks(_config: Config) -> Mapping[str, object]:
        trial = pt.get_trial()
        before, asked = trial.step, trial.should_checkpoint  # no report yet, so no message was read
        pt.report({"loss": 1.0})
        return {"before": before, "step": trial.step, "asked": asked}

    reported = [each.report.metrics for each in trained(looks, CheckpointAndStop()) if isinstance(each, StepDone)]
    assert reported[-1] == {"before": 0, "step": 1, "asked": True}


class _Saves(pt.Trainable):
    """Saves a trivial state; its third step reports another metric."""

    def setup(self, _config: Config) -> None:
        self.steps = 0

    def step(self) -> Mapping[str, object]:
        self.steps += 1
        return {"other": 1.0} if self.steps == 3 else {"loss": 1.0}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "state").write_text("1")

    def load_checkpoint(self, checkpoint_dir: str) -> None: ...


def test_a_stopper_is_asked_once_a_step_and_what_it_says_with_a_checkpoint_holds(
    trained: Trained, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"

    def says_so_once(_metrics: Config) -> bool:
        with asked.open("a") as file:
            file.write("x")
        return asked.stat().st_size == 2

    said = trained(_Saves, stopper=as_stopper(says_so_once), cadence=Cadence(every_steps=1))
    steps = [(each.report.step, each.finish_reason is not None) for each in said if isinstance(each, StepDone)]
    assert steps == [(1, False), (2, True)]
    assert isinstance(said[-1], TrialEnded)
    assert isinstance(said[-1].outcome, TrialFinished)
    assert asked.read_text() == "xx"


def test_a_stopper_that_fails_does_so_once_the_state_is_saved(trained: Trained) -> None:
    said = trained(_Saves, stopper=as_stopper({"loss": 5}), cadence=Cadence(every_steps=1))
    assert [each.report.step for each in said if isinstance(each, StepDone) and each.checkpoint] == [1, 2, 3]
    require_failure(said[-1])


def test_a_trial_that_is_not_asked_to_stop_sees_that(trained: Trained) -> None:
    def looks(_config: Config) -> Mapping[str, object]:
        return {"asked": pt.get_trial().should_checkpoint}

    (step,) = [each for each in trained(looks) if isinstance(each, StepDone)]
    assert step.report.metrics == {"asked": False}


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), Cause.MACHINE),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), Cause.MACHINE),
        (OSError(errno.EIO, "Input/output error"), Cause.MACHINE),
        (FileNotFoundError(errno.ENOENT, "No such file"), Cause.TRAINABLE),
        (MemoryError(), Cause.OUT_OF_MEMORY),
        (ImportError("no torch"), Cause.IMPORT),
        (ValueError("shapes differ"), Cause.TRAINABLE),
    ],
)
def test_what_a_trainable_raises_says_whose_fault_it_is(trained: Trained, error: Exception, cause: Cause) -> None:
    def breaks(_config: Config) -> None:
        raise error

    assert require_failure(trained(breaks)[-1]).cause is cause


def test_a_parser_that_another_thread_disturbs_fails_no_trial(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disturbed(_trainable: object) -> str:
        raise SystemError("AST constructor recursion depth mismatch (before=42, after=113)")

    monkeypatch.setattr("inspect.getsource", disturbed)
    said = trained(lambda _config: {"loss": 1.0})
    assert isinstance(said[-1], TrialEnded)
    assert said[-1].has_returned


def test_a_traceback_begins_in_the_trainable(trained: Trained) -> None:
    def divides(_config: Config) -> None:
        1 / 0  # noqa: B018  the error is the point

    arguments = require_reason(require_failure(trained(divides)[-1])).arguments
    files = re.findall(r'File "(.*)", line', arguments["traceback"])
    assert files == [__file__]
    assert arguments["location"].startswith("test_training.py:")
    assert arguments["traceback"].rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_traceback_without_a_frame_of_the_trainable_is_whole(trained: Trained) -> None:
    failure = require_failure(trained(partial(print, file=1))[-1])  # a call that fails in C
    assert "trial_process.py" in require_reason(failure).arguments["traceback"]


def test_a_trial_whose_last_step_reported_done_is_not_trained_again(trained: Trained) -> None:
    def trains(_config: Config) -> None:
        raise AssertionError("the trial was trained again")

    last = StepReport(step=3, metrics={"done": True})
    done = TrialFinished(trial="t", reason=make_reason("done-reported"))
    assert trained(trains, curve=(last,)) == [TrialEnded(outcome=done)]


def _write(directory: str) -> None:
    (Path(directory) / "weights").write_text("w")


def _reports_steps(config: Config) -> None:
    del config
    for _ in range(5):
        pt.report_step({"loss": 1.0}, _write)
    save_last_step(_write)


def test_a_function_that_reports_steps_is_saved_as_a_class_is_and_at_its_end(trained: Trained) -> None:
    said = trained(_reports_steps, cadence=Cadence(every_steps=2))
    checkpoints = [each for each in said if isinstance(each, StepDone) and each.checkpoint]
    saved = [each.report.step for each in checkpoints if not each.is_reported]
    states = [each.report.step for each in checkpoints if each.is_reported]
    assert (saved, states) == ([2, 4], [5])
    returned = TrialFinished(trial="t", reason=make_reason("returned"), kind=FinishKind.RETURNED)
    assert drop_seconds(said[-1]) == TrialEnded(outcome=returned)


def test_a_function_that_reports_steps_saves_the_one_that_meets_its_criterion(trained: Trained) -> None:
    *_, last, ended = trained(_reports_steps, stopper=MaxSteps(3))
    assert isinstance(last, StepDone)
    assert (last.report.step, last.checkpoint is not None) == (3, True)
    assert isinstance(ended, TrialEnded)
    assert get_reason_code(ended.outcome.reason) == "step-limit"


def _goes_on(report: Callable[[], None]) -> Trains:
    def trains(_config: Config) -> None:
        for _ in range(3):
            with suppress(StopTraining):
                report()
        save_last_step(_write)

    return trains


@pytest.mark.parametrize("report", [lambda: pt.report({"loss": 1.0}), lambda: pt.report_step({"loss": 1.0}, _write)])
def test_what_is_reported_after_the_end_counts_for_nothing(trained: Trained, report: Callable[[], None]) -> None:
    said = trained(_goes_on(report), stopper=MaxSteps(1))
    assert [type(each) for each in said] == [TrainableLoaded, StepDone, TrialEnded]


@pytest.mark.parametrize(
    "call",
    [
        lambda: pt.report({"loss": 1.0}),
        lambda: pt.report_step({"loss": 1.0}, _write),
        lambda: save_last_step(_write),
        pt.get_checkpoint,
        pt.get_trial,
    ],
)
def test_a_call_where_no_trial_runs_is_refused_with_a_name_that_exists(call: Callable[[], None]) -> None:
    with pytest.raises(pt.InvalidInput, match="was called where no trial runs") as refused:
        call()
    assert "the function that you pass to pt.tune(train, ...)" in str(refused.value)
    name = str(refused.value).partition("(")[0]
    assert callable(resolve_name(re.sub(r"^pt\.", "prefect_tune:", name)))


class _Asks(pt.Trainable):
    def setup(self, config: Config) -> None:
        del config
        self.count = 0

    def step(self) -> Mapping[str, object]:
        self.count += 1
        return {"count": self.count, **({"should_checkpoint": True} if self.count == 2 else {})}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        _write(checkpoint_dir)


def test_a_step_that_asks_for_it_is_saved_whatever_the_cadence(trained: Trained) -> None:
    never = Cadence(every_steps=1000, every_seconds=None, at_end=False)
    done = [each for each in trained(_Asks, stopper=MaxSteps(3), cadence=never) if isinstance(each, StepDone)]
    assert [each.report.step for each in done if each.checkpoint] == [2]
    assert done[1].report.metrics == {"count": 2}


@dataclass
class _Tensor:
    """Like a PyTorch tensor: `size` is a method."""

    values: list[float]

    def numel(self) -> int:
        return len(self.values)

    def size(self) -> tuple[int, ...]:
        return (len(self.values),)

    def item(self) -> float:
        (value,) = self.values
        return value


def test_a_tensor_of_one_number_is_a_metric_and_one_of_two_is_none() -> None:
    assert to_plain_metrics({"loss": _Tensor([0.5])}, "metrics") == {"loss": 0.5}
    with pytest.raises(pt.BadMetric, match="found _Tensor"):
        to_plain_metrics({"loss": _Tensor([0.5, 1.0])}, "metrics")


class _NeverSaved(pt.Trainable):
    def setup(self, config: Config) -> None:
        del config
        raise AssertionError("it is set up before it is refused")

    def step(self) -> Config:
        return {"loss": 1.0}


def test_a_class_that_cannot_save_fails_before_its_setup(trained: Trained) -> None:
    (end,) = trained(_NeverSaved)
    failure = require_failure(end)
    assert failure.cause is Cause.TRAINABLE
    assert "trainable _NeverSaved: expected the method `save_checkpoint`" in str(failure.reason)


def _leaves_by(code: object) -> Trains:
    def train(_config: Config) -> None:
        pt.report({"loss": 1.0})
        raise SystemExit(code)

    return train


@pytest.mark.parametrize("code", [None, 0, False])
def test_a_function_that_exits_as_a_script_that_succeeds_completes(trained: Trained, code: object) -> None:
    *_, end = trained(_leaves_by(code))
    assert isinstance(end, TrialEnded)
    assert end.has_returned


@pytest.mark.parametrize("code", [3, "no data"])
def test_a_function_that_exits_otherwise_fails(trained: Trained, code: object) -> None:
    failure = require_failure(trained(_leaves_by(code))[-1])
    assert failure.cause is Cause.TRAINABLE
    assert str(failure.reason).startswith(f"SystemExit: {code}. sys.exit(0) in a function completes its trial")


def test_a_class_that_exits_fails_since_its_step_was_not_reported(trained: Trained) -> None:
    class Exits(pt.Trainable):
        def step(self) -> Mapping[str, object]:
            raise SystemExit(0)

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            del checkpoint_dir

    failure = require_failure(trained(Exits)[-1])
    assert require_reason(failure).arguments["advice"]["code"] == "advice-exit"
    assert first_line(failure.reason).endswith("a class returns {'done': True}")


def test_an_interrupt_that_a_trainable_raises_is_its_error(trained: Trained) -> None:
    def train(_config: Config) -> None:
        raise KeyboardInterrupt

    failure = require_failure(trained(train)[-1])
    assert (failure.cause, first_line(failure.reason)) == (Cause.TRAINABLE, "KeyboardInterrupt")


async def _awaits(_config: Config) -> None: ...


def _yields(_config: Config) -> Iterator[int]:
    yield 1


class _CallsAsync:
    async def __call__(self, _config: Config) -> None: ...

    async def train(self, _config: Config) -> None: ...


def _net(**methods: object) -> type:
    return type(
        "Net", (pt.Trainable,), {"step": lambda _self: {}, "save_checkpoint": lambda _self, _dir: None} | methods
    )


async def _method(*_: object) -> None: ...


NO_PLAIN_FUNCTIONS = [
    _awaits,
    _yields,
    partial(_awaits),
    partial(partial(_yields)),
    _CallsAsync(),
    partial(_CallsAsync()),
    _CallsAsync().train,
    _net(step=_method),
    _net(setup=_method),
    _net(save_checkpoint=staticmethod(_method)),
    _net(cleanup=classmethod(_method)),
    _net(step=lambda _self: (yield)),
]


@pytest.mark.parametrize("trainable", NO_PLAIN_FUNCTIONS, ids=range(len(NO_PLAIN_FUNCTIONS)))
def test_a_trainable_that_returns_a_coroutine_or_a_generator_is_refused(trainable: object) -> None:
    with pytest.raises(InvalidInput, match=r"function with `(async def|yield)`, whose call returns a .*asyncio\.run"):
        require_trainable(trainable, trainable)


def _decorate(function: Callable[[Config], object]) -> Callable[[Config], object]:
    def decorated(config: Config) -> object:
        return function(config)

    return decorated


def test_one_that_only_its_call_shows_fails_with_the_same_advice(trained: Trained) -> None:
    for function in (_awaits, _yields):
        failure = require_failure(trained(_decorate(function))[-1])
        assert re.search(r"found a (coroutine|generator)\. Use `def`", str(failure.reason))


@pytest.mark.parametrize(("name", "is_hinted"), [("lr", True), ("momentum", False)])
def test_a_field_that_is_read_from_the_dict_of_a_dataclass_is_shown_as_its_key(name: str, *, is_hinted: bool) -> None:
    config: Any = {"lr": 0.1}
    with pytest.raises(AttributeError) as raised:
        getattr(config, name)
    hint = f". A configuration is a dict, even for a dataclass: config[{name!r}]" if is_hinted else ""
    failure = require_failure(failure_message(raised.value, "t"))
    assert first_line(failure.reason) == f"AttributeError: 'dict' object has no attribute {name!r}{hint}"


# Text that JSON cannot hold and numbers that a float cannot hold: each is one trial failure with its cause.


HALF = "\udcff"


class _Worded(Exception):
    def __str__(self) -> str:
        return f"\0{HALF}" + "x" * 10**6


def _raises_half_a_character(_: Config) -> None:
    raise ValueError(HALF)


def _raises_from_another(_: Config) -> None:
    try:
        raise KeyError(HALF)
    except KeyError as error:
        raise MemoryError("not enough") from error


def _raises_an_enormous_text(_: Config) -> None:
    raise _Worded


def _reads_a_file_with_such_a_name(_: Config) -> None:
    Path(f"/nowhere/{HALF}").read_bytes()


@pytest.mark.parametrize(
    ("function", "cause", "said"),
    [
        (_raises_half_a_character, Cause.TRAINABLE, "ValueError: \\udcff"),
        (_raises_from_another, Cause.OUT_OF_MEMORY, "MemoryError: not enough"),
        (_raises_an_enormous_text, Cause.TRAINABLE, "_Worded: \\x00\\udcffxxx"),
        (_reads_a_file_with_such_a_name, Cause.TRAINABLE, "FileNotFoundError: "),
        (lambda _: {"loss": 10**400}, Cause.BAD_METRIC, "'loss': found 1000"),
        (lambda _: {"loss": 10**5000}, Cause.BAD_METRIC, "'loss': found a whole number of 16610 bits"),
    ],
)
def test_what_a_trainable_raises_arrives_with_its_message_and_its_cause(
    tmp_path: Path,
    function: Callable[[Config], object],
    cause: Cause,
    said: str,
) -> None:
    _, end = _trained(tmp_path, function)
    failure = require_failure(end)
    assert failure.cause is cause
    assert said in str(failure.reason)
    assert len(str(failure.reason)) <= 200_100


class _WordyStopper(Stopper):
    def stop_reason(self, reports: Sequence[StepReport]) -> str:
        del reports
        return f"\0{HALF}" + "x" * 10**6


def test_the_reason_of_a_stopper_arrives_readable(tmp_path: Path) -> None:
    def trains(_: Config) -> None:
        pt.report({"loss": 1})

    *_, ended = _trained(tmp_path, trains, stopper=_WordyStopper())
    assert isinstance(ended, TrialEnded)
    assert isinstance(ended.outcome.reason, str)
    assert ended.outcome.reason.startswith("\\x00\\udcffxxx")
    assert len(ended.outcome.reason) <= 100_000


def test_a_trial_whose_folders_are_not_utf8_trains_and_saves(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()

    def trains(_: Config) -> None:
        directory = pt.get_trial().new_checkpoint_dir()
        (directory / "weights").write_text("w")
        pt.report({"loss": 1.0}, checkpoint=pt.Checkpoint.from_directory(directory))

    done = next(each for each in _trained(folder, trains) if isinstance(each, StepDone))
    assert done.checkpoint is not None
    assert Path(done.checkpoint).is_relative_to(folder)
