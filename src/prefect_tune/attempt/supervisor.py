"""Supervise one attempt: receive the messages of its ranks, queue its checkpoints for commit, return the outcome.

A single process is rank 0. Of several, rank 0 reports and decides; the others add to its checkpoints:

    rank 0: StepDone(s, its directory) ─┐
    rank 1: Part(s, its directory)      ├──► all there ──► commit worker: one directory, one commit
    rank 2: Part(s, nothing to add)    ─┘    deadline, or a rank has ended ──► this save fails on all ranks

Until all parts are there nothing is on the target, so a save that fails leaves nothing there. The metrics of a step, if
they are the mean over all ranks, are collected in the same way, before rank 0 reports it.

The attempt ends with the end of rank 0, or with the first failure of a rank: the others may wait for that one in a
collective operation for hours, so they are ended, after the moment in which a failure that caused another becomes
known. When the whole run stops, the trial has `spec.grace` to save, and is then killed. A trial that is stopped alone
gets a `Leave`, and has no limit: `tuner/stop_requests.py`. Never: a commit without the part of a rank.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import assert_never

from prefect_tune.attempt.commit_worker import USERS_FAULT, CommitWorker, FailedSave, GroupSave, remove_directory
from prefect_tune.attempt.processes.process_channel import OWN, OWN_SIGNALS, RankEnded, RankGroup
from prefect_tune.attempt.search_link import Answer, SearchLink
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.attempt.usage_meter import UsageMeter
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.journal_events import AttemptEnded, Cause, Finished, Outcome
from prefect_tune.core.messages.process_messages import (
    CheckpointSaved,
    Directive,
    FromTrial,
    Join,
    Leave,
    MeanMetrics,
    MilestoneReached,
    Part,
    RankMetrics,
    SaveFailed,
    StepDone,
    StopAndSave,
    TrainableLoaded,
    TrialEnded,
)
from prefect_tune.core.metrics import mean_of
from prefect_tune.core.reasons import AnyReason, Reason, make_reason, process_end_reason, rank_end_reason
from prefect_tune.core.shown_text import first_line
from prefect_tune.core.usage_records import RankEnd
from prefect_tune.storage_retries import is_abandoned
from prefect_tune.stores.deadline import Deadline

_TICK = timedelta(seconds=0.1)
_CAUSE_WITHIN = timedelta(seconds=1)
"""How long a failure of one rank may precede that of the rank that caused it, for each node: a killed peer breaks a
collective."""
_DIED, _FAILED, _ENDED_EARLY = range(3)
"""What causes what, where several ranks fail within `_CAUSE_WITHIN`: a death makes the others raise, which may be seen
first. Only a launcher in the trial ends other ranks when one fails: of its ranks the first failure is the cause, or
the death of one that it cannot have ended."""
_OTHERS_END_WITHIN = timedelta(seconds=20)
"""How long the other ranks have to end after rank 0."""
PARTS_WITHIN = timedelta(minutes=5)
"""How long the other parts of a checkpoint may take after that of rank 0."""
_ALL_JOIN_WITHIN = timedelta(minutes=10)
"""How long the ranks of a launcher have to join after the first of them: their imports differ, and their setup."""
_MAX_FAILED_SAVES = 2
"""So many saves that fail one after the other end the attempt: a rank hangs."""
_RETURNED = make_reason("returned")
_REPORTS_TWICE = (
    "the trial's own process reported a step, and so did the ranks that it has started: report in the ranks only"
)


def supervise(
    group: RankGroup, commit_worker: CommitWorker, spec: TrialSpec, link: SearchLink, meter: UsageMeter
) -> Outcome:
    """Serve the trial until it ends, crashes or stays silent too long, or its grace after `link.stop` expires.

    After `link.stop` it also ends, and with it the trial, as soon as the work of this context is abandoned.
    """
    supervisor = _Supervisor(group, commit_worker, spec, link, meter)
    outcome = supervisor.run()
    meter.rank_ends = supervisor.rank_ends(outcome)
    meter.ended()
    return outcome


class _Supervisor:
    def __init__(
        self, group: RankGroup, commit_worker: CommitWorker, spec: TrialSpec, link: SearchLink, meter: UsageMeter
    ) -> None:
        self._group = group
        self._commit_worker = commit_worker
        self._log = commit_worker.log
        self._spec = spec
        self._link = link
        self._meter = meter
        self._expect_ranks()
        self._failures: list[tuple[int, AttemptEnded, int]] = []
        """In the order in which they arrived, each with its place among what causes what, and its rank."""
        self._rank_ends: dict[int, AnyReason] = {}
        """How ranks ended by themselves."""
        self._end: Outcome | None = None
        self._ended_ranks: set[int] = set()
        self._returned: set[int] = set()
        self._ends_until: Deadline | None = None
        self._rank_0_ends_until: Deadline | None = None
        """How long rank 0 may train on after the trial's own process, whose launcher has started it."""
        self._steps = 0
        self._handed_over = self._given_up = 0  # counted by this thread
        self._committed = 0  # counted by the commit worker's thread
        self._incomplete: queue.SimpleQueue[FailedSave] = queue.SimpleQueue()
        """Checkpoints to which a node did not add its part; the commit worker's thread adds them."""
        self._failed_saves: list[Reason] = []
        """Why the last checkpoints were not committed, since the last one that was."""
        self._loaded: set[int] = set()
        self._leave: Leave | None = None
        self._first_join: Deadline | None = None
        self._last_message_at: float | None = None  # None until the trainable is loaded: loading may take any time
        self._is_asking = False
        self._stop_asked_at: float | None = None
        link.connect(self._on_answer)

    def run(self) -> Outcome:
        while True:
            try:
                if received := self._group.receive(_TICK):
                    rank, message = received
                    if rank in (0, OWN) and isinstance(message, StepDone | TrialEnded):
                        is_last_step = isinstance(message, StepDone) and message.finish_reason is not None
                        self._meter.note_seconds(message.seconds, is_last_step=is_last_step)
                    if self._last_message_at is not None:
                        self._last_message_at = time.monotonic()
                    self._on_message(rank, message)
                outcome = self._check_ends()
            except RankEnded as gone:
                outcome = self._on_rank_gone(gone) or self._check_ends()
            except InvalidInput as error:
                outcome = self._failure(Cause.USER, make_reason("invalid-use", text=str(error)))
            is_saving = self._is_uploading and self._spec.sync.commit == "sync"
            self._meter.look("waiting" if self._is_asking else "saving" if is_saving else "training")
            if outcome is not None:
                return outcome

    # ---------------------------------------------------------------------------------------- messages and answers

    def _on_message(self, rank: int, message: FromTrial) -> None:
        match message:
            case Join():
                self._on_join(rank)
            case TrainableLoaded():
                self._on_loaded(rank, message)
            case MilestoneReached(report=report):
                self._is_asking = True
                self._link.ask(report)
            case StepDone() if rank == OWN:
                raise InvalidInput(_REPORTS_TWICE)
            case StepDone():
                self._on_step(message)
            case Part():
                self._queue_save(self._saves.add(rank, message))
            case RankMetrics():
                if (mean := self._metrics.add(rank, message)) is not None:
                    self._group.tell(mean)
            case Directive():
                self._on_directive(message)
            case TrialEnded():
                self._on_rank_end(rank, message)
            case _:
                assert_never(message)

    def _on_join(self, rank: int) -> None:
        if self._steps and self._first_join is None:
            raise InvalidInput(_REPORTS_TWICE)
        self._first_join = self._first_join or Deadline.after(_ALL_JOIN_WITHIN)
        if self._saves.world_size != self._group.world_size:
            self._expect_ranks()
        if rank == 0 and self._stop_asked_at is not None:
            self._group.tell(StopAndSave())
        if rank == 0 and self._leave is not None:
            self._group.tell(self._leave)

    def _on_loaded(self, rank: int, message: TrainableLoaded) -> None:
        if self._group.is_here(rank):  # another machine's process may have the number of one of this machine
            self._meter.loaded(message.pid, decides=rank in (0, OWN))
        self._loaded.add(rank)
        if len(self._loaded) >= self._group.world_size:
            self._last_message_at = time.monotonic()
        self._commit_worker.code = message.code

    def _on_directive(self, directive: Directive) -> None:
        if directive.saves:
            self._saves.expect(directive.step)
        self._metrics.direct(directive.step)
        self._group.tell_others(directive)
        if not directive.saves:
            self._saves.close(directive.step)

    def _expect_ranks(self) -> None:
        """Begin to collect what the ranks of the group do: their number is known, or has become known."""
        count = self._group.world_size
        self._saves, self._metrics = GroupSaves(count), GroupMetrics(count)

    def _on_step(self, done: StepDone) -> None:
        """Note a report for the next entry, and hand over its checkpoint; write at once if the search is to decide."""
        if done.is_reported:
            self._hand_over(done)
            return
        self._steps += 1
        if early := sorted(self._returned - {0, OWN}):  # a rank follows each step before it returns
            self._returned.clear()
            self._log.warning(
                "rank %s has returned, and rank 0 reported another step: every rank calls pt.report once in each step, "
                "or the ranks do not save and end together",
                ", ".join(map(str, early)),
            )
        is_read = done.asks and self._link.asks_by_report
        self._commit_worker.note(done.report, asks=is_read)
        if done.checkpoint is not None:
            self._hand_over(done)
        if is_read:
            self._commit_worker.flush()
        self._is_asking = done.asks
        if done.asks:
            self._link.ask(done.report)

    def _on_answer(self, answer: Answer) -> None:
        if self._is_asking and self._last_message_at is not None:  # an unasked message is no progress
            self._last_message_at = time.monotonic()
        self._is_asking = False
        if isinstance(answer, Leave):
            self._leave = answer
        self._group.tell(answer)

    # ------------------------------------------------------------------------------------------------------- saves

    def _hand_over(self, done: StepDone) -> None:
        self._handed_over += 1
        self._queue_save(self._saves.hand_over(done))

    def _queue_save(self, save: GroupSave | None) -> None:
        if save is not None:
            self._commit_worker.save(save, self._on_saved, self._incomplete.put)

    def _on_saved(self, step: int) -> None:
        self._last_message_at = time.monotonic()
        self._committed += 1
        self._failed_saves.clear()
        self._group.tell(CheckpointSaved(step=step))  # at last: with it the trial may end, which looks at these

    @property
    def _is_uploading(self) -> bool:
        return self._committed + self._given_up < self._handed_over

    # --------------------------------------------------------------------------------------------- ends of ranks

    def _on_rank_end(self, rank: int, message: TrialEnded) -> None:
        self._group.leave(rank)
        self._ended_ranks.add(rank)
        # A process speaks for its own trial; what it used, and whether its checkpoint is to blame, is decided here.
        outcome = message.outcome.model_copy(update={"trial": self._spec.trial.trial, "use": None})
        if isinstance(outcome, AttemptEnded):
            outcome = outcome.model_copy(update={"at_start": False})
            if message.raised:
                self._on_rank_failure(rank, outcome, after_end=message.after_end)
                return
        # A rank of a launcher may return before the function that has started it, and others after it. Only the end of
        # rank 0 says that all is trained: a launcher that was killed, or is not waited for, returns too.
        if message.has_returned:
            self._returned.add(rank)
            self._rank_ends[rank] = _RETURNED
        if rank == OWN and self._group.is_launched and 0 not in self._ended_ranks:
            self._rank_0_ends_until = Deadline.after(_OTHERS_END_WITHIN)
            return
        decides = rank == OWN or (rank == 0 and not (message.has_returned and OWN in self._group.open_ranks))
        if decides and self._end is None and not self._failures:
            if self._failed_saves and isinstance(outcome, Finished):  # its last checkpoint was not committed
                outcome = self._failure(Cause.MACHINE, self._failed_saves[-1])
            elif self._failed_saves and isinstance(outcome, AttemptEnded) and outcome.cause is Cause.PREEMPTED:
                outcome = self._failure(Cause.PREEMPTED, self._failed_saves[-1])  # what it has saved is not committed
            self._end, self._ends_until = outcome, Deadline.after(_OTHERS_END_WITHIN if self._steps else _TICK)

    def _on_rank_failure(self, rank: int, ended: AttemptEnded, *, after_end: bool) -> None:
        cause, reason, memory = ended.cause, ended.reason, None
        if cause is Cause.MACHINE and self._group.is_here(rank) and self._meter.is_out_of_memory(is_killed=False):
            cause = Cause.OUT_OF_MEMORY  # what the trial has started was killed
        if cause is Cause.OUT_OF_MEMORY and self._group.is_here(rank):
            memory = self._meter.memory_reason()
        if isinstance(reason, Reason):
            # The other lines, and the place, differ by rank: ranks that ended alike are listed together.
            text, kind = first_line(reason.arguments.get("text", "")), reason.arguments.get("type")
            self._rank_ends[rank] = make_reason(reason.code, type=kind, text=text)
            reason = make_reason(reason.code, **{**reason.arguments, "rank": self._number_of(rank), "memory": memory})
        failure = self._failure(cause, reason)
        if rank > 0 and isinstance(self._end, Finished) and not after_end:
            self._end = failure  # rank 0 has trained its last step before this rank
        else:
            self._add_failure(failure, _FAILED, rank)

    def _on_rank_gone(self, gone: RankEnded) -> Outcome | None:
        rank = gone.rank
        self._ended_ranks.add(rank)
        if not gone.is_gone:
            self._rank_ends[rank] = first_line(gone)
            return self._failure(Cause.USER, make_reason("invalid-use", text=str(gone), rank=self._number_of(rank)))
        if rank > 0 and self._group.is_led and isinstance(self._end, Finished):
            self._rank_ends[rank] = _RETURNED  # rank 0 had started it, and has ended
            return None
        end = self._group.end(rank)
        self._rank_ends[rank] = rank_end_reason(end)
        is_killed = end.signal == "SIGKILL"
        is_hidden = end.reason is not None and end.reason.code == "rank-vanished"  # only its launcher knows its end
        if (is_killed or is_hidden) and self._group.is_here(rank) and self._meter.is_out_of_memory(is_killed=is_killed):
            cause, memory = Cause.OUT_OF_MEMORY, self._meter.memory_reason()
        else:
            is_own_end = end.exit_code is not None or end.signal in OWN_SIGNALS
            cause, memory = Cause.USER if is_own_end else Cause.MACHINE, None
        failure = self._failure(cause, process_end_reason(end, self._number_of(rank), memory))
        is_ended = self._group.is_launched and rank not in self._group.died_by_themselves
        self._add_failure(failure, _FAILED if is_ended else _DIED, rank)
        return None

    def _add_failure(self, failure: AttemptEnded, place: int, rank: int = OWN) -> None:
        """The attempt ends with a failure, once those that may have caused it are known."""
        if self._end is not None:
            self._log.warning("after the end of the trial: %s", first_line(failure.reason))
            return
        self._ends_until = self._ends_until or Deadline.after(_CAUSE_WITHIN * self._group.node_count)
        self._failures.append((place, failure, rank))

    def _failure(self, cause: Cause, reason: AnyReason) -> AttemptEnded:
        loaded = self._last_message_at is not None  # a checkpoint cannot cause a failure before loading
        at_start = cause is Cause.USER and loaded and self._steps == 0
        return AttemptEnded(trial=self._spec.trial.trial, cause=cause, reason=reason, at_start=at_start)

    def _number_of(self, rank: int) -> int | None:
        """Return the rank for a reason; None where it is the only one, or the process that has started the ranks."""
        return rank if self._group.world_size > 1 and rank != OWN else None

    def rank_ends(self, outcome: Outcome) -> Sequence[RankEnd]:
        """Return how ranks ended that did not end like the others, the cause of a failure first."""
        has_failed = isinstance(outcome, AttemptEnded)
        ends = {rank: how for rank, how in self._rank_ends.items() if rank != OWN and (has_failed or how != _RETURNED)}
        if self._group.world_size == 1 or not ends:
            return ()
        first = min(self._failures, key=itemgetter(0))[2] if self._failures else next(iter(ends))
        cause, groups = ends.get(first) if has_failed else None, list[tuple[AnyReason, list[int]]]()
        for rank in sorted(ends, key=lambda rank: (ends[rank] != cause, rank)):
            if groups and groups[-1][0] == ends[rank]:
                groups[-1][1].append(rank)
            else:
                groups.append((ends[rank], [rank]))
        return [RankEnd(ranks=tuple(ranks), how=how, is_cause=how == cause) for how, ranks in groups]

    # ------------------------------------------------------------------------------------ what ends the attempt

    def _check_ends(self) -> Outcome | None:
        """Return the outcome if a commit failed, the grace period expired or the trial is hung; None otherwise."""
        is_users_fault = isinstance(error := self._commit_worker.error, USERS_FAULT)
        if is_users_fault and not self._failures:  # a failing process may delete the files being saved
            return self._failure(Cause.USER, make_reason("save-failed", error=str(error)))
        if error is not None and not is_users_fault:
            return self._failure(Cause.MACHINE, make_reason("write-failed", error=f"{type(error).__name__}: {error}"))
        if isinstance(self._end, Finished) and (reason := self._metrics.surplus()) is not None:
            return self._failure(Cause.USER, reason)
        if self._ends_until is not None:
            return self._check_last_ranks(self._ends_until)
        if self._rank_0_ends_until is not None and self._rank_0_ends_until.remaining_seconds <= 0:
            seconds = _OTHERS_END_WITHIN.total_seconds()
            return self._failure(Cause.MACHINE, make_reason("launcher-returned", seconds=seconds))
        if (failure := self._check_saves() or self._check_joins() or self._check_metrics()) is not None:
            return failure
        if self._failures:  # one was added just now
            return None
        if self._link.stop.is_set():
            return self._check_grace()
        if self._is_uploading or self._is_asking:
            return None  # it may wait for an upload, which has its own timeout, or for an answer
        if self._spec.silence is None or self._last_message_at is None:
            return None
        silent = timedelta(seconds=time.monotonic() - self._last_message_at)
        if silent <= self._spec.silence:
            return None
        return self._failure(Cause.MACHINE, make_reason("silent", seconds=silent.total_seconds()))

    def _check_last_ranks(self, until: Deadline) -> Outcome | None:
        """Return the outcome once all ranks have ended, or their time for that has passed."""
        if self._group.open_ranks and until.remaining_seconds:
            return None
        training = sorted(rank for rank in self._group.open_ranks if rank > 0)
        if self._end is not None and training and self._steps:
            ranks, within = ", ".join(map(str, training)), _OTHERS_END_WITHIN.total_seconds()
            self._log.warning("rank %s had not ended %g s after rank 0, and was ended", ranks, within)
            self._rank_ends |= dict.fromkeys(training, make_reason("rank-outlived", seconds=within))
        return self._end or min(self._failures, key=itemgetter(0))[1]

    def _check_saves(self) -> Outcome | None:
        """Fail a checkpoint that is overdue; return the outcome if the trial cannot do without it."""
        if (reason := self._saves.without(self._ended_ranks)) is not None:
            self._add_failure(self._failure(Cause.USER, reason), _ENDED_EARLY)
            return None
        if (failed := self._saves.overdue()) is None:
            if self._incomplete.empty():
                return None
            failed = self._incomplete.get()
        self._given_up += 1
        reason = make_reason("not-committed", step=failed.step, error=failed.reason)
        self._failed_saves.append(reason)
        if failed.done.finish_reason is not None or len(self._failed_saves) >= _MAX_FAILED_SAVES:
            self._rank_ends |= dict.fromkeys(failed.ranks, make_reason("rank-without-part"))
            return self._failure(Cause.MACHINE, reason)
        self._log.warning(
            "%s; training continues. Every rank calls pt.report in each step, with or without a checkpoint", reason
        )
        self._group.tell(SaveFailed(step=failed.step))
        return None

    def _check_joins(self) -> Outcome | None:
        """Return the failure of ranks that a launcher has not started, or that did not join in time."""
        is_late = self._first_join is not None and self._first_join.remaining_seconds <= 0
        if not is_late or not (missing := self._group.missing_ranks):
            return None
        ranks = {"ranks": list(missing), "world_size": self._group.world_size}
        reason = make_reason("ranks-missing", **ranks, seconds=_ALL_JOIN_WITHIN.total_seconds())
        return self._failure(Cause.USER, reason)

    def _check_metrics(self) -> Outcome | None:
        """Return the failure of ranks whose metrics rank 0 waits for, and that have ended or are late."""
        if not self._metrics.missing or self._failures:
            return None
        if (reason := self._metrics.without(self._ended_ranks)) is not None:
            self._add_failure(self._failure(Cause.USER, reason), _ENDED_EARLY)
            return None
        if self._last_message_at is None or self._group.missing_ranks:
            self._metrics.restart()
        if (reason := self._metrics.overdue()) is None:
            return None
        self._rank_ends |= dict.fromkeys(self._metrics.missing, make_reason("rank-without-report"))
        return self._failure(Cause.MACHINE, reason)

    def _check_grace(self) -> Outcome | None:
        """Ask the trial to save and end; return the outcome when its grace is over, or the run is interrupted again."""
        if self._stop_asked_at is None:
            self._stop_asked_at = time.monotonic()
            self._group.tell(StopAndSave())
        grace = self._spec.grace
        if timedelta(seconds=time.monotonic() - self._stop_asked_at) <= grace:
            return self._failure(Cause.PREEMPTED, make_reason("interrupted-twice")) if is_abandoned() else None
        seconds = grace.total_seconds()
        reason = make_reason("upload-unfinished" if self._is_uploading else "no-checkpoint", seconds=seconds)
        return self._failure(Cause.PREEMPTED, reason)


