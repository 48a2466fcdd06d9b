"""The trial's side of an attempt: counts steps, sends reports and checkpoints, and waits for decisions."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from prefect_tune.core.errors import InvalidInput, StagedFilesChanged
from prefect_tune.core.experiment.stoppers import Stopper, why_over
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Finished,
    FinishKind,
)
from prefect_tune.core.messages.process_messages import (
    CheckpointSaved,
    FromTrial,
    Leave,
    MeanMetrics,
    MilestoneReached,
    Proceed,
    SaveFailed,
    Start,
    StepDone,
    StopAndSave,
    TrainableLoaded,
    TrialEnded,
)
from prefect_tune.core.metrics import storable
from prefect_tune.core.reasons import AnyReason, make_reason
from prefect_tune.core.search.objective import require_metrics
from prefect_tune.core.usage_records import PhaseSeconds
from prefect_tune.core.values import StepReport
from prefect_tune.runtime.message_stream import SupervisorConnection
from prefect_tune.runtime.trainable import Trainable, TrialInfo, TrialOver

if TYPE_CHECKING:
    from prefect_tune.runtime.checkpoint import Checkpoint


# Validate the directory that a trial reports as a checkpoint, and copy it for an asynchronous upload.

_CANNOT_COPY_RANGES = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def local_directory(checkpoint: object) -> Path:
    """Return the absolute path of a checkpoint's directory, links resolved, so that a later `chdir` does not matter.

    Raises:
        InvalidInput: it is not a directory of this machine.
    """
    path = getattr(checkpoint, "path", None)  # None if the caller passed a path instead of a checkpoint
    if path is None or _kind_of(checkpoint) != "local" or not Path(str(path)).is_dir():
        raise InvalidInput(
            f"pt.report(checkpoint={checkpoint!r}): expected a local directory{_seen_from(path)}, as in "
            "pt.Checkpoint.from_directory(path); a checkpoint that is on a target already need not be reported"
        )
    return Path(os.path.realpath(str(path)))


def _kind_of(checkpoint: object) -> object:
    """Return the kind of file system of its path; "local" if it names none."""
    place = getattr(checkpoint, "_place", None)
    if place is not None:
        return place.kind  # of `pt.Checkpoint`, without importing pyarrow
    return getattr(getattr(checkpoint, "filesystem", None), "type_name", "local")


def _seen_from(path: object) -> str:
    if path is None or Path(str(path)).is_absolute():
        return ""
    try:
        return f" in the working directory {Path.cwd()}"
    except FileNotFoundError:
        return " in the working directory, which has been removed"


def require_written(returned: object, directory: Path, step: int) -> None:
    """Refuse a state that is returned instead of written, as Ray allows: it would not be stored.

    An empty directory is allowed, for a trainable without state, and warned of.

    Raises:
        InvalidInput: `save_checkpoint` returned a mapping, or wrote nothing and returned something else.
    """
    is_empty = not any(directory.iterdir())
    if isinstance(returned, Mapping) or (is_empty and returned is not None and str(returned) != str(directory)):
        found = f"a {type(returned).__name__}"
        raise InvalidInput(f"step {step}: save_checkpoint returned {found}; write files into checkpoint_dir instead")
    if is_empty:
        said = "save_checkpoint wrote nothing into checkpoint_dir: a resume from there has no trained state"
        warnings.warn(said, stacklevel=2)  # the same text at each step: Python shows it once


def require_no_path(returned: object, directory: Path, step: int) -> None:
    """Refuse a path that a class returns for its `load_checkpoint`: early releases of Ray took it, Ray 2 refuses it.

    Raises:
        InvalidInput: it is a path other than `directory`, which is what `load_checkpoint` receives.
    """
    if not isinstance(returned, str | os.PathLike):
        return
    path, root = os.path.realpath(os.fsdecode(returned)), os.path.realpath(directory)
    if path != root:
        name = os.path.relpath(path, root) if path.startswith(f"{root}/") else Path(path).name
        raise InvalidInput(
            f"step {step}: save_checkpoint returned {os.fsdecode(returned)!r}, but load_checkpoint receives the "
            f"directory: return nothing, and load os.path.join(checkpoint_dir, {name!r}) there"
        )


def snapshot(source: Path, destination: Path) -> Path:
    """Copy a directory to `destination` and return that; the source may change after this returns.

    Raises:
        InvalidInput: an entry is neither a file nor a directory, or a link is not to a file.
        StagedFilesChanged: a file was truncated or deleted during the copy.
        OSError: such as a full disk; `shutil.copytree` would raise one without its number.
    """
    destination.mkdir(exist_ok=True)
    for each in source.iterdir():
        if each.is_symlink() and not each.is_file():  # a link to a folder may lead to one that it lies in
            raise InvalidInput(f"{each}: a link to a directory, or to nothing, cannot be saved; copy what it points to")
        try:
            if each.is_dir():
                snapshot(each, destination / each.name)
            else:
                _copy_file(each, destination / each.name)
        except FileNotFoundError as gone:
            raise StagedFilesChanged(f"{each}: was deleted while it was being saved") from gone
    return destination


def _copy_file(source: Path, destination: Path) -> None:
    """Copy a file inside the kernel; on XFS and Btrfs the copy shares the bytes, and takes milliseconds."""
    if not stat.S_ISREG(source.stat().st_mode):  # opening a named pipe would block until it has a writer
        raise InvalidInput(f"{source}: neither a file nor a directory, so it cannot be saved")
    with source.open("rb") as reading, destination.open("wb") as writing:
        size = os.fstat(reading.fileno()).st_size
        done = 0
        while done < size and (sent := _copy_range(reading.fileno(), writing.fileno(), done, size - done)):
            done += sent
    if done != size:
        raise StagedFilesChanged(f"{source}: expected {size} bytes, found {done}: it was truncated during the copy")
    shutil.copymode(source, destination)


def _copy_range(source: int, destination: int, offset: int, count: int) -> int:
    """Append bytes of `source` to `destination`; return how many. Not every file system can share them."""
    try:
        if copied := os.copy_file_range(source, destination, count, offset):
            return copied
    except OSError as error:
        if error.errno not in _CANNOT_COPY_RANGES:
            raise
    return os.sendfile(destination, source, offset, count)


_RETURN_WITHIN = timedelta(seconds=20)
"""How long a trainable has to return after `TrialOver` was raised only in a thread that it started."""


class TrialSession:
    """The state of one attempt in the trial's process: its connection to the supervisor, and its reports.

    It belongs to the process and the thread that create it. Other threads of the process may report too: each call is
    complete before the next one begins. A forked child may only read it.
    """

    def __init__(self, connection: SupervisorConnection, start: Start, stopper: Stopper) -> None:
        self.connection = connection
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._reports = threading.RLock()  # held during a call; again by a `save` that calls back
        self._sending = threading.Lock()
        self._ended = False
        self._overdue: threading.Timer | None = None
        self.start = start
        self._stopper = stopper
        self._curve: list[StepReport] = list(start.curve)
        self._trained_seconds = start.trained_seconds
        self._resumed_at = time.monotonic()
        self._loaded_at: float | None = None
        self._begun_at: float | None = None
        self._saving_seconds = self._waiting_seconds = 0.0
        self._saved_step, self._saved_at = start.from_step, self._resumed_at
        self._uploading: int | None = None
        self._want_save = False
        self._over: TrialOver | None = None
        self._judged: AnyReason | None = None
        self._judged_step: int | None = None
        self._milestone = start.milestone
        self._asking = False
        self._leave: Leave | None = None
        self._mean: MeanMetrics | None = None
        self.step = start.from_step
        self.asked_to_stop = False

    def info(self) -> TrialInfo:
        start = self.start
        return TrialInfo(
            id=start.trial,
            experiment=start.experiment,
            attempt=start.attempt,
            directory=Path(start.directory),
            config=start.config,
            rank=start.rank.rank,
            world_size=start.rank.world_size,
            local_rank=start.rank.local_rank,
            _session=self,
        )

    def is_asked_to_stop(self) -> bool:
        self._require_own_process("pt.get_trial().should_checkpoint")
        if self._reports.acquire(blocking=False):  # else another thread reports, and reads the messages
            try:
                self.listen()
            finally:
                self._reports.release()
        return self.asked_to_stop

    def restored(self) -> Path | None:
        return Path(self.start.restored) if self.start.restored else None

    def report(self, metrics: Mapping[str, object], checkpoint: Checkpoint | None) -> None:
        """Report a step of the function API with its checkpoint; raise `TrialOver` when the trial must end."""
        with self._reporting("pt.report"):
            directory = local_directory(checkpoint) if checkpoint is not None else None
            report = self.count(metrics)
            if directory is None:
                self.tell(report)
            elif directory.parent == Path(os.path.realpath(self.start.staging)):
                self.hand_over(report, directory, "moved")
            elif self.start.overlap or self.start.rank.world_size > 1:
                self._wait_for_upload()
                with self._saving():
                    copied = snapshot(directory, self.new_directory())
                self.hand_over(report, copied, "moved")
            else:
                self.hand_over(report, directory, "lent")
            self.heed_milestone()
            self.end_if_due(saved=directory is not None)

    def report_step(self, metrics: Mapping[str, object], save: Callable[[str], None]) -> None:
        """Report a step of the class API, and save the state if that is due; raise `TrialOver` as `report` does."""
        with self._reporting("pt.report_step"):
            report = self.count(metrics)
            if saves := self._is_save_due():
                self._saved_step, self._saved_at = self.step, time.monotonic()
                self.hand_over(report, self._written_by(save), "moved", None if self._asking else self._finish_reason())
            else:
                self.tell(report)
            self.heed_milestone()
            self.listen()  # the last time in this step: a later request to save and end is served after the next step
            wants = self.asked_to_stop or (self._leave is not None and self._leave.save)
            if wants and not saves:
                self.hand_over_state(report, self._written_by(save))
            self._end(saved=saves or wants)

    def save_last_step(self, save: Callable[[str], None]) -> None:
        """Save the state after the last step, unless it is saved already or the trial has ended."""
        self._require_own_process("save_last_step")
        with self._reports:
            if self._over is None and self.step > self._saved_step:
                self._saved_step, self._saved_at = self.step, time.monotonic()
                self.hand_over_state(self._curve[-1], self._written_by(save))

    def finish(self, returned: Mapping[str, object] | None) -> TrialEnded:
        """Report the metrics that the function returned, if any, as the last step; return how the attempt ended."""
        self._require_own_process("the end of the trainable")
        with self._reports:
            if self._over is None:
                if returned is not None:
                    self.tell(self.count(returned))
                self._wait_for_upload()
                self._over = TrialOver(self._finished(make_reason("returned"), FinishKind.RETURNED))
            # Else `TrialOver` was raised in another thread, or a broad except has caught it.
            return TrialEnded(outcome=self._over.outcome)

    @contextmanager
    def _reporting(self, call: str) -> Iterator[None]:
        """Serialize calls from all threads: each is complete before the next begins.

        Raises:
            TrialOver: the trial has ended: a framework may report once more while it ends its loop.
            InvalidInput: this is not the trial's own process.
        """
        self._require_own_process(call)
        with self._reports:
            if self._over is not None:
                raise self._leaving(self._over)
            yield

    @property
    def trains_here(self) -> bool:
        """Whether this is the process of the session, and no forked child of it."""
        return os.getpid() == self._process

    def _require_own_process(self, call: str) -> None:
        if (here := os.getpid()) != self._process:
            raise InvalidInput(
                f"{call}: expected process {self._process}, which trains trial {self.start.trial!r}, found "
                f"process {here}, a forked child of it. One process trains a trial: return results to that "
                "process (through a queue, a pipe or a pool) and report them there"
            )

    leaves_by: type[TrialOver] = TrialOver
    """What ends the trainable in this process."""

    def _leaving(self, over: TrialOver) -> TrialOver:
        """Record how the trial ends; if this is not the trainable's own thread, limit its time to return."""
        self._over = over = self.leaves_by(over.outcome)
        if threading.get_ident() != self._thread and self._overdue is None:
            self._overdue = threading.Timer(
                _RETURN_WITHIN.total_seconds(), self.end, [TrialEnded(outcome=over.outcome)]
            )
            self._overdue.daemon = True
            self._overdue.start()
        return over

    def _is_save_due(self) -> bool:
        cadence = self.start.cadence
        steps, elapsed = self.step - self._saved_step, timedelta(seconds=time.monotonic() - self._saved_at)
        self.listen()
        wants = self._want_save or self.asked_to_stop or (self._asking and self.start.saves_first)
        return wants or cadence.due(steps, elapsed) or (cadence.at_end and self._finish_reason() is not None)

    def _written_by(self, save: Callable[[str], None]) -> Path:
        with self._saving():
            directory = self.new_directory()
            returned = cast("Callable[[str], object]", save)(str(directory))  # users return other types than declared
        require_written(returned, directory, self.step)
        if isinstance(getattr(save, "__self__", None), Trainable):
            require_no_path(returned, directory, self.step)
        return directory

    def count(self, metrics: Mapping[str, object]) -> StepReport:
        """Make the report of the next step."""
        where = f"metrics of step {self.step + 1}"
        stored = storable(metrics, where)
        if self.start.rank.rank == 0:
            require_metrics(stored, self.start.required_metrics, where)
        self.step += 1
        self._want_save = stored.pop("should_checkpoint", False) is True
        trained_seconds = self._trained_seconds + time.monotonic() - self._resumed_at
        report = StepReport(step=self.step, metrics=stored, trained_seconds=trained_seconds)
        if not self._stopper.looks_back:
            self._curve.clear()  # else a trial of a million steps holds 0.5 GB of reports
        self._curve.append(report)
        self._asking = self._milestone is not None and self.step >= self._milestone
        return report

    def why_stop(self) -> AnyReason | None:
        """Return why the trial is over after the last step, which may precede a resume; None to continue.

        The stopper is called once per step, since its result may have been journaled.
        """
        if self._judged_step != self.step:
            self._judged, self._judged_step = self._judgement(), self.step
        return self._judged

    def _judgement(self) -> AnyReason | None:
        if not self._curve:
            return None
        return why_over(self._stopper, self._curve) or None

    def _finish_reason(self) -> AnyReason | None:
        """Return why this step finishes the trial, or None; an error of the stopper is raised after the report."""
        with suppress(Exception):
            return self.why_stop()
        return None

    def tell(self, report: StepReport) -> None:
        self._send(StepDone(report=report, asks=self._asking, seconds=self.seconds()))

    def hand_over(
        self,
        report: StepReport,
        directory: Path,
        how: Literal["moved", "lent"],
        finish_reason: AnyReason | None = None,
    ) -> None:
        """Send `directory` to be committed. "lent": wait for the commit; "moved": the supervisor now owns it."""
        self._wait_for_upload()
        moved = how == "moved"
        handed = {"checkpoint": str(directory), "moved": moved, "asks": self._asking}
        self._send(StepDone(report=report, finish_reason=finish_reason, seconds=self.seconds(), **handed))
        self._uploading = report.step
        if not (moved and self.start.overlap):
            self._wait_for_upload()

    def hand_over_state(self, report: StepReport, directory: Path) -> None:
        """Send the state after a step that was reported already, and wait for its commit."""
        self._wait_for_upload()
        handed = {"checkpoint": str(directory), "moved": True, "is_reported": True}
        self._send(StepDone(report=report, seconds=self.seconds(), **handed))
        self._uploading = report.step
        self._wait_for_upload()

    def ask_first(self) -> None:
        """If the restored checkpoint is at a milestone, wait for the decision before the first step.

        An earlier attempt saved it and crashed before the milestone was journaled, so it is not decided yet. Raises
        `TrialOver` as `report` does.
        """
        if self._curve and self._milestone is not None and self.step >= self._milestone:
            self._asking = True
            self._send(MilestoneReached(report=self._curve[-1]))
            self.heed_milestone()
            self.end_if_due(saved=True)

    def heed_milestone(self) -> None:
        """If the last step is a milestone, wait for its decision, or until the trial is asked to stop."""
        began = time.monotonic()
        while self._asking and not self.asked_to_stop:
            self._take_in()
        self._asking = False
        waited = time.monotonic() - began
        self._waiting_seconds += waited
        self._resumed_at += waited  # waiting is not training

    def new_directory(self) -> Path:
        """Return a new empty directory for a checkpoint."""
        name = f"{self.step:010d}-{self.start.rank.rank}-{time.monotonic_ns()}"
        directory = Path(self.start.staging) / name
        directory.mkdir(parents=True)
        return directory

    def end_if_due(self, *, saved: bool) -> None:
        """End the trial if a stop criterion is met, or if the state is saved and the trial is asked to stop.

        Raises:
            TrialOver: the trial ends.
        """
        self.listen()
        self._end(saved=saved)

    def _end(self, *, saved: bool) -> None:
        over = self._why_over(saved=saved)
        if over is not None:
            self._wait_for_upload()
            raise self._leaving(over)

    def _why_over(self, *, saved: bool) -> TrialOver | None:
        if (reason := self.why_stop()) is not None:
            return TrialOver(self._finished(reason, FinishKind.CRITERION))
        if self._leave is not None:
            return TrialOver(self._leave.outcome)
        is_interrupted = saved and self.asked_to_stop
        return TrialOver(self._interrupted(make_reason("saved-as-requested"))) if is_interrupted else None

    def _finished(self, reason: AnyReason, kind: FinishKind) -> Finished:
        return Finished(trial=self.start.trial, reason=reason, kind=kind)

    def _interrupted(self, reason: AnyReason) -> AttemptEnded:
        return AttemptEnded(trial=self.start.trial, cause=Cause.PREEMPTED, reason=reason)

    def loaded(self, code: str) -> None:
        """Report that the trainable is loaded."""
        self._loaded_at = time.monotonic()
        self._waiting_seconds = 0.0  # for an answer before that, which is a part of the start
        self._send(TrainableLoaded(pid=self._process, code=code))

    def end(self, message: TrialEnded) -> None:
        """Send the end of the attempt. Only the first such message is sent, and no message after it."""
        with self._sending:
            if not self._ended:
                self._ended = True
                after_end = message.raised and self._over is not None
                self.connection.send(message.model_copy(update={"seconds": self.seconds(), "after_end": after_end}))
        if self._overdue is not None:
            self._overdue.cancel()

    def _send(self, message: FromTrial) -> None:
        with self._sending:
            if self._ended:
                raise self._over or TrialOver(self._interrupted(make_reason("attempt-over")))
            self.connection.send(message)

    def begin(self) -> None:
        """Start the training clock, once the trainable is set up and the checkpoint is loaded."""
        self._resumed_at = self._saved_at = self._begun_at = time.monotonic()

    def listen(self) -> None:
        """Process the supervisor's messages that have arrived."""
        while self.connection.has_message():
            self._take_in()

    def _wait_for_upload(self) -> None:
        """Wait until no upload is in flight."""
        began = time.monotonic()
        with self._saving():
            while self._uploading is not None:
                self._take_in()
        self._resumed_at += time.monotonic() - began  # waiting is not training

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Count the block as time in which training stands still for a checkpoint."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._saving_seconds += time.monotonic() - began

    def seconds(self) -> PhaseSeconds | None:
        """Return where the time went since the trainable was loaded; None if it was not."""
        if self._loaded_at is None:
            return None
        now = time.monotonic()
        begun_at = now if self._begun_at is None else self._begun_at
        still = self._saving_seconds + self._waiting_seconds
        return PhaseSeconds(
            restoring=round(begun_at - self._loaded_at, 4),
            training=round(max(0.0, now - begun_at - still), 4),
            saving=round(self._saving_seconds, 4),
            waiting=round(self._waiting_seconds, 4),
        )

    def _take_in(self) -> None:
        match self.connection.receive():
            case CheckpointSaved(step=step) if step == self._uploading:
                self._uploading = None
            case SaveFailed(step=step):
                self._uploading = None if step == self._uploading else self._uploading
                self._saved_step = min(self._saved_step, step - 1)  # the next step, or the end, is saved
            case StopAndSave():
                self.asked_to_stop = True
            case Proceed(milestone=milestone):
                self._milestone, self._asking = milestone, False
            case Leave() as leave:
                self._leave, self._asking = leave, False
            case MeanMetrics() as mean:
                self._mean = mean
            case _:
                pass
