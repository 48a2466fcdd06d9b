"""The trial's side of an attempt: counts steps, sends reports and checkpoints, and waits for decisions.

Of several processes that train a trial together, rank 0 decides, and the other ranks follow:

    rank 0           report of step s ──► decides: save? end? ──► Directive(s) ─┐
    supervisor                                                                  ├─► sends it to all other ranks
    rank 1, 2, ...   report of step s ──► Part(s): its files ──► waits for ◄────┘

So all ranks save, continue and end at the same step, whatever their clocks say. Rank 0 never waits for another rank,
but for the commit of a checkpoint, to which each rank adds its part, within a deadline (`attempt/supervisor.py`).
Never: a rank that decides by itself whether it saves or ends; a checkpoint without the part of a rank.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, cast

from prefect_tune.core.errors import InvalidInput, StagedFilesChanged
from prefect_tune.core.experiment.stoppers import Stopper, why_over
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Finished,
    FinishKind,
    Outcome,
)
from prefect_tune.core.messages.process_messages import (
    CheckpointSaved,
    Directive,
    FromTrial,
    Join,
    Leave,
    MeanMetrics,
    MilestoneReached,
    Part,
    Proceed,
    Rank,
    RankMetrics,
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
from prefect_tune.linux import copy_range
from prefect_tune.runtime.load_named import working_directory
from prefect_tune.runtime.message_stream import SupervisorConnection
from prefect_tune.runtime.ranks import LEADS
from prefect_tune.runtime.trainable import Trainable, TrialInfo, TrialOver

if TYPE_CHECKING:
    from prefect_tune.runtime.checkpoint import Checkpoint


# Validate the directory that a trial reports as a checkpoint, and copy it for an asynchronous upload.


def local_directory(checkpoint: object) -> Path:
    """Return the absolute path of a checkpoint's directory, links resolved, so that a later `chdir` does not matter.

    Raises:
        InvalidInput: it is not a directory of this machine.
    """
    path = getattr(checkpoint, "path", None)  # None if the caller passed a path instead of a checkpoint
    place = getattr(checkpoint, "_place", None)  # of `pt.Checkpoint`, without importing pyarrow
    filesystem = getattr(checkpoint, "filesystem", None) if place is None else None
    kind = getattr(filesystem, "type_name", "local") if place is None else place.kind
    if path is None or kind != "local" or not Path(str(path)).is_dir():
        is_relative = path is not None and not Path(str(path)).is_absolute()
        below = f" in the working directory {working_directory()}" if is_relative else ""
        raise InvalidInput(
            f"pt.report(checkpoint={checkpoint!r}): expected a local directory{below}, as in "
            "pt.Checkpoint.from_directory(path); a checkpoint that is on a target already need not be reported"
        )
    return Path(os.path.realpath(str(path)))


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
        # The same text at each step: Python shows it once.
        warnings.warn("save_checkpoint wrote nothing into checkpoint_dir: a resume has no trained state", stacklevel=2)


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
    """Copy a file; on XFS and Btrfs the copy shares the bytes, and takes milliseconds."""
    if not stat.S_ISREG(source.stat().st_mode):  # opening a named pipe would block until it has a writer
        raise InvalidInput(f"{source}: neither a file nor a directory, so it cannot be saved")
    with source.open("rb") as reading, destination.open("wb") as writing:
        size = os.fstat(reading.fileno()).st_size
        done = 0
        while done < size and (count := copy_range(reading.fileno(), writing.fileno(), size - done, done)):
            done += count
    if done != size:
        raise StagedFilesChanged(f"{source}: expected {size} bytes, found {done}: it was truncated during the copy")
    shutil.copymode(source, destination)


_RETURN_WITHIN = timedelta(seconds=20)
"""How long a trainable has to return after `TrialOver` was raised only in a thread that it started."""


class TrialSession:
    """The state of one attempt in the process of rank 0: its connection to the supervisor, and its reports.

    It decides when to save and to end, and directs the other ranks, if there are any.
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
        self._directed_stop = False
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

    @property
    def _leads(self) -> bool:
        return self.start.rank.rank == 0 and self.start.rank.world_size > 1

    def lead(self, world_size: int) -> None:
        """Be rank 0 of so many ranks from now on: a launcher in this process starts the others.

        Raises:
            InvalidInput: a step was reported already, which the others do not have.
        """
        with self._reporting("a launcher of ranks"):
            if self._leads:
                return
            if self.step != self.start.from_step:
                raise InvalidInput("expected the ranks to be launched before the first pt.report, found a step before")
            rank = Rank(rank=0, world_size=world_size)
            self._send(Join(rank=rank, pid=os.getpid()))
            self.start = self.start.model_copy(update={"rank": rank})
            os.environ[LEADS] = "1"

    def _direct(self, *, saves: bool = False, over: Outcome | None = None) -> None:
        """Tell the other ranks, if there are any, what to do at this step."""
        if self._leads:
            if not saves:
                self._directed_stop = self.asked_to_stop
            self._send(Directive(step=self.step, saves=saves, stop=self._directed_stop, over=over))

    def is_asked_to_stop(self) -> bool:
        self._require_own_process("pt.get_trial().should_checkpoint")
        if self._leads:  # what all ranks know since the last report: else some would save a step before the others
            return self._directed_stop
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
                self.hand_over(report, directory, moved=True)
            elif self.start.overlap or self.start.rank.world_size > 1:
                self._wait_for_upload()
                with self._saving():
                    copied = snapshot(directory, self.new_directory())
                self.hand_over(report, copied, moved=True)
            else:
                self.hand_over(report, directory, moved=False)
            self.heed_milestone()
            self.end_if_due(saved=directory is not None)

    def report_step(
        self, metrics: Mapping[str, object], save: Callable[[str], None], *, may_lack: bool = False
    ) -> None:
        """Report a step of the class API, and save the state if that is due; raise `TrialOver` as `report` does."""
        with self._reporting("pt.report_step"):
            report = self.count(metrics, may_lack=may_lack)
            if saves := self._is_save_due():
                self._saved_step, self._saved_at = self.step, time.monotonic()
                try:
                    directory = self._written_by(save)
                except BaseException:  # the step counts: else the checkpoint that was loaded is blamed for its save
                    self._asking = False
                    self.tell(report)
                    raise
                reason = None if self._asking else self._finish_reason()
                self.hand_over(report, directory, moved=True, finish_reason=reason)
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
            if self._over is None:
                self._direct()

    def finish(self, returned: Mapping[str, object] | None) -> TrialEnded:
        """Report the metrics that the function returned, if any, as the last step; return how the attempt ended."""
        self._require_own_process("the end of the trainable")
        with self._reports:
            if self._over is None:
                if returned is not None:
                    self.tell(self.count(returned))
                self._wait_for_upload()
                reason = make_reason("returned")
                self._over = TrialOver(Finished(trial=self.start.trial, reason=reason, kind=FinishKind.RETURNED))
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
        self._direct(saves=True)
        with self._saving():
            directory = self.new_directory()
            returned = cast("Callable[[str], object]", save)(str(directory))  # users return other types than declared
        require_written(returned, directory, self.step)
        if isinstance(getattr(save, "__self__", None), Trainable):
            require_no_path(returned, directory, self.step)
        return directory

    def count(self, metrics: Mapping[str, object], *, may_lack: bool = False) -> StepReport:
        """Make the report of the next step; with `metrics_from="mean"` of what all ranks report for it."""
        step = self.step + 1
        where = f"metrics of step {step}"
        stored = storable(metrics, where)
        if self._leads and self.start.metrics_from == "mean":
            self._send(RankMetrics(step=step, metrics=stored))
            while self._mean is None or self._mean.step != step:
                self._take_in()
            stored = storable(self._mean.metrics, where)
        if self.start.rank.rank == 0 and not may_lack:
            require_metrics(stored, self.start.required_metrics, where)
        self.step = step
        self._want_save = stored.pop("should_checkpoint", False) is True
        trained_seconds = self._trained_seconds + time.monotonic() - self._resumed_at
        report = StepReport(step=step, metrics=stored, trained_seconds=trained_seconds)
        if not self._stopper.looks_back:
            self._curve.clear()  # else a trial of a million steps holds 0.5 GB of reports
        self._curve.append(report)
        self._asking = self._milestone is not None and step >= self._milestone
        return report

    def why_stop(self) -> AnyReason | None:
        """Return why the trial is over after the last step, which may precede a resume; None to continue.

        The stopper is called once per step, since its result may have been journaled.
        """
        if self._judged_step != self.step:
            self._judged = (why_over(self._stopper, self._curve) or None) if self._curve else None
            self._judged_step = self.step  # not if the stopper has raised: then the next call raises, too
        return self._judged

    def _finish_reason(self) -> AnyReason | None:
        """Return why this step finishes the trial, or None; an error of the stopper is raised after the report."""
        with suppress(Exception):
            return self.why_stop()
        return None

    def tell(self, report: StepReport) -> None:
        self._send(StepDone(report=report, asks=self._asking, seconds=self.seconds()))

    def hand_over(
        self, report: StepReport, directory: Path, *, moved: bool, finish_reason: AnyReason | None = None
    ) -> None:
        """Send `directory` to be committed. If it is `moved`, the supervisor now owns it; else wait for the commit."""
        self._wait_for_upload()
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
        self._direct(over=None if over is None else over.outcome)
        if over is not None:
            self._wait_for_upload()
            raise self._leaving(over)

    def _why_over(self, *, saved: bool) -> TrialOver | None:
        if (reason := self.why_stop()) is not None:
            return TrialOver(Finished(trial=self.start.trial, reason=reason, kind=FinishKind.CRITERION))
        if self._leave is not None:
            return TrialOver(self._leave.outcome)
        is_interrupted = saved and self.asked_to_stop
        return TrialOver(self._interrupted(make_reason("saved-as-requested"))) if is_interrupted else None

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


