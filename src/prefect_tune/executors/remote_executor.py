"""Attempts on other machines, which share only the target with their search.

    search     RemoteExecutor: reads the outboxes of the attempts, and writes decisions to the target
    attempt    RemoteSearchChannel: posts to its outbox, and polls the target for decisions

A report that needs a decision is posted immediately. The present owner of the experiment writes the decision as an
object, even if another owner started the attempt. If a post is unreadable, the driver ends the attempt by closing its
outbox, and adopts the attempt's checkpoints.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias

from pydantic import TypeAdapter

from prefect_tune.attempt.processes.process_channel import TrialChannel
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.process_pool import TrialProcessPool, shared_pool
from prefect_tune.attempt.search_channel import Answer, DecisionAwaited, OutboxJournal, SearchChannel, TrialJournal
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import StorageTarget, target_reference
from prefect_tune.core.errors import (
    InvalidInput,
    JournalCorrupt,
    StoreRefused,
    StoreUnavailable,
    Superseded,
    TuneError,
    UnknownVersion,
)
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal.outbox import MAX_POSTS_PER_READ, Post, read_posts
from prefect_tune.core.journal_events import AttemptStarted, Owner, StepReported
from prefect_tune.core.messages.process_messages import CheckpointAndStop, ContinueTraining, Start, StopTrial
from prefect_tune.core.messages.target_messages import (
    UNSOLICITED_STEP,
    AnyAnswer,
    delete_unsolicited_answer,
    read_answer,
    write_answer,
)
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import AttemptExited, Message, PostArrived, RemoteAttemptStarted
from prefect_tune.journal_access import make_process_owner, read_experiment_id
from prefect_tune.runtime.trainable import Reuse
from prefect_tune.storage_retries import with_store

_SEARCH_TIMEOUT = timedelta(seconds=60)
_ATTEMPT_TIMEOUT = timedelta(seconds=30)
_MAX_READ_OUTAGE = timedelta(minutes=10)
"""How long reads of the target may fail before the search ends with their error."""
_FIRST_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 1.0
_UNSOLICITED_POLL_SECONDS = 2.0

# The parameters of the flow `train_trial`: a trial's specification and the request for one attempt, as JSON.

_specs: TypeAdapter[TrialSpec] = TypeAdapter(TrialSpec)
_requests: TypeAdapter[AttemptRequest] = TypeAdapter(AttemptRequest)
_JSON_KEY = "json"


def make_spec_parameter(spec: TrialSpec) -> dict[str, Any]:
    """Convert `spec` to a parameter of `train_trial` that contains no secrets and is valid in any process.

    Raises:
        InvalidInput: the trainable is not an import path, the target needs secrets, or the trials run in threads.
    """
    if ":" not in spec.trainable:
        text = "trials='deployment': other machines must import the trainable; pass it as 'package.module:Name'"
        raise InvalidInput(text)
    if spec.isolation != "process":
        raise InvalidInput("isolation='thread': trials that run as deployments need isolation='process'")
    plain = _specs.dump_python(spec, mode="json", exclude={"target", "sync"})
    return {**plain, "target": target_reference(spec.target), "sync": spec.sync.parameters()}


def make_request_parameter(request: AttemptRequest) -> dict[str, Any]:
    """Convert `request` to a parameter that holds one JSON text, which Prefect does not interpret.

    The request contains untrusted values from a target. If the values were JSON objects, Prefect would load the blocks
    to which they refer (`$ref`), and render templates (`__prefect_kind`).
    """
    return {_JSON_KEY: _requests.dump_json(request).decode()}


def parse_request(parameter: Mapping[str, Any]) -> AttemptRequest:
    """Return the request that `make_request_parameter` converted."""
    return _requests.validate_json(parameter[_JSON_KEY])


class RemoteSearchChannel(SearchChannel):
    """Connects an attempt to its search through the target. It can be pickled until `subscribe` is called.

    Args:
        owner_term: the term of the owner that starts the attempt. In each process, attempts of one owner share a pool.
        reuse: how the trials in that pool share the import of the trainable's module.
        pool: a pool to use instead of the shared pool; the pickled channel does not contain it.
    """

    requests_decisions_by_report = True

    def __init__(
        self,
        target: StorageTarget,
        trial: TrialKey,
        attempt: int,
        owner_term: int = 0,
        reuse: Reuse = "never",
        *,
        pool: TrialProcessPool | None = None,
    ) -> None:
        super().__init__()
        self._target, self._trial, self._attempt = target, trial, attempt
        self._owner_term, self._reuse, self._pool = owner_term, reuse, pool
        self._outbox: OutboxJournal | None = None
        self._awaited_step: int | None = None
        self._decision_requested = threading.Event()
        self._closed = threading.Event()
        self._closed.set()  # no thread polls before `start_polling`
        self._has_unsolicited_answer = False
        self._logged_error: type[TuneError] | None = None

    def __reduce__(self) -> tuple[type[RemoteSearchChannel], tuple[object, ...]]:
        return RemoteSearchChannel, (self._target, self._trial, self._attempt, self._owner_term, self._reuse)

    def use_stop_event(self, stop: threading.Event) -> RemoteSearchChannel:
        """Use `stop`, an event of this process, as `run_stop`; return self."""
        self.run_stop = stop
        return self

    @contextmanager
    def open_process(self, start: Start, log: Log, environment: Mapping[str, str]) -> Iterator[TrialChannel]:
        search = self._target.uri, self._trial.journal_key, self._owner_term
        context = nullcontext(self._pool) if self._pool is not None else shared_pool(search, self._reuse)
        with context as pool, pool.open_process(start, log, environment, self.run_stop) as channel:
            yield channel

    def subscribe(self, on_answer: Callable[[Answer], None]) -> None:
        super().subscribe(on_answer)
        self.start_polling()

    @property
    def supervisor(self) -> Owner:
        return make_process_owner()

    def make_journal(self, spec: TrialSpec, request: AttemptRequest) -> TrialJournal:
        """Return the attempt's outbox. Raises Superseded if the experiment that requested the attempt was deleted."""
        if request.experiment_id and read_experiment_id(self._target, spec.trial.journal_key) != request.experiment_id:
            raise Superseded(
                f"experiment {spec.trial.experiment!r} at {self._target.uri} was deleted after it requested attempt "
                f"{self._attempt} of trial {spec.trial.trial!r}. Nothing was trained or written"
            )
        self._outbox = OutboxJournal(self._target, spec.trial, request.trial)
        return self._outbox

    def expect_decision(self, report: StepReport) -> None:
        self._awaited_step = report.step
        self._decision_requested.set()

    def close(self) -> None:
        """Stop polling for decisions."""
        self._closed.set()
        self._awaited_step = None
        self._decision_requested.set()

    def start_polling(self) -> None:
        """Start the thread that polls for decisions, if it is not running. A retry calls this after `close`."""
        if self._closed.is_set():
            self._closed = threading.Event()
            if self._awaited_step is None:
                self._decision_requested.clear()
            poll = partial(copy_context().run, self._poll_answers, self._closed)
            threading.Thread(target=poll, name="answers", daemon=True).start()

    def _poll_answers(self, closed: threading.Event) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not closed.is_set():
            self._decision_requested.wait(_UNSOLICITED_POLL_SECONDS)
            if self._deliver_answers(is_late=pause_seconds == _MAX_PAUSE_SECONDS):
                pause_seconds = _FIRST_PAUSE_SECONDS
            elif self._awaited_step is not None:
                closed.wait(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)

    def _deliver_answers(self, *, is_late: bool) -> bool:
        """Deliver the answers that have arrived; return True if one of them is the awaited answer.

        An error of the target is ignored, since the next poll reads again. An answer that is damaged or of an unknown
        version stops the trial: the trial saves and ends, and its next attempt gets other answers. If the awaited
        answer is late, also check the outbox, because a waiting trial posts nothing, and so would not notice that a new
        owner has closed the outbox to end the attempt. A closed outbox stops the trial, too.
        """
        unsolicited, step, is_closed = None, self._awaited_step, False
        try:
            with self._target.open(timeout=_ATTEMPT_TIMEOUT) as store:
                if not self.run_stop.is_set() and not self._has_unsolicited_answer:
                    unsolicited = read_answer(store, self._trial, self._attempt, UNSOLICITED_STEP)
                answer = read_answer(store, self._trial, self._attempt, step) if step is not None else None
                if answer is None and is_late and self._outbox is not None:
                    is_closed = self._outbox.check_closed(store)
        except (StoreUnavailable, OSError):  # OSError: a local error, such as too many open files
            return False
        except TuneError as error:  # do not raise: expired credentials, for example, may still be replaced
            if type(error) is not self._logged_error:
                self._logged_error, log = type(error), logging.getLogger("prefect_tune")
                kind = type(error).__name__
                log.warning("trial %s cannot read decisions from the target: %s: %s", self._trial.trial, kind, error)
            if isinstance(error, JournalCorrupt | UnknownVersion):
                self.run_stop.set()
            return False
        if isinstance(unsolicited, CheckpointAndStop) or is_closed:
            self.run_stop.set()
        elif unsolicited is not None:
            self._has_unsolicited_answer = True
            self.send_answer(unsolicited)
        if answer is None or isinstance(answer, CheckpointAndStop):
            return False
        self._awaited_step = None
        self._decision_requested.clear()
        self.send_answer(answer)
        return True


