"""The main loop of a search: start trials, receive their messages, journal every change, and only then act on it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import assert_never

from prefect_tune.attempt.attempt import last_report
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.search_link import EntryWritten, LatestReport, StepReported
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.errors import InvalidInput, ResumeFailed, Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial
from prefect_tune.core.journal.journal import entries_beyond, next_entry
from prefect_tune.core.journal_events import (
    Absorbed,
    Cause,
    Entry,
    Event,
    Opened,
    Resumed,
    SlotFreed,
    TrialAdded,
    Writer,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import Continue
from prefect_tune.core.search.base import Exhausted, Proposed, Wait
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.executors.trial_executor import (
    AttemptCancelledError,
    AttemptExited,
    Message,
    RemoteAttemptStarted,
    TrialExecutor,
    have_ended,
)
from prefect_tune.journal_access import (
    JournalWriter,
    Opening,
    begin_run_clock,
    current_owner,
    new_write_id,
    open_journal,
    run_now,
)
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.parameters.search_limits import SearchLimits
from prefect_tune.storage_retries import on_target
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.terminal.live_display import NOTICE
from prefect_tune.tuner.decisions import Decisions
from prefect_tune.tuner.failure_handling import FailureHandler
from prefect_tune.tuner.pending_entry import PendingEntry
from prefect_tune.tuner.search_policy import ONLY_TRIAL, SearchPolicy, extension_of, finish_of, retry_of, trial_id
from prefect_tune.tuner.stop_requests import Stopping, StopSource

# Merge the entries of the trials' own journals into the experiment's journal.

_TIMEOUT = timedelta(minutes=5)


class TrialJournalMerger:
    """Merges each entry of each trial's journal, once, in order; a single training has the experiment's only.

    Methods that read or write a journal raise `StoreUnavailable` if the target fails for longer than the retries last.
    """

    def __init__(self, pending_entry: PendingEntry, policy: SearchPolicy, journal_writer: JournalWriter) -> None:
        self._pending_entry = pending_entry
        self._policy = policy
        self._journal_writer = journal_writer

    def absorb(self, wrote: EntryWritten) -> None:
        """Merge an entry that a trial has announced, after any missing entries before it."""
        if wrote.journal is not None and wrote.journal.key == self._pending_entry.state.key:
            self._pending_entry.follow(wrote.events, wrote.journal)
            return
        due = self._pending_entry.state.trial(wrote.trial).absorbed + 1
        if wrote.number > due:
            self.catch_up(wrote.trial)
        elif wrote.number == due:
            self._take_in(wrote.trial, wrote.number, wrote.events, wrote.at, writer="owner")

    def catch_up(self, trial: str) -> None:
        """Merge entries that were not announced here: of an earlier owner, or of a trial that outlived one."""
        if not self._pending_entry.state.trial(trial).own_journal:
            return  # the experiment's journal holds them
        absorbed = self._pending_entry.state.trial(trial).absorbed

        def read(store: ObjectStore) -> Sequence[Entry]:
            with transfer_pool() as transfers:
                return entries_beyond(store, self._journal(trial), absorbed, side_by_side=transfers)

        for entry in on_target(self._journal_writer.target, read, _TIMEOUT):
            self._take_in(trial, entry.number, entry.events, entry.at, writer=entry.writer)

    def settle(self, trial: str) -> None:
        """End an attempt that died without writing its end, in the trial's journal, and merge what it had saved.

        Raises:
            Superseded: a newer owner of the experiment has opened the trial.
        """
        state = self._pending_entry.state
        if state.trial(trial).phase is Phase.RUNNING:
            owner = current_owner(search_term=state.term, attempt=state.trial(trial).attempt)
            open_journal(self._journal_writer.target, self._journal(trial), Opening(owner, new_write_id()))
            self.catch_up(trial)

    def require_ours(self) -> None:
        """Check that no other owner has taken the experiment over. One request: call it only on suspicion.

        Raises:
            Superseded: another owner has.
        """
        written, entry = self._journal_writer.experiment, self._beyond(self._journal_writer.experiment.number)
        while entry is not None:
            if entry.term != written.term:
                owner = next((f", {each.owner}," for each in entry.events if isinstance(each, Opened)), "")
                raise Superseded(
                    f"{written.key}: this process is owner {written.term}, and owner {entry.term}{owner} took over "
                    f"in entry {entry.number}"
                )
            entry = self._beyond(entry.number)  # a guest's entry

    def _beyond(self, number: int) -> Entry | None:
        key = self._journal_writer.experiment.key
        return on_target(self._journal_writer.target, lambda store: next_entry(store, key, number), _TIMEOUT)

    def _journal(self, trial: str) -> JournalKey:
        return self._pending_entry.state.key.of_trial(trial)

    def _take_in(self, trial: str, number: int, events: Sequence[Event], at: str | None, *, writer: Writer) -> None:
        own = tuple(event for event in events if not isinstance(event, Absorbed))
        self._pending_entry.put(Absorbed(trial=trial, number=number, events=own, at=at, writer=writer))
        self._policy.has_trained(self._pending_entry.state.trial(trial))


_PATIENCE = timedelta(seconds=0.5)
_STARTS_AT_ONCE = 8  # then trials that train get their answers: a start on a cluster takes some 30 ms of this process


class Driver:
    """One owner's run of an experiment.

    Each change is journaled, and recorded by the policy, before it takes effect: a resume replays the same changes.
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
        self._pending_entry = PendingEntry(journal_writer, policy, listener, spec.sync.sync_period)
        self._merger = TrialJournalMerger(self._pending_entry, policy, journal_writer)
        self._stopping = Stopping(limits, policy, executor, self._pending_entry, log)
        self._startable: deque[str] = deque()
        self._failure_handler = FailureHandler(limits, self._pending_entry, self._stopping, self._startable, log)
        self._decisions = Decisions(
            *(policy, executor, self._pending_entry, self._failure_handler), saves_at_end=spec.cadence.at_end
        )
        self._attempts: dict[str, int] = {}  # number of the attempt before the present one
        self._found: set[str] = set()  # trials whose running attempt was started by an earlier owner
        self._slots: dict[str, tuple[str, float]] = {}  # when each trial got its slot: the run's clock, monotonic
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
            with suppress(TuneError):  # the error that ended the search is the one to raise
                have_ended(self._executor, self._spec.grace)
            raise

    def _run(self, stop_source: StopSource) -> Experiment:
        self._policy.replay(self._state)
        self._take_up()
        while True:
            self._stopping.heed(stop_source)
            has_free_slots = not self._stopping.ends and self._fill_slots()
            written = self._pending_entry.write(may_wait=len(self._executor) > 0)
            stop_source.journaled(len(written.stop_requests))
            if not len(self._executor):
                return self._failure_handler.require_imported(written)
            patience = timedelta(0) if has_free_slots else _PATIENCE
            self._receive(self._failure_handler.noted(self._executor.poll(patience)))

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
            self._merger.settle(trial)
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
        if (paused := self._policy.resume_next()) is None:
            return None if self._policy.is_waiting() else self._propose()
        return self._resume(paused)

    def _stop_unneeded(self) -> None:
        while (stopped := self._policy.stop_next()) is not None and stopped[0] not in self._slots:
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
                spec, trial = self._spec, trial_id(self._policy.proposed) if self._spec.own_journal else ONLY_TRIAL
                self._put(
                    TrialAdded(trial=trial, config=config, fingerprint=spec.fingerprint, own_journal=spec.own_journal)
                )
                return trial
            case Wait():
                is_busy = len(self._executor) or self._pending_entry.is_awaited
                return None if is_busy else self._without_new_trials()
            case Exhausted(reason=reason):
                if self._spec.own_journal:
                    are_fewer = len(self._state.trials) < (self._limits.options.trial_count or math.inf)
                    self._log.info("no more trials: %s", reason, extra=NOTICE if are_fewer else None)
                self._search_is_done = True
                return self._without_new_trials()
            case never:
                assert_never(never)

    def _without_new_trials(self) -> str | None:
        self._policy.no_more()
        self._stop_unneeded()
        paused = self._policy.resume_next()
        return self._resume(paused) if paused is not None else None

    def _start(self, trial: str, *, finds: bool = False) -> None:
        if not finds:
            for event in self._before_training():
                self._put(event)
            self._before_training = tuple
        state = self._state.trial(trial)
        spec = replace(self._spec, trial=self._state.trial_key(trial))
        number = state.attempt + (not finds)
        request = AttemptRequest(
            search_term=self._state.term,
            attempt=number,
            config=state.config,
            reached=state.reached,
            milestone=self._policy.milestone(state),
            saves_first=self._policy.saves_first,
            exploit=state.exploits,
            last_step=self._limits.options.stopper.step_count if state.exploits else None,
            quarantines=self._failure_handler.quarantines.pop(trial, ()),
            answers={each.key: each.answer for each in self._state.answers if each.trial == trial},
        )
        self._attempts[trial] = number - 1
        self._slots[trial] = run_now(), time.monotonic()
        self._pending_entry.then(lambda: self._executor.start(spec, request, number, state.absorbed))
        if finds:
            self._answer_again(trial)

    def _answer_again(self, name: str) -> None:
        """Send an attempt again what it may have missed: a request to stop, and the answer for its present step."""
        trial = self._state.trial(name)
        if name in self._state.stops:
            self._stopping.tell(name)
        if not trial.step:
            return  # it has not asked yet; step 0 is the key of unasked answers
        milestone = self._policy.milestone(trial)
        if milestone is not None and trial.step >= milestone and trial.exploits is None:
            self._reported(StepReported(name, last_report(trial), asks=True))
        else:
            self._decisions.carry_out(name, trial.exploits or Continue(), trial.step)

    # --------------------------------------------------------------------------------------------- the trials

    def _receive(self, messages: Sequence[Message]) -> None:
        over: list[AttemptExited] = []
        for message in messages:
            match message:
                case StepReported():
                    self._reported(message)
                case LatestReport():
                    self._listener.latest(message)
                case EntryWritten():
                    self._merger.absorb(message)
                case RemoteAttemptStarted():
                    self._answer_again(message.trial)
                case AttemptExited():
                    over.append(message)
                case never:
                    assert_never(never)
        for each in over:
            self._executor.forget(each.trial)
            self._free_slot(each.trial)
            self._conclude(each)
            self._extend(each.trial)

    def _free_slot(self, name: str) -> None:
        """Journal how long the trial had its slot; the one slot of a training is its run's."""
        (since, began), trial = self._slots.pop(name), self._state.trial(name)
        if trial.own_journal:
            number = max(trial.attempt, self._attempts[name] + 1)
            held_seconds = round(time.monotonic() - began, 3)
            self._put(SlotFreed(trial=name, attempt=number, since=since, seconds=held_seconds))

    def _reported(self, step: StepReported) -> None:
        self._listener.reported(step, self._state)
        if step.asks:
            self._decisions.answer(step.trial, step.report)

    def _conclude(self, over: AttemptExited) -> None:
        """Handle the end of an attempt, by the state that its journal gives."""
        trial = self._state.trial(over.trial)
        began = trial.attempt > self._attempts.pop(over.trial)
        if self._failure_handler.conclude_undecided(trial.trial):
            pass
        elif over.error is not None and not (trial.own_journal and isinstance(over.error, Exception)):
            raise over.error  # such as KeyboardInterrupt: end the search; a single training ends with any error
        elif isinstance(over.error, AttemptCancelledError) and trial.phase not in ENDED:
            self._stopping.stop_alone(trial.trial, str(over.error))
        elif isinstance(over.error, ResumeFailed | InvalidInput):
            reason = make_reason("raised", text=str(over.error))
            self._failure_handler.give_up(trial.trial, Cause.USER, reason)
        elif trial.trial in self._state.stops:
            self._stopping.finish(trial.trial)
        elif trial.trial in self._state.questions:
            if trial.own_journal:  # the other trials save and end, too
                self._stopping.end(make_reason("trial-asks", trial=trial.trial))
        elif trial.phase is Phase.PENDING and trial.cause is not None and began:
            self._failure_handler.failed(trial, trial.cause, over.error)
        elif trial.phase is Phase.PENDING and self._stopping.ends:
            self._startable.append(trial.trial)  # the attempt was stopped before it began
        elif trial.phase in (Phase.PENDING, Phase.RUNNING):
            self._merger.require_ours()  # a newer owner of the search owns the trial too
            self._failure_handler.lost(trial.trial, over.error)
        else:
            self._let_proceed(trial)

    def _let_proceed(self, trial: Trial) -> None:
        """Resume a paused trial that is to exploit another, or whose pause the scheduler does not know."""
        if self._policy.is_to_resume(trial):
            self._put(Resumed(trial=trial.trial))
            self._startable.append(trial.trial)

    def _extend(self, name: str) -> None:
        """Requeue a trial that finished by an earlier owner's criterion, if today's is not met."""
        trial = self._state.trial(name)
        if name in self._found and trial.phase is Phase.FINISHED and not self._limits.has_had_enough(trial):
            self._put(extension_of(trial))
            self._startable.append(name)

    # ------------------------------------------------------------------------------------------------ a resume

    def _take_up(self) -> None:
        """Bring the trials that an earlier owner left unfinished into a state from which they can continue."""
        errored = {each.trial for each in self._state.trials.values() if each.phase is Phase.ERRORED}
        unended = self._unended()
        for trial in unended:
            self._merger.catch_up(trial)  # a trial that ended unnoticed may have to be extended too
        self._requeue()
        for trial in self._unended():
            if self._limits.options.reruns_errored == "only" and trial not in errored:
                continue
            if trial not in unended:
                self._merger.catch_up(trial)
            self._take_on(trial)
        # So that an attempt found again gets a stop as an answer, and is not finished.
        self._pending_entry.write(may_wait=True)

    def _unended(self) -> Mapping[str, Trial]:
        """The trials that continue, without those that the scheduler holds paused."""
        waiting = (Phase.PENDING, Phase.RUNNING)
        trials = self._state.trials.values()
        return {each.trial: each for each in trials if each.phase in waiting or self._policy.is_to_resume(each)}

    def _take_on(self, name: str) -> None:
        if self._executor.survives_search and self._state.trial(name).phase is Phase.RUNNING:
            self._found.add(name)
            self._start(name, finds=True)  # the attempt has outlived its search, and needs no free slot
            return
        self._merger.settle(name)
        if name in self._state.stops:
            self._stopping.finish(name)
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
