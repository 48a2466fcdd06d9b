"""The trial's side of an attempt: saves that store nothing, snapshots, and a trial that saves and stops."""

from __future__ import annotations

import errno
import os
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.stoppers import Never, Stopper
from prefect_tune.core.messages.process_messages import CheckpointSaved, FromTrial, StepDone, ToTrial
from prefect_tune.core.values import StepReport
from prefect_tune.runtime.session import TrialSession, copy_directory
from prefect_tune.runtime.trainable import StopTraining, Trainable
from tests.fakes.checkpoints import read_files, write_files
from tests.fakes.outcomes import make_stop
from tests.fakes.trial_processes import make_start


class Supervisor:
    """Sends `message` at the `moment`-th check for a message, and acknowledges every checkpoint."""

    def __init__(self, moment: int, message: ToTrial) -> None:
        self._moment, self._message = moment, message
        self._waiting: deque[ToTrial] = deque()
        self._check_count = self.steps = self.saved = 0

    def is_readable(self) -> bool:
        self._check_count += 1
        if self._check_count == self._moment:
            self._waiting.append(self._message)
        return bool(self._waiting)

    def receive(self) -> ToTrial:
        return self._waiting.popleft()

    def send(self, message: FromTrial) -> None:
        match message:
            case StepDone(report=report, checkpoint=str()):
                self.steps = self.saved = report.step
                self._waiting.append(CheckpointSaved(step=report.step))
            case StepDone(report=report):
                self.steps = report.step
            case _:
                pass


def make_session(folder: Path, stopper: Stopper = Never()) -> TrialSession:  # noqa: B008  frozen: safe to share
    supervisor: Any = Supervisor(0, None)  # type: ignore[arg-type]  # it sends no message
    start = make_start("any:Thing", folder).model_copy(update={"cadence": Cadence(every_steps=1)})
    return TrialSession(supervisor, start, stopper)


def write_weights(directory: str) -> object:
    return Path(directory, "weights").write_text("1")


def write_and_return(directory: str) -> object:
    write_weights(directory)
    return {"step": 1}


@pytest.mark.parametrize(
    "save", [lambda _: {"step": 1}, lambda _: {}, write_and_return, lambda _: b"state", lambda _: "elsewhere"]
)
def test_a_state_that_is_returned_is_refused_for_nothing_would_be_stored_of_it(
    tmp_path: Path, save: Callable[[str], Any]
) -> None:
    with pytest.raises(InvalidInput, match=r"step 1: save_checkpoint returned a \w+; write files into checkpoint_dir"):
        make_session(tmp_path).report_step({"loss": 1.0}, save)