class AttemptLauncher(Protocol):
    """Launches attempts on other machines. If attempts outlive the search, a repeated launch finds the same attempt."""

    @property
    def attempts_outlive_search(self) -> bool:
        """Whether an attempt continues after the search that started the attempt has ended."""

    def __call__(
        self, spec: TrialSpec, request: AttemptRequest, channel: RemoteSearchChannel, attempt: int
    ) -> Callable[[], object]:
        """Launch an attempt; return a function that waits for its end, and raises its error if the error is known."""

    def cancel_unstarted_attempts(self) -> None:
        """Cancel the attempts that have not begun, if the launcher can. Do not wait."""


_AddressedAnswer: TypeAlias = tuple[TrialKey, int, int, AnyAnswer]
"""Trial, attempt number, step, and the answer."""


@dataclass
class _RemoteAttempt:
    spec: TrialSpec
    number: int
    milestone: int | None
    outbox: int
    """The number of the attempt's outbox."""
    last_post: int
    """The number of the last post that was read from the outbox."""
    has_ended: bool = False
    damage: TuneError | None = None
    """The error of an unreadable post, after which the search ends the attempt and reads no further posts."""
    unread_since: float | None = None
    """The monotonic time since which no read was complete; None after a complete read."""

    def should_wait_for_posts(self, now: float) -> bool:
        """Return whether the end of the attempt must wait for unread posts; False after 10 minutes of errors."""
        return self.unread_since is not None and now - self.unread_since <= _MAX_READ_OUTAGE.total_seconds()

    def address_answer(self, step: int, answer: AnyAnswer) -> _AddressedAnswer:
        """Return `answer`, addressed to this attempt at `step`."""
        return self.spec.trial, self.number, step, answer

    def needs_decision_at(self, step: int) -> bool:
        """Return whether the scheduler decides about the trial at `step`."""
        return self.milestone is not None and step >= self.milestone


