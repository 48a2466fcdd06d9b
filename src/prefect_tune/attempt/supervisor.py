"""Supervise one attempt: receive the messages of its ranks, queue its checkpoints for commit, return the outcome.

A single process is rank 0. Of several ranks, rank 0 reports, and tells the others when to add parts to its checkpoints:

    rank 0: StepDone(s, its directory) ─┐
    rank 1: CheckpointPart, with files  ├──► complete ──► commit worker: one directory, one commit
    rank 2: CheckpointPart, no files   ─┘    a part is late ──► the save fails; its rank has ended ──► the attempt ends
    rank 0: RankCommand(s) ──► all other ranks: save now, or go on (this closes step s for new checkpoints)

Nothing is uploaded before the checkpoint has the parts of all ranks, so a failed save leaves nothing on the target.
If a step's metrics are the mean over all ranks, the metrics of each rank are first collected in the same way.

If the trial's own process starts ranks with a launcher, such as `torchrun`, this process is called the parent process.
It is either rank 0, or not a rank. If it is not a rank, it sends its messages as the pseudo-rank `PARENT_RANK`.

The attempt ends for one of these reasons, checked in this order (`_check_outcome`); the `Cause` is on the right:

    1  a message breaks a rule: for example, both the parent and a rank report   TRAINABLE
    2  a write fails: a checkpoint's files are invalid, or the target fails      TRAINABLE, MACHINE
    3  rank 0 has finished, but another rank waits in a later step               TRAINABLE
    4  rank 0 or the parent has ended, and the others had up to 20 s to end      (the outcome of rank 0 or the parent)
       or a rank has failed, and the root cause had 1 s per node to arrive       that of the root cause
    5  the parent has ended, but rank 0 still runs 20 s later                    MACHINE
    6  late: parts (of 2 saves in a row, or the last), a joining rank, metrics   MACHINE, TRAINABLE, MACHINE
    7  the whole run stops, and `spec.grace_period` ends or is cut short         PREEMPTED
    8  silence for `spec.silence_timeout` while no save or decision is pending   MACHINE

`StopTrial` asks the trial to end the attempt, also for a pause or an exploit, and sets no time limit.
`CheckpointAndStop` asks the trial to save and end, because the whole run stops. A user's stop request leads to either.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import assert_never

from prefect_tune.attempt.commit_worker import TRAINABLE_ERRORS, CommitWorker, FailedSave, GroupSave, remove_directory
from prefect_tune.attempt.processes.process_channel import CRASH_SIGNALS, PARENT_RANK, RankGroup, RankLostError
from prefect_tune.attempt.search_channel import Answer, SearchChannel
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.attempt.usage_meter import UsageMeter
from prefect_tune.core.display_text import first_line
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.journal_events import AttemptEnded, Cause, Outcome, TrialFinished
from prefect_tune.core.messages.process_messages import (
    CheckpointAndStop,
    CheckpointPart,
    CheckpointSaved,
    FromTrial,
    MeanMetrics,
    MilestoneReached,
    RankCommand,
    RankJoined,
    RankMetrics,
    SaveFailed,
    StepDone,
    StopTrial,
    TrainableLoaded,
    TrainingEnded,
)
from prefect_tune.core.metrics import average_metrics
from prefect_tune.core.reasons import AnyReason, Reason, make_reason, process_end_reason, rank_end_reason
from prefect_tune.core.usage_records import RankEnd
from prefect_tune.storage_retries import is_work_abandoned
from prefect_tune.stores.deadline import Deadline

_POLL_INTERVAL = timedelta(seconds=0.1)
_ROOT_CAUSE_TIMEOUT = timedelta(seconds=1)
"""The wait per node for the root cause, since errors of collectives often arrive before the crash that caused them."""
_DIED, _FAILED, _ENDED_EARLY = range(3)
"""The kinds of failure. If several ranks fail within `_ROOT_CAUSE_TIMEOUT`, the lowest kind is the likeliest root
cause, because a crash makes other ranks raise, and their errors may arrive before the crash. But if one rank fails, a
launcher kills the others, so a lost rank of a launcher is `_FAILED`, unless it exited before any rank was killed."""
_RANK_EXIT_TIMEOUT = timedelta(seconds=20)
"""How long the other ranks may run after rank 0 has ended, and rank 0 after the parent process has ended."""
PARTS_TIMEOUT = timedelta(minutes=5)
"""After rank 0 has added its part of a checkpoint, the other ranks have this time to add their parts."""
_JOIN_TIMEOUT = timedelta(minutes=10)
"""After the first rank of a launcher has joined, the other ranks have this time to join, since setup times differ."""
_MAX_FAILED_SAVES = 2
"""After this many consecutive failed saves, the attempt ends, since a rank probably hangs."""
_RETURNED_REASON = make_reason("returned")
_REPORTS_TWICE = "both the trial's own process and the ranks that it started reported a step: report in the ranks only"


def supervise(
    group: RankGroup, commit_worker: CommitWorker, spec: TrialSpec, channel: SearchChannel, meter: UsageMeter
) -> Outcome:
    """Serve the trial until it ends, crashes or sends nothing for too long, or its grace period expires.

    The event `channel.run_stop` starts the grace period. A second interrupt (`is_work_abandoned`) ends it immediately.
    """
    supervisor = _Supervisor(group, commit_worker, spec, channel, meter)
    outcome = supervisor.run()
    meter.rank_ends = supervisor.make_rank_ends(outcome)
    meter.on_trial_end()
    return outcome


class _Supervisor:
    def __init__(
        self, group: RankGroup, commit_worker: CommitWorker, spec: TrialSpec, channel: SearchChannel, meter: UsageMeter
    ) -> None:
        self._group, self._commit_worker, self._log = group, commit_worker, commit_worker.log
        self._spec, self._channel, self._meter = spec, channel, meter
        self._make_collectors()
        self._failures: list[tuple[int, AttemptEnded, int | None]] = []
        """Of each failure: its kind (the lowest is the root cause), the attempt's outcome, and the rank or None."""
        self._leading_outcome: Outcome | None = None
        """The attempt's outcome: that of rank 0 or the parent process, or a failure in another rank's last step."""
        self._end_deadline: Deadline | None = None
        """When the attempt ends at the latest; set with `_leading_outcome`, or at the first failure."""
        self._rank_0_deadline: Deadline | None = None
        """The time by which rank 0 must end; None until the parent process has ended."""
        self._ended_ranks: set[int] = set()
        """The ranks that have sent their last message, or are lost."""
        self._rank_end_reasons: dict[int, AnyReason] = {}
        """How each rank ended, if known; journaled for display, and used for no decision."""
        self._returned_ranks: set[int] = set()
        """The ranks that have returned; cleared when the log warns that rank 0 reported a step after they returned."""
        self._step_count = 0  # the steps that rank 0 has reported in this attempt
        self._submitted_save_count = self._failed_save_count = 0  # counted by this thread
        self._committed_save_count = 0  # counted by the commit worker's thread
        self._saves_without_node_part: queue.SimpleQueue[FailedSave] = queue.SimpleQueue()
        """The failed saves that lack a node's part; the commit worker's thread adds them."""
        self._failed_save_reasons: list[Reason] = []
        """The reasons of the failed saves since the last committed checkpoint."""
        self._loaded_ranks: set[int] = set()
        self._join_deadline: Deadline | None = None
        """The time by which all ranks of a launcher must have joined; None until the first of them has joined."""
        self._silent_since: float | None = None
        """When the last message, commit, failed save or answer came; None until all ranks have loaded the trainable."""
        self._awaits_decision = False
        self._stop_answer: StopTrial | None = None  # ends this attempt; sent again if rank 0 joins later
        self._grace_deadline: Deadline | None = None
        """The time by which the trial must save and end; None until the whole run stops."""
        channel.subscribe(self._on_answer)

    def run(self) -> Outcome:
        while True:
            try:
                if received := self._group.receive(_POLL_INTERVAL):
                    rank, message = received
                    if rank in (0, PARENT_RANK) and isinstance(message, StepDone | TrainingEnded):
                        is_last_step = isinstance(message, StepDone) and message.finish_reason is not None
                        self._meter.record_phase_seconds(message.seconds, is_last_step=is_last_step)
                    if self._silent_since is not None:
                        self._silent_since = time.monotonic()
                    self._on_message(rank, message)
                outcome = self._check_outcome()
            except RankLostError as error:
                outcome = self._on_rank_lost(error) or self._check_outcome()
            except InvalidInput as error:
                outcome = self._make_attempt_ended(Cause.TRAINABLE, make_reason("invalid-use", text=str(error)))
            is_saving = self._has_pending_saves and self._spec.sync.commit == "sync"
            self._meter.sample_if_due("waiting" if self._awaits_decision else "saving" if is_saving else "training")
            if outcome is not None:
                return outcome

    # -------------------------------------------------------------------------------------- messages and decisions

    def _on_message(self, rank: int, message: FromTrial) -> None:
        match message:
            case RankJoined():
                self._on_rank_joined(rank)
            case TrainableLoaded():
                self._on_loaded(rank, message)
            case MilestoneReached(report=report):
                self._awaits_decision = True
                self._channel.expect_decision(report)
            case StepDone() if rank == PARENT_RANK:
                raise InvalidInput(_REPORTS_TWICE)
            case StepDone():
                self._on_step(message)
            case CheckpointPart():
                self._queue_save(self._saves.add_part(rank, message))
            case RankMetrics():
                if (mean := self._metrics.add_metrics(rank, message)) is not None:
                    self._group.send_to_rank_0(mean)
            case RankCommand():
                self._on_rank_command(message)
            case TrainingEnded():
                self._on_rank_end(rank, message)
            case _:
                assert_never(message)

    def _on_rank_joined(self, rank: int) -> None:
        if self._step_count and self._join_deadline is None:
            raise InvalidInput(_REPORTS_TWICE)
        self._join_deadline = self._join_deadline or Deadline.after(_JOIN_TIMEOUT)
        if self._saves.world_size != self._group.world_size:
            self._make_collectors()
        if rank == 0 and self._grace_deadline is not None:
            self._group.send_to_rank_0(CheckpointAndStop())
        if rank == 0 and self._stop_answer is not None:
            self._group.send_to_rank_0(self._stop_answer)

    def _on_loaded(self, rank: int, message: TrainableLoaded) -> None:
        if self._group.is_local(rank):  # a process on another machine cannot be measured here
            self._meter.on_loaded(message.pid, is_rank_0=rank in (0, PARENT_RANK))
        self._loaded_ranks.add(rank)
        if len(self._loaded_ranks) >= self._group.world_size:
            self._silent_since = time.monotonic()
        self._commit_worker.source_digest = message.source_digest

    def _on_rank_command(self, command: RankCommand) -> None:
        if command.save:
            self._saves.reopen_step(command.step)
        self._metrics.record_commanded_step(command.step)
        self._group.send_to_others(command)
        if not command.save:
            self._saves.close_steps(command.step)

    def _make_collectors(self) -> None:
        """Start to collect parts and metrics for the current number of ranks."""
        self._saves, self._metrics = PartCollector(self._group.world_size), MetricsCollector(self._group.world_size)

    def _on_step(self, done: StepDone) -> None:
        """Queue a report and its checkpoint; flush at once if the report tells the search that a decision is needed."""
        if done.is_reported:
            self._add_rank_0_part(done)
            return
        self._step_count += 1
        if early := sorted(self._returned_ranks - {0, PARENT_RANK}):  # these ranks returned before rank 0
            self._returned_ranks.clear()
            self._log.warning(
                "rank %s has returned, but rank 0 reported another step: every rank must call pt.report once in each "
                "step, so that all ranks save and end together",
                ", ".join(map(str, early)),
            )
        needs_decision = done.awaits_decision and self._channel.requests_decisions_by_report
        self._commit_worker.queue_report(done.report, awaits_decision=needs_decision)
        if done.checkpoint is not None:
            self._add_rank_0_part(done)
        if needs_decision:
            self._commit_worker.queue_flush()
        self._awaits_decision = done.awaits_decision
        if done.awaits_decision:
            self._channel.expect_decision(done.report)

    def _on_answer(self, answer: Answer) -> None:
        if self._awaits_decision and self._silent_since is not None:  # this wait does not count as silence
            self._silent_since = time.monotonic()
        self._awaits_decision = False
        if isinstance(answer, StopTrial):
            self._stop_answer = answer
        self._group.send_to_rank_0(answer)

    # ------------------------------------------------------------------------------------------------------- saves

    def _add_rank_0_part(self, done: StepDone) -> None:
        self._submitted_save_count += 1
        self._queue_save(self._saves.add_rank_0_part(done))

    def _queue_save(self, save: GroupSave | None) -> None:
        if save is not None:
            self._commit_worker.queue_save(save, self._on_checkpoint_committed, self._saves_without_node_part.put)

    def _on_checkpoint_committed(self, step: int) -> None:
        self._silent_since = time.monotonic()
        self._committed_save_count += 1
        self._failed_save_reasons.clear()
        self._group.send_to_rank_0(CheckpointSaved(step=step))  # last, since the trial may end once it receives this

    @property
    def _has_pending_saves(self) -> bool:
        return self._committed_save_count + self._failed_save_count < self._submitted_save_count

    # --------------------------------------------------------------------------------------------- ends of ranks

    def _on_rank_end(self, rank: int, message: TrainingEnded) -> None:
        self._group.stop_receiving(rank)
        self._ended_ranks.add(rank)
        # Replace the fields that the trial's process must not set: `trial`, `usage` and `before_first_step`.
        outcome = message.outcome.model_copy(update={"trial": self._spec.trial.trial, "usage": None})
        if isinstance(outcome, AttemptEnded):
            outcome = outcome.model_copy(update={"before_first_step": False})
            if message.raised:
                self._on_rank_failure(rank, outcome, raised_after_end=message.raised_after_end)
                return
        # Ranks may return before or after the function that launched them. Only the end of rank 0 proves that training
        # is complete, since the function may return after the launcher was killed, or while the launcher still runs.
        if message.has_returned:
            self._returned_ranks.add(rank)
            self._rank_end_reasons[rank] = _RETURNED_REASON
        if rank == PARENT_RANK and 0 not in self._ended_ranks:
            self._rank_0_deadline = Deadline.after(_RANK_EXIT_TIMEOUT)
            return
        awaits_parent = message.has_returned and PARENT_RANK in self._group.open_ranks
        decides = rank == PARENT_RANK or (rank == 0 and not awaits_parent)
        if decides and self._leading_outcome is None and not self._failures:
            is_preempted = isinstance(outcome, AttemptEnded) and outcome.cause is Cause.PREEMPTED
            if self._failed_save_reasons and (is_preempted or isinstance(outcome, TrialFinished)):
                cause = Cause.PREEMPTED if is_preempted else Cause.MACHINE  # the trial's last save failed
                outcome = self._make_attempt_ended(cause, self._failed_save_reasons[-1])
            self._leading_outcome = outcome
            self._end_deadline = Deadline.after(_RANK_EXIT_TIMEOUT if self._step_count else _POLL_INTERVAL)

    def _on_rank_failure(self, rank: int, ended: AttemptEnded, *, raised_after_end: bool) -> None:
        """Record the failure of a rank; `raised_after_end` says whether it raised after its training had ended."""
        cause, reason, memory = ended.cause, ended.reason, None
        if cause is Cause.MACHINE and self._group.is_local(rank) and self._meter.is_out_of_memory(is_killed=False):
            cause = Cause.OUT_OF_MEMORY  # the kernel killed a child process of the trial
        if cause is Cause.OUT_OF_MEMORY and self._group.is_local(rank):
            memory = self._meter.out_of_memory_reason()
        if isinstance(reason, Reason):
            # Omit the location and the traceback, which differ between ranks, so that equal ends are listed together.
            text, kind = first_line(reason.arguments.get("text", "")), reason.arguments.get("type")
            self._rank_end_reasons[rank] = make_reason(reason.code, type=kind, text=text)
            arguments = {**reason.arguments, "rank": self._rank_for_reason(rank), "memory": memory}
            reason = make_reason(reason.code, **arguments)
        failure = self._make_attempt_ended(cause, reason)
        if rank > 0 and isinstance(self._leading_outcome, TrialFinished) and not raised_after_end:
            self._leading_outcome = failure  # this rank failed in its last step, which rank 0 has completed
            self._failures.append((_FAILED, failure, rank))
        else:
            self._add_failure(failure, _FAILED, rank)

    def _on_rank_lost(self, error: RankLostError) -> Outcome | None:
        rank = error.rank
        self._ended_ranks.add(rank)
        if not error.is_gone:
            self._rank_end_reasons[rank] = first_line(error)
            reason = make_reason("invalid-use", text=str(error), rank=self._rank_for_reason(rank))
            return self._make_attempt_ended(Cause.TRAINABLE, reason)
        if rank > 0 and self._group.parent_is_rank_0 and isinstance(self._leading_outcome, TrialFinished):
            self._rank_end_reasons[rank] = _RETURNED_REASON  # no failure: rank 0, its launcher, has finished
            return None
        end = self._group.end_rank(rank)
        self._rank_end_reasons[rank] = rank_end_reason(end)
        is_killed = end.signal == "SIGKILL"
        is_hidden = end.reason is not None and end.reason.code == "rank-vanished"  # its launcher hides how it ended
        may_lack_memory = (is_killed or is_hidden) and self._group.is_local(rank)
        if may_lack_memory and self._meter.is_out_of_memory(is_killed=is_killed):
            cause, memory = Cause.OUT_OF_MEMORY, self._meter.out_of_memory_reason()
        else:
            is_own_end = end.exit_code is not None or end.signal in CRASH_SIGNALS
            cause, memory = Cause.TRAINABLE if is_own_end else Cause.MACHINE, None
        failure = self._make_attempt_ended(cause, process_end_reason(end, self._rank_for_reason(rank), memory))
        may_be_killed = self._group.has_separate_parent and rank not in self._group.self_exited_ranks
        self._add_failure(failure, _FAILED if may_be_killed else _DIED, rank)
        return None

    def _add_failure(self, failure: AttemptEnded, failure_order: int, rank: int | None = None) -> None:
        """Add a failure. The attempt ends a little later, so that the root cause can still arrive."""
        if self._leading_outcome is not None:
            self._log.warning("a rank failed after the end of the trial: %s", first_line(failure.reason))
            return
        self._end_deadline = self._end_deadline or Deadline.after(_ROOT_CAUSE_TIMEOUT * self._group.node_count)
        self._failures.append((failure_order, failure, rank))

    def _make_attempt_ended(self, cause: Cause, reason: AnyReason) -> AttemptEnded:
        is_loaded = self._silent_since is not None  # a checkpoint cannot cause a failure before the trainable is loaded
        at_start = cause is Cause.TRAINABLE and is_loaded and self._step_count == 0
        return AttemptEnded(trial=self._spec.trial.trial, cause=cause, reason=reason, before_first_step=at_start)

    def _rank_for_reason(self, rank: int) -> int | None:
        """Return the rank to name in a reason; None for a single rank, and for the parent process."""
        return rank if self._group.world_size > 1 and rank != PARENT_RANK else None

    def make_rank_ends(self, outcome: Outcome) -> Sequence[RankEnd]:
        """Return how the ranks ended, the cause of a failure first. If the trial succeeded, omit the returned ranks."""
        has_failed, reasons = isinstance(outcome, AttemptEnded), self._rank_end_reasons.items()
        ends = {rank: how for rank, how in reasons if rank >= 0 and (has_failed or how != _RETURNED_REASON)}
        if self._group.world_size == 1 or not ends:
            return ()
        candidates = [min(self._failures, key=itemgetter(0))[2]] if self._failures else ends
        causes = (how for rank, how in ends.items() if rank in candidates and how != _RETURNED_REASON)
        cause = next(causes, None) if has_failed else None
        hows = [ends[rank] for rank in sorted(ends)]
        sorted_ranks = sorted(ends, key=lambda rank: (ends[rank] != cause, hows.index(ends[rank]), rank))
        groups = groupby(sorted_ranks, key=ends.__getitem__)  # equal ends are listed together
        return [RankEnd(ranks=tuple(ranks), how=how, is_cause=how == cause) for how, ranks in groups]

    # ------------------------------------------------------------------------------------ what ends the attempt

    def _check_outcome(self) -> Outcome | None:
        """Return the outcome if the attempt ends now; else None. The module's docstring lists the checks in order."""
        is_trainable_error = isinstance(error := self._commit_worker.error, TRAINABLE_ERRORS)
        if is_trainable_error and not self._failures:  # otherwise, a failed rank may have deleted the files
            return self._make_attempt_ended(Cause.TRAINABLE, make_reason("save-failed", error=str(error)))
        if error is not None and not is_trainable_error:
            text = f"{type(error).__name__}: {error}"
            return self._make_attempt_ended(Cause.MACHINE, make_reason("write-failed", error=text))
        has_finished = isinstance(self._leading_outcome, TrialFinished) and self._step_count > 0
        if has_finished and (reason := self._metrics.surplus_reason()) is not None:
            return self._make_attempt_ended(Cause.TRAINABLE, reason)
        if self._end_deadline is not None:
            return self._check_ranks_ended(self._end_deadline)
        if self._rank_0_deadline is not None and self._rank_0_deadline.remaining_seconds <= 0:
            seconds = _RANK_EXIT_TIMEOUT.total_seconds()
            return self._make_attempt_ended(Cause.MACHINE, make_reason("launcher-returned", seconds=seconds))
        if (failure := self._handle_failed_saves() or self._check_joins() or self._check_metrics()) is not None:
            return failure
        if self._failures:  # a failure was added just now: wait for the root cause
            return None
        if self._channel.run_stop.is_set():
            return self._carry_out_stop()
        if self._silent_since is None or self._has_pending_saves or self._awaits_decision:
            return None  # silence is expected: a rank loads, or a save (with its own timeout) or decision is pending
        elapsed, timeout = timedelta(seconds=time.monotonic() - self._silent_since), self._spec.silence_timeout
        if timeout is None or elapsed <= timeout:
            return None
        return self._make_attempt_ended(Cause.MACHINE, make_reason("silent", seconds=elapsed.total_seconds()))

    def _check_ranks_ended(self, deadline: Deadline) -> Outcome | None:
        """Return the outcome if all ranks have ended or the deadline has passed; None otherwise."""
        if self._group.open_ranks and deadline.remaining_seconds:
            return None
        training = sorted(rank for rank in self._group.open_ranks if rank > 0)
        if self._leading_outcome is not None and training and self._step_count:
            ranks, seconds = ", ".join(map(str, training)), _RANK_EXIT_TIMEOUT.total_seconds()
            self._log.warning("rank %s was still running %g s after rank 0 finished, and was killed", ranks, seconds)
            self._rank_end_reasons |= dict.fromkeys(training, make_reason("rank-outlived", seconds=seconds))
        return self._leading_outcome or min(self._failures, key=itemgetter(0))[1]

    def _handle_failed_saves(self) -> Outcome | None:
        """Handle a save that lacks a part; return the outcome if this ends the attempt now, and None otherwise."""
        if (reason := self._saves.ended_rank_reason(self._ended_ranks)) is not None:
            self._add_failure(self._make_attempt_ended(Cause.TRAINABLE, reason), _ENDED_EARLY)
            return None
        if (failed := self._saves.fail_overdue_save()) is None:
            if self._saves_without_node_part.empty():
                return None
            failed = self._saves_without_node_part.get()
        self._failed_save_count += 1
        reason = make_reason("not-committed", step=failed.step, error=failed.reason)
        self._failed_save_reasons.append(reason)
        if failed.done.finish_reason is not None or len(self._failed_save_reasons) >= _MAX_FAILED_SAVES:
            self._rank_end_reasons |= dict.fromkeys(failed.ranks, make_reason("rank-without-part"))
            return self._make_attempt_ended(Cause.MACHINE, reason)
        self._log.warning(
            "%s; training continues. Every rank must call pt.report in each step, even without a checkpoint", reason
        )
        self._group.send_to_rank_0(SaveFailed(step=failed.step))
        if self._silent_since is not None:
            self._silent_since = time.monotonic()  # count silence from now: the ranks may have waited
        return None

    def _check_joins(self) -> Outcome | None:
        """Return the failure if ranks of a launcher did not join in time; None otherwise."""
        is_late = self._join_deadline is not None and self._join_deadline.remaining_seconds <= 0
        if not is_late or not (missing := self._group.missing_ranks):
            return None
        ranks = {"ranks": list(missing), "world_size": self._group.world_size}
        reason = make_reason("ranks-missing", **ranks, seconds=_JOIN_TIMEOUT.total_seconds())
        return self._make_attempt_ended(Cause.TRAINABLE, reason)

    def _check_metrics(self) -> Outcome | None:
        """Return the failure if metrics are late. If a rank ended without them, add this failure, and return None."""
        if not self._metrics.missing_ranks or self._failures:
            return None
        if (reason := self._metrics.ended_rank_reason(self._ended_ranks)) is not None:
            self._add_failure(self._make_attempt_ended(Cause.TRAINABLE, reason), _ENDED_EARLY)
            return None
        if self._silent_since is None or self._group.missing_ranks:
            self._metrics.restart_timeout()
        if (reason := self._metrics.overdue_reason()) is None:
            return None
        self._rank_end_reasons |= dict.fromkeys(self._metrics.missing_ranks, make_reason("rank-without-report"))
        return self._make_attempt_ended(Cause.MACHINE, reason)

    def _carry_out_stop(self) -> Outcome | None:
        """Ask the trial once to save and end; return the failure after the grace period or a second interrupt."""
        if self._grace_deadline is None:
            self._grace_deadline = Deadline.after(self._spec.grace_period)
            self._group.send_to_rank_0(CheckpointAndStop())
        if not self._grace_deadline.remaining_seconds:
            seconds = self._spec.grace_period.total_seconds()
            reason = make_reason("upload-unfinished" if self._has_pending_saves else "no-checkpoint", seconds=seconds)
            return self._make_attempt_ended(Cause.PREEMPTED, reason)
        if is_work_abandoned():
            return self._make_attempt_ended(Cause.PREEMPTED, make_reason("interrupted-twice"))
        return None


