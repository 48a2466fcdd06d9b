"""The trial's side of an attempt: count steps, send reports and checkpoints, and wait for decisions.

If several processes train a trial together, rank 0 decides, and the other ranks follow:

    rank 0           report of step s ──► decides: save? end? ──► RankCommand ──┐
    supervisor                                                                  ├─► sends it to all other ranks
    rank 1, 2, ...   report of step s ──► its CheckpointPart ──► waits for ◄────┘

So all ranks save, continue and end at the same step, independently of their clocks. Rank 0 waits for the other ranks
only to compute mean metrics and to commit a checkpoint. Each rank must add its part to the checkpoint before a deadline
(`attempt/supervisor.py`). No other rank decides whether to save or end, and no checkpoint lacks a rank's part.
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
from prefect_tune.core.experiment.stoppers import Stopper, trial_stop_reason
from prefect_tune.core.journal_events import AttemptEnded, Cause, FinishKind, Outcome, TrialFinished
from prefect_tune.core.messages.process_messages import (
    CheckpointAndStop,
    CheckpointPart,
    CheckpointSaved,
    ContinueTraining,
    FromTrial,
    MeanMetrics,
    MilestoneReached,
    RankCommand,
    RankInfo,
    RankJoined,
    RankMetrics,
    SaveFailed,
    Start,
    StepDone,
    StopTrial,
    TrainableLoaded,
    TrainingEnded,
)
from prefect_tune.core.metrics import to_plain_metrics
from prefect_tune.core.reasons import AnyReason, make_reason
from prefect_tune.core.search.objective import require_metrics
from prefect_tune.core.usage_records import PhaseSeconds
from prefect_tune.core.values import StepReport
from prefect_tune.linux import copy_range
from prefect_tune.runtime.load_named import describe_working_directory
from prefect_tune.runtime.message_stream import SupervisorConnection
from prefect_tune.runtime.ranks import RANK_0_ENV
from prefect_tune.runtime.trainable import StopTraining, Trainable, TrialInfo

if TYPE_CHECKING:
    from prefect_tune.runtime.checkpoint import Checkpoint


# Validate the directory that a trial reports as a checkpoint, and copy it for an asynchronous upload.


def resolve_local_directory(checkpoint: object) -> Path:
    """Return the absolute path of a checkpoint's directory, with links resolved, so that a later `chdir` is harmless.

    Raises:
        InvalidInput: `checkpoint` is not a directory on this machine.
    """
    path = getattr(checkpoint, "path", None)  # None if the caller passed a path instead of a checkpoint
    location = getattr(checkpoint, "_location", None)  # since `pt.Checkpoint.filesystem` would import pyarrow
    filesystem = getattr(checkpoint, "filesystem", None) if location is None else None
    kind = getattr(filesystem, "type_name", "local") if location is None else location.kind
    if path is None or kind != "local" or not Path(str(path)).is_dir():
        is_relative = path is not None and not Path(str(path)).is_absolute()
        below = f" in the working directory {describe_working_directory()}" if is_relative else ""
        raise InvalidInput(
            f"pt.report(checkpoint={checkpoint!r}): expected a local directory{below}, as in "
            "pt.Checkpoint.from_directory(path); do not report a checkpoint that is already on a target"
        )
    return Path(os.path.realpath(str(path)))


def require_files_written(returned: object, directory: Path, step: int) -> None:
    """Raise if `save_checkpoint` returned the state instead of writing it, because only written files are saved here.

    An empty directory only causes a warning, since the trainable may have no state.

    Raises:
        InvalidInput: `save_checkpoint` returned a mapping, or wrote nothing and returned neither None nor `directory`.
    """
    is_empty = not any(directory.iterdir())
    if isinstance(returned, Mapping) or (is_empty and returned is not None and str(returned) != str(directory)):
        kind = f"a {type(returned).__name__}"
        raise InvalidInput(f"step {step}: save_checkpoint returned {kind}; write files into checkpoint_dir instead")
    if is_empty:
        # The text is the same at each step, so Python shows it only once.
        warnings.warn("save_checkpoint wrote nothing into checkpoint_dir: a resume has no trained state", stacklevel=2)


def require_no_returned_path(returned: object, directory: Path, step: int) -> None:
    """Raise if `save_checkpoint` returned a path for `load_checkpoint`. Ray 1 accepted such a path; Ray 2 refuses it.

    Raises:
        InvalidInput: `returned` is a path other than `directory`; `load_checkpoint` receives `directory`.
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