# What the ranks add to a step: the parts of its checkpoint, and their metrics.


@dataclass(slots=True)
class _PendingSave:
    deadline: Deadline
    done: StepDone | None = None
    parts: dict[int, Part] = field(default_factory=dict)


class GroupSaves:
    """Collects the parts of the checkpoints of `world_size` ranks. Rank 0 hands over one checkpoint after the other."""

    def __init__(self, world_size: int, within: timedelta = PARTS_WITHIN) -> None:
        self.world_size = world_size
        self._others = range(1, world_size)
        self._within = within
        self._pending: dict[int, _PendingSave] = {}
        self._failed: set[int] = set()
        self._closed_step = -1  # the last step at which rank 0 hands over no more checkpoint

    def expect(self, step: int) -> None:
        """All ranks are directed to save `step`, which rank 0 may have closed before."""
        self._closed_step = min(self._closed_step, step - 1)

    def hand_over(self, done: StepDone) -> GroupSave | None:
        """Take the directory of rank 0; return the checkpoint if that was its last part."""
        pending = self._at(done.report.step)
        pending.done, pending.deadline = done, Deadline.after(self._within)
        return self._take_complete(done.report.step)

    def add(self, rank: int, part: Part) -> GroupSave | None:
        """Take the part of another rank; return the checkpoint if that was its last part.

        Raises:
            InvalidInput: the rank saves at a step at which rank 0 did not.
        """
        if part.step in self._failed:
            remove_directory(part.directory)
            return None
        if part.step <= self._closed_step and part.step not in self._pending:
            _require_no_files(rank, part)
            return None
        self._at(part.step).parts[rank] = part
        return self._take_complete(part.step)

    def close(self, step: int) -> None:
        """Rank 0 hands over no more checkpoint of `step`: what the others added without one is dropped.

        Raises:
            InvalidInput: a rank saved at a step at which rank 0 did not.
        """
        self._closed_step = max(self._closed_step, step)
        for at in [at for at, pending in self._pending.items() if at <= step and pending.done is None]:
            for rank, part in self._pending.pop(at).parts.items():
                _require_no_files(rank, part)

    def without(self, ended: Collection[int]) -> Reason | None:
        """Return which checkpoint can never be complete, since ranks have ended without their part; else None."""
        for step, pending in self._pending.items():
            gone = [rank for rank in self._others if rank not in pending.parts and rank in ended]
            if pending.done is not None and gone:
                return make_reason("ranks-left-save", ranks=gone, step=step)
        return None

    def overdue(self) -> FailedSave | None:
        """Return a checkpoint whose deadline has passed; its files are removed."""
        for step, pending in self._pending.items():
            if pending.done is None or pending.deadline.remaining_seconds > 0:
                continue
            del self._pending[step]
            self._failed.add(step)
            for directory in (*(part.directory for part in pending.parts.values()), pending.done.checkpoint):
                remove_directory(directory)
            missing = [rank for rank in self._others if rank not in pending.parts]
            reason = make_reason("part-late", ranks=missing, seconds=self._within.total_seconds())
            return FailedSave(pending.done, reason, missing)
        return None

    def _at(self, step: int) -> _PendingSave:
        return self._pending.setdefault(step, _PendingSave(Deadline.after(self._within)))

    def _take_complete(self, step: int) -> GroupSave | None:
        pending = self._pending[step]
        if pending.done is None or not pending.parts.keys() >= set(self._others):
            return None
        del self._pending[step]
        directories = {
            rank: Path(part.directory) for rank, part in sorted(pending.parts.items()) if part.directory is not None
        }
        nodes = tuple(sorted({part.node for part in pending.parts.values() if part.node}))
        return GroupSave(pending.done, directories, nodes)