class RemoteExecutor:
    """A `TrialExecutor` for attempts that share only the target with this process."""

    is_remote = True

    def __init__(self, target: StorageTarget, launch: AttemptLauncher, poll_interval: timedelta) -> None:
        self._target, self._launch, self._poll_interval = target, launch, poll_interval
        self._exits: queue.SimpleQueue[tuple[_RemoteAttempt, AttemptExited]] = queue.SimpleQueue()
        self._attempts: dict[str, _RemoteAttempt] = {}
        self._experiment_id: str | None = None
        self._stopped = False
        self._failing_since: float | None = None
        self._exited: list[AttemptExited] = []
        self._queued_answers: list[_AddressedAnswer] = []

    @property
    def attempts_outlive_search(self) -> bool:
        return self._launch.attempts_outlive_search

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, trial: str) -> bool:
        return trial in self._attempts

    def start_attempt(self, spec: TrialSpec, request: AttemptRequest) -> None:
        trial = request.trial
        number = trial.attempt + (trial.phase is not Phase.RUNNING)
        if trial.outbox is None:
            raise ValueError(f"trial {trial.id!r} has no outbox")
        with_store(self._target, lambda store: delete_unsolicited_answer(store, spec.trial, number), _SEARCH_TIMEOUT)
        if self._experiment_id is None:  # a late attempt compares this id, to notice a deletion
            self._experiment_id = read_experiment_id(self._target, spec.trial.journal_key)
        channel = RemoteSearchChannel(self._target, spec.trial, number, request.owner_term, spec.reuse)
        wait = self._launch(spec, replace(request, experiment_id=self._experiment_id or ""), channel, number)
        attempt = _RemoteAttempt(spec, number, request.milestone, trial.outbox, trial.last_post)
        self._attempts[trial.id] = attempt

        def wait_for_end() -> None:
            error: BaseException | None = None
            try:
                wait()
            except BaseException as launch_error:  # noqa: BLE001  the driver handles any error of an attempt
                error = launch_error
            self._exits.put((attempt, AttemptExited(trial.id, error)))

        threading.Thread(target=copy_context().run, args=(wait_for_end,), daemon=True).start()

    def send_answer(self, trial: str, answer: ContinueTraining | StopTrial, step: int | None = None) -> None:
        """Queue an answer, which the next `poll_messages` writes; do nothing if the attempt has ended."""
        if (attempt := self._attempts.get(trial)) is None:
            return
        if isinstance(answer, ContinueTraining):
            attempt.milestone = answer.milestone
        self._queued_answers.append(attempt.address_answer(UNSOLICITED_STEP if step is None else step, answer))

    def stop_all(self) -> None:
        """Ask every trial to save and end. After an error of the target, call this method again."""
        if not self._stopped:
            self._launch.cancel_unstarted_attempts()
            self._write_queued_answers()
            stop, attempts = CheckpointAndStop(), self._attempts.values()
            self._write_answers([attempt.address_answer(UNSOLICITED_STEP, stop) for attempt in attempts])
            self._stopped = True

    def poll_messages(self, timeout: timedelta) -> list[Message]:
        """Write the queued decisions; return the new messages, and wait up to `timeout` for the first message.

        The end of an attempt is returned after all its posts. If its outbox cannot be read, the end is returned after
        10 minutes.
        """
        self._write_queued_answers()
        end = time.monotonic() + timeout.total_seconds()
        while True:
            pause = min(self._poll_interval.total_seconds(), max(0.0, end - time.monotonic()))
            with suppress(queue.Empty):
                self._record_exit(*self._exits.get(timeout=pause))
                while True:
                    self._record_exit(*self._exits.get_nowait())
            messages, now = self._read_outboxes(), time.monotonic()
            ready = [exited for exited in self._exited if not self._attempts[exited.trial].should_wait_for_posts(now)]
            self._exited = [exited for exited in self._exited if exited not in ready]
            if messages or ready or time.monotonic() >= end:
                return [*messages, *ready]

    def remove_attempt(self, trial: str) -> None:
        del self._attempts[trial]

    def reject_events(self) -> None:
        """Do nothing: remote attempts submit no events."""

    def _record_exit(self, attempt: _RemoteAttempt, exited: AttemptExited) -> None:
        """Record the end of an attempt; do nothing if a damaged outbox has already ended the attempt."""
        if self._attempts.get(exited.trial) is attempt and not attempt.has_ended:
            attempt.has_ended = True
            self._exited.append(exited)

    def _read_outboxes(self) -> list[Message]:
        """Return the messages of new posts in all outboxes. If the target fails, a later call reads the rest.

        Raises:
            StoreUnavailable, StoreRefused: no outbox could be read for 10 minutes.
        """
        attempts, now = [*self._attempts.values()], time.monotonic()
        errors: list[StoreUnavailable | StoreRefused] = []
        read: list[tuple[_RemoteAttempt, Sequence[Post]]] = []
        for attempt in attempts:
            attempt.unread_since = attempt.unread_since or now  # `_read_new_posts` resets it after a complete read
        with _collecting_errors(errors), self._target.open(timeout=_SEARCH_TIMEOUT) as store:
            read += zip(attempts, store.map(partial(_read_new_posts, store, errors), attempts), strict=True)
        for attempt in attempts:
            if attempt.damage is not None:
                self._record_exit(attempt, AttemptExited(attempt.spec.trial.trial, attempt.damage))
        if not errors or len(errors) < len(read):  # at least one read succeeded
            self._failing_since = None
        else:
            if self._failing_since is None:
                logging.getLogger("prefect_tune").warning("cannot read outboxes of trials; retrying: %s", errors[0])
                self._failing_since = time.monotonic()
            if time.monotonic() - self._failing_since > _MAX_READ_OUTAGE.total_seconds():
                raise errors[0]
        return [
            message
            for attempt, posts in read
            for number, post in enumerate(posts, attempt.last_post - len(posts) + 1)
            for message in self._process_post(number, post, attempt)
        ]

    def _process_post(self, number: int, post: Post, attempt: _RemoteAttempt) -> list[Message]:
        """Return the messages of a post; if a report waits for a decision that was already made, queue the answer."""
        trial = attempt.spec.trial.trial
        messages: list[Message] = [PostArrived(trial, number, post.events)]
        for event in post.events:
            match event:
                case AttemptStarted(from_step=step) if attempt.needs_decision_at(step):  # the attempt may be waiting
                    messages.append(RemoteAttemptStarted(trial))
                case StepReported(report=report, awaits_decision=True) if attempt.needs_decision_at(report.step):
                    messages.append(DecisionAwaited(trial, report))
                case StepReported(report=report, awaits_decision=True):
                    answer = ContinueTraining(milestone=attempt.milestone)
                    self._queued_answers.append(attempt.address_answer(report.step, answer))
                case _:
                    pass
        return messages

    def _write_queued_answers(self) -> None:
        self._write_answers(self._queued_answers)
        self._queued_answers = []

    def _write_answers(self, answers: Sequence[_AddressedAnswer]) -> None:
        """Write answers in parallel, since each takes a round trip; of two answers for a step, write only the first."""
        first = {answer[:3]: answer for answer in reversed(answers)}

        def write_all(store: ObjectStore) -> None:
            for _ in store.map(lambda answer: write_answer(store, *answer), first.values()):
                pass

        if answers:
            with_store(self._target, write_all, _SEARCH_TIMEOUT)


@contextmanager
def _collecting_errors(errors: list[StoreUnavailable | StoreRefused]) -> Iterator[None]:
    """Append an error of the target to `errors` instead of raising it."""
    try:
        yield
    except (StoreUnavailable, StoreRefused) as error:
        errors.append(error)


def _read_new_posts(
    store: ObjectStore, errors: list[StoreUnavailable | StoreRefused], attempt: _RemoteAttempt
) -> Sequence[Post]:
    """Read the unread posts of an attempt; record the error if a post is unreadable."""
    posts: Sequence[Post] = ()
    with _collecting_errors(errors):
        try:
            if attempt.damage is None:
                posts = read_posts(store, attempt.spec.trial, attempt.outbox, attempt.last_post)
        except (JournalCorrupt, UnknownVersion) as error:
            attempt.damage = error
        attempt.last_post += len(posts)
        attempt.unread_since = time.monotonic() if len(posts) == MAX_POSTS_PER_READ else None  # there may be more posts
    return posts