def copy_directory(source: Path, destination: Path) -> Path:
    """Copy a directory to `destination` and return `destination`; the source may change afterwards.

    Raises:
        InvalidInput: an entry is neither a file nor a directory, or a link does not point to a file.
        StagedFilesChanged: a file was truncated or deleted during the copy.
        OSError: for example, the disk is full. (`shutil.copytree` would raise an error without `errno`.)
    """
    destination.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.is_symlink() and not path.is_file():  # a link to a parent directory would make the copy endless
            raise InvalidInput(f"{path}: a link to a directory, or to nothing, cannot be saved; copy what it points to")
        try:
            if path.is_dir():
                copy_directory(path, destination / path.name)
            else:
                _copy_file(path, destination / path.name)
        except FileNotFoundError as error:
            raise StagedFilesChanged(f"{path}: was deleted while it was being saved") from error
    return destination


def _copy_file(source: Path, destination: Path) -> None:
    """Copy a file. On XFS and Btrfs, the copy shares its bytes with the source and takes milliseconds."""
    if not stat.S_ISREG(source.stat().st_mode):  # opening a named pipe would block until it has a writer
        raise InvalidInput(f"{source}: neither a file nor a directory, so it cannot be saved")
    with source.open("rb") as reader, destination.open("wb") as writer:
        size = os.fstat(reader.fileno()).st_size
        copied = 0
        while copied < size and (count := copy_range(reader.fileno(), writer.fileno(), size - copied, copied)):
            copied += count
    if copied != size:
        raise StagedFilesChanged(f"{source}: expected {size} bytes, found {copied}: it was truncated during the copy")
    shutil.copymode(source, destination)


_RETURN_TIMEOUT = timedelta(seconds=20)
"""How long the trainable may take to return after `StopTraining` was raised in a thread other than its own."""