class FollowingSession(TrialSession):
    """The session of another rank: it adds its part to checkpoints, and follows the directives of rank 0."""

    def count(self, metrics: Mapping[str, object], *, may_lack: bool = False) -> StepReport:
        """Make the report of the next step, and send its metrics if rank 0 waits for their mean."""
        report = super().count(metrics, may_lack=may_lack)
        self._send_metrics(report)
        return report

    def _send_metrics(self, report: StepReport, *, returned: bool = False) -> None:
        if self.start.metrics_from == "mean":
            self._send(RankMetrics(step=report.step, metrics=report.metrics, returned=returned))

    def lead(self, world_size: int) -> None:
        """Refuse it: this is another rank than 0."""
        found = self.start.rank.rank
        raise InvalidInput(f"expected one process, or rank 0, to start {world_size} ranks, found rank {found}")

    def is_asked_to_stop(self) -> bool:
        return self.asked_to_stop

    def report(self, metrics: Mapping[str, object], checkpoint: Checkpoint | None) -> None:
        with self._reporting("pt.report"):
            directory = None if checkpoint is None else local_directory(checkpoint)
            if directory is not None and directory.parent != Path(os.path.realpath(self.start.staging)):
                with self._saving():
                    directory = snapshot(directory, self.new_directory())
            self.count(metrics)
            self._add(directory)
            self._follow(None)

    def report_step(
        self, metrics: Mapping[str, object], save: Callable[[str], None], *, may_lack: bool = False
    ) -> None:
        with self._reporting("pt.report_step"):
            self.count(metrics, may_lack=may_lack)
            self._follow(save)

    def save_last_step(self, save: Callable[[str], None]) -> None:
        self._require_own_process("save_last_step")
        with self._reports:
            if self._over is None:
                self._follow(save)

    def finish(self, returned: Mapping[str, object] | None) -> TrialEnded:
        """Return how the attempt ended. What the function returned is not reported, but a part of the mean."""
        with self._reports:
            if self.start.metrics_from == "mean" and self._over is None and returned is not None:
                self._send_metrics(super().count(returned), returned=True)
        return super().finish(None)

    def why_stop(self) -> AnyReason | None:
        """Return None: rank 0 decides."""
        return None

    def ask_first(self) -> None:
        """Wait for the decision on the restored checkpoint's step, if it is a milestone."""
        if self._curve and self._milestone is not None and self.step >= self._milestone:
            self._follow(None)

    def _add(self, directory: Path | None) -> None:
        path = None if directory is None else str(directory)
        self._send(Part(step=self.step, directory=path))

    def _follow(self, save: Callable[[str], None] | None) -> None:
        """Do what rank 0 directs at this step.

        Raises:
            TrialOver: the trial ends.
            InvalidInput: rank 0 has reported more steps.
        """
        began = time.monotonic()
        while True:
            match self.connection.receive():
                case Directive() as directive:
                    if directive.step != self.step:
                        raise InvalidInput(
                            f"rank {self.start.rank.rank}: expected a report of step {directive.step}, as rank 0 made "
                            f"it, found one of step {self.step}. Every rank calls pt.report once in each step, with or "
                            "without a checkpoint"
                        )
                    if directive.over is not None:
                        raise self._leaving(TrialOver(directive.over))
                    if not directive.saves:
                        break
                    if save is not None:
                        self._add(self._written_by(save))
                case _:
                    pass
        self.asked_to_stop = directive.stop
        self._resumed_at += time.monotonic() - began  # waiting is not training
