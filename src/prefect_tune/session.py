"""The trial's own side of an attempt: it counts steps, hands checkpoints over, and asks whether to go on."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.questions import GO_ON, Scalar, answer_to, valid_fields
from prefect_tune.core.stoppers import Stopper
from prefect_tune.core.values import StepReport
from prefect_tune.core.wire import (
    Asked,
    FromTrial,
    GoOn,
    Leave,
    Question,
    Saved,
    Start,
    StateSaved,
    StepDone,
    StopAndSave,
    to_trial,
)
from prefect_tune.snapshot import snapshot
from prefect_tune.trainable import TrialInfo

if TYPE_CHECKING:
    from prefect_tune.checkpoint import Checkpoint

__all__ = ["TrialOver", "TrialSession", "send", "storable"]


class TrialOver(BaseException):
    """Unwinds the user's function when the trial is to end; not an Exception, so that no broad except stops it."""

    def __init__(
        self,
        reason: str,
        *,
        interrupted: bool = False,
        paused: bool = False,
        left: bool = False,
        question: Question | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.interrupted = interrupted
        self.paused = paused
        self.left = left
        self.question = question


class TrialSession:
    """One attempt as seen from inside: the channel to the supervisor, and what has been reported."""

    def __init__(self, channel: Connection, start: Start, stopper: Stopper) -> None:
        self._channel = channel
        self._start = start
        self._stopper = stopper
        self._curve: list[StepReport] = list(start.curve)
        self._trained = timedelta(seconds=start.trained_seconds)
        self._resumed_at = time.monotonic()
        self._saved_step, self._saved_at = start.from_step, self._resumed_at
        self._uploading: int | None = None
        self._want_save = False
        self._over: TrialOver | None = None
        self._judged: str | None = None
        self._judged_count = 0
        self._milestone = start.milestone
        self._asking = False
        self._leave: Leave | None = None
        self.step = start.from_step
        self.asked_to_stop = False

    def info(self) -> TrialInfo:
        start = self._start
        return TrialInfo(
            id=start.trial,
            experiment=start.experiment,
            attempt=start.attempt,
            directory=Path(start.directory),
            config=start.config,
            _session=self,
        )

    def is_asked_to_stop(self) -> bool:
        self.listen()
        return self.asked_to_stop

    def restored(self) -> Path | None:
        return Path(self._start.restored) if self._start.restored else None

    def report(self, metrics: Mapping[str, object], checkpoint: Checkpoint | None) -> None:
        """The function API's step: report, hand over, and leave by `TrialOver` when the trial is to end."""
        self._require_going_on()
        told = self.count(metrics)
        directory = _local_directory(checkpoint) if checkpoint is not None else None
        if directory is None:
            self.tell(told)
        elif directory.parent == Path(self._start.staging):
            self.hand_over(told, directory, "moved")
        elif self._start.overlap:
            self._wait_for_upload()
            self.hand_over(told, snapshot(directory, self.new_directory()), "moved")
        else:
            self.hand_over(told, directory, "lent")
        self.heed_milestone()
        self.end_if_due(saved=directory is not None)

    def report_step(self, metrics: Mapping[str, object], save: Callable[[str], None]) -> None:
        """The class API's step: report, have the state saved when that is due, and leave as `report` does."""
        self._require_going_on()
        told = self.count(metrics)
        if saves := self._is_save_due():
            self._saved_step, self._saved_at = self.step, time.monotonic()
            self.hand_over(told, self._written_by(save), "moved", self._over_already())
        else:
            self.tell(told)
        self.heed_milestone()
        self.listen()  # and not again before the end: who is told to save and leave after this does so a step later
        wants = self.wants_state
        if wants and not saves:
            self.hand_over_state(told, self._written_by(save))
        self._end(saved=saves or wants)

    def save_last_step(self, save: Callable[[str], None]) -> None:
        """Have the state after the last step saved, where that has not been done and the trial has not ended."""
        if self._over is None and self.step > self._saved_step:
            self._saved_step, self._saved_at = self.step, time.monotonic()
            self.hand_over_state(self._curve[-1], self._written_by(save))

    def ask(
        self,
        question: str,
        fields: Mapping[str, object] | None,
        key: str | None,
        save: Callable[[str], None] | None,
    ) -> dict[str, Scalar]:
        """Return what a person has answered; where nobody has yet, leave by `TrialOver` until somebody does."""
        self._require_going_on()
        wanted = valid_fields(GO_ON if fields is None else fields)
        asked = Question(key=key or f"step {self.step}: {question}", question=question, fields=wanted)
        if (given := self._start.answers.get(asked.key)) is not None:
            return answer_to(wanted, {name: value for name, value in given.items() if name in wanted})
        if save is not None:
            self.save_last_step(save)
        self.settle()
        self._over = TrialOver(f"asks a person: {question}", interrupted=True, question=asked)
        raise self._over

    def _is_save_due(self) -> bool:
        cadence = self._start.cadence
        steps, elapsed = self.step - self._saved_step, timedelta(seconds=time.monotonic() - self._saved_at)
        return self.wants_save() or cadence.due(steps, elapsed) or (cadence.at_end and self.why_stop() is not None)

    def _written_by(self, save: Callable[[str], None]) -> Path:
        directory = self.new_directory()
        returned = cast("Callable[[str], object]", save)(str(directory))  # whatever it is typed
        _require_written(returned, directory, self.step)
        return directory

    def _require_going_on(self) -> None:
        """Count nothing that comes after the end: a framework may end its loop in order, and report once more."""
        if self._over is not None:
            raise self._over

    def count(self, metrics: Mapping[str, object]) -> StepReport:
        """Make the report of the next step."""
        stored = storable(metrics, f"metrics of step {self.step + 1}")
        self.step += 1
        self._want_save = stored.pop("should_checkpoint", False) is True
        told = StepReport(step=self.step, metrics=stored, trained_seconds=self._trained_so_far().total_seconds())
        self._curve.append(told)
        self._asking = self._milestone is not None and self.step >= self._milestone
        return told

    def wants_save(self) -> bool:
        """Say whether the last step asked to be saved, or somebody asked the trial to stop."""
        self.listen()
        return self._want_save or self.asked_to_stop or (self._asking and self._start.saves_first)

    def why_stop(self) -> str | None:
        """Return why the trial is over after the last step, be it one before a resume; None to go on.

        The stopper is asked once a step: what it said may have been journaled.
        """
        if self._judged_count != len(self._curve):
            self._judged, self._judged_count = self._judgement(), len(self._curve)
        return self._judged

    def _judgement(self) -> str | None:
        if not self._curve:
            return None
        if self._curve[-1].metrics.get("done") is True:
            return "the trainable said it is done"
        return self._stopper.why_stop(self._curve)

    def _over_already(self) -> str:
        """Why the trial is over whatever becomes of it; a stopper that fails does so once the state is saved."""
        with suppress(Exception):
            return "" if self._asking else self.why_stop() or ""
        return ""

    def tell(self, report: StepReport) -> None:
        send(self._channel, StepDone(report=report, asks=self._asking))

    def hand_over(self, report: StepReport, directory: Path, how: Literal["moved", "lent"], over: str = "") -> None:
        """Have `directory` committed. A lent one is waited for; a moved one is the supervisor's from now on."""
        self._wait_for_upload()
        moved = how == "moved"
        handed = StepDone(report=report, checkpoint=str(directory), handed_over=moved, asks=self._asking, over=over)
        send(self._channel, handed)
        self._uploading = report.step
        if not (moved and self._start.overlap):
            self._wait_for_upload()

    def hand_over_state(self, report: StepReport, directory: Path) -> None:
        """Have the state after a step that was told already committed, and wait for it."""
        self._wait_for_upload()
        send(self._channel, StateSaved(report=report, checkpoint=str(directory)))
        self._uploading = report.step
        self._wait_for_upload()

    def ask_first(self) -> None:
        """Where the checkpoint stands at a milestone already, ask before the first step; leave as `report` does.

        Whoever trained there saved it and died before that was journaled: nobody has decided yet.
        """
        if self._curve and self._milestone is not None and self.step >= self._milestone:
            self._asking = True
            send(self._channel, Asked(report=self._curve[-1]))
            self.heed_milestone()
            self.end_if_due(saved=True)

    def heed_milestone(self) -> None:
        """Where the last step is a milestone, wait until it is decided, or until the trial is asked to stop."""
        began = time.monotonic()
        while self._asking and not self.asked_to_stop:
            self._take_in()
        self._asking = False
        self._resumed_at += time.monotonic() - began  # waiting is not training

    @property
    def wants_state(self) -> bool:
        """Whether whoever ends the trial now wants its state."""
        return self.asked_to_stop or (self._leave is not None and self._leave.save)

    def new_directory(self) -> Path:
        """Return a new empty directory to hand over."""
        directory = Path(self._start.staging) / f"{self.step:010d}-{time.monotonic_ns()}"
        directory.mkdir(parents=True)
        return directory

    def end_if_due(self, *, saved: bool) -> None:
        """Leave when a stop criterion is met, or when the state is saved and somebody asked to stop.

        Raises:
            TrialOver: always, where it does not return.
        """
        self.listen()
        self._end(saved=saved)

    def _end(self, *, saved: bool) -> None:
        over = self._why_over(saved=saved)
        if over is not None:
            self.settle()
            self._over = over
            raise over

    def _why_over(self, *, saved: bool) -> TrialOver | None:
        if why := self.why_stop():
            return TrialOver(why)
        if self._leave is not None:
            for_good = self._leave.for_good
            return TrialOver(self._leave.reason, paused=not for_good, left=for_good)
        return TrialOver("saved, as asked", interrupted=True) if saved and self.asked_to_stop else None

    @property
    def over(self) -> TrialOver | None:
        """How the trial was told to end; whatever became of the exception in the user's code."""
        return self._over

    def begin(self) -> None:
        """Start the clock: everything is set up, and the checkpoint is loaded."""
        self._resumed_at = self._saved_at = time.monotonic()

    def settle(self) -> None:
        """Return once nothing is being uploaded any more."""
        self._wait_for_upload()

    def listen(self) -> None:
        """Take in what the supervisor has said meanwhile."""
        while self._channel.poll():
            self._take_in()

    def _wait_for_upload(self) -> None:
        began = time.monotonic()
        while self._uploading is not None:
            self._take_in()
        self._resumed_at += time.monotonic() - began  # waiting is not training

    def _take_in(self) -> None:
        match to_trial.validate_json(self._channel.recv_bytes()):
            case Saved(step=step) if step == self._uploading:
                self._uploading = None
            case StopAndSave():
                self.asked_to_stop = True
            case GoOn(milestone=milestone):
                self._milestone, self._asking = milestone, False
            case Leave() as leave:
                self._leave, self._asking = leave, False
            case _:
                pass

    def _trained_so_far(self) -> timedelta:
        return self._trained + timedelta(seconds=time.monotonic() - self._resumed_at)


def _require_written(returned: object, directory: Path, step: int) -> None:
    """Refuse a state that is returned, as Ray takes it: nothing of it would be stored. Who has none writes nothing."""
    is_empty = not any(directory.iterdir())
    if isinstance(returned, Mapping) or (is_empty and returned is not None and str(returned) != str(directory)):
        found = f"a {type(returned).__name__}"
        raise InvalidInput(f"step {step}: save_checkpoint returned {found}; write files into checkpoint_dir instead")
    if is_empty:
        said = "save_checkpoint wrote nothing into checkpoint_dir: who goes on from there has no trained state"
        warnings.warn(said, stacklevel=2)  # the same words at each step: Python shows them once


def send(channel: Connection, message: FromTrial) -> None:
    """Tell the supervisor."""
    channel.send_bytes(message.model_dump_json().encode())


def storable(value: Mapping[str, object], where: str) -> dict[str, object]:
    """Return `value` as plain JSON: numbers of NumPy and the like become Python's.

    Raises:
        BadMetric: something cannot be stored; says what, and where.
    """
    if not isinstance(value, Mapping):
        raise BadMetric(f"{where}: expected a dict of metrics, found {type(value).__name__}")
    return {_key(name, where): _plain(each, f"{where}: {name!r}") for name, each in value.items()}


def _key(name: object, where: str) -> str:
    if isinstance(name, str):
        return name
    raise BadMetric(f"{where}: expected names of type str, found {name!r}")


def _plain(value: object, where: str) -> object:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return _finite(value, where)
    if isinstance(value, Mapping):
        return storable(value, where)
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}[{index}]") for index, each in enumerate(value)]
    item = getattr(value, "item", None)
    if callable(item) and _element_count(value) == 1:
        return _plain(item(), where)
    raise BadMetric(
        f"{where}: expected a finite number, text, or JSON made of these, found {type(value).__name__}; "
        "convert it (float(x), x.tolist()), or save it in the checkpoint"
    )


def _element_count(value: object) -> object:
    """NumPy's `size` is a number; PyTorch's is a method, and says something else."""
    count = getattr(value, "numel", None)
    return count() if callable(count) else getattr(value, "size", 1)


def _finite(value: float, where: str) -> float:
    if math.isfinite(value):
        return value
    raise BadMetric(f"{where}: found {value}; training has diverged, or the metric divides by zero")


def _local_directory(checkpoint: Checkpoint) -> Path:
    path = getattr(checkpoint, "path", None)  # or somebody gives the path itself
    if path is None or not Path(str(path)).is_dir():
        raise InvalidInput(
            f"pt.report(checkpoint={checkpoint!r}): expected a local directory, as in "
            "pt.Checkpoint.from_directory(path); what is on a target already need not be reported"
        )
    return Path(str(path))