# Collect what the ranks send for a step: the parts of a checkpoint, and metrics.


@dataclass(slots=True)
class _PartialSave:
    deadline: Deadline
    done: StepDone | None = None  # None until rank 0 has added its part
    parts: dict[int, CheckpointPart] = field(default_factory=dict)


class PartCollector:
    """Collects the parts of each checkpoint from `world_size` ranks. Rank 0 adds its parts in order of the steps."""

    def __init__(self, world_size: int, timeout: timedelta = PARTS_TIMEOUT) -> None:
        self.world_size = world_size
        self._other_ranks = range(1, world_size)
        self._timeout = timeout
        self._pending: dict[int, _PartialSave] = {}
        self._failed_steps: set[int] = set()
        self._closed_step = -1  # no checkpoint of a step up to this one may begin; begun ones still accept parts

    def reopen_step(self, step: int) -> None:
        """Accept parts of `step` again, even after `close_steps`, since rank 0 commands all ranks to save this step."""
        self._closed_step = min(self._closed_step, step - 1)

    def add_rank_0_part(self, done: StepDone) -> GroupSave | None:
        """Add the directory of rank 0; return the checkpoint if it is complete now."""
        pending = self._get_pending(done.report.step)
        pending.done, pending.deadline = done, Deadline.after(self._timeout)
        return self._pop_if_complete(done.report.step)

    def add_part(self, rank: int, part: CheckpointPart) -> GroupSave | None:
        """Add the part of another rank; return the checkpoint if it is complete now.

        Raises:
            InvalidInput: the rank saved a checkpoint at a step at which rank 0 saved none.
        """
        if part.step in self._failed_steps:
            remove_directory(part.directory)
            return None
        if part.step <= self._closed_step and part.step not in self._pending:
            _require_no_files(rank, part)
            return None
        self._get_pending(part.step).parts[rank] = part
        return self._pop_if_complete(part.step)

    def close_steps(self, step: int) -> None:
        """Begin no more checkpoints up to `step`; drop other ranks' parts for steps at which rank 0 did not save.

        Raises:
            InvalidInput: a rank saved a checkpoint at a step at which rank 0 saved none.
        """
        self._closed_step = max(self._closed_step, step)
        for closed in [key for key, pending in self._pending.items() if key <= step and pending.done is None]:
            for rank, part in self._pending.pop(closed).parts.items():
                _require_no_files(rank, part)

    def ended_rank_reason(self, ended: Collection[int]) -> Reason | None:
        """Return why a checkpoint cannot become complete: ranks in `ended` did not add their parts; None otherwise."""
        for step, pending in self._pending.items():
            ranks = [rank for rank in self._other_ranks if rank not in pending.parts and rank in ended]
            if pending.done is not None and ranks:
                return make_reason("ranks-left-save", ranks=ranks, step=step)
        return None

    def fail_overdue_save(self) -> FailedSave | None:
        """Delete the files of one overdue checkpoint, and return the failed save; None if no checkpoint is overdue."""
        for step, pending in self._pending.items():
            if pending.done is None or pending.deadline.remaining_seconds > 0:
                continue
            del self._pending[step]
            self._failed_steps.add(step)
            for directory in (*(part.directory for part in pending.parts.values()), pending.done.checkpoint):
                remove_directory(directory)
            missing = [rank for rank in self._other_ranks if rank not in pending.parts]
            reason = make_reason("part-late", ranks=missing, seconds=self._timeout.total_seconds())
            return FailedSave(pending.done, reason, missing)
        return None

    def _get_pending(self, step: int) -> _PartialSave:
        return self._pending.setdefault(step, _PartialSave(Deadline.after(self._timeout)))

    def _pop_if_complete(self, step: int) -> GroupSave | None:
        pending = self._pending[step]
        if pending.done is None or not pending.parts.keys() >= set(self._other_ranks):
            return None
        del self._pending[step]
        parts = sorted(pending.parts.items())
        directories = {rank: Path(part.directory) for rank, part in parts if part.directory is not None}
        return GroupSave(pending.done, directories, tuple(sorted({part.node for _, part in parts if part.node})))


