"""An executor of attempts on simulated other machines, which post their events to outboxes on the target."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from prefect_tune.attempt.attempt import make_attempt_started
from prefect_tune.attempt.search_channel import DecisionAwaited, OutboxJournal
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.journal.outbox import read_posts
from prefect_tune.core.journal_events import AttemptEvent, CheckpointCommitted, CheckpointRef, StepReported
from prefect_tune.core.messages.process_messages import ContinueTraining, StopTrial
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import AttemptExited, Message, PostArrived
from prefect_tune.storage_retries import with_store


class RemoteAttempt:
    """One attempt; a test has it post, ask and exit."""

    def __init__(self, spec: TrialSpec, request: AttemptRequest) -> None:
        self.spec, self.request, self.trial = spec, request, request.trial.id
        self.outbox = OutboxJournal(spec.target, spec.trial, request.trial)
        self.messages: list[Message] = []
        self.read = request.trial.last_post
        self.is_readable = True
        """Whether the search sees new posts."""

    def post(self, *events: AttemptEvent) -> None:
        self.outbox.write(events)

    def start(self) -> None:
        self.post(make_attempt_started(self.request.trial))

    def save(self, step: int, *retires: int, loss: float = 1.0) -> None:
        report = StepReport(step=step, metrics={"loss": loss})
        ref = CheckpointRef(sequence=self.outbox.trial.next_sequence, **report.model_dump())
        committed = CheckpointCommitted(trial=self.trial, checkpoint=ref, retired_sequences=retires)
        self.post(StepReported(trial=self.trial, report=report), committed)

    def await_decision(self) -> None:
        trial = self.outbox.trial
        self.messages.append(DecisionAwaited(self.trial, StepReport(step=trial.step, metrics=trial.metrics)))

    def exit(self, error: BaseException | None = None) -> None:
        self.messages.append(AttemptExited(self.trial, error))

    def take_messages(self) -> list[Message]:
        """Return new posts, each twice, before the other messages."""
        after, messages, self.messages = self.read, self.messages, []
        if not self.is_readable:
            return messages
        key, outbox = self.spec.trial, self.request.trial.outbox_count
        posts = with_store(self.spec.target, lambda store: read_posts(store, key, outbox, after))
        self.read += len(posts)
        arrived = [PostArrived(self.trial, number, post.events) for number, post in enumerate(posts, after + 1)]
        return [*(message for message in arrived for _ in range(2)), *messages]


class PostingExecutor:
    """Calls `act` with each attempt that is requested, and `answer_trial` with each answer."""

    is_remote = True

    def __init__(
        self,
        act: Callable[[RemoteAttempt], None],
        answer_trial: Callable[[RemoteAttempt, ContinueTraining | StopTrial], None] = lambda _attempt, _answer: None,
        *,
        attempts_outlive_search: bool = False,
    ) -> None:
        self.attempts_outlive_search = attempts_outlive_search
        self.attempts: list[RemoteAttempt] = []
        self._act, self._answer_trial = act, answer_trial
        self._running: dict[str, RemoteAttempt] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, trial: str) -> bool:
        return trial in self._running

    def start_attempt(self, spec: TrialSpec, request: AttemptRequest) -> None:
        attempt = self._running[request.trial.id] = RemoteAttempt(spec, request)
        self.attempts.append(attempt)
        self._act(attempt)

    def send_answer(self, trial: str, answer: ContinueTraining | StopTrial, step: int | None = None) -> None:
        del step
        self._answer_trial(self._running[trial], answer)

    def poll_messages(self, timeout: timedelta) -> list[Message]:
        del timeout
        return [message for attempt in self._running.values() for message in attempt.take_messages()]

    def stop_all(self) -> None:
        """Forget all attempts, as a search that is killed does."""
        self._running.clear()

    def remove_attempt(self, trial: str) -> None:
        del self._running[trial]

    def reject_events(self) -> None:
        """Do nothing: its attempts submit nothing."""
