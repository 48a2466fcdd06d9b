"""Supervise one attempt: receive the messages of its ranks, queue its checkpoints for commit, return the outcome.

A single process is rank 0. Of several, rank 0 reports and decides; the others add to its checkpoints. The attempt ends
with the end of rank 0, or with the first failure of a rank: the others may wait for that one in a collective operation
for hours, so they are ended, after the moment in which a failure that caused another becomes known.

When the whole run stops, the trial has `spec.grace` to save, and is then killed. A trial that is stopped alone gets a
`Leave`, and has no limit: `tuner/stop_requests.py`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from datetime import timedelta
from operator import itemgetter
from typing import assert_never

from prefect_tune.attempt.commit_worker import USERS_FAULT, CommitWorker
from prefect_tune.attempt.group_saves import FailedSave, GroupMetrics, GroupSave, GroupSaves
from prefect_tune.attempt.processes.process_channel import OWN_SIGNALS
from prefect_tune.attempt.processes.rank_group import OWN, RankEnded, RankGroup
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
    MilestoneReached,
    Part,
    RankMetrics,
    SaveFailed,
    StepDone,
    StopAndSave,
    TrainableLoaded,
    TrialEnded,
)
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
_ALL_JOIN_WITHIN = timedelta(minutes=10)
"""How long the ranks of a launcher have to join after the first of them: their imports differ, and their setup."""
_FAILED_SAVES = 2
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
        self._meter = meter
        self._expect_ranks()
        self._commit_worker = commit_worker
        self._spec = spec
        self._link = link
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
        self._not_whole: queue.SimpleQueue[FailedSave] = queue.SimpleQueue()
        """Checkpoints to which a node did not add its part; the commit worker's thread adds them."""
        self._failed_saves: list[Reason] = []
        """Why the last checkpoints were not committed, since the last one that was."""
        self._loaded: set[int] = set()
        self._leave: Leave | None = None
        self._first_join: Deadline | None = None
        self._last_message_at: float | None = None  # None until the trainable is loaded: loading may take any time
        self._asks = False
        link.connect(self._answer)
        self._asked_at: float | None = None

    def run(self) -> Outcome:
        while True:
            try:
                received = self._group.receive(_TICK)
                outcome = self._took_in(*received) if received else self._waited_enough()
            except RankEnded as ended:
                outcome = self._gone(ended)
            except InvalidInput as error:
                outcome = self._failed(Cause.USER, make_reason("invalid-use", text=str(error)))
            self._meter.look(self._phase())
            if outcome is not None:
                return outcome

    def _expect_ranks(self) -> None:
        """Begin to collect what the ranks of the group do: their number is known, or has become known."""
        count = self._group.world_size
        self._saves, self._metrics = GroupSaves(count), GroupMetrics(count)

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

    def _phase(self) -> str:
        is_saving = self._is_uploading and self._spec.sync.commit == "sync"
        return "waiting" if self._asks else "saving" if is_saving else "training"

    @property
    def _is_uploading(self) -> bool:
        return self._committed + self._given_up < self._handed_over

    def _took_in(self, rank: int, message: FromTrial) -> Outcome | None:
        self._note(rank, message)
        match message:
            case Join():
                self._has_joined(rank)
            case StepDone() if rank == OWN:
                raise InvalidInput(_REPORTS_TWICE)
            case Part():
                self._commit(self._saves.add(rank, message))
            case RankMetrics():
                self._add_metrics(rank, message)
            case Directive():
                self._pass_on(message)
            case TrainableLoaded(code=code, pid=pid):
                self._has_loaded(rank, pid)
                self._commit_worker.code = code
            case MilestoneReached(report=report):
                self._asks = True
                self._link.ask(report)
            case StepDone():
                self._take_down(message)
            case TrialEnded():
                return self._rank_ended(rank, message)
            case _:
                assert_never(message)
        return self._waited_enough()

    def _note(self, rank: int, message: FromTrial) -> None:
        if rank in (0, OWN):
            self._meter.received(message)
        if self._last_message_at is not None:
            self._last_message_at = time.monotonic()

    def _has_loaded(self, rank: int, pid: int) -> None:
        """From when all ranks are loaded on, silence is no loading."""
        if self._group.is_here(rank):  # another machine's process may have the number of one of this machine
            self._meter.loaded(pid, decides=rank in (0, OWN))
        self._loaded.add(rank)
        if len(self._loaded) >= self._group.world_size:
            self._last_message_at = time.monotonic()

    def _has_joined(self, rank: int) -> None:
        if self._steps and self._first_join is None:
            raise InvalidInput(_REPORTS_TWICE)
        self._first_join = self._first_join or Deadline.after(_ALL_JOIN_WITHIN)
        if self._saves.world_size != self._group.world_size:
            self._expect_ranks()
        if rank == 0 and self._asked_at is not None:
            self._group.tell(StopAndSave())
        if rank == 0 and self._leave is not None:
            self._group.tell(self._leave)

    def _add_metrics(self, rank: int, message: RankMetrics) -> None:
        if (mean := self._metrics.add(rank, message)) is not None:
            self._group.tell(mean)

    def _pass_on(self, directive: Directive) -> None:
        if directive.saves:
            self._saves.expect(directive.step)
        self._metrics.direct(directive.step)
        self._group.tell_others(directive)
        if not directive.saves:
            self._saves.close(directive.step)

    def _rank_ended(self, rank: int, message: TrialEnded) -> Outcome | None:
        self._group.leave(rank)
        self._ended_ranks.add(rank)
        # A process speaks for its own trial; what it used, and whether its checkpoint is to blame, is decided here.
        outcome = message.outcome.model_copy(update={"trial": self._spec.trial.trial, "use": None})
        if isinstance(outcome, AttemptEnded):
            outcome = outcome.model_copy(update={"at_start": False})
        if not message.raised or not isinstance(outcome, AttemptEnded):
            # A rank of a launcher may return before the function that has started it, and others after it. Only the
            # end of rank 0 says that all is trained: a launcher that was killed, or is not waited for, returns too.
            if message.has_returned:
                self._returned.add(rank)
                self._rank_ends[rank] = _RETURNED
            if rank == OWN and self._group.is_launched and 0 not in self._ended_ranks:
                self._rank_0_ends_until = Deadline.after(_OTHERS_END_WITHIN)
                return self._waited_enough()
            decides = rank == OWN or (rank == 0 and not (message.has_returned and OWN in self._group.open_ranks))
            return self._end_with(self._whole(outcome)) if decides else self._waited_enough()
        cause, reason, memory = outcome.cause, outcome.reason, None
        if cause is Cause.MACHINE and self._group.is_here(rank) and self._meter.is_out_of_memory(is_killed=False):
            cause = Cause.OUT_OF_MEMORY  # what the trial has started was killed
        if cause is Cause.OUT_OF_MEMORY and self._group.is_here(rank):
            memory = self._meter.memory_reason()
        if isinstance(reason, Reason):
            # The other lines, and the place, differ by rank: ranks that ended alike are listed together.
            text, kind = first_line(reason.arguments.get("text", "")), reason.arguments.get("type")
            self._rank_ends[rank] = make_reason(reason.code, type=kind, text=text)
            reason = make_reason(reason.code, **{**reason.arguments, "rank": self._number_of(rank), "memory": memory})
        failed = self._failed(cause, reason)
        if rank > 0 and isinstance(self._end, Finished) and not message.after_end:
            self._end = failed  # rank 0 has trained its last step before this rank
            return self._waited_enough()
        return self._fail(failed, _FAILED, rank)

    def _end_with(self, outcome: Outcome) -> Outcome | None:
        """Return the outcome once the other ranks have ended too, or their time for that has passed."""
        if self._end is None and not self._failures:
            self._end, self._ends_until = outcome, Deadline.after(_OTHERS_END_WITHIN if self._steps else _TICK)
        return self._waited_enough()

    def _whole(self, outcome: Outcome) -> Outcome:
        """Return a failure in place of the end of a trial whose last checkpoint was not committed."""
        is_lacking = self._failed_saves and isinstance(outcome, Finished)
        return self._failed(Cause.MACHINE, self._failed_saves[-1]) if is_lacking else outcome

    def _gone(self, ended: RankEnded) -> Outcome | None:
        self._ended_ranks.add(ended.rank)
        if not ended.is_gone:
            self._rank_ends[ended.rank] = first_line(ended)
            reason = make_reason("invalid-use", text=str(ended), rank=self._number_of(ended.rank))
            return self._failed(Cause.USER, reason)
        if ended.rank > 0 and self._group.is_led and isinstance(self._end, Finished):
            self._rank_ends[ended.rank] = _RETURNED  # rank 0 had started it, and has ended
            return self._waited_enough()
        is_ended = self._group.is_launched and ended.rank not in self._group.died_by_themselves
        return self._fail(self._died(ended.rank), _FAILED if is_ended else _DIED, ended.rank)

    def _fail(self, failed: AttemptEnded, place: int, rank: int = OWN) -> Outcome | None:
        """Return the failure, once those that may have caused it are known; `place` is among what causes what."""
        if self._end is None:
            if self._ends_until is None:
                self._ends_until = Deadline.after(_CAUSE_WITHIN * self._group.node_count)
            self._failures.append((place, failed, rank))
        else:
            self._commit_worker.log.warning("after the end of the trial: %s", first_line(failed.reason))
        return self._waited_enough()

    def _number_of(self, rank: int) -> int | None:
        """Return the rank for a reason; None where it is the only one, or the process that has started the ranks."""
        return rank if self._group.world_size > 1 and rank != OWN else None

    def _take_down(self, done: StepDone) -> None:
        """Note a report for the next entry, and hand over its checkpoint; write at once if the search is to decide."""
        if done.is_reported:
            self._save(done)
            return
        self._steps += 1
        self._warn_of_returned()
        is_read = done.asks and self._link.asks_by_report
        if is_read:
            self._commit_worker.asks_at = done.report.step
        self._commit_worker.note(done.report)
        if done.checkpoint is not None:
            self._save(done)
        if is_read:
            self._commit_worker.flush()
        self._asks = done.asks
        if done.asks:
            self._link.ask(done.report)

    def _warn_of_returned(self) -> None:
        """Say once that ranks have returned and rank 0 trains on; a rank follows each step before it returns."""
        if early := sorted(self._returned - {0, OWN}):
            self._returned.clear()
            which = ", ".join(map(str, early))
            self._commit_worker.log.warning(
                "rank %s has returned, and rank 0 reported another step: every rank calls pt.report once in each step, "
                "or the ranks do not save and end together",
                which,
            )

    def _save(self, done: StepDone) -> None:
        self._handed_over += 1
        self._commit(self._saves.hand_over(done))

    def _commit(self, save: GroupSave | None) -> None:
        if save is not None:
            self._commit_worker.save(save, self._saved, self._not_whole.put)

    def _failed_save(self) -> Outcome | None:
        """Fail a checkpoint that is overdue; return the outcome if the trial cannot do without it."""
        if (reason := self._saves.without(self._ended_ranks)) is not None:
            return self._fail(self._failed(Cause.USER, reason), _ENDED_EARLY)
        if (failed := self._saves.overdue()) is None:
            if self._not_whole.empty():
                return None
            failed = self._not_whole.get()
        self._given_up += 1
        reason = make_reason("not-committed", step=failed.step, error=failed.reason)
        self._failed_saves.append(reason)
        if failed.done.finish_reason is not None or len(self._failed_saves) >= _FAILED_SAVES:
            self._rank_ends |= dict.fromkeys(failed.ranks, make_reason("rank-without-part"))
            return self._failed(Cause.MACHINE, reason)
        self._commit_worker.log.warning(
            "%s; training continues. Every rank calls pt.report in each step, with or without a checkpoint", reason
        )
        self._group.tell(SaveFailed(step=failed.step))
        return None

    def _answer(self, answer: Answer) -> None:
        if self._asks and self._last_message_at is not None:  # it waited for this; an unasked message is no progress
            self._last_message_at = time.monotonic()
        self._asks = False
        if isinstance(answer, Leave):
            self._leave = answer
        self._group.tell(answer)

    def _saved(self, step: int) -> None:
        self._group.tell(CheckpointSaved(step=step))
        self._last_message_at = time.monotonic()
        self._committed += 1
        self._failed_saves.clear()

    def _waited_enough(self) -> Outcome | None:
        """Return the outcome if a commit failed, the grace period expired or the trial is hung; None otherwise."""
        if self._commit_worker.error is not None:
            return self._not_written(self._commit_worker.error)
        if isinstance(self._end, Finished) and (reason := self._metrics.surplus()) is not None:
            return self._failed(Cause.USER, reason)
        if self._ends_until is not None:
            if self._group.open_ranks and self._ends_until.remaining_seconds:
                return None
            self._say_who_goes_on()
            return self._end or min(self._failures, key=itemgetter(0))[1]
        if self._rank_0_ends_until is not None and self._rank_0_ends_until.remaining_seconds <= 0:
            seconds = _OTHERS_END_WITHIN.total_seconds()
            return self._failed(Cause.MACHINE, make_reason("launcher-returned", seconds=seconds))
        if (failed := self._failed_save()) is not None:
            return failed
        if (absent := self._absent() or self._lacking_metrics()) is not None:
            return absent
        if self._link.stop.is_set():
            return self._ask_to_stop()
        if self._is_uploading or self._asks:
            return None  # it may wait for an upload, which has its own timeout, or for an answer
        if self._spec.silence is None or self._last_message_at is None:
            return None
        silent = timedelta(seconds=time.monotonic() - self._last_message_at)
        if silent <= self._spec.silence:
            return None
        return self._failed(Cause.MACHINE, make_reason("silent", seconds=silent.total_seconds()))

    def _not_written(self, error: BaseException) -> AttemptEnded:
        if isinstance(error, USERS_FAULT):
            return self._failed(Cause.USER, make_reason("save-failed", error=str(error)))
        return self._failed(Cause.MACHINE, make_reason("write-failed", error=f"{type(error).__name__}: {error}"))

    def _absent(self) -> Outcome | None:
        """Return the failure of ranks that a launcher has not started, or that did not join in time."""
        if self._first_join is None or self._first_join.remaining_seconds > 0:
            return None
        if not (missing := self._group.missing_ranks):
            return None
        ranks = {"ranks": list(missing), "world_size": self._group.world_size}
        reason = make_reason("ranks-missing", **ranks, seconds=_ALL_JOIN_WITHIN.total_seconds())
        return self._failed(Cause.USER, reason)

    def _lacking_metrics(self) -> Outcome | None:
        """Return the failure of ranks whose metrics rank 0 waits for, and that have ended or are late."""
        if not self._metrics.missing:
            return None
        if (reason := self._metrics.without(self._ended_ranks)) is not None:
            return self._fail(self._failed(Cause.USER, reason), _ENDED_EARLY)
        if self._last_message_at is None or self._group.missing_ranks:
            self._metrics.restart()
        if (reason := self._metrics.overdue()) is None:
            return None
        self._rank_ends |= dict.fromkeys(self._metrics.missing, make_reason("rank-without-report"))
        return self._failed(Cause.MACHINE, reason)

    def _say_who_goes_on(self) -> None:
        going_on = sorted(each for each in self._group.open_ranks if each > 0)
        if self._end is not None and going_on and self._steps:
            ranks, within = ", ".join(map(str, going_on)), _OTHERS_END_WITHIN.total_seconds()
            self._commit_worker.log.warning("rank %s had not ended %g s after rank 0, and was ended", ranks, within)
            self._rank_ends |= dict.fromkeys(going_on, make_reason("rank-outlived", seconds=within))

    def _ask_to_stop(self) -> Outcome | None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._group.tell(StopAndSave())
        waited = timedelta(seconds=time.monotonic() - self._asked_at)
        if waited <= self._spec.grace:
            return self._failed(Cause.PREEMPTED, make_reason("interrupted-twice")) if is_abandoned() else None
        seconds, is_uploading = self._spec.grace.total_seconds(), self._is_uploading
        reason = make_reason("upload-unfinished" if is_uploading else "no-checkpoint", seconds=seconds)
        return self._failed(Cause.PREEMPTED, reason)

    def _died(self, rank: int) -> AttemptEnded:
        end = self._group.end(rank)
        self._rank_ends[rank] = rank_end_reason(end)
        is_killed = end.signal == "SIGKILL"
        is_hidden = end.reason is not None and end.reason.code == "rank-vanished"  # only its launcher knows its end
        if (is_killed or is_hidden) and self._group.is_here(rank) and self._meter.is_out_of_memory(is_killed=is_killed):
            reason = process_end_reason(end, self._number_of(rank), self._meter.memory_reason())
            return self._failed(Cause.OUT_OF_MEMORY, reason)
        is_own_end = end.exit_code is not None or end.signal in OWN_SIGNALS
        cause = Cause.USER if is_own_end else Cause.MACHINE
        return self._failed(cause, process_end_reason(end, self._number_of(rank)))

    def _failed(self, cause: Cause, reason: AnyReason) -> AttemptEnded:
        loaded = self._last_message_at is not None  # a checkpoint cannot cause a failure before loading
        at_start = cause is Cause.USER and loaded and self._steps == 0
        return AttemptEnded(trial=self._spec.trial.trial, cause=cause, reason=reason, at_start=at_start)
