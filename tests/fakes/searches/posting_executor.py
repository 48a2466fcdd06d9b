"""An executor of attempts on simulated other machines, which post their events to outboxes on the target."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from prefect_tune.attempt.attempt import next_start
from prefect_tune.attempt.search_link import AnswerAwaited, Outbox
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.journal.outbox import read_posts
from prefect_tune.core.journal_events import AttemptEvent, CheckpointRef, Committed, Reported
from prefect_tune.core.messages.process_messages import Leave, Proceed
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import AttemptExited, Message, PostReceived
from prefect_tune.storage_retries import on_target


class RemoteAttempt:
    """One attempt; a test has it post, ask and exit."""

    def __init__(self, spec: TrialSpec, request: AttemptRequest) -> None:
        self.spec, self.request, self.trial = spec, request, request.trial.trial
        self.outbox = Outbox(spec.target, spec.trial, request.trial)
        self.messages: list[Message] = []
        self.read = request.trial.post
        self.is_readable = True
        """Whether the search sees new posts."""

    def posts(self, *events: AttemptEvent) -> None:
        self.outbox.write(events)

    def starts(self) -> None:
        self.posts(next_start(self.request.trial))

    def saves(self, step: int, *retires: int, loss: float = 1.0) -> None:
        report = StepReport(step=step, metrics={"loss": loss})
        ref = CheckpointRef(sequence=self.outbox.trial.next_sequence, **report.model_dump())
        saved = Committed(trial=self.trial, checkpoint=ref, retires=retires)
        self.posts(Reported(trial=self.trial, report=report), saved)

    def asks(self) -> None:
        trial = self.outbox.trial
        self.messages.append(AnswerAwaited(self.trial, StepReport(step=trial.step, metrics=trial.metrics)))

    def exits(self, error: BaseException | None = None) -> None:
        self.messages.append(AttemptExited(self.trial, error))

    def take_messages(self) -> list[Message]:
        """Return what the search finds: new posts, each twice, before the other messages."""
        after, messages, self.messages = self.read, self.messages, []
        if not self.is_readable:
            return messages
        key, outbox = self.spec.trial, self.request.trial.outbox_count
        posts = on_target(self.spec.target, lambda store: read_posts(store, key, outbox, after))
        self.read += len(posts)
        found = [PostReceived(self.trial, number, post.events) for number, post in enumerate(posts, after + 1)]
        return [*(message for each in found for message in (each, each)), *messages]


class PostingExecutor:
    """Calls `act` with each attempt that is requested, and `answer_trial` with each answer."""

    is_remote = True

    def __init__(
        self,
        act: Callable[[RemoteAttempt], None],
        answer_trial: Callable[[RemoteAttempt, Proceed | Leave], None] = lambda _attempt, _answer: None,
        *,
        survives_search: bool = False,
    ) -> None:
        self.survives_search = survives_search
        self.attempts: list[RemoteAttempt] = []
        self._act, self._answer_trial = act, answer_trial
        self._running: dict[str, RemoteAttempt] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, trial: str) -> bool:
        return trial in self._running

    def start(self, spec: TrialSpec, request: AttemptRequest) -> None:
        attempt = self._running[request.trial.trial] = RemoteAttempt(spec, request)
        self.attempts.append(attempt)
        self._act(attempt)

    def answer(self, trial: str, said: Proceed | Leave, step: int | None = None) -> None:
        del step
        self._answer_trial(self._running[trial], said)

    def poll(self, patience: timedelta) -> list[Message]:
        del patience
        return [message for attempt in self._running.values() for message in attempt.take_messages()]

    def stop(self) -> None:
        """Forget all attempts, as a search that is killed does."""
        self._running.clear()

    def forget(self, trial: str) -> None:
        del self._running[trial]

    def refuse(self) -> None:
        """Do nothing: its attempts submit nothing."""
