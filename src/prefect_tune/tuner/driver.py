"""The main loop of a search: start trials, handle their messages, and journal every change before acting on it."""

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

from prefect_tune.attempt.attempt import ReportReader, make_attempt_started
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.search_channel import DecisionAwaited, EventsSubmitted
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.clock import begin_run_clock, new_write_stamp, run_clock_now
from prefect_tune.core.errors import (
    IllegalTransition,
    InvalidInput,
    JournalCorrupt,
    ResumeFailed,
    TuneError,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment, last_report
from prefect_tune.core.experiment.trial_transitions import (
    ENDED_PHASES,
    Phase,
    Trial,
    find_clonable_checkpoint,
    is_live_checkpoint,
    make_clone_ref,
)
from prefect_tune.core.journal.journal import is_final_snapshot_due
from prefect_tune.core.journal.outbox import MAX_POSTS_PER_READ, ClosedOutbox, Post, close_outbox, read_posts
from prefect_tune.core.journal_events import (
    AttemptEvent,
    AttemptLaunched,
    Cause,
    CheckpointCloned,
    CheckpointCommitted,
    Event,
    OutboxClosed,
    PostReceived,
    SlotFreed,
    StepReported,
    StopRequested,
    TrialAdded,
    TrialResumed,
)
from prefect_tune.core.operations.trial_gc import find_collectable_origins
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.restore import make_adoption_events
from prefect_tune.core.schedulers.base import Continue
from prefect_tune.core.search.base import Exhausted, Proposed, Wait
from prefect_tune.executors.trial_executor import (
    AttemptCancelledError,
    AttemptExited,
    Message,
    PostArrived,
    RemoteAttemptStarted,
    TrialExecutor,
    stop_and_wait,
)
from prefect_tune.journal_access import JournalWriter, mark_attempt_crashed
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.parameters.plan_checks import SearchLimits
from prefect_tune.storage_retries import with_store
from prefect_tune.stores.parallel_map import parallel_map
from prefect_tune.terminal.live_display import NOTICE
from prefect_tune.tuner.decisions import DecisionHandler, FailureHandler
from prefect_tune.tuner.pending_entry import BackgroundWorker, PendingEntry
from prefect_tune.tuner.search_policy import (
    ONLY_TRIAL,
    SearchPolicy,
    make_extension_event,
    make_finish_event,
    make_retry_event,
    trial_id,
)
from prefect_tune.tuner.stop_requests import StopHandler, StopSource

_POLL_TIMEOUT = timedelta(seconds=0.5)
_IO_TIMEOUT = timedelta(minutes=5)
_MAX_STARTS = 8  # per pass of the loop, so that running trials get answers soon: a start on a cluster takes some 30 ms


class Driver:
    """One owner's run of an experiment, and the only writer of its journal.

    Each change is journaled, and recorded by the policy, before it takes effect: a resume replays the same changes.
    Attempts in this process submit their events; attempts on other machines post them, and the driver reads the posts.
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
        observer: SearchObserver,
        make_first_events: Callable[[], Sequence[Event]] = tuple,  # called once, before the first attempt
    ) -> None:
        self._spec = spec
        self._observer = observer
        self._make_first_events = make_first_events
        self._limits = limits
        self._policy = policy
        self._executor = executor
        self._log = log
        self._target = journal_writer.target
        self._background_worker = worker = BackgroundWorker(self._target)
        self._pending_entry = PendingEntry(journal_writer, policy, observer, spec.sync.sync_period, worker)
        self._curves = ReportReader(self._target, journal_writer.experiment.key) if spec.needs_history else None
        self._stop_handler = StopHandler(limits, policy, executor, self._pending_entry, self._close_outbox, log)
        self._ready_queue: deque[str] = deque()
        self._failure_handler = FailureHandler(limits, self._pending_entry, self._stop_handler, self._ready_queue, log)
        self._decision_handler = DecisionHandler(
            policy, executor, self._pending_entry, self._failure_handler, saves_at_end=spec.cadence.at_end
        )
        self._previous_attempts: dict[str, int] = {}  # by trial: the number of the attempt before the present one
        self._reattached: set[str] = set()  # trials whose running attempt was started by an earlier owner
        self._slot_starts: dict[str, tuple[str, float]] = {}  # by trial: the run's clock and the monotonic clock
        self._messages: deque[Message] = deque()  # not handled yet
        self._is_search_exhausted = False
        begin_run_clock()

    def run(self, stop_source: StopSource) -> Experiment:
        """Run until nothing is left to do, or a stop is requested; return the fully journaled state.

        On any error, stop the running trials after a save, unless they outlive the search. So no trial waits for an
        answer that never comes.
        """
        try:
            return self._run_loop(stop_source)
        except BaseException:
            self._pending_entry.drop_actions()
            with suppress(TuneError):  # raise the error that ended the search instead
                stop_and_wait(self._executor, self._spec.grace_period, self._journal_submitted_events)
            raise
        finally:
            self._background_worker.close()

    def _journal_submitted_events(self, submitted: Sequence[EventsSubmitted]) -> None:
        """Journal the events that attempts submitted before the loop failed; if the write fails, they get its error."""
        unhandled = [message for message in self._messages if isinstance(message, EventsSubmitted)]
        self._messages.clear()
        for events in (*unhandled, *submitted):
            self._pending_entry.add_submitted(events)
        with suppress(TuneError):
            if self._pending_entry.has_waiters:
                self._pending_entry.write(may_wait=False)

    def _run_loop(self, stop_source: StopSource) -> Experiment:
        self._policy.replay(self._state)
        self._recover_trials()
        while True:
            self._stop_handler.check_stop_causes(stop_source)
            has_free_slots = not self._stop_handler.is_stopping and self._fill_slots()
            written = self._pending_entry.write(may_wait=len(self._executor) > 0)
            stop_source.on_requests_journaled(len(written.stop_requests))
            if not len(self._executor):
                if is_final_snapshot_due(written):
                    self._background_worker.write_snapshot(written)
                self._failure_handler.require_loaded_trainable()
                return written
            poll_timeout = timedelta(0) if has_free_slots else _POLL_TIMEOUT
            self._handle_messages(self._executor.poll_messages(poll_timeout))

    @property
    def _state(self) -> Experiment:
        """The experiment, including events that are not written yet."""
        return self._pending_entry.state

    def _add_event(self, event: Event) -> None:
        self._pending_entry.add_event(event)

    def _fill_slots(self) -> bool:
        """Start at most `_MAX_STARTS` trials; return whether slots are still free and more trials may be ready."""
        free = self._limits.max_concurrent_trials - len(self._executor)
        for _ in range(min(free, _MAX_STARTS)):
            if (trial := self._take_next_trial()) is None:
                return False
            self._start_attempt(trial)
        return free > _MAX_STARTS

    def _take_next_trial(self) -> str | None:
        while self._ready_queue:
            trial = self._ready_queue.popleft()
            self._end_attempt_if_vanished(trial)
            if not self._has_queued_attempt(trial):
                self._decision_handler.decide_missed_milestone(trial)
            state = self._state.trial(trial)
            if self._stop_handler.is_stopping:
                return None
            if state.phase is Phase.PENDING:
                return trial
            self._resume_if_due(state)
        if self._limits.plan.effective_rerun_errored == "only":
            return None
        self._stop_unneeded_trials()
        if (paused_trial := self._policy.schedule.next_trial_to_resume()) is None:
            return None if self._policy.schedule.is_waiting() else self._propose_trial()
        return self._resume_trial(paused_trial)

    def _stop_unneeded_trials(self) -> None:
        schedule = self._policy.schedule
        while (stop := schedule.next_trial_to_stop()) is not None and stop[0] not in self._slot_starts:
            self._add_event(make_finish_event(*stop))

    def _resume_trial(self, trial: str) -> str | None:
        """Resume a paused trial, and return its id; None while its attempt still saves the checkpoint of the pause."""
        if trial in self._slot_starts:  # `_executor` has the trial only after its start is journaled
            return None
        self._add_event(TrialResumed(trial=trial))
        return trial

    def _propose_trial(self) -> str | None:
        if self._is_search_exhausted:
            return self._resume_without_new_trials()
        match self._policy.suggest():
            case Proposed(config=config):
                fingerprint, by_search = self._spec.fingerprint, self._spec.proposed_by_search
                trial = trial_id(self._policy.proposed_count) if by_search else ONLY_TRIAL
                added = TrialAdded(trial=trial, config=config, fingerprint=fingerprint, proposed_by_search=by_search)
                self._add_event(added)
                return trial
            case Wait():
                is_busy = len(self._executor) or self._pending_entry.has_waiters
                return None if is_busy else self._resume_without_new_trials()
            case Exhausted(reason=reason):
                if self._spec.proposed_by_search:
                    are_fewer = len(self._state.trials) < (self._limits.plan.trial_count or math.inf)
                    self._log.info("no more trials: %s", reason, extra=NOTICE if are_fewer else None)
                self._is_search_exhausted = True
                return self._resume_without_new_trials()
            case never:
                assert_never(never)

    def _resume_without_new_trials(self) -> str | None:
        self._policy.schedule.on_search_exhausted()
        self._stop_unneeded_trials()
        paused_trial = self._policy.schedule.next_trial_to_resume()
        return self._resume_trial(paused_trial) if paused_trial is not None else None

    def _start_attempt(self, trial: str, *, reattaches: bool = False) -> None:
        if not reattaches:
            for event in self._make_first_events():
                self._add_event(event)
            self._make_first_events = tuple
            self._clone_for_exploit(self._state.trial(trial))
            if self._executor.is_remote and self._state.trial(trial).outbox is None:
                self._add_event(AttemptLaunched(trial=trial, outbox=self._state.trial(trial).outbox_count + 1))
        state = self._state.trial(trial)
        milestone = self._policy.next_milestone(state)
        self._previous_attempts[trial] = state.attempt - reattaches
        self._slot_starts[trial] = run_clock_now(), time.monotonic()
        self._pending_entry.after_write(lambda: self._send_attempt_request(trial, milestone))
        if reattaches:
            self._resend_answers(trial)

    def _send_attempt_request(self, name: str, milestone: int | None) -> None:
        """Ask the executor to start an attempt, or to reattach to one; the trial's state is journaled."""
        trial = self._state.trial(name)
        request = AttemptRequest(
            search_term=self._state.term,
            trial=trial.model_copy(update={"policy_events": (), "attempt_records": ()}),
            reports=tuple(self._curves.read_reports(trial)) if self._curves is not None and trial.checkpoints else (),
            decision_step=milestone,
            saves_first=self._policy.schedule.saves_first,
        )
        self._executor.start_attempt(replace(self._spec, trial=self._state.trial_key(name)), request)

    def _clone_for_exploit(self, trial: Trial) -> None:
        """Clone the newest checkpoint of the exploited trial that a step can follow; if there is none, one of `trial`.

        The new configuration trains at least one step, so that all metrics shown with it are its own.
        """
        if (exploit := trial.pending_exploit) is None:
            return
        for source in (exploit.source, trial.id):
            ref = find_clonable_checkpoint(self._state.trial(source), self._limits.plan.stopper.step_count)
            if ref is not None:
                copy, config, reason = make_clone_ref(trial, ref, source), exploit.config, exploit.reason
                event = CheckpointCloned(trial=trial.id, checkpoint=copy, source=source, config=config, reason=reason)
                self._add_event(event)
                return
            self._log.warning("trial %s has no checkpoint from which another step can be trained", source)

    def _resend_answers(self, name: str) -> None:
        """Resend the messages that an attempt may have missed: a stop, and the answer for its present step."""
        trial = self._state.trial(name)
        if name in self._state.pending_stops:
            self._stop_handler.send_stop(name)
        if not trial.step:
            return  # the trial has not reported yet; step 0 is the key of unsolicited answers
        milestone = self._policy.next_milestone(trial)
        if milestone is not None and trial.step >= milestone and trial.pending_exploit is None:
            self._decision_handler.answer_report(name, last_report(trial))
        else:
            self._decision_handler.send_decision(name, trial.pending_exploit or Continue(), trial.step)

    def _handle_messages(self, messages: Sequence[Message]) -> None:
        exits: list[AttemptExited] = []
        self._messages.extend(messages)
        while self._messages:
            match message := self._messages.popleft():
                case EventsSubmitted():
                    self._update_has_trained(message.events)
                    before = self._state.trial(message.trial)
                    self._pending_entry.add_submitted(message)
                    self._delete_clone_origins(before)
                case PostArrived():
                    self._update_has_trained(message.events)
                    self._journal_post(message.trial, message.number, message.events)
                case DecisionAwaited():
                    self._failure_handler.has_trained = True
                    self._decision_handler.answer_report(message.trial, message.report)
                case RemoteAttemptStarted():
                    self._resend_answers(message.trial)
                case AttemptExited():
                    exits.append(message)
                case never:
                    assert_never(never)
        for attempt_exit in exits:
            name = attempt_exit.trial
            self._executor.remove_attempt(name)
            (since, began), trial = self._slot_starts.pop(name), self._state.trial(name)
            if trial.proposed_by_search:  # a single training has no slots
                number, held_seconds = max(trial.attempt, self._previous_attempts[name] + 1), time.monotonic() - began
                self._add_event(SlotFreed(trial=name, attempt=number, since=since, seconds=round(held_seconds, 3)))
            self._handle_attempt_exit(attempt_exit)
            trial = self._state.trial(name)
            was_reattached = name in self._reattached
            if was_reattached and trial.phase is Phase.FINISHED and not self._limits.meets_stop_criterion(trial):
                self._add_event(make_extension_event(trial))  # it met only an earlier owner's criterion
                self._ready_queue.append(name)

    def _update_has_trained(self, events: Sequence[AttemptEvent]) -> None:
        if any(isinstance(event, StepReported | CheckpointCommitted) for event in events):
            self._failure_handler.has_trained = True

    def _journal_post(self, name: str, number: int, events: Sequence[AttemptEvent]) -> None:
        """Journal a post of an attempt on another machine; then delete the post and the checkpoints that it retires."""
        before = self._state.trial(name)
        if before.outbox is None or number != before.last_post + 1:
            return  # the post was received when the outbox was closed
        try:
            self._pending_entry.add_events([PostReceived(trial=name, post=number), *events])
        except IllegalTransition as impossible:
            message = "trial %s: the attempt is ended, because its post %d cannot follow the journal: %s"
            self._log.error(message, name, number, impossible)
            self._fence_attempt(name, before.outbox)
            self._add_event(OutboxClosed(trial=name))
            return
        folder, outbox = self._state.trial_key(name), before.outbox
        self._pending_entry.after_next_write(lambda: self._background_worker.delete_post(folder, outbox, number))

        def delete_retired() -> None:
            trial = self._state.trial(name)
            keys = (folder.checkpoint_key(ref) for ref in before.checkpoints if ref.origin is None)
            if retired := [key for key in keys if not is_live_checkpoint(trial, key)]:
                self._background_worker.delete_checkpoints(folder, trial, retired)

        self._pending_entry.after_next_write(delete_retired)
        self._delete_clone_origins(before)

    def _delete_clone_origins(self, before: Trial) -> None:
        """After the next write, delete other trials' retired checkpoints of which this trial had the last clone.

        The state after that write decides: if a non-owner has just quarantined a checkpoint, none was retired.
        """
        clones = [ref for ref in before.checkpoints if ref.origin is not None]
        if not clones or self._state.trial(before.id).checkpoints is before.checkpoints:
            return

        def delete_collectable_origins() -> None:
            for key in find_collectable_origins(self._state, clones):
                self._background_worker.delete_checkpoints(key.trial, self._state.trial(key.trial.trial), [key])

        self._pending_entry.after_next_write(delete_collectable_origins)

    def _fence_attempt(self, name: str, outbox: int) -> ClosedOutbox:
        """Close the trial's outbox on the target, so that its attempt can post nothing more; return the new posts."""
        trial, write_stamp, owner = self._state.trial(name), new_write_stamp(), str(self._state.owner)
        return with_store(
            self._target,
            lambda store: close_outbox(store, self._state.trial_key(name), outbox, trial.last_post, owner, write_stamp),
            _IO_TIMEOUT,
        )

    def _close_outbox(self, name: str) -> None:
        """Fence the attempt that posts to the trial's outbox, and journal its remaining posts."""
        trial = self._state.trial(name)
        if trial.outbox is None:
            return
        closed = self._fence_attempt(name, trial.outbox)
        for number, post in enumerate(closed.posts, trial.last_post + 1):
            self._journal_post(name, number, post.events)
        if closed.damage:
            self._log.error("trial %s: %s. Later posts are ignored", name, closed.damage)
        if self._state.trial(name).outbox is not None:  # the attempt has not posted its end
            self._add_event(OutboxClosed(trial=name))
        if closed.damage and self._state.trial(name).phase is Phase.PENDING:  # the damaged post was its start
            self._add_event(make_attempt_started(self._state.trial(name)))

    def _has_queued_attempt(self, name: str) -> bool:
        """Return whether this run reattaches to an attempt that an earlier run launched and that has not begun."""
        trial = self._state.trial(name)
        is_open = trial.outbox is not None and trial.last_post == 0
        return self._executor.is_detached and is_open and trial.phase is Phase.PENDING

    def _end_attempt_if_vanished(self, name: str) -> None:
        """End an attempt that exited without journaling its end, and adopt its checkpoints.

        This includes the checkpoints that the attempt committed after a damaged post.
        """
        if not self._has_queued_attempt(name):
            self._close_outbox(name)
        trial = self._state.trial(name)
        if trial.phase is Phase.RUNNING:
            if trial.supervisor is not None and self._state.owner is not None:
                mark_attempt_crashed(trial.supervisor, self._state.owner)
            adopt = partial(make_adoption_events, experiment=self._state, trials=[name])
            for event in with_store(self._target, adopt, _IO_TIMEOUT):
                self._add_event(event)

    def _handle_attempt_exit(self, attempt_exit: AttemptExited) -> None:
        """Handle the exit of an attempt, depending on the journaled state of its trial."""
        self._close_outbox(attempt_exit.trial)
        trial, error = self._state.trial(attempt_exit.trial), attempt_exit.error
        has_begun = trial.attempt > self._previous_attempts.pop(trial.id)
        if self._failure_handler.give_up_if_undecidable(trial.id):
            pass
        elif error is not None and not (trial.proposed_by_search and isinstance(error, Exception)):
            raise error  # such as KeyboardInterrupt; any error ends a single training
        elif isinstance(error, AttemptCancelledError) and trial.phase not in ENDED_PHASES:
            self._stop_handler.stop_trial(trial.id, StopRequested(trial=trial.id, reason=str(error)))
        elif isinstance(error, ResumeFailed | InvalidInput):
            self._failure_handler.give_up(trial.id, Cause.TRAINABLE, make_reason("raised", text=str(error)))
        elif trial.id in self._state.pending_stops:
            self._stop_handler.finish_trial(trial.id)
        elif trial.phase is Phase.PENDING and trial.cause is not None and has_begun:
            self._failure_handler.on_attempt_failed(trial, trial.cause, error)
        elif trial.phase is Phase.PENDING and self._stop_handler.is_stopping:
            self._ready_queue.append(trial.id)  # the attempt was stopped before it began
        elif trial.phase in (Phase.PENDING, Phase.RUNNING):
            self._failure_handler.on_attempt_lost(trial.id, error)
        else:
            self._resume_if_due(trial)

    def _resume_if_due(self, trial: Trial) -> None:
        """Resume a paused trial if it exploits another trial, or if the scheduler did not pause it."""
        if self._policy.should_resume(trial):
            self._add_event(TrialResumed(trial=trial.id))
            self._ready_queue.append(trial.id)

    def _recover_trials(self) -> None:
        """Prepare the trials that an earlier owner left unfinished, so that they can continue."""
        errored = {trial.id for trial in self._state.trials.values() if trial.phase is Phase.ERRORED}
        # Before requeuing: a trial whose end is not read yet may have to be extended too.
        self._journal_unread_posts(list(self._find_unfinished_trials().values()))
        self._requeue_ended_trials()
        for name in self._find_unfinished_trials():
            if self._limits.plan.effective_rerun_errored == "only" and name not in errored:
                continue
            self._recover_trial(name)
        # Write now, so that a stop reaches a reattached attempt as an answer, and does not finish its trial.
        self._pending_entry.write(may_wait=True)

    def _journal_unread_posts(self, trials: Sequence[Trial]) -> None:
        """Journal unread posts in batches: the posts of several days are too many for one timeout."""

        def read_next_posts(trial: Trial, context: Context) -> Sequence[Post] | None:
            """Return the next posts in a trial's open outbox; None if a post cannot be read."""
            folder, outbox = self._state.trial_key(trial.id), trial.outbox_count
            read_trial_posts = partial(read_posts, trial=folder, outbox=outbox, after=trial.last_post)
            try:
                return context.run(with_store, self._target, read_trial_posts, _IO_TIMEOUT)
            except (JournalCorrupt, UnknownVersion):
                return None

        while trials := [trial for trial in trials if trial.outbox is not None]:
            calls = [(trial, copy_context()) for trial in trials]
            results = list(parallel_map(lambda call: read_next_posts(*call), calls))
            unread_trials: list[str] = []
            for trial, posts in zip(trials, results, strict=True):
                if posts is None:
                    self._close_outbox(trial.id)
                    continue
                for number, post in enumerate(posts, trial.last_post + 1):
                    self._journal_post(trial.id, number, post.events)
                if len(posts) == MAX_POSTS_PER_READ:
                    unread_trials.append(trial.id)
            if unread_trials:
                self._pending_entry.write(may_wait=False)
            trials = [self._state.trial(name) for name in unread_trials]

    def _find_unfinished_trials(self) -> Mapping[str, Trial]:
        """Return the trials to continue: pending ones, running ones, and paused ones that resume at once."""
        phases = (Phase.PENDING, Phase.RUNNING)
        trials = self._state.trials.values()
        return {trial.id: trial for trial in trials if trial.phase in phases or self._policy.should_resume(trial)}

    def _recover_trial(self, name: str) -> None:
        trial = self._state.trial(name)
        if self._executor.is_detached and trial.phase is Phase.RUNNING and trial.outbox is not None:
            self._reattached.add(name)
            self._start_attempt(name, reattaches=True)  # the attempt outlived its search, and needs no free slot
            return
        self._end_attempt_if_vanished(name)
        if name in self._state.pending_stops:
            self._close_outbox(name)
            self._stop_handler.finish_trial(name)
            return
        if self._has_queued_attempt(name):
            self._ready_queue.append(name)
            return
        self._decision_handler.decide_missed_milestone(name)
        trial = self._state.trial(name)
        self._resume_if_due(trial)
        if trial.phase is Phase.PENDING and trial.cause is not None and trial.attempt:
            self._failure_handler.recover_failed_trial(trial, trial.cause)
        elif trial.phase is Phase.PENDING:
            self._ready_queue.append(name)

    def _requeue_ended_trials(self) -> None:
        """Requeue errored trials that this run retries, and finished trials that no longer meet the stop criterion."""
        for trial in list(self._state.trials.values()):
            if trial.phase is Phase.ERRORED and self._limits.plan.effective_rerun_errored:
                self._add_event(make_retry_event(trial))
            elif self._limits.plan.effective_rerun_errored == "only":
                continue
            elif trial.phase is Phase.FINISHED and not self._limits.meets_stop_criterion(trial):
                self._add_event(make_extension_event(trial))