@pytest.mark.parametrize("save", [lambda _: None, lambda directory: directory, Path])
def test_a_state_of_no_files_is_stored_and_warned_of_once(tmp_path: Path, save: Callable[[str], Any]) -> None:
    session = make_session(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for _ in range(3):
            session.report_step({"loss": 1.0}, save)
    assert ["wrote nothing into checkpoint_dir" in str(warning.message) for warning in warned] == [True]


def test_a_step_whose_save_raises_is_reported_and_asks_nothing(tmp_path: Path) -> None:
    """Without a step it would count as a failure of the start, which quarantines the loaded checkpoint."""
    session = make_session(tmp_path)
    session._milestone = 1
    sent: list[FromTrial] = []
    session.connection.send = sent.append  # type: ignore[method-assign, assignment]  # it is a fake
    with pytest.raises(ZeroDivisionError):
        session.report_step({"loss": 1.0}, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]  # it returns nothing
    (step,) = [message for message in sent if isinstance(message, StepDone)]
    assert (step.report.step, step.checkpoint, step.awaits_decision) == (1, None, False)


def test_a_report_may_lack_the_metric_of_the_search_only_where_its_caller_says_so(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    session.start = session.start.model_copy(update={"required_metrics": ("val_loss",)})
    session.report_step({"loss": 1.0}, write_weights, allow_missing=True)
    with pytest.raises(BadMetric, match="allow_missing_metric"):
        session.report_step({"loss": 1.0}, write_weights)


class PathReturningTrainable(Trainable):
    """Writes a file and returns a path, which early releases of Ray passed to `load_checkpoint`."""

    def __init__(self, returns: Callable[[str], object]) -> None:
        self._returns = returns

    def save_checkpoint(self, checkpoint_dir: str) -> Any:
        Path(checkpoint_dir, "model.pt").write_text("1")
        return self._returns(checkpoint_dir)


@pytest.mark.parametrize(
    ("returns", "is_refused"),
    [
        (lambda directory: f"{directory}/model.pt", True),
        (lambda directory: Path(directory, "model.pt"), True),
        (lambda _: "model.pt", True),
        (lambda directory: f"{directory}/", False),
        (Path, False),
        (lambda _: None, False),
        (lambda _: 17, False),
    ],
)
def test_a_class_that_returns_a_path_below_its_directory_is_refused_at_its_first_save(
    tmp_path: Path, returns: Callable[[str], object], *, is_refused: bool
) -> None:
    """A resume would pass the directory to `load_checkpoint`. A function that saves has no such method."""
    advice = r"step 1: save_checkpoint returned '.*model\.pt', but load_.*join\(checkpoint_dir, 'model\.pt'\)"
    with pytest.raises(InvalidInput, match=advice) if is_refused else nullcontext():
        make_session(tmp_path / "class").report_step({"loss": 1.0}, PathReturningTrainable(returns).save_checkpoint)
    saves: Any = lambda directory: PathReturningTrainable(returns).save_checkpoint(directory)  # noqa: E731  a function, not a method
    make_session(tmp_path / "function").report_step({"loss": 1.0}, saves)


def test_what_a_save_returns_is_ignored_if_it_wrote_files(tmp_path: Path) -> None:
    save: Any = write_weights
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_session(tmp_path).report_step({"loss": 1.0}, save)


def test_a_path_in_place_of_a_checkpoint_is_refused_with_how_to_make_one_of_it(tmp_path: Path) -> None:
    path: Any = str(tmp_path)
    with pytest.raises(InvalidInput, match=r"as in pt\.Checkpoint\.from_directory"):
        make_session(tmp_path).report({"loss": 1.0}, path)


@pytest.mark.parametrize("elsewhere", ["", "/dev/shm"], ids=["within a file system", "between two"])
def test_a_snapshot_holds_what_was_there_and_refuses_a_pipe(tmp_path: Path, elsewhere: str) -> None:
    with TemporaryDirectory(dir=elsewhere or tmp_path) as other:
        source = write_files(Path(other, "source"), {"weights": bytes(range(256)) * 5000, "deep/empty": b""})
        (source / "weights").chmod(0o640)
        copy = copy_directory(source, tmp_path / "copy")
        assert read_files(copy) == read_files(source)
        assert (copy / "weights").stat().st_mode == (source / "weights").stat().st_mode
        (source / "newest").symlink_to("weights")
        assert read_files(copy_directory(source, tmp_path / "linked"))["newest"] == read_files(source)["weights"]
        os.mkfifo(source / "pipe")
        with pytest.raises(InvalidInput, match="neither a file nor a directory"):
            copy_directory(source, tmp_path / "again")


@pytest.mark.parametrize("link_target", [".", "../elsewhere", "nothing"])
def test_a_snapshot_follows_no_link_to_a_directory_which_may_be_its_own(tmp_path: Path, link_target: str) -> None:
    source = write_files(tmp_path / "source", {"weights": b"1"})
    write_files(tmp_path / "elsewhere", {"data": b"2"})
    (source / "link").symlink_to(link_target)
    with pytest.raises(InvalidInput, match="link: a link to a directory, or to nothing, cannot be saved"):
        copy_directory(source, tmp_path / "copy")


def test_a_disk_that_is_full_during_a_snapshot_is_the_machines_fault(tmp_path: Path) -> None:
    source = write_files(tmp_path / "source", {"deep/weights": b"1"})
    (tmp_path / "copy" / "deep").mkdir(parents=True)
    (tmp_path / "copy" / "deep" / "weights").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        copy_directory(source, tmp_path / "copy")
    assert raised.value.errno == errno.ENOSPC


def test_a_trial_holds_no_more_reports_than_its_stopper_looks_at(tmp_path: Path) -> None:
    seen: list[int] = []

    class HistoryStopper(Stopper):
        def __init__(self, *, needs_history: bool) -> None:
            self._needs_history = needs_history

        @property
        def needs_history(self) -> bool:
            return self._needs_history

        def stop_reason(self, reports: Sequence[StepReport]) -> None:
            seen.append(len(reports))

    for needs_history in (True, False):
        session = make_session(tmp_path, HistoryStopper(needs_history=needs_history))
        for _ in range(3):
            session.report({"loss": 1.0}, None)
    assert seen == [1, 2, 3, 1, 1, 1]


@pytest.mark.parametrize("moment", range(1, 13))
def test_a_trial_that_is_to_save_and_leave_saves_the_step_at_which_it_leaves(tmp_path: Path, moment: int) -> None:
    stop = make_stop("enough", save=True)
    supervisor: Any = Supervisor(moment, stop)
    session = TrialSession(supervisor, make_start("any:Thing", tmp_path), Never())

    def train() -> None:
        for _ in range(12):
            session.report_step({"loss": 1.0}, lambda _: None)

    with pytest.raises(StopTraining) as raised:
        train()
    assert raised.value.outcome == stop.outcome
    assert supervisor.saved == supervisor.steps == session.step
