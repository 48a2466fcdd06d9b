"""Supervise one attempt: receive the trial's messages, queue its checkpoints for commit, return the outcome."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import assert_never

from prefect_tune.attempt.commit_worker import USERS_FAULT, CommitWorker
from prefect_tune.attempt.outcomes import Asking, Done, Failed, Outcome, Yielded
from prefect_tune.attempt.processes.process_channel import TrialChannel
from prefect_tune.attempt.search_link import Answer, SearchLink
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.core.journal_events import Cause
from prefect_tune.core.messages.process_messages import (
    Broke,
    CheckpointSaved,
    EndOfAttempt,
    FromTrial,
    Leave,
    MilestoneReached,
    StepDone,
    StopAndSave,
    TrainableLoaded,
    TrialEnded,
)
from prefect_tune.runtime.message_stream import MalformedMessage
from prefect_tune.storage_retries import is_abandoned

_TICK = timedelta(seconds=0.1)
_KILLS_PERIOD = timedelta(seconds=1)
# The trainable or its libraries cause these signals; SIGKILL comes from outside the process.
_OWN_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")


def supervise(channel: TrialChannel, commit_worker: CommitWorker, spec: TrialSpec, link: SearchLink) -> Outcome:
    """Serve the trial until it ends, crashes or stays silent too long, or its grace after `link.stop` expires.

    After `link.stop` it also ends, and with it the trial, as soon as the work of this context is abandoned.
    """
    return _Supervisor(channel, commit_worker, spec, link).run()


class _Supervisor:
    def __init__(self, channel: TrialChannel, commit_worker: CommitWorker, spec: TrialSpec, link: SearchLink) -> None:
        self._channel = channel
        self._commit_worker = commit_worker
        self._spec = spec
        self._link = link
        self._steps = 0
        self._handed_over = 0  # counted by this thread
        self._committed = 0  # counted by the commit worker's thread
        self._last_message_at: float | None = None  # None until the trainable is loaded: loading may take any time
        self._asks = False
        self._left: EndOfAttempt | None = None
        link.connect(self._answer)
        self._asked_at: float | None = None
        self._kills_seen = (time.monotonic(), _out_of_memory_kills())

    def run(self) -> Outcome:
        while True:
            try:
                message = self._channel.receive(_TICK)
            except EOFError:
                return self._died()
            except MalformedMessage as error:
                return self._failed(Cause.USER, str(error))
            outcome = self._took_in(message) if message else self._waited_enough()
            self._look_for_kills()
            if outcome is not None:
                return outcome

    def _look_for_kills(self) -> None:
        """Sample the kernel's OOM kill counter once a second.

        The counter is machine-wide: a kill counts as the trial's only if it follows the last sample before its death.
        """
        now = time.monotonic()
        if now - self._kills_seen[0] >= _KILLS_PERIOD.total_seconds():
            self._kills_seen = (now, _out_of_memory_kills())

    def _took_in(self, message: FromTrial) -> Outcome | None:
        if self._last_message_at is not None:
            self._last_message_at = time.monotonic()
        match message:
            case TrainableLoaded(code=code):
                self._last_message_at = time.monotonic()
                self._commit_worker.code = code
            case MilestoneReached(report=report):
                self._asks = True
                self._link.reported(report, asks=True)
            case StepDone(is_reported=True):
                self._save(message)
            case StepDone():
                self._steps += 1
                self._take_down(message)
            case TrialEnded():
                return self._ended(message)
            case Broke(cause=cause, message=why, traceback=trace):
                return self._failed(cause, f"{why}\n{trace}".rstrip())
            case _:
                assert_never(message)
        return self._waited_enough()

    def _ended(self, ended: TrialEnded) -> Outcome:
        if ended.question is not None:
            return Asking(ended.question)
        if ended.interrupted:
            return self._failed(Cause.PREEMPTED, ended.reason)
        if ended.paused and self._left == "errored":
            return self._failed(Cause.BAD_METRIC, ended.reason)
        if ended.paused:
            return Yielded(ended.reason)
        return Done(ended.reason, ended.returned, ended.ended_early, self._left if ended.ended_early else None)

    def _take_down(self, done: StepDone) -> None:
        is_read = done.asks and self._link.reads_journal
        if is_read:
            self._commit_worker.asks_at = done.report.step
        self._commit_worker.note(done.report)
        if done.checkpoint is not None:
            self._save(done)
        if is_read:
            self._commit_worker.flush()
        self._asks = done.asks
        self._link.reported(done.report, asks=done.asks)

    def _save(self, done: StepDone) -> None:
        self._handed_over += 1
        self._commit_worker.save(done, self._saved)

    def _answer(self, answer: Answer) -> None:
        if self._asks and self._last_message_at is not None:  # it waited for this; an unasked message is no progress
            self._last_message_at = time.monotonic()
        self._asks = False
        if isinstance(answer, Leave):
            self._left = answer.end
        self._channel.tell(answer)

    def _saved(self, step: int) -> None:
        self._channel.tell(CheckpointSaved(step=step))
        self._last_message_at = time.monotonic()
        self._committed += 1

    def _waited_enough(self) -> Outcome | None:
        """Return the outcome if a commit failed, the grace period expired or the trial is hung; None otherwise."""
        if self._commit_worker.error is not None:
            return self._not_written(self._commit_worker.error)
        if self._link.stop.is_set():
            return self._ask_to_stop()
        if self._committed < self._handed_over or self._asks:
            return None  # it may wait for an upload, which has its own timeout, or for an answer
        if self._spec.silence is None or self._last_message_at is None:
            return None
        silent = timedelta(seconds=time.monotonic() - self._last_message_at)
        if silent <= self._spec.silence:
            return None
        return self._failed(Cause.MACHINE, f"no report for {silent}: presumed hung, and killed")

    def _not_written(self, error: BaseException) -> Failed:
        if isinstance(error, USERS_FAULT):
            return self._failed(Cause.USER, f"its checkpoint cannot be saved: {error}")
        return self._failed(Cause.MACHINE, f"its reports could not be written: {type(error).__name__}: {error}")

    def _ask_to_stop(self) -> Outcome | None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._channel.tell(StopAndSave())
        waited = timedelta(seconds=time.monotonic() - self._asked_at)
        if waited <= self._spec.grace:
            return self._failed(Cause.PREEMPTED, "interrupted twice, and killed") if is_abandoned() else None
        uploading = self._committed < self._handed_over
        late = "its checkpoint was still being uploaded after" if uploading else "it reported no checkpoint within"
        return self._failed(Cause.PREEMPTED, f"asked to stop; {late} {self._spec.grace.total_seconds():g} s")

    def _died(self) -> Outcome:
        became = self._channel.end()
        how = became.partition("\n")[0]  # its last output follows, which may contain any text
        if "SIGKILL" in how and _out_of_memory_kills() > self._kills_seen[1]:
            return self._failed(Cause.OUT_OF_MEMORY, f"the kernel killed it for using too much memory: {became}")
        own = "exited with code" in how or any(name in how for name in _OWN_SIGNALS)
        return self._failed(Cause.USER if own else Cause.MACHINE, f"the trial's process {became}")

    def _failed(self, cause: Cause, message: str) -> Failed:
        loaded = self._last_message_at is not None  # a checkpoint cannot cause a failure before loading
        return Failed(cause, message, at_start=cause is Cause.USER and loaded and self._steps == 0)


def _out_of_memory_kills() -> int:
    """Return how many processes this machine's kernel has killed for memory; 0 if it does not publish the count."""
    try:
        counters = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), 0)
