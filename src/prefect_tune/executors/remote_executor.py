"""Attempts on other machines, which share only the target with their search.

    search     RemoteExecutor: reads their outboxes, and stores answers on the target
    attempt    StoreLink: posts to its outbox, and polls the target for answers

A report that needs an answer is posted at once. The owner of the experiment, which may have changed since the attempt
was started, creates the answer as an object. A post that cannot be read ends its attempt: the driver closes the outbox,
and adopts what the attempt had saved.
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
from prefect_tune.attempt.processes.process_pool import TrialProcessPool, worker_pool
from prefect_tune.attempt.search_link import Answer, AnswerAwaited, Outbox, SearchLink, TrialJournal
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
from prefect_tune.core.journal.outbox import POSTS_AT_ONCE, Post, read_posts
from prefect_tune.core.journal_events import Owner, Reported, Started
from prefect_tune.core.messages.process_messages import Leave, Proceed, Start, StopAndSave
from prefect_tune.core.messages.target_messages import UNASKED, answer, read_answer, take_back
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import AttemptExited, Message, PostReceived, RemoteAttemptStarted
from prefect_tune.journal_access import current_owner, experiment_id
from prefect_tune.runtime.trainable import Reuse
from prefect_tune.storage_retries import on_target

_SEARCH_TIMEOUT = timedelta(seconds=60)
_ATTEMPT_TIMEOUT = timedelta(seconds=30)
_UNREAD = timedelta(minutes=10)
"""How long reads of the target may fail before the search ends with their error."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_UNASKED_SECONDS = 2.0

# The parameters of the flow `train_trial`: a trial's specification and the request for one attempt, as JSON.

_specs: TypeAdapter[TrialSpec] = TypeAdapter(TrialSpec)
_requests: TypeAdapter[AttemptRequest] = TypeAdapter(AttemptRequest)
_AS_TEXT = "json"


def spec_as_parameters(spec: TrialSpec) -> dict[str, Any]:
    """Return `spec` as a parameter, as `train_trial` takes it: without secrets, and valid in any process.

    Raises:
        InvalidInput: the trainable is not an import path, the target needs secrets, or trials are threads.
    """
    if ":" not in spec.trainable:
        raise InvalidInput(
            "trials='deployment': another machine has to import the trainable; pass it as 'package.module:Name'"
        )
    if spec.isolation != "process":
        raise InvalidInput("isolation='thread': trials that run as deployments run in processes")
    plain = _specs.dump_python(spec, mode="json", exclude={"target", "sync"})
    return {**plain, "target": target_reference(spec.target), "sync": spec.sync.parameters()}


def request_as_parameters(request: AttemptRequest) -> dict[str, Any]:
    """Return `request` as a parameter: one JSON text, which Prefect does not interpret.

    It holds configurations and answers from a target. In an object, Prefect would load blocks that it refers to
    (`$ref`), and render templates (`__prefect_kind`).
    """
    return {_AS_TEXT: _requests.dump_json(request).decode()}


def request_from(parameter: Mapping[str, Any]) -> AttemptRequest:
    """Return the request from `request_as_parameters`."""
    return _requests.validate_json(parameter[_AS_TEXT])


