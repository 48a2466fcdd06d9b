"""The trial's side of a training, run in this process; all messages to the trial are sent before it starts."""

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
    TrainingEnded,
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
TrainFunction = Callable[[Config], Mapping[str, object] | None]
Trainer = Callable[..., Sequence[FromTrial]]


def list_steps(messages: Sequence[FromTrial]) -> Sequence[StepDone]:
    return [message for message in messages if isinstance(message, StepDone)]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """Train in this process; return the trial's messages."""
    return partial(run_training, tmp_path)


def run_training(
    folder: Path,
    function: TrainFunction,
    *messages: ToTrial,
    stopper: Stopper | None = None,
    reports: tuple[StepReport, ...] = (),
    cadence: Cadence = Cadence(),  # noqa: B008  frozen: safe to share
) -> Sequence[FromTrial]:
    start = make_start(
        function,
        folder,
        import_path=(),
        stopper=serialize_for_trial(stopper or Never()),
        from_step=reports[-1].step if reports else 0,
        reports=reports,
        cadence=cadence,
    )
    ours, theirs = socket.socketpair()
    with closing(Connection(ours.detach())) as near, closing(Connection(theirs.detach())) as far:
        for message in (start, *messages):
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
    while not (received and isinstance(received[-1], TrainingEnded)):
        message = from_trial_adapter.validate_json(near.recv_bytes())
        if isinstance(message, StartReceived):
            continue
        received.append(message)
        if isinstance(message, StepDone) and message.checkpoint:
            near.send_bytes(CheckpointSaved(step=message.report.step).model_dump_json().encode())


def _save() -> None:
    directory = pt.get_trial().new_checkpoint_dir()
    (directory / "weights").write_text("w")
    pt.report({"loss": 1.0}, checkpoint=pt.Checkpoint.from_directory(directory))


def _swallow_stop(_config: Config) -> Config | None:
    try:
        _save()
    except BaseException:  # noqa: BLE001  what is tested
        return {"loss": 2.0}
    return None