def _require_no_files(rank: int, part: Part) -> None:
    if part.directory is not None or part.node:
        raise InvalidInput(
            f"rank {rank} reported a checkpoint at step {part.step}, and rank 0 did not: report one on rank 0 too, in "
            "each step in which a rank does"
        )


class GroupMetrics:
    """Collects the metrics that ranks report for a step, whose mean rank 0 waits for."""

    def __init__(self, world_size: int, within: timedelta = PARTS_WITHIN) -> None:
        self._ranks = range(world_size)
        self._within = within
        self._reported: dict[int, dict[int, Mapping[str, object]]] = {}
        self._newest: dict[int, RankMetrics] = {}
        self._directed = 0
        self._step: int | None = None
        self.restart()

    def direct(self, step: int) -> None:
        """Rank 0 has directed what the other ranks do at `step`, for which each waits in `pt.report`."""
        self._directed = step

    def restart(self) -> None:
        """Give the ranks their whole time again: some are not loaded yet."""
        self._deadline = Deadline.after(self._within)

    def add(self, rank: int, reported: RankMetrics) -> MeanMetrics | None:
        """Take what a rank reports; return the mean with the last of them."""
        by_rank = self._reported.setdefault(reported.step, {})
        by_rank[rank], self._newest[rank] = reported.metrics, reported
        if rank == 0:
            self._step = reported.step
            self.restart()
        if not by_rank.keys() >= set(self._ranks):
            return None
        self._step = None
        del self._reported[reported.step]
        return MeanMetrics(step=reported.step, metrics=mean_of([by_rank[rank] for rank in self._ranks]))

    def without(self, ended: Collection[int]) -> Reason | None:
        """Return of which step there can never be a mean, since ranks have ended before it; else None."""
        gone = [rank for rank in self.missing if rank in ended]
        return make_reason("ranks-left-mean", ranks=gone, step=self._step) if gone else None

    def surplus(self) -> Reason | None:
        """Return which rank waits in `pt.report` for rank 0, which has ended; else None."""
        for rank, reported in sorted(self._newest.items()):
            if rank and reported.step > self._directed and not reported.returned:
                return make_reason("surplus-report", rank=rank, step=reported.step)
        return None

    def overdue(self) -> Reason | None:
        """Return which ranks have not reported in time the step that rank 0 waits for; else None."""
        if self._deadline.remaining_seconds > 0:
            return None
        seconds = self._within.total_seconds()
        return make_reason("metrics-late", ranks=self.missing, step=self._step, seconds=seconds)

    @property
    def missing(self) -> Sequence[int]:
        """The ranks whose metrics rank 0 waits for."""
        return [] if self._step is None else [rank for rank in self._ranks if rank not in self._reported[self._step]]