class TrialSession:
    """The state of one attempt in the process of rank 0: its connection to the supervisor, and its reports.

    The session decides when to save and end, and sends commands to the other ranks, if there are any.
    It belongs to the process and the thread that created it. Other threads of the process may report too, but each call
    completes before the next call begins. A forked child may only read from the session.
    """

    def __init__(self, connection: SupervisorConnection, start: Start, stopper: Stopper) -> None:
        self.connection = connection
        self._pid, self._thread_id = os.getpid(), threading.get_ident()
        self._report_lock = threading.RLock()  # reentrant, because a `save` can call the session again
        self._send_lock = threading.Lock()
        self._is_end_sent = False
        self._return_timer: threading.Timer | None = None
        self.start = start
        self._stopper = stopper
        self._reports: list[StepReport] = list(start.reports)
        self._trained_seconds = start.trained_seconds
        self._resumed_at = time.monotonic()
        self._loaded_at: float | None = None
        self._training_started_at: float | None = None
        self._saving_seconds = self._waiting_seconds = 0.0
        self._saved_step, self._saved_at = start.from_step, self._resumed_at
        self._uploading_step: int | None = None
        self._wants_save = False
        self._stop_error: StopTraining | None = None
        self._stop_reason: AnyReason | None = None
        self._stop_reason_step: int | None = None
        self._milestone = start.milestone
        self._awaits_decision = False
        self._stop_decision: StopTrial | None = None
        self._mean_metrics: MeanMetrics | None = None
        self._is_stop_sent_to_ranks = False
        self.step = start.from_step
        self.is_stop_requested = False

    def make_trial_info(self) -> TrialInfo:
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
    def _leads_other_ranks(self) -> bool:
        return self.start.rank.rank == 0 and self.start.rank.world_size > 1

    def become_rank_0(self, world_size: int) -> None:
        """Become rank 0 of `world_size` ranks, because a launcher in this process is starting the other ranks.

        Raises:
            InvalidInput: a step was already reported, and the other ranks would lack that step.
        """
        with self._reporting("a launcher of ranks"):
            if self._leads_other_ranks:
                return
            if self.step != self.start.from_step:
                raise InvalidInput("expected a launch of the ranks before the first pt.report, found a reported step")
            rank = RankInfo(rank=0, world_size=world_size)
            self._send_message(RankJoined(rank=rank, pid=os.getpid()))
            self.start = self.start.model_copy(update={"rank": rank})
            os.environ[RANK_0_ENV] = "1"

    def _send_rank_command(self, *, saves: bool = False, outcome: Outcome | None = None) -> None:
        """Send the command for this step to the other ranks, if there are any."""
        if self._leads_other_ranks:
            if not saves:
                self._is_stop_sent_to_ranks = self.is_stop_requested
            stop = self._is_stop_sent_to_ranks
            self._send_message(RankCommand(step=self.step, save=saves, stop=stop, outcome=outcome))

    def poll_stop_request(self) -> bool:
        self._require_own_process("pt.get_trial().should_checkpoint")
        if self._leads_other_ranks:  # return the value that all ranks received last, so that they save at the same step
            return self._is_stop_sent_to_ranks
        if self._report_lock.acquire(blocking=False):  # otherwise another thread is reporting, and reads the messages
            try:
                self.handle_pending_messages()
            finally:
                self._report_lock.release()
        return self.is_stop_requested

    def get_restored_directory(self) -> Path | None:
        return Path(self.start.restored_directory) if self.start.restored_directory else None

    def report(self, metrics: Mapping[str, object], checkpoint: Checkpoint | None) -> None:
        """Report a step of the function API with its checkpoint; raise `StopTraining` if the trial must end."""
        with self._reporting("pt.report"):
            directory = resolve_local_directory(checkpoint) if checkpoint is not None else None
            report = self.record_report(metrics)
            if directory is None:
                self.send_step(report)
            elif directory.parent == Path(os.path.realpath(self.start.staging)):
                self.send_checkpoint(report, directory, is_owned_by_supervisor=True)
            elif self.start.async_commit or self.start.rank.world_size > 1:
                self._wait_for_upload()
                with self._timing_save():
                    copied = copy_directory(directory, self.make_checkpoint_directory())
                self.send_checkpoint(report, copied, is_owned_by_supervisor=True)
            else:
                self.send_checkpoint(report, directory, is_owned_by_supervisor=False)
            self.wait_for_decision()
            self.handle_pending_messages()
            self._end_if_due(saved=directory is not None)

    def report_step(
        self, metrics: Mapping[str, object], save: Callable[[str], None], *, allow_missing: bool = False
    ) -> None:
        """Report a step of the class API, and save the state if a save is due; raise `StopTraining` like `report`."""
        with self._reporting("pt.report_step"):
            report = self.record_report(metrics, allow_missing=allow_missing)
            if saves := self._decide_save():
                self._saved_step, self._saved_at = self.step, time.monotonic()
                try:
                    directory = self._write_checkpoint(save)
                except BaseException:  # report the step, so that the loaded checkpoint is not blamed for the failure
                    self._awaits_decision = False
                    self.send_step(report)
                    raise
                reason = None if self._awaits_decision else self._find_finish_reason()
                self.send_checkpoint(report, directory, is_owned_by_supervisor=True, reason=reason)
            else:
                self.send_step(report)
            self.wait_for_decision()
            self.handle_pending_messages()  # a request to save and end that comes later is handled at the next step
            must_save = self.is_stop_requested or (self._stop_decision is not None and self._stop_decision.save)
            if must_save and not saves:
                self.send_late_checkpoint(report, self._write_checkpoint(save))
            self._end_if_due(saved=saves or must_save)

    def save_last_step(self, save: Callable[[str], None]) -> None:
        """Save the state after the last step, unless it is already saved or the trial has ended."""
        self._require_own_process("save_last_step")
        with self._report_lock:
            if self._stop_error is None and self.step > self._saved_step:
                self._saved_step, self._saved_at = self.step, time.monotonic()
                self.send_late_checkpoint(self._reports[-1], self._write_checkpoint(save))
            if self._stop_error is None:
                self._send_rank_command()

    def finish(self, returned: Mapping[str, object] | None) -> TrainingEnded:
        """Report the metrics that the function returned, if any, as the last step; return the rank's last message."""
        self._require_own_process("the end of the trainable")
        with self._report_lock:
            if self._stop_error is None:
                if returned is not None:
                    self.send_step(self.record_report(returned))
                self._wait_for_upload()
                reason, kind = make_reason("returned"), FinishKind.RETURNED
                self._stop_error = StopTraining(TrialFinished(trial=self.start.trial, reason=reason, kind=kind))
            # If `_stop_error` was set before, another thread has raised it, or a broad `except` has caught it.
            return TrainingEnded(outcome=self._stop_error.outcome)

    @contextmanager
    def _reporting(self, caller: str) -> Iterator[None]:
        """Serialize the calls of all threads: each call completes before the next call begins.

        If the trial has ended, raise `StopTraining` again, since a framework may report once more before its loop ends.
        """
        self._require_own_process(caller)
        with self._report_lock:
            if self._stop_error is not None:
                raise self._record_stop(self._stop_error.outcome)
            yield

    @property
    def belongs_to_this_process(self) -> bool:
        """Whether this process is the session's own process, not a forked child of that process."""
        return os.getpid() == self._pid

    def _require_own_process(self, caller: str) -> None:
        if (pid := os.getpid()) != self._pid:
            raise InvalidInput(
                f"{caller}: expected process {self._pid}, which trains trial {self.start.trial!r}, found "
                f"process {pid}, a forked child of it. One process trains a trial: return results to that process "
                "(through a queue, a pipe or a pool) and report them there"
            )

    stop_exception_type: type[StopTraining] = StopTraining
    """The exception that ends the trainable in this process."""

    def _record_stop(self, outcome: Outcome) -> StopTraining:
        """Record the end of the trial, and return the exception to raise.

        In a thread other than the trainable's own, also limit the time in which the trainable must return.
        """
        self._stop_error = stop = self.stop_exception_type(outcome)
        if threading.get_ident() != self._thread_id and self._return_timer is None:
            seconds, end = _RETURN_TIMEOUT.total_seconds(), TrainingEnded(outcome=outcome)
            self._return_timer = threading.Timer(seconds, self.send_end, [end])
            self._return_timer.daemon = True
            self._return_timer.start()
        return stop

    def _decide_save(self) -> bool:
        cadence = self.start.cadence
        steps, elapsed = self.step - self._saved_step, timedelta(seconds=time.monotonic() - self._saved_at)
        self.handle_pending_messages()
        is_due = self._wants_save or self.is_stop_requested or (self._awaits_decision and self.start.saves_first)
        is_due = is_due or cadence.is_save_due(steps, elapsed)
        return is_due or (cadence.at_end and self._find_finish_reason() is not None)

    def _write_checkpoint(self, save: Callable[[str], None]) -> Path:
        self._send_rank_command(saves=True)
        with self._timing_save():
            directory = self.make_checkpoint_directory()
            returned = cast("Callable[[str], object]", save)(str(directory))  # a user's method may return anything
        require_files_written(returned, directory, self.step)
        if isinstance(getattr(save, "__self__", None), Trainable):
            require_no_returned_path(returned, directory, self.step)
        return directory

    def record_report(self, metrics: Mapping[str, object], *, allow_missing: bool = False) -> StepReport:
        """Record the next step's report. With `metrics_from="mean"`, the report has the mean metrics of all ranks."""
        step = self.step + 1
        where = f"metrics of step {step}"
        stored = to_plain_metrics(metrics, where)
        if self._leads_other_ranks and self.start.metrics_from == "mean":
            self._send_message(RankMetrics(step=step, metrics=stored))
            while self._mean_metrics is None or self._mean_metrics.step != step:
                self._handle_next_message()
            stored = to_plain_metrics(self._mean_metrics.metrics, where)
        if self.start.rank.rank == 0 and not allow_missing:
            require_metrics(stored, self.start.required_metrics, where)
        self.step = step
        self._wants_save = stored.pop("should_checkpoint", False) is True
        trained_seconds = self._trained_seconds + time.monotonic() - self._resumed_at
        report = StepReport(step=step, metrics=stored, trained_seconds=trained_seconds)
        if not self._stopper.needs_history:
            self._reports.clear()  # else a trial of a million steps would keep 0.5 GB of reports
        self._reports.append(report)
        self._awaits_decision = self._milestone is not None and step >= self._milestone
        return report

    def find_stop_reason(self) -> AnyReason | None:
        """Return why the trial ends after its newest step, which an earlier attempt may have trained; None to continue.

        The stopper is called only once for each step, because its first result may already be in the journal.
        """
        if self._stop_reason_step != self.step:
            self._stop_reason = (trial_stop_reason(self._stopper, self._reports) or None) if self._reports else None
            self._stop_reason_step = self.step  # not reached if the stopper raises, so the next call raises again
        return self._stop_reason

    def _find_finish_reason(self) -> AnyReason | None:
        """Return why this step finishes the trial, or None. A stopper's error is ignored until the step is sent."""
        with suppress(Exception):
            return self.find_stop_reason()
        return None

    def send_step(self, report: StepReport) -> None:
        awaits, seconds = self._awaits_decision, self.get_phase_seconds()
        self._send_message(StepDone(report=report, awaits_decision=awaits, seconds=seconds))

    def send_checkpoint(
        self, report: StepReport, directory: Path, *, is_owned_by_supervisor: bool, reason: AnyReason | None = None
    ) -> None:
        """Send a step and its checkpoint. Wait for the commit if it is synchronous, or if the user owns `directory`."""
        self._wait_for_upload()
        done = StepDone(
            report=report,
            checkpoint=str(directory),
            is_owned_by_supervisor=is_owned_by_supervisor,
            awaits_decision=self._awaits_decision,
            finish_reason=reason,
            seconds=self.get_phase_seconds(),
        )
        self._send_message(done)
        self._uploading_step = report.step
        if not (is_owned_by_supervisor and self.start.async_commit):
            self._wait_for_upload()

    def send_late_checkpoint(self, report: StepReport, directory: Path) -> None:
        """Send the checkpoint of a step that was already reported, and wait for its commit."""
        self._wait_for_upload()
        path, seconds = str(directory), self.get_phase_seconds()
        done = StepDone(report=report, checkpoint=path, is_owned_by_supervisor=True, is_reported=True, seconds=seconds)
        self._send_message(done)
        self._uploading_step = report.step
        self._wait_for_upload()

    def wait_for_pending_decision(self) -> None:
        """If the restored checkpoint is at a milestone, wait for the decision before the first step.

        In that case, an earlier attempt crashed after it saved this checkpoint, and before the milestone was journaled.
        Raise `StopTraining` if the trial ends.
        """
        if self._reports and self._milestone is not None and self.step >= self._milestone:
            self._awaits_decision = True
            self._send_message(MilestoneReached(report=self._reports[-1]))
            self.wait_for_decision()
            self.handle_pending_messages()
            self._end_if_due(saved=True)

    def wait_for_decision(self) -> None:
        """If the last step is a milestone, wait for its decision, or for a request to stop."""
        started_at = time.monotonic()
        while self._awaits_decision and not self.is_stop_requested:
            self._handle_next_message()
        self._awaits_decision = False
        waited = time.monotonic() - started_at
        self._waiting_seconds += waited
        self._resumed_at += waited  # exclude the wait from the training time

    def make_checkpoint_directory(self) -> Path:
        directory = Path(self.start.staging) / f"{self.step:010d}-{self.start.rank.rank}-{time.monotonic_ns()}"
        directory.mkdir(parents=True)
        return directory

    def _end_if_due(self, *, saved: bool) -> None:
        """Raise `StopTraining` if a criterion, a decision, or (if `saved`) a requested stop ends the trial."""
        outcome: Outcome | None = None
        if (reason := self.find_stop_reason()) is not None:
            outcome = TrialFinished(trial=self.start.trial, reason=reason, kind=FinishKind.CRITERION)
        elif self._stop_decision is not None:
            outcome = self._stop_decision.outcome
        elif saved and self.is_stop_requested:
            outcome = self._make_preemption(make_reason("saved-as-requested"))
        self._send_rank_command(outcome=outcome)
        if outcome is not None:
            self._wait_for_upload()
            raise self._record_stop(outcome)

    def _make_preemption(self, reason: AnyReason) -> AttemptEnded:
        return AttemptEnded(trial=self.start.trial, cause=Cause.PREEMPTED, reason=reason)

    def send_trainable_loaded(self, source_digest: str) -> None:
        self._loaded_at = time.monotonic()
        self._waiting_seconds = 0.0  # a wait before this point is part of the startup
        self._send_message(TrainableLoaded(pid=self._pid, source_digest=source_digest))

    def send_end(self, message: TrainingEnded) -> None:
        """Send the end of the attempt. After this, neither another end nor any other message is sent."""
        with self._send_lock:
            if not self._is_end_sent:
                self._is_end_sent = True
                after_end, seconds = message.raised and self._stop_error is not None, self.get_phase_seconds()
                self.connection.send(message.model_copy(update={"seconds": seconds, "raised_after_end": after_end}))
        if self._return_timer is not None:
            self._return_timer.cancel()

    def _send_message(self, message: FromTrial) -> None:
        with self._send_lock:
            if self._is_end_sent:
                raise self._stop_error or StopTraining(self._make_preemption(make_reason("attempt-over")))
            self.connection.send(message)

    def start_training_clock(self) -> None:
        """Start to measure the training time, after the trainable was set up and the checkpoint was loaded."""
        self._resumed_at = self._saved_at = self._training_started_at = time.monotonic()

    def handle_pending_messages(self) -> None:
        while self.connection.is_readable():
            self._handle_next_message()

    def _wait_for_upload(self) -> None:
        started_at = time.monotonic()
        with self._timing_save():
            while self._uploading_step is not None:
                self._handle_next_message()
        self._resumed_at += time.monotonic() - started_at  # exclude the wait from the training time

    @contextmanager
    def _timing_save(self) -> Iterator[None]:
        """Add the duration of the `with` block to the time in which training is stopped for checkpoints."""
        started_at = time.monotonic()
        try:
            yield
        finally:
            self._saving_seconds += time.monotonic() - started_at

    def get_phase_seconds(self) -> PhaseSeconds | None:
        """Return the seconds of each phase since the trainable was loaded; None before that."""
        if self._loaded_at is None:
            return None
        now = time.monotonic()
        training_started_at = now if self._training_started_at is None else self._training_started_at
        idle = self._saving_seconds + self._waiting_seconds
        return PhaseSeconds(
            restoring=round(training_started_at - self._loaded_at, 4),
            training=round(max(0.0, now - training_started_at - idle), 4),
            saving=round(self._saving_seconds, 4),
            waiting=round(self._waiting_seconds, 4),
        )

    def _handle_next_message(self) -> None:
        match self.connection.receive():
            case CheckpointSaved(step=step) if step == self._uploading_step:
                self._uploading_step = None
            case SaveFailed(step=step):
                self._uploading_step = None if step == self._uploading_step else self._uploading_step
                self._saved_step = min(self._saved_step, step - 1)  # so that the next step, or the end, saves again
            case CheckpointAndStop():
                self.is_stop_requested = True
            case ContinueTraining(milestone=milestone):
                self._milestone, self._awaits_decision = milestone, False
            case StopTrial() as decision:
                self._stop_decision, self._awaits_decision = decision, False
            case MeanMetrics() as mean:
                self._mean_metrics = mean
            case _:
                pass


