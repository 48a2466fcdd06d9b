"""Executor of attempts on other machines: reads their outboxes, and answers them through the target."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeAlias

from prefect_tune.attempt.search_link import AnswerAwaited
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import JournalCorrupt, StoreRefused, StoreUnavailable, TuneError, UnknownVersion
from prefect_tune.core.experiment.trial import Phase
from prefect_tune.core.journal.outbox import Post, read_posts
from prefect_tune.core.journal_events import Reported, Started
from prefect_tune.core.messages.process_messages import Leave, Proceed, StopAndSave
from prefect_tune.core.messages.target_messages import UNASKED, answer, take_back
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.executors.remote_link import PoolSharing, StoreLink
from prefect_tune.executors.trial_executor import AttemptExited, Message, PostReceived, RemoteAttemptStarted
from prefect_tune.journal_access import experiment_id
from prefect_tune.storage_retries import on_target
from prefect_tune.stores.local.staging import transfer_pool

_REQUEST = timedelta(seconds=60)
_UNREAD = timedelta(minutes=10)
"""How long reads of the target may fail before the search ends with their error."""


_Reply: TypeAlias = tuple[TrialKey, int, int, Proceed | Leave | StopAndSave]
"""To a trial, to its attempt, at its step."""


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

    def __init__(self, target: StorageTarget, elsewhere: AttemptLauncher, look_every: timedelta) -> None:
        self._target = target
        self._elsewhere = elsewhere
        self._look_every = look_every
        self._ends: queue.SimpleQueue[tuple[_RemoteAttempt, AttemptExited]] = queue.SimpleQueue()
        self._attempts: dict[str, _RemoteAttempt] = {}
        self._experiment_id: str | None = None
        self._stopped = False
        self._unread_since: float | None = None
        self._over: list[AttemptExited] = []
        self._unsent: list[_Reply] = []

    @property
    def survives_search(self) -> bool:
        return self._elsewhere.survives_search

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, trial: str) -> bool:
        return trial in self._attempts

    def start(self, spec: TrialSpec, request: AttemptRequest) -> None:
        trial = request.trial
        number = trial.attempt + (trial.phase is not Phase.RUNNING)
        if trial.outbox is None:
            raise ValueError(f"trial {trial.trial!r} has no outbox")
        on_target(self._target, lambda store: take_back(store, spec.trial, number), _REQUEST)
        link = StoreLink(self._target, spec.trial, number, PoolSharing(request.search_term, spec.reuse))
        wait = self._elsewhere(spec, replace(request, experiment_id=self._id_of(spec)), link, number)
        attempt = _RemoteAttempt(spec, number, request.milestone, trial.outbox, trial.post)
        self._attempts[trial.trial] = attempt
        threading.Thread(target=copy_context().run, args=(self._await, attempt, wait), daemon=True).start()

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
            self._elsewhere.withdraw()
            self._send_queued()
            self._send([attempt.reply(UNASKED, StopAndSave()) for attempt in self._attempts.values()])
            self._stopped = True

    def poll(self, patience: timedelta) -> list[Message]:
        """Send the answers; return the new messages, and wait up to `patience` for the first.

        The end of an attempt is returned after all its posts; while its outbox cannot be read, later.
        """
        self._send_queued()
        end = time.monotonic() + patience.total_seconds()
        while True:
            self._wait_for_ends(min(self._look_every, timedelta(seconds=max(0.0, end - time.monotonic()))))
            messages = self._read_outboxes()
            over = [each for each in self._over if not self._attempts[each.trial].is_unread(time.monotonic())]
            self._over = [each for each in self._over if each not in over]
            if messages or over or time.monotonic() >= end:
                return [*messages, *over]

    def forget(self, trial: str) -> None:
        """Remove an attempt that has ended."""
        del self._attempts[trial]

    def refuse(self) -> None:
        """Do nothing: remote attempts submit nothing."""

    def _id_of(self, spec: TrialSpec) -> str:
        """Return the experiment's id; an attempt that starts after its experiment was deleted detects this by it."""
        if self._experiment_id is None:
            self._experiment_id = experiment_id(self._target, spec.trial.of_experiment)
        return self._experiment_id or ""

    def _await(self, attempt: _RemoteAttempt, wait: Callable[[], object]) -> None:
        trial = attempt.spec.trial.trial
        try:
            wait()
        except BaseException as error:  # noqa: BLE001  the driver handles any error of an attempt
            self._ends.put((attempt, AttemptExited(trial, error)))
        else:
            self._ends.put((attempt, AttemptExited(trial)))

    def _wait_for_ends(self, patience: timedelta) -> None:
        """Take over the attempts that have ended; wait up to `patience` for the first."""
        with suppress(queue.Empty):
            self._end(*self._ends.get(timeout=patience.total_seconds()))
            while True:
                self._end(*self._ends.get_nowait())

    def _end(self, attempt: _RemoteAttempt, exited: AttemptExited) -> None:
        """Note that an attempt is over, once: its outbox may have been found damaged before."""
        if self._attempts.get(exited.trial) is attempt and not attempt.is_over:
            attempt.is_over = True
            self._over.append(exited)

    def _read_outboxes(self) -> list[Message]:
        """Return the messages of new posts in all outboxes. If the target fails, a later call reads the rest."""
        read: list[tuple[_RemoteAttempt, Sequence[Post]]] = []
        failed: list[StoreUnavailable | StoreRefused] = []
        attempts, now = [*self._attempts.values()], time.monotonic()
        for each in attempts:
            each.unread_since = each.unread_since or now  # until it is read
        with _noted(failed), self._target.open(timeout=_REQUEST) as store, transfer_pool() as transfers:
            read += zip(attempts, transfers(partial(_read_new_posts, store, failed), attempts), strict=True)
        for attempt in attempts:
            if attempt.damage is not None:
                self._end(attempt, AttemptExited(attempt.spec.trial.trial, attempt.damage))
        target_works = len(failed) < len(read)  # at least one read succeeded
        self._note_unread(() if target_works else failed)
        return [
            message
            for attempt, posts in read
            for number, post in enumerate(posts, attempt.read - len(posts) + 1)
            for message in self._messages_of(number, post, attempt)
        ]

    def _note_unread(self, failed: Sequence[StoreUnavailable | StoreRefused]) -> None:
        """Take note of the errors of the reads just made. Raises the first one after reads failed for `_UNREAD`."""
        if not failed:
            self._unread_since = None
            return
        if self._unread_since is None:
            logging.getLogger("prefect_tune").warning("the outboxes of remote trials are read later: %s", failed[0])
            self._unread_since = time.monotonic()
        if time.monotonic() - self._unread_since > _UNREAD.total_seconds():
            raise failed[0]

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
            with transfer_pool() as transfers:
                for _ in transfers(lambda reply: answer(store, *reply), first.values()):
                    pass

        if replies:
            on_target(self._target, send, _REQUEST)


@contextmanager
def _noted(failed: list[StoreUnavailable | StoreRefused]) -> Iterator[None]:
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
    with _noted(failed):
        try:
            if attempt.damage is None:
                posts = read_posts(store, attempt.spec.trial, attempt.outbox, attempt.read)
        except (JournalCorrupt, UnknownVersion) as unreadable:
            attempt.damage = unreadable
        attempt.read += len(posts)
        attempt.unread_since = None
    return posts
