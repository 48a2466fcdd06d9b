"""The trial's own side, in this process: every word that it hears is there before it begins."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from contextvars import copy_context
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.core.cadence import Cadence
from prefect_tune.core.events import Cause
from prefect_tune.core.stoppers import MaxSteps, Never, Stopper
from prefect_tune.core.values import StepReport
from prefect_tune.core.wire import (
    Broke,
    FromTrial,
    Loaded,
    Saved,
    Start,
    StepDone,
    StopAndSave,
    ToTrial,
    TrialEnded,
    from_trial,
)
from prefect_tune.tasks.plan import payload
from prefect_tune.trial_process import train

Config = Mapping[str, object]
Trains = Callable[[Config], Mapping[str, object] | None]


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Sequence[FromTrial]]:
    """Train here, with everything that the supervisor says said at once; return what the trial says."""
    return partial(_trained, tmp_path)


def _trained(
    folder: Path, function: Trains, *said: ToTrial, stopper: Stopper | None = None, curve: tuple[StepReport, ...] = ()
) -> Sequence[FromTrial]:
    start = Start(
        experiment="e",
        trial="t",
        attempt=1,
        trainable=payload(function),
        stopper=payload(stopper or Never()),
        import_path=(),
        config={},
        directory=str(folder),
        staging=str(folder),
        temporary=str(folder),
        restored=None,
        from_step=curve[-1].step if curve else 0,
        trained_seconds=0,
        curve=curve,
        cadence=Cadence(),
        overlap=False,
    )
    ours, theirs = socket.socketpair()
    with closing(Connection(ours.detach())) as near, closing(Connection(theirs.detach())) as far:
        for message in (start, *said):
            near.send_bytes(message.model_dump_json().encode())
        # In a context of its own, as a thread is: the trial of one test is not the next one's.
        copy_context().run(train, far, whole_process=False)
        heard = []
        while near.poll():
            heard.append(from_trial.validate_json(near.recv_bytes()))
        return heard


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
            except BaseException:  # noqa: BLE001  a thread's own end is seen by nobody
                return

    thread = threading.Thread(target=copy_context().run, args=(work,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("trains", [_swallows, _trains_in_a_thread])
def test_a_function_that_never_saw_its_end_was_interrupted_and_has_not_returned(
    trained: Callable[..., Sequence[FromTrial]], trains: Trains
) -> None:
    loaded, step, ended = trained(trains, StopAndSave(), Saved(step=1))
    assert isinstance(loaded, Loaded)
    assert isinstance(step, StepDone)
    assert ended == TrialEnded(reason="saved, as asked", interrupted=True)


@pytest.mark.parametrize("trains", [_swallows, _trains_in_a_thread])
def test_a_function_that_never_saw_its_criterion_has_met_it(
    trained: Callable[..., Sequence[FromTrial]], trains: Trains
) -> None:
    ended = trained(trains, Saved(step=1), stopper=MaxSteps(1))[-1]
    assert isinstance(ended, TrialEnded)
    assert "step" in ended.reason
    assert (ended.interrupted, ended.returned) == (False, False)


def test_a_trial_that_is_kept_says_what_is_true_now(trained: Callable[..., Sequence[FromTrial]]) -> None:
    def looks(_config: Config) -> Mapping[str, object]:
        trial = pt.get_trial()
        before, asked = trial.step, trial.should_checkpoint  # nothing has been reported yet that would listen
        pt.report({"loss": 1.0})
        return {"before": before, "step": trial.step, "asked": asked}

    told = [each.report.metrics for each in trained(looks, StopAndSave()) if isinstance(each, StepDone)]
    assert told[-1] == {"before": 0, "step": 1, "asked": True}


def test_nobody_asked_to_stop_who_was_not(trained: Callable[..., Sequence[FromTrial]]) -> None:
    def looks(_config: Config) -> Mapping[str, object]:
        return {"asked": pt.get_trial().should_checkpoint}

    (told,) = [each for each in trained(looks) if isinstance(each, StepDone)]
    assert told.report.metrics == {"asked": False}


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), Cause.MACHINE),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), Cause.MACHINE),
        (OSError(errno.EIO, "Input/output error"), Cause.MACHINE),
        (FileNotFoundError(errno.ENOENT, "No such file"), Cause.USER),
        (MemoryError(), Cause.OUT_OF_MEMORY),
        (ImportError("no torch"), Cause.IMPORT),
        (ValueError("shapes differ"), Cause.USER),
    ],
)
def test_what_a_trainable_raises_says_whose_fault_it_is(
    trained: Callable[..., Sequence[FromTrial]], error: Exception, cause: Cause
) -> None:
    def breaks(_config: Config) -> None:
        raise error

    broke = trained(breaks)[-1]
    assert isinstance(broke, Broke)
    assert broke.cause is cause


def test_a_trial_whose_last_step_said_done_is_not_trained_again(
    trained: Callable[..., Sequence[FromTrial]],
) -> None:
    def trains(_config: Config) -> None:
        raise AssertionError("it was done")

    last = StepReport(step=3, metrics={"done": True})
    assert trained(trains, curve=(last,)) == [TrialEnded(reason="the trainable said it is done")]