class StoreLink(SearchLink):
    """A link through the target. It can be pickled and sent to another machine until it is connected.

    Args:
        search_term: the run of the search that starts it: its attempts in one process share a pool of processes.
        reuse: how that pool shares the import of the trainable's module.
        pool: the pool to train in, instead of that one; it is not pickled.
    """

    asks_by_report = True

    def __init__(
        self,
        target: StorageTarget,
        trial: TrialKey,
        attempt: int,
        search_term: int = 0,
        reuse: Reuse = "never",
        *,
        pool: TrialProcessPool | None = None,
    ) -> None:
        super().__init__()
        self._target, self._trial, self._attempt = target, trial, attempt
        self._search_term, self._reuse, self._pool = search_term, reuse, pool
        self._outbox: Outbox | None = None
        self._asked: int | None = None
        self._asks = threading.Event()
        self._closed = threading.Event()
        self._closed.set()  # until `watch`
        self._was_answered = False
        self._logged_error: type[TuneError] | None = None

    def __reduce__(self) -> tuple[type[StoreLink], tuple[object, ...]]:
        return StoreLink, (self._target, self._trial, self._attempt, self._search_term, self._reuse)

    def stopped_by(self, stop: threading.Event) -> StoreLink:
        """Let this event of the local process stop the trial too."""
        self.stop = stop
        return self

    @contextmanager
    def process(self, start: Start, log: Log, environment: Mapping[str, str]) -> Iterator[TrialChannel]:
        search = self._target.uri, self._trial.of_experiment, self._search_term
        opened = nullcontext(self._pool) if self._pool is not None else worker_pool(search, self._reuse)
        with opened as pool, pool.process(start, log, environment, self.stop) as channel:
            yield channel

    def connect(self, on_answer: Callable[[Answer], None]) -> None:
        super().connect(on_answer)
        self.watch()

    @property
    def supervisor(self) -> Owner:
        return current_owner()

    def open_journal(self, spec: TrialSpec, request: AttemptRequest) -> TrialJournal:
        """Return the outbox of the attempt, after checking that the experiment which requested it still exists.

        Raises:
            Superseded: there is no such experiment any more.
        """
        if request.experiment_id and experiment_id(self._target, spec.trial.of_experiment) != request.experiment_id:
            raise Superseded(
                f"experiment {spec.trial.experiment!r} at {self._target.uri} no longer exists: the one that requested "
                f"attempt {self._attempt} of trial {spec.trial.trial!r} was deleted. Nothing was trained or written"
            )
        self._outbox = Outbox(self._target, spec.trial, request.trial)
        return self._outbox

    def ask(self, report: StepReport) -> None:
        self._asked = report.step
        self._asks.set()

    def close(self) -> None:
        """Stop polling for answers."""
        self._closed.set()
        self._asked = None
        self._asks.set()

    def watch(self) -> None:
        """Start the thread that polls the target for answers, if none does; after `close`, for a retry of the task."""
        if self._closed.is_set():
            self._closed = threading.Event()
            if self._asked is None:
                self._asks.clear()
            poll = partial(copy_context().run, self._poll, self._closed)
            threading.Thread(target=poll, name="answers", daemon=True).start()

    def _poll(self, closed: threading.Event) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not closed.is_set():
            self._asks.wait(_UNASKED_SECONDS)
            if self._deliver_answer(is_late=pause_seconds == _LONGEST_PAUSE_SECONDS):
                pause_seconds = _FIRST_PAUSE_SECONDS
            elif self._asked is not None:
                closed.wait(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _deliver_answer(self, *, is_late: bool) -> bool:
        """Return whether an answer was found and delivered. An unavailable or refusing target is polled again.

        An answer that is damaged or of an unknown version stops the trial: it saves and ends, and its next attempt
        has other answers. If an answer is late, the end of the outbox stops it: a new owner has ended the attempt, of
        which the trial, while it waits, would post nothing and so learn nothing.
        """
        unasked, step, is_over = None, self._asked, False
        try:
            with self._target.open(timeout=_ATTEMPT_TIMEOUT) as store:
                if not self.stop.is_set() and not self._was_answered:
                    unasked = read_answer(store, self._trial, self._attempt, UNASKED)
                found = read_answer(store, self._trial, self._attempt, step) if step is not None else None
                if found is None and is_late and self._outbox is not None:
                    is_over = self._outbox.is_closed(store)
        except (StoreUnavailable, OSError):  # an error of this machine, such as too many open files
            return False
        except TuneError as error:  # such as expired credentials, which may be replaced while the trial runs
            if type(error) is not self._logged_error:
                self._logged_error, log = type(error), logging.getLogger("prefect_tune")
                kind = type(error).__name__
                log.warning("trial %s cannot read its answers on the target: %s: %s", self._trial.trial, kind, error)
            if isinstance(error, JournalCorrupt | UnknownVersion):
                self.stop.set()
            return False
        if isinstance(unasked, StopAndSave) or is_over:
            self.stop.set()
        elif unasked is not None:
            self._was_answered = True
            self.answer(unasked)
        if found is None or isinstance(found, StopAndSave):
            return False
        self._asked = None
        self._asks.clear()
        self.answer(found)
        return True


class AttemptLauncher(Protocol):
    """Launches attempts on other machines; a second launch for the same outbox finds the first one."""

    @property
    def survives_search(self) -> bool:
        """Whether an attempt continues after the search that started it has ended."""
        ...

    def __call__(self, spec: TrialSpec, request: AttemptRequest, link: StoreLink, attempt: int) -> Callable[[], object]:
        """Launch; return a function that waits for the attempt's end, and raises its error if that is known."""
        ...

    def withdraw(self) -> None:
        """Cancel attempts that have not begun, where the launcher can; return without waiting."""
        ...


_Reply: TypeAlias = tuple[TrialKey, int, int, Proceed | Leave | StopAndSave]
"""To a trial, to its attempt, at its step."""


@dataclass
class _RemoteAttempt:
    spec: TrialSpec
    number: int
    milestone: int | None
    outbox: int
    """Number of its outbox."""
    read: int
    """Number of the last post that was read from it."""
    is_over: bool = False
    damage: TuneError | None = None
    """The error of a post that cannot be read: the search ends the attempt, and receives no more of its posts."""
    unread_since: float | None = None
    """Since when reads of its outbox fail, in seconds of the monotonic clock; None if the last one succeeded."""

    def is_unread(self, now: float) -> bool:
        """Whether its outbox may have posts that were not read; False after 10 minutes of errors."""
        return self.unread_since is not None and now - self.unread_since <= _UNREAD.total_seconds()

    def reply(self, step: int, said: Proceed | Leave | StopAndSave) -> _Reply:
        """Return the reply to this attempt at `step`."""
        return self.spec.trial, self.number, step, said

    def is_due(self, step: int) -> bool:
        """Whether the scheduler decides about the trial at `step`."""
        return self.milestone is not None and step >= self.milestone


class RemoteExecutor:
    """A `TrialExecutor` for attempts that share only the target with this process."""

    is_remote = True

    def __init__(self, target: StorageTarget, launch: AttemptLauncher, poll_interval: timedelta) -> None:
        self._target, self._launch, self._poll_interval = target, launch, poll_interval
        self._ends: queue.SimpleQueue[tuple[_RemoteAttempt, AttemptExited]] = queue.SimpleQueue()
        self._attempts: dict[str, _RemoteAttempt] = {}
        self._experiment_id: str | None = None
        self._stopped = False
        self._unread_since: float | None = None
        self._over: list[AttemptExited] = []
        self._unsent: list[_Reply] = []

    @property
    def survives_search(self) -> bool:
        return self._launch.survives_search

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, trial: str) -> bool:
        return trial in self._attempts

    def start(self, spec: TrialSpec, request: AttemptRequest) -> None:
        trial = request.trial
        number = trial.attempt + (trial.phase is not Phase.RUNNING)
        if trial.outbox is None:
            raise ValueError(f"trial {trial.trial!r} has no outbox")
        on_target(self._target, lambda store: take_back(store, spec.trial, number), _SEARCH_TIMEOUT)
        if self._experiment_id is None:  # by it, an attempt that starts late finds that its experiment was deleted
            self._experiment_id = experiment_id(self._target, spec.trial.of_experiment)
        link = StoreLink(self._target, spec.trial, number, request.search_term, spec.reuse)
        wait = self._launch(spec, replace(request, experiment_id=self._experiment_id or ""), link, number)
        attempt = _RemoteAttempt(spec, number, request.milestone, trial.outbox, trial.post)
        self._attempts[trial.trial] = attempt

        def wait_for_end() -> None:
            error: BaseException | None = None
            try:
                wait()
            except BaseException as raised:  # noqa: BLE001  the driver handles any error of an attempt
                error = raised
            self._ends.put((attempt, AttemptExited(trial.trial, error)))

        threading.Thread(target=copy_context().run, args=(wait_for_end,), daemon=True).start()

    def answer(self, trial: str, said: Proceed | Leave, step: int | None = None) -> None:
        """Write an answer for the trial to the target, with the next `poll`; do nothing if its attempt has ended."""
        attempt = self._attempts.get(trial)
        if attempt is None:
            return
        if isinstance(said, Proceed):
            attempt.milestone = said.milestone
        self._unsent.append(attempt.reply(UNASKED if step is None else step, said))

    def stop(self) -> None:
        """Have every trial save and end. After an error of the target, the next call writes to all of them again."""
        if not self._stopped:
            self._launch.withdraw()
            self._send_queued()
            self._send([attempt.reply(UNASKED, StopAndSave()) for attempt in self._attempts.values()])
            self._stopped = True

    def poll(self, patience: timedelta) -> list[Message]:
        """Send the answers; return the new messages, and wait up to `patience` for the first.

        The end of an attempt is returned after all its posts; while its outbox cannot be read, later, or after 10
        minutes.
        """
        self._send_queued()
        end = time.monotonic() + patience.total_seconds()
        while True:
            timeout = min(self._poll_interval.total_seconds(), max(0.0, end - time.monotonic()))
            with suppress(queue.Empty):
                self._end(*self._ends.get(timeout=timeout))
                while True:
                    self._end(*self._ends.get_nowait())
            messages = self._read_outboxes()
            over = [exited for exited in self._over if not self._attempts[exited.trial].is_unread(time.monotonic())]
            self._over = [exited for exited in self._over if exited not in over]
            if messages or over or time.monotonic() >= end:
                return [*messages, *over]

    def forget(self, trial: str) -> None:
        """Remove an attempt that has ended."""
        del self._attempts[trial]

    def refuse(self) -> None:
        """Do nothing: remote attempts submit nothing."""

    def _end(self, attempt: _RemoteAttempt, exited: AttemptExited) -> None:
        """Note that an attempt is over, once: its outbox may have been found damaged before."""
        if self._attempts.get(exited.trial) is attempt and not attempt.is_over:
            attempt.is_over = True
            self._over.append(exited)

    def _read_outboxes(self) -> list[Message]:
        """Return the messages of new posts in all outboxes. If the target fails, a later call reads the rest.

        Raises:
            StoreUnavailable, StoreRefused: no outbox could be read for 10 minutes.
        """
        attempts, now = [*self._attempts.values()], time.monotonic()
        failed: list[StoreUnavailable | StoreRefused] = []
        read: list[tuple[_RemoteAttempt, Sequence[Post]]] = []
        for attempt in attempts:
            attempt.unread_since = attempt.unread_since or now  # until it is read
        with _collecting(failed), self._target.open(timeout=_SEARCH_TIMEOUT) as store:
            read += zip(attempts, store.map(partial(_read_new_posts, store, failed), attempts), strict=True)
        for attempt in attempts:
            if attempt.damage is not None:
                self._end(attempt, AttemptExited(attempt.spec.trial.trial, attempt.damage))
        if not failed or len(failed) < len(read):  # at least one read succeeded
            self._unread_since = None
        else:
            if self._unread_since is None:
                logging.getLogger("prefect_tune").warning("the outboxes of remote trials are read later: %s", failed[0])
                self._unread_since = time.monotonic()
            if time.monotonic() - self._unread_since > _UNREAD.total_seconds():
                raise failed[0]
        return [
            message
            for attempt, posts in read
            for number, post in enumerate(posts, attempt.read - len(posts) + 1)
            for message in self._messages_of(number, post, attempt)
        ]

    def _messages_of(self, number: int, post: Post, attempt: _RemoteAttempt) -> list[Message]:
        trial = attempt.spec.trial.trial
        messages: list[Message] = [PostReceived(trial, number, post.events)]
        for event in post.events:
            match event:
                case Started(from_step=step) if attempt.is_due(step):  # it waits at its milestone
                    messages.append(RemoteAttemptStarted(trial))
                case Reported(report=report, asks=True) if attempt.is_due(report.step):
                    messages.append(AnswerAwaited(trial, report))
                case Reported(report=report, asks=True):  # its request predates the latest decision
                    self._unsent.append(attempt.reply(report.step, Proceed(milestone=attempt.milestone)))
                case _:
                    pass
        return messages

    def _send_queued(self) -> None:
        self._send(self._unsent)
        self._unsent = []

    def _send(self, replies: Sequence[_Reply]) -> None:
        """Write replies side by side, since each takes a round trip on an object store; of two for a step the first."""
        first = {reply[:3]: reply for reply in reversed(replies)}

        def send(store: ObjectStore) -> None:
            for _ in store.map(lambda reply: answer(store, *reply), first.values()):
                pass

        if replies:
            on_target(self._target, send, _SEARCH_TIMEOUT)


@contextmanager
def _collecting(failed: list[StoreUnavailable | StoreRefused]) -> Iterator[None]:
    """Add an error of the target to `failed` instead of raising it."""
    try:
        yield
    except (StoreUnavailable, StoreRefused) as error:
        failed.append(error)


def _read_new_posts(
    store: ObjectStore, failed: list[StoreUnavailable | StoreRefused], attempt: _RemoteAttempt
) -> Sequence[Post]:
    """Read the posts of an attempt that were not read yet, or note that one is damaged."""
    posts: Sequence[Post] = ()
    with _collecting(failed):
        try:
            if attempt.damage is None:
                posts = read_posts(store, attempt.spec.trial, attempt.outbox, attempt.read)
        except (JournalCorrupt, UnknownVersion) as unreadable:
            attempt.damage = unreadable
        attempt.read += len(posts)
        attempt.unread_since = time.monotonic() if len(posts) == POSTS_AT_ONCE else None  # there may be more of them
    return posts
