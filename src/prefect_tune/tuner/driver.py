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
    format_trial_id,
    make_extension_event,
    make_finish_event,
    make_retry_event,
)
from prefect_tune.tuner.stop_requests import StopHandler, StopSource

_POLL_TIMEOUT = timedelta(seconds=0.5)
_IO_TIMEOUT = timedelta(minutes=5)
_MAX_STARTS = 8  # per pass of the loop; a start on a cluster takes 30 ms, and running trials get no answer meanwhile


class Driver:
    """Drives an experiment during one owner's term, and writes the owner's entries in its journal.

    Each change is journaled, and recorded by the policy, before it takes effect, so that a resume can replay it.
    Attempts in this process submit their events; attempts on other machines post them, and the driver reads the posts.

    When an attempt has exited, these methods act, in this order:

    1. `_handle_attempt_exit` journals the remaining posts. Depending on the error, pending stops and the phase, the
       trial is finished, given up, or added to `_ready_queue`. Trials that the scheduler paused wait for the scheduler.
    2. `_take_next_trial` takes the trial from the queue once a slot is free. Only now does it end a lost attempt in the
       journal, and make a missed decision. If the decision ends or pauses the trial, the trial does not start.
    3. `_start_attempt` journals what the next attempt needs; after the write, the executor starts the attempt.
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
        make_code_change_events: Callable[[], Sequence[Event]] = tuple,  # called once, before the first attempt
    ) -> None:
        self._spec = spec
        self._observer = observer
        self._make_code_change_events = make_code_change_events
        self._limits = limits
        self._policy = policy
        self._executor = executor
        self._log = log
        self._target = journal_writer.target
        self._background_worker = worker = BackgroundWorker(self._target)
        self._pending_entry = entry = PendingEntry(journal_writer, policy, observer, spec.sync.sync_period, worker)
        self._report_reader = ReportReader(self._target, journal_writer.experiment.key) if spec.needs_history else None
        self._stop_handler = StopHandler(limits, policy, executor, entry, self._close_outbox, log)
        self._ready_queue: deque[str] = deque()
        self._failure_handler = FailureHandler(limits, entry, self._stop_handler, self._ready_queue, log)
        self._decision_handler = DecisionHandler(
            policy, executor, entry, self._failure_handler, saves_at_end=spec.cadence.at_end
        )
        self._previous_attempt_numbers: dict[str, int] = {}  # by running trial: number of its previous attempt
        self._reattached_trials: set[str] = set()  # the trials whose attempt was launched by an earlier owner
        self._slot_starts: dict[str, tuple[str, float]] = {}  # by trial: when it took its slot (run clock, monotonic)
        self._messages: deque[Message] = deque()  # not handled yet
        self._is_search_exhausted = False
        begin_run_clock()

    def run(self, stop_source: StopSource) -> Experiment:
        """Run until nothing is left to do, or a stop is requested; return the fully journaled state.

        On any error, stop the running trials after a save, unless they outlive the search, so that no trial waits for
        an answer that never comes.
        """
        try:
            return self._run_loop(stop_source)
        except BaseException:
            self._pending_entry.drop_actions()
            with suppress(TuneError):  # raise the error that ended the search, not an error of this stop
                stop_and_wait(self._executor, self._spec.grace_period, self._write_submitted_events)
            raise
        finally:
            self._background_worker.close()

    def _write_submitted_events(self, submitted: Sequence[EventsSubmitted]) -> None:
        """Journal the events that attempts submitted before the loop failed; if the write fails, they get the error."""
        unhandled, self._messages = self._messages, deque()
        for message in (*unhandled, *submitted):
            if isinstance(message, AttemptExited):
                self._executor.remove_attempt(message.trial)
            elif isinstance(message, EventsSubmitted):
                with suppress(Exception):  # such as an error of the scheduler; the attempt gets it too
                    self._pending_entry.add_submitted(message)
        with suppress(TuneError):
            if unhandled or submitted or self._pending_entry.has_unfinished_work:
                self._pending_entry.write(may_defer=False)

    def _run_loop(self, stop_source: StopSource) -> Experiment:
        self._policy.replay(self._experiment)
        self._recover_trials()
        while True:
            self._stop_handler.check_stop_causes(stop_source)
            has_free_slots = not self._stop_handler.is_stopping and self._fill_slots()
            written = self._pending_entry.write(may_defer=len(self._executor) > 0)
            stop_source.on_requests_journaled(len(written.stop_requests))
            if not len(self._executor):
                if is_final_snapshot_due(written):
                    self._background_worker.write_snapshot(written)
                self._failure_handler.require_loaded_trainable()
                return written
            poll_timeout = timedelta(0) if has_free_slots else _POLL_TIMEOUT
            self._handle_messages(self._executor.poll_messages(poll_timeout))

    @property
    def _experiment(self) -> Experiment:
        """The experiment, including events that are not written yet."""
        return self._pending_entry.state

    def _add_event(self, event: Event) -> None:
        self._pending_entry.add_event(event)

    def _fill_slots(self) -> bool:
        """Start at most `_MAX_STARTS` trials; return whether slots are still free and more trials may be ready."""
        free = self._limits.max_concurrent_trials - len(self._executor)
        for _ in range(min(free, _MAX_STARTS)):
            if (trial_id := self._take_next_trial()) is None:
                return False
            self._start_attempt(trial_id)
        return free > _MAX_STARTS

    def _take_next_trial(self) -> str | None:
        while self._ready_queue:
            trial_id = self._ready_queue.popleft()
            self._end_attempt_if_lost(trial_id)
            if not self._awaits_first_post(trial_id):
                self._decision_handler.decide_missed_milestone(trial_id)
            trial = self._experiment.trial(trial_id)
            if self._stop_handler.is_stopping:
                return None
            if trial.phase is Phase.PENDING:
                return trial_id
            self._resume_unless_scheduler_paused(trial)
        if self._limits.plan.effective_rerun_errored == "only":
            return None
        self._end_unneeded_trials()
        if (paused_id := self._policy.schedule.next_trial_to_resume()) is None:
            return None if self._policy.schedule.is_waiting() else self._propose_trial()
        return self._resume_trial(paused_id)

    def _holds_slot(self, trial_id: str) -> bool:
        """Return whether the trial has an attempt that runs, or whose start is requested after the next write."""
        return trial_id in self._slot_starts

    def _end_unneeded_trials(self) -> None:
        schedule = self._policy.schedule
        while (stop := schedule.next_trial_to_stop()) is not None and not self._holds_slot(stop[0]):
            self._add_event(make_finish_event(*stop))

    def _resume_trial(self, trial_id: str | None) -> str | None:
        """Resume a paused trial, and return its id; None while its attempt still saves the checkpoint of the pause."""
        if trial_id is None or self._holds_slot(trial_id):
            return None
        self._add_event(TrialResumed(trial=trial_id))
        return trial_id

    def _propose_trial(self) -> str | None:
        if self._is_search_exhausted:
            return self._resume_without_new_trials()
        match self._policy.suggest():
            case Proposed(config=config):
                fingerprint, by_search = self._spec.fingerprint, self._spec.proposed_by_search
                trial_id = format_trial_id(self._policy.proposed_count) if by_search else ONLY_TRIAL
                added = TrialAdded(trial=trial_id, config=config, fingerprint=fingerprint, proposed_by_search=by_search)
                self._add_event(added)
                return trial_id
            case Wait():  # a trial whose start is not sent yet is busy, too: its end may let the search propose
                is_busy = len(self._executor) or self._pending_entry.has_unfinished_work
                return None if is_busy else self._resume_without_new_trials()
            case Exhausted(reason=reason):
                if self._spec.proposed_by_search:
                    are_fewer = len(self._experiment.trials) < (self._limits.plan.trial_count or math.inf)
                    self._log.info("no more trials: %s", reason, extra=NOTICE if are_fewer else None)
                self._is_search_exhausted = True
                return self._resume_without_new_trials()
            case never:
                assert_never(never)

    def _resume_without_new_trials(self) -> str | None:
        self._policy.schedule.on_no_new_trial()
        self._end_unneeded_trials()
        return self._resume_trial(self._policy.schedule.next_trial_to_resume())

    def _start_attempt(self, trial_id: str, *, reattaches: bool = False) -> None:
        if not reattaches:
            for event in self._make_code_change_events():
                self._add_event(event)
            self._make_code_change_events = tuple
            self._clone_for_exploit(self._experiment.trial(trial_id))
            trial = self._experiment.trial(trial_id)
            if self._executor.is_remote and trial.outbox is None:
                self._add_event(AttemptLaunched(trial=trial_id, outbox=trial.outbox_count + 1))
        trial = self._experiment.trial(trial_id)
        milestone = self._policy.next_milestone(trial)
        self._previous_attempt_numbers[trial_id] = trial.attempt - reattaches
        self._slot_starts[trial_id] = run_clock_now(), time.monotonic()
        self._pending_entry.run_after_forced_write(lambda: self._send_attempt_request(trial_id, milestone))
        if reattaches:
            self._resend_answers(trial_id)

    def _send_attempt_request(self, trial_id: str, milestone: int | None) -> None:
        """Ask the executor to start an attempt, or to reattach to one; the journal already has the trial's state."""
        trial, reader = self._experiment.trial(trial_id), self._report_reader
        request = AttemptRequest(
            owner_term=self._experiment.term,
            trial=trial.model_copy(update={"policy_events": (), "attempt_records": ()}),
            reports=tuple(reader.read_reports(trial)) if reader is not None and trial.checkpoints else (),
            milestone=milestone,
            saves_first=self._policy.schedule.saves_first,
        )
        self._executor.start_attempt(replace(self._spec, trial=self._experiment.trial_key(trial_id)), request)

    def _clone_for_exploit(self, trial: Trial) -> None:
        """Clone the newest checkpoint that leaves a step to train: the exploited trial's or, if it has none, `trial`'s.

        The new configuration trains at least one step, so that all metrics shown with it are its own.
        """
        if (exploit := trial.pending_exploit) is None:
            return
        for source in (exploit.source, trial.id):
            ref = find_clonable_checkpoint(self._experiment.trial(source), self._limits.plan.stopper.step_count)
            if ref is not None:
                copy, config, reason = make_clone_ref(trial, ref, source), exploit.config, exploit.reason
                event = CheckpointCloned(trial=trial.id, checkpoint=copy, source=source, config=config, reason=reason)
                self._add_event(event)
                return
            self._log.warning("trial %s has no checkpoint from which another step can be trained", source)

    def _resend_answers(self, trial_id: str) -> None:
        """Resend the messages that an attempt may have missed: a stop, and the answer for its present step."""
        trial = self._experiment.trial(trial_id)
        if trial_id in self._experiment.pending_stops:
            self._stop_handler.send_stop(trial_id)
        if not trial.step:
            return  # the trial has not reported, so it waits for no answer
        milestone = self._policy.next_milestone(trial)
        if milestone is not None and trial.step >= milestone and trial.pending_exploit is None:
            self._decision_handler.answer_report(trial_id, last_report(trial))
        else:
            self._decision_handler.send_decision(trial_id, trial.pending_exploit or Continue(), trial.step)

    def _handle_messages(self, messages: Sequence[Message]) -> None:
        self._messages.extend(sorted(messages, key=lambda message: isinstance(message, AttemptExited)))  # exits last
        while self._messages:
            match message := self._messages.popleft():
                case EventsSubmitted():
                    self._update_has_trained(message.events)
                    before = self._experiment.trial(message.trial)
                    self._pending_entry.add_submitted(message)
                    self._delete_clone_origins(before)
                case PostArrived():
                    self._update_has_trained(message.events)
                    self._add_post(message.trial, message.number, message.events)
                case DecisionAwaited():
                    self._failure_handler.has_trained = True
                    self._decision_handler.answer_report(message.trial, message.report)
                case RemoteAttemptStarted():
                    self._resend_answers(message.trial)
                case AttemptExited():
                    self._handle_attempt_exit(message)
                case never:
                    assert_never(never)

    def _update_has_trained(self, events: Sequence[AttemptEvent]) -> None:
        if any(isinstance(event, StepReported | CheckpointCommitted) for event in events):
            self._failure_handler.has_trained = True

    def _add_post(self, trial_id: str, number: int, events: Sequence[AttemptEvent]) -> None:
        """Journal a post of a remote attempt; then delete the post, and the checkpoints that its events retire."""
        before = self._experiment.trial(trial_id)
        if before.outbox is None or number != before.last_post + 1:
            return  # `_close_outbox` has journaled this post, or has closed the outbox at an earlier post
        try:
            self._pending_entry.add_events([PostReceived(trial=trial_id, post=number), *events])
        except IllegalTransition as impossible:
            message = "trial %s: the attempt is ended, because its post %d cannot follow the journal: %s"
            self._log.error(message, trial_id, number, impossible)
            self._close_outbox_on_target(trial_id, before.outbox)
            self._add_event(OutboxClosed(trial=trial_id))
            return
        trial_key, outbox = self._experiment.trial_key(trial_id), before.outbox
        self._pending_entry.run_after_write(lambda: self._background_worker.delete_post(trial_key, outbox, number))

        def delete_retired() -> None:
            trial = self._experiment.trial(trial_id)
            keys = (trial_key.checkpoint_key(ref) for ref in before.checkpoints if ref.origin is None)
            if retired := [key for key in keys if not is_live_checkpoint(trial, key)]:
                self._background_worker.delete_checkpoints(trial_key, trial, retired)

        self._pending_entry.run_after_write(delete_retired)
        self._delete_clone_origins(before)

    def _delete_clone_origins(self, before: Trial) -> None:
        """After the next write, delete other trials' retired checkpoints of which this trial had the last clone.

        Look at the written state, since a commit retires nothing if a non-owner quarantines a checkpoint just before.
        """
        clones = [ref for ref in before.checkpoints if ref.origin is not None]
        if not clones or self._experiment.trial(before.id).checkpoints is before.checkpoints:
            return

        def delete_collectable_origins() -> None:
            for key in find_collectable_origins(self._experiment, clones):
                self._background_worker.delete_checkpoints(key.trial, self._experiment.trial(key.trial.trial), [key])

        self._pending_entry.run_after_write(delete_collectable_origins)

    def _close_outbox_on_target(self, trial_id: str, outbox: int) -> ClosedOutbox:
        """Make the trial's attempt unable to post anything more; return the unread posts. Journal nothing."""
        key, last_post = self._experiment.trial_key(trial_id), self._experiment.trial(trial_id).last_post
        owner, stamp = str(self._experiment.owner), new_write_stamp()
        close = partial(close_outbox, trial=key, outbox=outbox, after=last_post, closed_by=owner, stamp=stamp)
        return with_store(self._target, close, _IO_TIMEOUT)

    def _close_outbox(self, trial_id: str) -> None:
        """If the trial's outbox is open, close it on the target, and journal its remaining posts and its closing."""
        trial = self._experiment.trial(trial_id)
        if trial.outbox is None:
            return
        closed = self._close_outbox_on_target(trial_id, trial.outbox)
        for number, post in enumerate(closed.posts, trial.last_post + 1):
            self._add_post(trial_id, number, post.events)
        if closed.damage:
            self._log.error("trial %s: %s. Later posts are ignored", trial_id, closed.damage)
        if self._experiment.trial(trial_id).outbox is not None:  # the attempt has not posted its end
            self._add_event(OutboxClosed(trial=trial_id))
        trial = self._experiment.trial(trial_id)
        if closed.damage and trial.phase is Phase.PENDING:  # the damaged post was the attempt's start
            self._add_event(make_attempt_started(trial))

    def _awaits_first_post(self, trial_id: str) -> bool:
        """Return whether an earlier owner launched an attempt that outlives its search and has posted nothing yet."""
        trial = self._experiment.trial(trial_id)
        is_open = trial.outbox is not None and trial.last_post == 0
        return self._executor.attempts_outlive_search and is_open and trial.phase is Phase.PENDING

    def _end_attempt_if_lost(self, trial_id: str) -> None:
        """Close the trial's outbox, unless an attempt may still begin; if the attempt was lost, journal its end.

        An attempt was lost if it exited and the journal does not hold its end. Its checkpoints are adopted, even those
        committed after a damaged post. `retry_lost_attempt` counts the lost attempt, and queues the trial.
        """
        if not self._awaits_first_post(trial_id):
            self._close_outbox(trial_id)
        trial = self._experiment.trial(trial_id)
        if trial.phase is Phase.RUNNING:
            if trial.supervisor is not None and self._experiment.owner is not None:
                mark_attempt_crashed(trial.supervisor, self._experiment.owner)
            adopt = partial(make_adoption_events, experiment=self._experiment, trials=[trial_id])
            for event in with_store(self._target, adopt, _IO_TIMEOUT):
                self._add_event(event)

    def _handle_attempt_exit(self, attempt_exit: AttemptExited) -> None:
        """Free the slot; then handle the first case that applies: errors, then stops, then the trial's phase."""
        trial_id, error = attempt_exit.trial, attempt_exit.error
        self._executor.remove_attempt(trial_id)
        (since, began), trial = self._slot_starts.pop(trial_id), self._experiment.trial(trial_id)
        previous_number = self._previous_attempt_numbers.pop(trial_id)
        if trial.proposed_by_search:  # a single training has no slots
            number, seconds = max(trial.attempt, previous_number + 1), round(time.monotonic() - began, 3)
            self._add_event(SlotFreed(trial=trial_id, attempt=number, since=since, seconds=seconds))
        self._close_outbox(trial_id)
        trial = self._experiment.trial(trial_id)
        if self._failure_handler.give_up_if_undecidable(trial.id):
            pass
        elif error is not None and not (trial.proposed_by_search and isinstance(error, Exception)):
            raise error  # a `KeyboardInterrupt` or the like, or any error of a single training
        elif isinstance(error, AttemptCancelledError) and trial.phase not in ENDED_PHASES:
            self._stop_handler.stop_trial(trial.id, StopRequested(trial=trial.id, reason=str(error)))
        elif isinstance(error, ResumeFailed | InvalidInput):
            self._failure_handler.give_up(trial.id, Cause.TRAINABLE, make_reason("raised", text=str(error)))
        elif trial.id in self._experiment.pending_stops:
            self._stop_handler.finish_trial(trial.id)
        elif (cause := trial.retry_cause) is not None and trial.attempt > previous_number:
            self._failure_handler.on_attempt_failed(trial, cause, error)
        elif trial.phase is Phase.PENDING and self._stop_handler.is_stopping:
            self._ready_queue.append(trial.id)  # the attempt was stopped before it began
        elif trial.phase in (Phase.PENDING, Phase.RUNNING):
            self._failure_handler.retry_lost_attempt(trial.id, error)
        else:
            self._resume_unless_scheduler_paused(trial)
        if trial_id in self._reattached_trials:
            self._reattached_trials.remove(trial_id)
            self._pending_entry.write(may_defer=False)  # so that `stays_finished` reads all reports
            trial = self._experiment.trial(trial_id)
            if trial.phase is Phase.FINISHED and not self._limits.stays_finished(trial):
                self._add_event(make_extension_event(trial))  # only an earlier owner's stop criterion ended the trial
                self._ready_queue.append(trial_id)

    def _resume_unless_scheduler_paused(self, trial: Trial) -> None:
        """Resume a paused trial if it exploits another trial, or if the scheduler did not pause it."""
        if self._policy.resumes_without_scheduler(trial):
            self._add_event(TrialResumed(trial=trial.id))
            self._ready_queue.append(trial.id)

    def _recover_trials(self) -> None:
        """Prepare the trials that an earlier owner left unfinished, so that they can continue."""
        errored = {trial.id for trial in self._experiment.trials.values() if trial.phase is Phase.ERRORED}
        errored_or_stopped = errored | self._experiment.pending_stops.keys()
        # Read posts before requeuing, since a trial whose end was not read yet may have to be extended too.
        self._add_unread_posts(list(self._find_trials_to_recover().values()))
        self._pending_entry.write(may_defer=False)  # so that `stays_finished` reads all posted reports
        self._requeue_ended_trials()
        for trial_id in self._find_trials_to_recover():
            if self._limits.plan.effective_rerun_errored != "only" or trial_id in errored_or_stopped:
                self._recover_trial(trial_id)
        # Reattaching to an attempt forces this write; only after it can the executor send a stop to the attempt.
        self._pending_entry.write(may_defer=True)

    def _add_unread_posts(self, trials: Sequence[Trial]) -> None:
        """Journal unread posts in batches, since one timeout is too short to read the posts of several days."""

        def read_next_posts(trial: Trial, context: Context) -> Sequence[Post] | None:
            """Return the next posts in a trial's open outbox; None if a post cannot be read."""
            trial_key, outbox = self._experiment.trial_key(trial.id), trial.outbox_count  # the last outbox is open
            read_trial_posts = partial(read_posts, trial=trial_key, outbox=outbox, after=trial.last_post)
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
                    self._add_post(trial.id, number, post.events)
                if len(posts) == MAX_POSTS_PER_READ:
                    unread_trials.append(trial.id)
            if unread_trials:
                self._pending_entry.write(may_defer=False)
            trials = [self._experiment.trial(trial_id) for trial_id in unread_trials]

    def _find_trials_to_recover(self) -> Mapping[str, Trial]:
        """Return the pending and running trials, the trials to stop, and the paused trials that resume at once."""
        phases, resumes = (Phase.PENDING, Phase.RUNNING), self._policy.resumes_without_scheduler
        trials = self._experiment.trials.values()
        stops = self._experiment.pending_stops  # may include a paused trial that an earlier owner had no time to stop
        return {trial.id: trial for trial in trials if trial.phase in phases or resumes(trial) or trial.id in stops}

    def _recover_trial(self, trial_id: str) -> None:
        """Prepare a trial for its next attempt. The first case that applies decides.

        - Its attempt runs on another machine, and outlived the search: reattach to it, even if no slot is free.
        - The trial is to be stopped, perhaps while it is paused: finish it, after journaling a lost attempt's end.
        - An attempt was launched, and has not begun: queue the trial; the executor finds the attempt.
        - Its attempt was lost: journal its end, with the checkpoints found; then treat it like any failed attempt.
        - It is paused, but its scheduler did not pause it: resume it.
        """
        trial = self._experiment.trial(trial_id)
        is_posting = trial.phase is Phase.RUNNING and trial.outbox is not None
        if is_posting and self._executor.attempts_outlive_search:
            self._reattached_trials.add(trial_id)
            self._start_attempt(trial_id, reattaches=True)
            return
        self._end_attempt_if_lost(trial_id)
        if trial_id in self._experiment.pending_stops:
            self._close_outbox(trial_id)  # close even the outbox of an attempt that has not begun
            self._stop_handler.finish_trial(trial_id)
            return
        if self._awaits_first_post(trial_id):
            self._reattached_trials.add(trial_id)
            self._ready_queue.append(trial_id)
            return
        self._decision_handler.decide_missed_milestone(trial_id)
        trial = self._experiment.trial(trial_id)
        self._resume_unless_scheduler_paused(trial)
        if (cause := trial.retry_cause) is not None and trial.attempt:
            self._failure_handler.recover_failed_trial(trial, cause)
        elif trial.phase is Phase.PENDING:
            self._ready_queue.append(trial_id)

    def _requeue_ended_trials(self) -> None:
        """Requeue errored trials that are to be rerun, and finished ones that no longer meet the stop criterion."""
        for trial in list(self._experiment.trials.values()):
            if trial.phase is Phase.ERRORED and self._limits.plan.effective_rerun_errored:
                self._add_event(make_retry_event(trial))
            elif self._limits.plan.effective_rerun_errored == "only":
                continue
            elif trial.phase is Phase.FINISHED and not self._limits.stays_finished(trial):
                self._add_event(make_extension_event(trial))