def _train_in_thread(_config: Config) -> None:
    def work() -> None:
        for _ in range(9):
            try:
                _save()
            except BaseException:  # noqa: BLE001  no test reads a thread's exception
                return

    thread = threading.Thread(target=copy_context().run, args=(work,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("train", [_swallow_stop, _train_in_thread])
def test_a_function_that_never_saw_its_end_was_interrupted_and_has_not_returned(
    trainer: Trainer, train: TrainFunction
) -> None:
    loaded, step, ended = trainer(train, CheckpointAndStop())
    assert isinstance(loaded, TrainableLoaded)
    assert isinstance(step, StepDone)
    saved = AttemptEnded(trial="t", cause=Cause.PREEMPTED, reason=make_reason("saved-as-requested"))
    assert drop_seconds(ended) == TrainingEnded(outcome=saved)


@pytest.mark.parametrize("train", [_swallow_stop, _train_in_thread])
def test_a_function_that_never_saw_its_criterion_has_met_it(trainer: Trainer, train: TrainFunction) -> None:
    ended = trainer(train, stopper=MaxSteps(1))[-1]
    met = TrialFinished(trial="t", reason=make_reason("step-limit", step=1, limit=1), kind=FinishKind.CRITERION)
    assert drop_seconds(ended) == TrainingEnded(outcome=met)


def test_a_trial_that_is_kept_says_what_is_true_now(trainer: Trainer) -> None:
    def read_trial(_config: Config) -> Mapping[str, object]:
        trial = pt.get_trial()
        before, is_asked = trial.step, trial.should_checkpoint  # no report yet, so no message was read
        pt.report({"loss": 1.0})
        return {"before": before, "step": trial.step, "asked": is_asked}

    assert list_steps(trainer(read_trial, CheckpointAndStop()))[-1].report.metrics == {
        "before": 0,
        "step": 1,
        "asked": True,
    }


class _SavingTrainable(pt.Trainable):
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
    trainer: Trainer, tmp_path: Path
) -> None:
    calls = tmp_path / "asked"

    def stop_at_second_call(_metrics: Config) -> bool:
        with calls.open("a") as file:
            file.write("x")
        return calls.stat().st_size == 2

    messages = trainer(_SavingTrainable, stopper=as_stopper(stop_at_second_call), cadence=Cadence(every_steps=1))
    steps = [(step.report.step, step.finish_reason is not None) for step in list_steps(messages)]
    assert steps == [(1, False), (2, True)]
    assert isinstance(messages[-1], TrainingEnded)
    assert isinstance(messages[-1].outcome, TrialFinished)
    assert calls.read_text() == "xx"


def test_a_stopper_that_fails_does_so_once_the_state_is_saved(trainer: Trainer) -> None:
    messages = trainer(_SavingTrainable, stopper=as_stopper({"loss": 5}), cadence=Cadence(every_steps=1))
    assert [step.report.step for step in list_steps(messages) if step.checkpoint] == [1, 2, 3]
    require_failure(messages[-1])


def test_a_trial_that_is_not_asked_to_stop_sees_that(trainer: Trainer) -> None:
    def read_trial(_config: Config) -> Mapping[str, object]:
        return {"asked": pt.get_trial().should_checkpoint}

    (step,) = list_steps(trainer(read_trial))
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
def test_what_a_trainable_raises_says_whose_fault_it_is(trainer: Trainer, error: Exception, cause: Cause) -> None:
    def fail(_config: Config) -> None:
        raise error

    assert require_failure(trainer(fail)[-1]).cause is cause


def test_a_parser_that_another_thread_disturbs_fails_no_trial(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_parse(_trainable: object) -> str:
        raise SystemError("AST constructor recursion depth mismatch (before=42, after=113)")

    monkeypatch.setattr("inspect.getsource", fail_to_parse)
    *_, end = trainer(lambda _config: {"loss": 1.0})
    assert isinstance(end, TrainingEnded)
    assert end.has_returned


def test_a_traceback_begins_in_the_trainable(trainer: Trainer) -> None:
    def divide_by_zero(_config: Config) -> None:
        1 / 0  # noqa: B018  the error is the point

    arguments = require_reason(require_failure(trainer(divide_by_zero)[-1])).arguments
    files = re.findall(r'File "(.*)", line', arguments["traceback"])
    assert files == [__file__]
    assert arguments["location"].startswith("test_training.py:")
    assert arguments["traceback"].rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_traceback_without_a_frame_of_the_trainable_is_whole(trainer: Trainer) -> None:
    failure = require_failure(trainer(partial(print, file=1))[-1])  # a call that fails in C
    assert "trial_process.py" in require_reason(failure).arguments["traceback"]


def test_a_trial_whose_last_step_reported_done_is_not_trained_again(trainer: Trainer) -> None:
    def train(_config: Config) -> None:
        raise AssertionError("the trial was trained again")

    last = StepReport(step=3, metrics={"done": True})
    done = TrialFinished(trial="t", reason=make_reason("done-reported"))
    assert trainer(train, reports=(last,)) == [TrainingEnded(outcome=done)]


def _write(directory: str) -> None:
    (Path(directory) / "weights").write_text("w")


def _report_steps(config: Config) -> None:
    del config
    for _ in range(5):
        pt.report_step({"loss": 1.0}, _write)
    save_last_step(_write)


def test_a_function_that_reports_steps_is_saved_as_a_class_is_and_at_its_end(trainer: Trainer) -> None:
    messages = trainer(_report_steps, cadence=Cadence(every_steps=2))
    checkpoints = [(step.report.step, step.is_reported) for step in list_steps(messages) if step.checkpoint]
    assert checkpoints == [(2, False), (4, False), (5, True)]
    returned = TrialFinished(trial="t", reason=make_reason("returned"), kind=FinishKind.RETURNED)
    assert drop_seconds(messages[-1]) == TrainingEnded(outcome=returned)


def test_a_function_that_reports_steps_saves_the_one_that_meets_its_criterion(trainer: Trainer) -> None:
    *_, last, ended = trainer(_report_steps, stopper=MaxSteps(3))
    assert isinstance(last, StepDone)
    assert (last.report.step, last.checkpoint is not None) == (3, True)
    assert isinstance(ended, TrainingEnded)
    assert get_reason_code(ended.outcome.reason) == "step-limit"


def _report_after_stop(report: Callable[[], None]) -> TrainFunction:
    def train(_config: Config) -> None:
        for _ in range(3):
            with suppress(StopTraining):
                report()
        save_last_step(_write)

    return train


@pytest.mark.parametrize("report", [lambda: pt.report({"loss": 1.0}), lambda: pt.report_step({"loss": 1.0}, _write)])
def test_what_is_reported_after_the_end_counts_for_nothing(trainer: Trainer, report: Callable[[], None]) -> None:
    messages = trainer(_report_after_stop(report), stopper=MaxSteps(1))
    assert [type(message) for message in messages] == [TrainableLoaded, StepDone, TrainingEnded]


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
    with pytest.raises(pt.InvalidInput, match="was called where no trial runs") as error:
        call()
    assert "the function that you pass to pt.tune(train, ...)" in str(error.value)
    name = str(error.value).partition("(")[0]
    assert callable(resolve_name(re.sub(r"^pt\.", "prefect_tune:", name)))


class _CheckpointRequester(_SavingTrainable):
    def step(self) -> Mapping[str, object]:
        self.steps += 1
        return {"count": self.steps, **({"should_checkpoint": True} if self.steps == 2 else {})}


def test_a_step_that_asks_for_it_is_saved_whatever_the_cadence(trainer: Trainer) -> None:
    never = Cadence(every_steps=1000, every_seconds=None, at_end=False)
    steps = list_steps(trainer(_CheckpointRequester, stopper=MaxSteps(3), cadence=never))
    assert [step.report.step for step in steps if step.checkpoint] == [2]
    assert steps[1].report.metrics == {"count": 2}


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


def test_a_class_that_cannot_save_fails_before_its_setup(trainer: Trainer) -> None:
    (end,) = trainer(_NeverSaved)
    failure = require_failure(end)
    assert failure.cause is Cause.TRAINABLE
    assert "trainable _NeverSaved: expected the method `save_checkpoint`" in str(failure.reason)


def _exit_with(code: object) -> TrainFunction:
    def train(_config: Config) -> None:
        pt.report({"loss": 1.0})
        raise SystemExit(code)

    return train


@pytest.mark.parametrize("code", [None, 0, False])
def test_a_function_that_exits_as_a_script_that_succeeds_completes(trainer: Trainer, code: object) -> None:
    *_, end = trainer(_exit_with(code))
    assert isinstance(end, TrainingEnded)
    assert end.has_returned


@pytest.mark.parametrize("code", [3, "no data"])
def test_a_function_that_exits_otherwise_fails(trainer: Trainer, code: object) -> None:
    failure = require_failure(trainer(_exit_with(code))[-1])
    assert failure.cause is Cause.TRAINABLE
    assert str(failure.reason).startswith(f"SystemExit: {code}. sys.exit(0) in a function completes its trial")


def test_a_class_that_exits_fails_since_its_step_was_not_reported(trainer: Trainer) -> None:
    class Exits(_SavingTrainable):
        def step(self) -> Mapping[str, object]:
            raise SystemExit(0)

    failure = require_failure(trainer(Exits)[-1])
    assert require_reason(failure).arguments["advice"]["code"] == "advice-exit"
    assert first_line(failure.reason).endswith("a class returns {'done': True}")


def test_an_interrupt_that_a_trainable_raises_is_its_error(trainer: Trainer) -> None:
    def train(_config: Config) -> None:
        raise KeyboardInterrupt

    failure = require_failure(trainer(train)[-1])
    assert (failure.cause, first_line(failure.reason)) == (Cause.TRAINABLE, "KeyboardInterrupt")


async def _async_train(_config: Config) -> None: ...


def _yielding_train(_config: Config) -> Iterator[int]:
    yield 1


class _AsyncCallable:
    async def __call__(self, _config: Config) -> None: ...

    async def train(self, _config: Config) -> None: ...


def _make_class(**methods: object) -> type:
    return type(
        "Net", (pt.Trainable,), {"step": lambda _self: {}, "save_checkpoint": lambda _self, _dir: None} | methods
    )


async def _async_method(*_: object) -> None: ...


REFUSED_TRAINABLES = [
    _async_train,
    _yielding_train,
    partial(_async_train),
    partial(partial(_yielding_train)),
    _AsyncCallable(),
    partial(_AsyncCallable()),
    _AsyncCallable().train,
    _make_class(step=_async_method),
    _make_class(setup=_async_method),
    _make_class(save_checkpoint=staticmethod(_async_method)),
    _make_class(cleanup=classmethod(_async_method)),
    _make_class(step=lambda _self: (yield)),
]


@pytest.mark.parametrize("trainable", REFUSED_TRAINABLES, ids=range(len(REFUSED_TRAINABLES)))
def test_a_trainable_that_returns_a_coroutine_or_a_generator_is_refused(trainable: object) -> None:
    with pytest.raises(InvalidInput, match=r"function with `(async def|yield)`, whose call returns a .*asyncio\.run"):
        require_trainable(trainable, trainable)


def _wrap_function(function: Callable[[Config], object]) -> Callable[[Config], object]:
    def wrapper(config: Config) -> object:
        return function(config)

    return wrapper


def test_one_that_only_its_call_shows_fails_with_the_same_advice(trainer: Trainer) -> None:
    for function in (_async_train, _yielding_train):
        failure = require_failure(trainer(_wrap_function(function))[-1])
        assert re.search(r"found a (coroutine|generator)\. Use `def`", str(failure.reason))


@pytest.mark.parametrize(("name", "is_hinted"), [("lr", True), ("momentum", False)])
def test_a_field_that_is_read_from_the_dict_of_a_dataclass_is_shown_as_its_key(name: str, *, is_hinted: bool) -> None:
    config: Any = {"lr": 0.1}
    with pytest.raises(AttributeError) as raised:
        getattr(config, name)
    hint = f". A configuration is a dict, even for a dataclass: config[{name!r}]" if is_hinted else ""
    failure = require_failure(failure_message(raised.value, "t"))
    assert first_line(failure.reason) == f"AttributeError: 'dict' object has no attribute {name!r}{hint}"


# Text that JSON cannot hold, and numbers that a float cannot hold: the trial fails with the right cause.


SURROGATE = "\udcff"


class _LongError(Exception):
    def __str__(self) -> str:
        return f"\0{SURROGATE}" + "x" * 10**6


def _raise_surrogate(_: Config) -> None:
    raise ValueError(SURROGATE)


def _raise_from_another(_: Config) -> None:
    try:
        raise KeyError(SURROGATE)
    except KeyError as error:
        raise MemoryError("not enough") from error


def _raise_long_error(_: Config) -> None:
    raise _LongError


def _read_surrogate_path(_: Config) -> None:
    Path(f"/nowhere/{SURROGATE}").read_bytes()


@pytest.mark.parametrize(
    ("function", "cause", "text"),
    [
        (_raise_surrogate, Cause.TRAINABLE, "ValueError: \\udcff"),
        (_raise_from_another, Cause.OUT_OF_MEMORY, "MemoryError: not enough"),
        (_raise_long_error, Cause.TRAINABLE, "_LongError: \\x00\\udcffxxx"),
        (_read_surrogate_path, Cause.TRAINABLE, "FileNotFoundError: "),
        (lambda _: {"loss": 10**400}, Cause.BAD_METRIC, "'loss': found 1000"),
        (lambda _: {"loss": 10**5000}, Cause.BAD_METRIC, "'loss': found a whole number of 16610 bits"),
    ],
)
def test_what_a_trainable_raises_arrives_with_its_message_and_its_cause(
    tmp_path: Path, function: Callable[[Config], object], cause: Cause, text: str
) -> None:
    _, end = run_training(tmp_path, function)
    failure = require_failure(end)
    assert failure.cause is cause
    assert text in str(failure.reason)
    assert len(str(failure.reason)) <= 200_100


class _LongReasonStopper(Stopper):
    def stop_reason(self, reports: Sequence[StepReport]) -> str:
        del reports
        return f"\0{SURROGATE}" + "x" * 10**6


def test_the_reason_of_a_stopper_arrives_readable(tmp_path: Path) -> None:
    def train(_: Config) -> None:
        pt.report({"loss": 1})

    *_, ended = run_training(tmp_path, train, stopper=_LongReasonStopper())
    assert isinstance(ended, TrainingEnded)
    assert isinstance(ended.outcome.reason, str)
    assert ended.outcome.reason.startswith("\\x00\\udcffxxx")
    assert len(ended.outcome.reason) <= 100_000


def test_a_trial_whose_folders_are_not_utf8_trains_and_saves(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    step = list_steps(run_training(folder, lambda _: _save()))[0]
    assert step.checkpoint is not None
    assert Path(step.checkpoint).is_relative_to(folder)
