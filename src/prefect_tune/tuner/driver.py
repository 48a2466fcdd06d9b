"""The main loop of a search: start trials, receive their messages, journal every change, and only then act on it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import assert_never

from prefect_tune.attempt.attempt import CurveReader, next_start
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.search_link import AnswerAwaited, EventsSubmitted
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.clock import begin_run_clock, new_write_id, run_now
from prefect_tune.core.errors import (
    IllegalTransition,
    InvalidInput,
    JournalCorrupt,
    ResumeFailed,
    TuneError,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment, last_report
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial, clonable_checkpoint, clone_for, is_live
from prefect_tune.core.journal.journal import lacks_snapshot
from prefect_tune.core.journal.outbox import POSTS_AT_ONCE, ClosedOutbox, Post, close_outbox, read_posts
from prefect_tune.core.journal_events import (
    AttemptEvent,
    Cause,
    Cloned,
    Committed,
    Event,
    Launched,
    OutboxClosed,
    Received,
    Reported,
    Resumed,
    SlotFreed,
    StopAsked,
    TrialAdded,
)
from prefect_tune.core.operations.trial_gc import collectable_origins
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.restore import adopt
from prefect_tune.core.schedulers.base import Continue
from prefect_tune.core.search.base import Exhausted, Proposed, Wait
from prefect_tune.executors.trial_executor import (
    AttemptCancelledError,
    AttemptExited,
    Message,
    PostReceived,
    RemoteAttemptStarted,
    TrialExecutor,
    have_ended,
)
from prefect_tune.journal_access import JournalWriter, set_attempt_crashed
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.parameters.plan_checks import SearchLimits
from prefect_tune.storage_retries import on_target
from prefect_tune.stores.parallel_map import parallel_map
from prefect_tune.terminal.live_display import NOTICE
from prefect_tune.tuner.decisions import Decisions, FailureHandler
from prefect_tune.tuner.pending_entry import Janitor, PendingEntry
from prefect_tune.tuner.search_policy import ONLY_TRIAL, SearchPolicy, extension_of, finish_of, retry_of, trial_id
from prefect_tune.tuner.stop_requests import Stopping, StopSource

_PATIENCE = timedelta(seconds=0.5)
_TIMEOUT = timedelta(minutes=5)
_STARTS_AT_ONCE = 8  # then trials that train get their answers: a start on a cluster takes some 30 ms of this process


class Driver:
    """One owner's run of an experiment, and the only writer of its journal.

    Each change is journaled, and recorded by the policy, before it takes effect: a resume replays the same changes.
    Attempts in this process submit their events; those on other machines post them, and the driver receives the posts.
    """

    def __init__(
        self,
        spec: TrialSpec,
        limits: SearchLimits,
        policy: SearchPolicy,
        executor: TrialExecutor,
        journal_writer: JournalWriter,
        *,
        log: Log,
        listener: SearchObserver,
        before_training: Callable[[], Sequence[Event]] = tuple,  # called once; the events precede the first attempt
    ) -> None:
        self._spec = spec
        self._listener = listener
        self._before_training = before_training
        self._limits = limits
        self._policy = policy
        self._executor = executor
        self._log = log
        self._target = journal_writer.target
        self._janitor = Janitor(journal_writer.target)
        self._pending_entry = PendingEntry(journal_writer, policy, listener, spec.sync.sync_period, self._janitor)
        self._curves = CurveReader(journal_writer.target, journal_writer.experiment.key) if spec.needs_curve else None
        self._stopping = Stopping(limits, policy, executor, self._pending_entry, self._close_outbox, log)
        self._startable: deque[str] = deque()
        self._failure_handler = FailureHandler(limits, self._pending_entry, self._stopping, self._startable, log)
        self._decisions = Decisions(
            policy, executor, self._pending_entry, self._failure_handler, saves_at_end=spec.cadence.at_end
        )
        self._attempts: dict[str, int] = {}  # number of the attempt before the present one
        self._found: set[str] = set()  # trials whose running attempt was started by an earlier owner
        self._slots: dict[str, tuple[str, float]] = {}  # when each trial got its slot: the run's clock, monotonic
        self._messages: deque[Message] = deque()  # those that are not handled yet
        self._search_is_done = False
        begin_run_clock()

    # ------------------------------------------------------------------------------------------------ the loop

    def run(self, stop_source: StopSource) -> Experiment:
        """Run until nothing is left to do, or a stop is requested; return the state, all of it journaled.

        On any error, running trials are asked to save and end, unless they outlive the search: none is left to wait
        for an answer.
        """
        try:
            return self._run(stop_source)
        except BaseException:
            self._pending_entry.drop_actions()
            with suppress(TuneError):  # the error that ended the search is the one to raise
                have_ended(self._executor, self._spec.grace, self._journal_at_once)
            raise
        finally:
            self._janitor.close()

    def _journal_at_once(self, submitted: Sequence[EventsSubmitted]) -> None:
        """Write what attempts wait for after the loop has failed; they get the error of the write, if that fails."""
        unhandled = [message for message in self._messages if isinstance(message, EventsSubmitted)]
        self._messages.clear()
        for events in (*unhandled, *submitted):
            self._pending_entry.submit(events)
        with suppress(TuneError):
            if self._pending_entry.is_awaited:
                self._pending_entry.write(may_wait=False)

    def _run(self, stop_source: StopSource) -> Experiment:
        self._policy.replay(self._state)
        self._take_up()
        while True:
            self._stopping.heed(stop_source)
            has_free_slots = not self._stopping.ends and self._fill_slots()
            written = self._pending_entry.write(may_wait=len(self._executor) > 0)
            stop_source.journaled(len(written.stop_requests))
            if not len(self._executor):
                if lacks_snapshot(written):
                    self._janitor.write_snapshot(written)
                return self._failure_handler.require_imported(written)
            patience = timedelta(0) if has_free_slots else _PATIENCE
            self._receive(self._executor.poll(patience))

    @property
    def _state(self) -> Experiment:
        """The experiment, with the events that are not written yet."""
        return self._pending_entry.state

    def _put(self, event: Event) -> None:
        self._pending_entry.put(event)

    # ----------------------------------------------------------------------------------------------- the slots

    def _fill_slots(self) -> bool:
        """Start trials, `_STARTS_AT_ONCE` at most; return whether free slots are left for which there may be more."""
        free = self._limits.max_concurrent_trials - len(self._executor)
        for _ in range(min(free, _STARTS_AT_ONCE)):
            if (trial := self._next_trial()) is None:
                return False
            self._start(trial)
        return free > _STARTS_AT_ONCE

    def _next_trial(self) -> str | None:
        while self._startable:
            trial = self._startable.popleft()
            self._settle(trial)
            if not self._is_queued(trial):
                self._decisions.decide_what_is_open(trial)
            state = self._state.trial(trial)
            if self._stopping.ends:
                return None
            if state.phase is Phase.PENDING:
                return trial
            self._let_proceed(state)
        if self._limits.options.reruns_errored == "only":
            return None
        self._stop_unneeded()
        if (paused := self._policy.schedule.resume_next()) is None:
            return None if self._policy.schedule.is_waiting() else self._propose()
        return self._resume(paused)

    def _stop_unneeded(self) -> None:
        while (stopped := self._policy.schedule.stop_next()) is not None and stopped[0] not in self._slots:
            self._put(finish_of(*stopped))

    def _resume(self, trial: str) -> str | None:
        """Resume a paused trial; return None, and wait, while its attempt still saves the checkpoint of the pause."""
        if trial in self._slots:  # the executor has it only once the entry of its start is written
            return None
        self._put(Resumed(trial=trial))
        return trial

    def _propose(self) -> str | None:
        if self._search_is_done:
            return self._without_new_trials()
        match self._policy.suggest():
            case Proposed(config=config):
                spec, trial = self._spec, trial_id(self._policy.proposed) if self._spec.of_search else ONLY_TRIAL
                self._put(
                    TrialAdded(trial=trial, config=config, fingerprint=spec.fingerprint, of_search=spec.of_search)
                )
                return trial
            case Wait():
                is_busy = len(self._executor) or self._pending_entry.is_awaited
                return None if is_busy else self._without_new_trials()
            case Exhausted(reason=reason):
                if self._spec.of_search:
                    are_fewer = len(self._state.trials) < (self._limits.options.trial_count or math.inf)
                    self._log.info("no more trials: %s", reason, extra=NOTICE if are_fewer else None)
                self._search_is_done = True
                return self._without_new_trials()
            case never:
                assert_never(never)

    def _without_new_trials(self) -> str | None:
        self._policy.schedule.exhausted()
        self._stop_unneeded()
        paused = self._policy.schedule.resume_next()
        return self._resume(paused) if paused is not None else None

    def _start(self, trial: str, *, finds: bool = False) -> None:
        if not finds:
            for event in self._before_training():
                self._put(event)
            self._before_training = tuple
            self._exploit(self._state.trial(trial))
            if self._executor.is_remote and self._state.trial(trial).outbox is None:
                self._put(Launched(trial=trial, outbox=self._state.trial(trial).outbox_count + 1))
        state = self._state.trial(trial)
        milestone = self._policy.milestone(state)
        self._attempts[trial] = state.attempt - finds
        self._slots[trial] = run_now(), time.monotonic()
        self._pending_entry.then(lambda: self._request(trial, milestone))
        if finds:
            self._answer_again(trial)

    def _request(self, name: str, milestone: int | None) -> None:
        """Start an attempt, or find it; the journal holds everything that the trial is by now."""
        trial = self._state.trial(name)
        request = AttemptRequest(
            search_term=self._state.term,
            trial=trial.model_copy(update={"past": (), "records": ()}),
            curve=tuple(self._curves.of(trial)) if self._curves is not None and trial.checkpoints else (),
            milestone=milestone,
            saves_first=self._policy.schedule.saves_first,
        )
        self._executor.start(replace(self._spec, trial=self._state.trial_key(name)), request)

    def _exploit(self, trial: Trial) -> None:
        """Clone the newest checkpoint of the trial to exploit, if another step follows it; else of the trial itself.

        The new configuration trains at least one step, so that no result is shown beside a configuration without a
        part in it.
        """
        if (exploit := trial.exploits) is None:
            return
        for source in (exploit.source, trial.trial):
            ref = clonable_checkpoint(self._state.trial(source), self._limits.options.stopper.step_count)
            if ref is not None:
                copy = clone_for(trial, ref, source)
                config, reason = exploit.config, exploit.reason
                self._put(Cloned(trial=trial.trial, checkpoint=copy, source=source, config=config, reason=reason))
                return
            self._log.warning("trial %s has no checkpoint to exploit from which another step can be trained", source)

    def _answer_again(self, name: str) -> None:
        """Send an attempt again what it may have missed: a request to stop, and the answer for its present step."""
        trial = self._state.trial(name)
        if name in self._state.stops:
            self._stopping.tell(name)
        if not trial.step:
            return  # it has not asked yet; step 0 is the key of unasked answers
        milestone = self._policy.milestone(trial)
        if milestone is not None and trial.step >= milestone and trial.exploits is None:
            self._decisions.answer(name, last_report(trial))
        else:
            self._decisions.carry_out(name, trial.exploits or Continue(), trial.step)

    # --------------------------------------------------------------------------------------------- the trials

    def _receive(self, messages: Sequence[Message]) -> None:
        over: list[AttemptExited] = []
        self._messages.extend(messages)
        while self._messages:
            match message := self._messages.popleft():
                case EventsSubmitted():
                    self._note_steps(message.events)
                    before = self._state.trial(message.trial)
                    self._pending_entry.submit(message)
                    self._delete_origins(before)
                case PostReceived():
                    self._note_steps(message.events)
                    self._receive_post(message.trial, message.number, message.events)
                case AnswerAwaited():
                    self._failure_handler.has_trained = True
                    self._decisions.answer(message.trial, message.report)
                case RemoteAttemptStarted():
                    self._answer_again(message.trial)
                case AttemptExited():
                    over.append(message)
                case never:
                    assert_never(never)
        for each in over:
            name = each.trial
            self._executor.forget(name)
            (since, began), trial = self._slots.pop(name), self._state.trial(name)
            if trial.of_search:  # the one slot of a training is its run's
                number, held_seconds = max(trial.attempt, self._attempts[name] + 1), time.monotonic() - began
                self._put(SlotFreed(trial=name, attempt=number, since=since, seconds=round(held_seconds, 3)))
            self._conclude(each)
            trial = self._state.trial(name)
            if name in self._found and trial.phase is Phase.FINISHED and not self._limits.has_had_enough(trial):
                self._put(extension_of(trial))  # it finished by an earlier owner's criterion
                self._startable.append(name)

    def _note_steps(self, events: Sequence[AttemptEvent]) -> None:
        if any(isinstance(event, Reported | Committed) for event in events):
            self._failure_handler.has_trained = True

    def _receive_post(self, name: str, number: int, events: Sequence[AttemptEvent]) -> None:
        """Journal a post of an attempt on another machine, and then delete it, and what it retires."""
        before = self._state.trial(name)
        if before.outbox is None or number != before.post + 1:
            return  # it was received when the outbox was closed
        try:
            self._pending_entry.put_all([Received(trial=name, post=number), *events])
        except IllegalTransition as impossible:
            self._log.error(
                "trial %s: post %d cannot follow the journal, and ends the attempt: %s", name, number, impossible
            )
            self._fence_off(name, before.outbox)
            self._put(OutboxClosed(trial=name))
            return
        folder, outbox = self._state.trial_key(name), before.outbox
        self._pending_entry.after_entry(lambda: self._janitor.delete_post(folder, outbox, number))

        def delete_retired() -> None:
            """Delete the checkpoints that the trial had and has retired by the written journal."""
            trial = self._state.trial(name)
            keys = (folder.checkpoint_key(ref) for ref in before.checkpoints if ref.origin is None)
            if retired := [key for key in keys if not is_live(trial, key)]:
                self._janitor.delete_checkpoints(folder, trial, retired)

        self._pending_entry.after_entry(delete_retired)
        self._delete_origins(before)

    def _delete_origins(self, before: Trial) -> None:
        """Delete retired checkpoints of which the trial had the last clone in the state `before`, after the entry.

        Only the written entry decides: a guest may have quarantined a checkpoint, so that none was retired.
        """
        clones = [ref for ref in before.checkpoints if ref.origin is not None]
        if not clones or self._state.trial(before.trial).checkpoints is before.checkpoints:
            return

        def delete() -> None:
            for key in collectable_origins(self._state, clones):
                self._janitor.delete_checkpoints(key.trial, self._state.trial(key.trial.trial), [key])

        self._pending_entry.after_entry(delete)

    def _fence_off(self, name: str, outbox: int) -> ClosedOutbox:
        """End the trial's outbox on the target: its attempt can post nothing more. Return what it has posted."""
        trial, stamp, owner = self._state.trial(name), new_write_id(), str(self._state.owner)
        return on_target(
            self._target,
            lambda store: close_outbox(store, self._state.trial_key(name), outbox, trial.post, owner, stamp),
            _TIMEOUT,
        )

    def _close_outbox(self, name: str) -> None:
        """Fence off the attempt that posts to the trial's outbox, and receive what it has posted."""
        trial = self._state.trial(name)
        if trial.outbox is None:
            return
        closed = self._fence_off(name, trial.outbox)
        for number, post in enumerate(closed.posts, trial.post + 1):
            self._receive_post(name, number, post.events)
        if closed.damage:
            self._log.error("trial %s: %s. What was posted after it counts no more", name, closed.damage)
        if self._state.trial(name).outbox is not None:  # it has not posted its end
            self._put(OutboxClosed(trial=name))
        if closed.damage and self._state.trial(name).phase is Phase.PENDING:  # its begin is damaged: see `_settle`
            self._put(next_start(self._state.trial(name)))

    def _is_queued(self, name: str) -> bool:
        """Whether an earlier search has launched an attempt that has not begun, and will be found again."""
        trial = self._state.trial(name)
        is_open = trial.outbox is not None and trial.post == 0
        return self._executor.survives_search and is_open and trial.phase is Phase.PENDING

    def _settle(self, name: str) -> None:
        """End an attempt that died without journaling its end, and adopt what it had saved.

        That is also how the commits are found that an attempt has posted after a post that is damaged.
        """
        if not self._is_queued(name):
            self._close_outbox(name)
        trial = self._state.trial(name)
        if trial.phase is Phase.RUNNING:
            if trial.supervisor is not None and self._state.owner is not None:
                set_attempt_crashed(trial.supervisor, self._state.owner)
            for event in on_target(self._target, lambda store: adopt(store, self._state, trials=[name]), _TIMEOUT):
                self._put(event)

    def _conclude(self, over: AttemptExited) -> None:
        """Handle the end of an attempt, by the state of its trial in the journal."""
        self._close_outbox(over.trial)
        trial = self._state.trial(over.trial)
        began = trial.attempt > self._attempts.pop(over.trial)
        if self._failure_handler.conclude_undecided(trial.trial):
            pass
        elif over.error is not None and not (trial.of_search and isinstance(over.error, Exception)):
            raise over.error  # such as KeyboardInterrupt: end the search; a single training ends with any error
        elif isinstance(over.error, AttemptCancelledError) and trial.phase not in ENDED:
            self._stopping.stop_trial(trial.trial, StopAsked(trial=trial.trial, reason=str(over.error)))
        elif isinstance(over.error, ResumeFailed | InvalidInput):
            reason = make_reason("raised", text=str(over.error))
            self._failure_handler.give_up(trial.trial, Cause.USER, reason)
        elif trial.trial in self._state.stops:
            self._stopping.finish(trial.trial)
        elif trial.phase is Phase.PENDING and trial.cause is not None and began:
            self._failure_handler.failed(trial, trial.cause, over.error)
        elif trial.phase is Phase.PENDING and self._stopping.ends:
            self._startable.append(trial.trial)  # the attempt was stopped before it began
        elif trial.phase in (Phase.PENDING, Phase.RUNNING):
            self._failure_handler.lost(trial.trial, over.error)
        else:
            self._let_proceed(trial)

    def _let_proceed(self, trial: Trial) -> None:
        """Resume a paused trial that is to exploit another, or whose pause the scheduler does not know."""
        if self._policy.is_to_resume(trial):
            self._put(Resumed(trial=trial.trial))
            self._startable.append(trial.trial)

    # ------------------------------------------------------------------------------------------------ a resume

    def _take_up(self) -> None:
        """Bring the trials that an earlier owner left unfinished into a state from which they can continue."""
        errored = {each.trial for each in self._state.trials.values() if each.phase is Phase.ERRORED}
        self._receive_posts(list(self._unended().values()))  # a trial that ended unnoticed may have to be extended too
        self._requeue()
        for trial in self._unended():
            if self._limits.options.reruns_errored == "only" and trial not in errored:
                continue
            self._take_on(trial)
        # So that an attempt found again gets a stop as an answer, and is not finished.
        self._pending_entry.write(may_wait=True)

    def _receive_posts(self, trials: Sequence[Trial]) -> None:
        """Receive what attempts have posted since the last search read their outboxes: a part of each at a time.

        They may have posted for days, more than can be read before a deadline; so each part is journaled.
        """

        def read_part(trial: Trial, context: Context) -> Sequence[Post] | None:
            """Return the next posts of a trial from its open outbox, which is its last; None if one cannot be read."""
            folder, outbox = self._state.trial_key(trial.trial), trial.outbox_count
            read = partial(read_posts, trial=folder, outbox=outbox, after=trial.post)
            try:
                return context.run(on_target, self._target, read, _TIMEOUT)
            except (JournalCorrupt, UnknownVersion):
                return None

        while trials := [trial for trial in trials if trial.outbox is not None]:
            parts = list(parallel_map(lambda call: read_part(*call), [(each, copy_context()) for each in trials]))
            unread: list[str] = []
            for trial, posts in zip(trials, parts, strict=True):
                if posts is None:
                    self._close_outbox(trial.trial)
                    continue
                for number, post in enumerate(posts, trial.post + 1):
                    self._receive_post(trial.trial, number, post.events)
                if len(posts) == POSTS_AT_ONCE:
                    unread.append(trial.trial)
            if unread:
                self._pending_entry.write(may_wait=False)
            trials = [self._state.trial(name) for name in unread]

    def _unended(self) -> Mapping[str, Trial]:
        """The trials that continue, without those that the scheduler holds paused."""
        waiting = (Phase.PENDING, Phase.RUNNING)
        trials = self._state.trials.values()
        return {each.trial: each for each in trials if each.phase in waiting or self._policy.is_to_resume(each)}

    def _take_on(self, name: str) -> None:
        trial = self._state.trial(name)
        if self._executor.survives_search and trial.phase is Phase.RUNNING and trial.outbox is not None:
            self._found.add(name)
            self._start(name, finds=True)  # the attempt has outlived its search, and needs no free slot
            return
        self._settle(name)
        if name in self._state.stops:
            self._close_outbox(name)
            self._stopping.finish(name)
            return
        if self._is_queued(name):
            self._startable.append(name)
            return
        self._decisions.decide_what_is_open(name)
        trial = self._state.trial(name)
        self._let_proceed(trial)
        if trial.phase is Phase.PENDING and trial.cause is not None and trial.attempt:
            self._failure_handler.resumed(trial, trial.cause)
        elif trial.phase is Phase.PENDING:
            self._startable.append(name)

    def _requeue(self) -> None:
        """Requeue ended trials: errored ones that this run retries, finished ones that today's criterion extends."""
        for trial in list(self._state.trials.values()):
            if trial.phase is Phase.ERRORED and self._limits.options.reruns_errored:
                self._put(retry_of(trial))
            elif self._limits.options.reruns_errored == "only":
                continue
            elif trial.phase is Phase.FINISHED and not self._limits.has_had_enough(trial):
                self._put(extension_of(trial))