class WorkerRankSession(TrialSession):
    """The session of a rank other than 0. It adds its part to checkpoints, and executes the commands of rank 0."""

    def record_report(self, metrics: Mapping[str, object], *, allow_missing: bool = False) -> StepReport:
        """Record the report of the next step, and send its metrics if rank 0 waits for the mean of all ranks."""
        report = super().record_report(metrics, allow_missing=allow_missing)
        self._send_metrics(report)
        return report

    def _send_metrics(self, report: StepReport, *, returned: bool = False) -> None:
        if self.start.metrics_from == "mean":
            self._send_message(RankMetrics(step=report.step, metrics=report.metrics, returned=returned))

    def become_rank_0(self, world_size: int) -> None:
        rank = self.start.rank.rank
        raise InvalidInput(f"expected one process, or rank 0, to start {world_size} ranks, found rank {rank}")

    def poll_stop_request(self) -> bool:
        return self.is_stop_requested

    def report(self, metrics: Mapping[str, object], checkpoint: Checkpoint | None) -> None:
        with self._reporting("pt.report"):
            directory = None if checkpoint is None else resolve_local_directory(checkpoint)
            if directory is not None and directory.parent != Path(os.path.realpath(self.start.staging)):
                with self._timing_save():
                    directory = copy_directory(directory, self.make_checkpoint_directory())
            self.record_report(metrics)
            self._send_part(directory)
            self._execute_rank_0_commands(None)

    def report_step(
        self, metrics: Mapping[str, object], save: Callable[[str], None], *, allow_missing: bool = False
    ) -> None:
        with self._reporting("pt.report_step"):
            self.record_report(metrics, allow_missing=allow_missing)
            self._execute_rank_0_commands(save)

    def save_last_step(self, save: Callable[[str], None]) -> None:
        self._require_own_process("save_last_step")
        with self._report_lock:
            if self._stop_error is None:
                self._execute_rank_0_commands(save)

    def finish(self, returned: Mapping[str, object] | None) -> TrainingEnded:
        """Return the last message. Metrics that the function returned are used only for the mean of all ranks."""
        with self._report_lock:
            if self.start.metrics_from == "mean" and self._stop_error is None and returned is not None:
                self._send_metrics(super().record_report(returned), returned=True)
        return super().finish(None)

    def find_stop_reason(self) -> AnyReason | None:
        """Return None, because only rank 0 decides whether the trial ends."""
        return None

    def wait_for_pending_decision(self) -> None:
        """If the step of the restored checkpoint is a milestone, wait for the decision."""
        if self._reports and self._milestone is not None and self.step >= self._milestone:
            self._execute_rank_0_commands(None)

    def _send_part(self, directory: Path | None) -> None:
        path = None if directory is None else str(directory)
        self._send_message(CheckpointPart(step=self.step, directory=path))

    def _execute_rank_0_commands(self, save: Callable[[str], None] | None) -> None:
        """Wait for rank 0's commands for this step, and execute them.

        Raises:
            StopTraining: the trial ends.
            InvalidInput: rank 0's command is for another step.
        """
        started_at = time.monotonic()
        while True:
            match self.connection.receive():
                case RankCommand() as command:
                    if command.step != self.step:
                        raise InvalidInput(
                            f"rank {self.start.rank.rank}: expected a report of step {command.step}, like rank 0, "
                            f"found a report of step {self.step}. Every rank must call pt.report once in each step, "
                            "with or without a checkpoint"
                        )
                    if command.outcome is not None:
                        raise self._record_stop(command.outcome)
                    if not command.save:
                        break
                    if save is not None:
                        self._send_part(self._write_checkpoint(save))
                case _:
                    pass
        self.is_stop_requested = command.stop
        self._resumed_at += time.monotonic() - started_at  # exclude the wait from the training time