def _require_no_files(rank: int, part: CheckpointPart) -> None:
    if part.directory is not None or part.node:
        raise InvalidInput(
            f"rank {rank} reported a checkpoint at step {part.step}, but rank 0 did not: whenever a rank reports a "
            "checkpoint, rank 0 must report one too"
        )


class MetricsCollector:
    """Collects the metrics that ranks report for a step; rank 0 waits for their mean."""

    def __init__(self, world_size: int, timeout: timedelta = PARTS_TIMEOUT) -> None:
        self._ranks = range(world_size)
        self._timeout = timeout
        self._reported: dict[int, dict[int, Mapping[str, object]]] = {}
        self._newest_reports: dict[int, RankMetrics] = {}
        self._commanded_step = 0
        self._step: int | None = None
        self.restart_timeout()

    def record_commanded_step(self, step: int) -> None:
        """Record that rank 0 has sent its command for `step`. The other ranks wait for this command in `pt.report`."""
        self._commanded_step = step

    def restart_timeout(self) -> None:
        """Restart the time limit for the metrics of all ranks, for example because a rank is not loaded yet."""
        self._deadline = Deadline.after(self._timeout)

    def add_metrics(self, rank: int, report: RankMetrics) -> MeanMetrics | None:
        """Add the metrics of a rank; return the mean if all ranks have now reported the step."""
        by_rank = self._reported.setdefault(report.step, {})
        by_rank[rank], self._newest_reports[rank] = report.metrics, report
        if rank == 0:
            self._step = report.step
            self.restart_timeout()
        if not by_rank.keys() >= set(self._ranks):
            return None
        self._step = None
        del self._reported[report.step]
        return MeanMetrics(step=report.step, metrics=average_metrics([by_rank[rank] for rank in self._ranks]))

    def ended_rank_reason(self, ended: Collection[int]) -> Reason | None:
        """Return why the mean of a step cannot be computed: ranks in `ended` did not report it; None otherwise."""
        ranks = [rank for rank in self.missing_ranks if rank in ended]
        return make_reason("ranks-left-mean", ranks=ranks, step=self._step) if ranks else None

    def surplus_reason(self) -> Reason | None:
        """Return the reason if a rank waits in `pt.report` although rank 0 has ended; None otherwise."""
        for rank, report in sorted(self._newest_reports.items()):
            if rank and report.step > self._commanded_step and not report.returned:
                return make_reason("surplus-report", rank=rank, step=report.step)
        return None

    def overdue_reason(self) -> Reason | None:
        """Return the reason if ranks have not reported the step of rank 0 in time; None otherwise."""
        if self._deadline.remaining_seconds > 0:
            return None
        seconds = self._timeout.total_seconds()
        return make_reason("metrics-late", ranks=self.missing_ranks, step=self._step, seconds=seconds)

    @property
    def missing_ranks(self) -> Sequence[int]:
        """The ranks whose metrics rank 0 waits for."""
        return [] if self._step is None else [rank for rank in self._ranks if rank not in self._reported[self._step]]
