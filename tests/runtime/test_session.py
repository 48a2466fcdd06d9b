"""The trial's side of an attempt: saves that store nothing, snapshots, and a trial that is to save and leave."""

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
    """Sends `said` at the `moment`-th check for a message, and acknowledges every checkpoint."""

    def __init__(self, moment: int, said: ToTrial) -> None:
        self._moment = moment
        self._said = said
        self._looks = 0
        self._waiting: deque[ToTrial] = deque()
        self.steps = 0
        self.saved = 0

    def has_message(self) -> bool:
        self._looks += 1
        if self._looks == self._moment:
            self._waiting.append(self._said)
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


def session_in(place: Path, stopper: Stopper = Never()) -> TrialSession:  # noqa: B008  frozen: safe to share
    supervisor: Any = Supervisor(0, None)  # type: ignore[arg-type]  # it sends no message
    start = make_start("any:Thing", place).model_copy(update={"cadence": Cadence(every_steps=1)})
    return TrialSession(supervisor, start, stopper)


def written(directory: str) -> object:
    return Path(directory, "weights").write_text("1")


def both(directory: str) -> object:
    written(directory)
    return {"step": 1}


@pytest.mark.parametrize("save", [lambda _: {"step": 1}, lambda _: {}, both, lambda _: b"state", lambda _: "elsewhere"])
def test_a_state_that_is_returned_is_refused_for_nothing_would_be_stored_of_it(
    tmp_path: Path, save: Callable[[str], Any]
) -> None:
    with pytest.raises(InvalidInput, match=r"step 1: save_checkpoint returned a \w+; write files into checkpoint_dir"):
        session_in(tmp_path).report_step({"loss": 1.0}, save)


@pytest.mark.parametrize("save", [lambda _: None, lambda directory: directory, Path])
def test_a_state_of_no_files_is_stored_and_warned_of_once(tmp_path: Path, save: Callable[[str], Any]) -> None:
    session = session_in(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for _ in range(3):
            session.report_step({"loss": 1.0}, save)
    assert ["wrote nothing into checkpoint_dir" in str(each.message) for each in warned] == [True]


def test_a_step_whose_save_raises_is_reported_and_asks_nothing(tmp_path: Path) -> None:
    """Without a step the failure is one of the start, for which the checkpoint that was loaded is quarantined."""
    session = session_in(tmp_path)
    session._milestone = 1
    sent: list[FromTrial] = []
    session.connection.send = sent.append  # type: ignore[method-assign, assignment]  # it is a fake
    with pytest.raises(ZeroDivisionError):
        session.report_step({"loss": 1.0}, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]  # it returns nothing
    assert [
        (done.report.step, done.checkpoint, done.awaits_decision) for done in sent if isinstance(done, StepDone)
    ] == [(1, None, False)]


def test_a_report_may_lack_the_metric_of_the_search_only_where_its_caller_says_so(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    session.start = session.start.model_copy(update={"required_metrics": ("val_loss",)})
    session.report_step({"loss": 1.0}, written, allow_missing=True)
    with pytest.raises(BadMetric, match="allow_missing_metric"):
        session.report_step({"loss": 1.0}, written)


class Writes(Trainable):
    """Writes a file and returns a path: what early releases of Ray handed to `load_checkpoint`."""

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
    """A resume would hand the directory to `load_checkpoint`. A function that saves has no such method."""
    advice = r"step 1: save_checkpoint returned '.*model\.pt', but load_.*join\(checkpoint_dir, 'model\.pt'\)"
    with pytest.raises(InvalidInput, match=advice) if is_refused else nullcontext():
        session_in(tmp_path / "class").report_step({"loss": 1.0}, Writes(returns).save_checkpoint)
    saves: Any = lambda directory: Writes(returns).save_checkpoint(directory)  # noqa: E731  a function, not a method
    session_in(tmp_path / "function").report_step({"loss": 1.0}, saves)


def test_what_a_save_returns_is_ignored_if_it_wrote_files(tmp_path: Path) -> None:
    save: Any = written
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session_in(tmp_path).report_step({"loss": 1.0}, save)


def test_a_path_in_place_of_a_checkpoint_is_refused_with_how_to_make_one_of_it(tmp_path: Path) -> None:
    given: Any = str(tmp_path)
    with pytest.raises(InvalidInput, match=r"as in pt\.Checkpoint\.from_directory"):
        session_in(tmp_path).report({"loss": 1.0}, given)


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


@pytest.mark.parametrize("meant", [".", "../elsewhere", "nothing"])
def test_a_snapshot_follows_no_link_to_a_directory_which_may_be_its_own(tmp_path: Path, meant: str) -> None:
    source = write_files(tmp_path / "source", {"weights": b"1"})
    write_files(tmp_path / "elsewhere", {"data": b"2"})
    (source / "link").symlink_to(meant)
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

    class Looks(Stopper):
        def __init__(self, *, back: bool) -> None:
            self._back = back

        @property
        def needs_history(self) -> bool:
            return self._back

        def stop_reason(self, reports: Sequence[StepReport]) -> None:
            seen.append(len(reports))

    for back in (True, False):
        session = session_in(tmp_path, Looks(back=back))
        for _ in range(3):
            session.report({"loss": 1.0}, None)
    assert seen == [1, 2, 3, 1, 1, 1]


@pytest.mark.parametrize("moment", range(1, 13))
def test_a_trial_that_is_to_save_and_leave_saves_the_step_at_which_it_leaves(tmp_path: Path, moment: int) -> None:
    leave = make_stop("enough", save=True)
    supervisor: Any = Supervisor(moment, leave)
    session = TrialSession(supervisor, make_start("any:Thing", tmp_path), Never())

    def train() -> None:
        for _ in range(12):
            session.report_step({"loss": 1.0}, lambda _: None)

    with pytest.raises(StopTraining) as over:
        train()
    assert over.value.outcome == leave.outcome
    assert supervisor.saved == supervisor.steps == session.step
