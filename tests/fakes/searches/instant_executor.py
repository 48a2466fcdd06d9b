"""An executor that trains nothing: its trials report at once what real ones report in hours."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from prefect_tune.attempt.attempt import make_attempt_started
from prefect_tune.attempt.search_channel import DecisionAwaited, EventsSubmitted
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.experiment.trial_transitions import Trial, apply_trial_event, newest_checkpoint
from prefect_tune.core.journal_events import (
    AttemptEvent,
    CheckpointCommitted,
    CheckpointRef,
    StepReported,
    TrialFinished,
)
from prefect_tune.core.messages.process_messages import ContinueTraining, StopTrial
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import AttemptExited, Message


class InstantExecutor:
    """Every trial reports each step, saves at its milestone and at its end, and ends after `steps` steps.

    Its metrics depend on its name and the step only. `on_start` is called whenever a trial starts.
    """

    is_remote = False
    attempts_outlive_search = False

    def __init__(self, steps: int, on_start: Callable[[str], None] = lambda _: None) -> None:
        self._steps = steps
        self._on_start = on_start
        self._inbox: deque[Message] = deque()
        self._trials: dict[str, _Attempt] = {}
        self.report_count = 0

    def __len__(self) -> int:
        return len(self._trials)

    def __contains__(self, trial: str) -> bool:
        return trial in self._trials

    def start_attempt(self, spec: TrialSpec, request: AttemptRequest) -> None:
        trial = spec.trial.trial
        assert trial not in self, f"trial {trial}: attempt {request.attempt} begins beside another"
        self._on_start(trial)
        self._trials[trial] = simulated = self._make_attempt(request.trial)
        self._inbox.append(simulated.begin())
        self._train(simulated, request.milestone, saves=request.saves_first)

    def _make_attempt(self, trial: Trial) -> _Attempt:
        return _Attempt(trial)

    def send_answer(self, trial: str, answer: ContinueTraining | StopTrial, step: int | None = None) -> None:
        del step
        simulated = self._trials[trial]
        if isinstance(answer, StopTrial):
            self._inbox.extend(simulated.stop(answer))
        else:
            self._train(simulated, answer.milestone, saves=simulated.saves_first)

    def _train(self, simulated: _Attempt, milestone: int | None, *, saves: bool) -> None:
        simulated.saves_first = saves
        end = min(self._steps, milestone or self._steps)
        if simulated.step >= end and milestone is not None:  # the restored checkpoint is at its milestone
            self._inbox.append(simulated.await_decision())
            return
        self.report_count += end - simulated.step
        self._inbox.extend(simulated.train(end, awaits_decision=end == milestone, is_last=end == self._steps))

    def stop_all(self) -> None:
        raise AssertionError("unexpected call of stop()")

    def poll_messages(self, timeout: timedelta) -> list[Message]:
        """Return one message at a time, as slow trials would send them."""
        del timeout
        return [self._inbox.popleft()]

    def reject_events(self) -> None:
        """Do nothing: no attempt waits for an entry."""

    def remove_attempt(self, trial: str) -> None:
        del self._trials[trial]


class _Attempt:
    """One simulated attempt."""

    def __init__(self, state: Trial) -> None:
        self.state = state
        self.trial = state.id
        self.saves_first = False
        newest = newest_checkpoint(state)
        self.step = newest.step if newest else 0

    def begin(self) -> Message:
        return self._submit(make_attempt_started(self.state))

    def await_decision(self) -> Message:
        return DecisionAwaited(self.trial, self._make_report())

    def train(self, end: int, *, awaits_decision: bool, is_last: bool) -> Iterator[Message]:
        while self.step < end:
            self.step += 1
            saves = [self._commit()] if self.step == end and (is_last or self.saves_first) else []
            yield self._submit(StepReported(trial=self.trial, report=self._make_report()), *saves)
        if awaits_decision and not is_last:
            yield self.await_decision()
        if is_last:
            yield self._submit(TrialFinished(trial=self.trial, reason=make_reason("step-limit", step=end, limit=end)))
            yield AttemptExited(self.trial)

    def stop(self, decision: StopTrial) -> Iterator[Message]:
        saves = [self._commit()] if decision.save and not self.saves_first else []
        yield self._submit(*saves, decision.outcome)
        yield AttemptExited(self.trial)

    def _submit(self, *events: AttemptEvent) -> EventsSubmitted:
        for event in events:
            self.state = apply_trial_event(self.state, event)
        is_awaited = any(not isinstance(event, StepReported) for event in events)
        return EventsSubmitted(self.trial, events, is_awaited=is_awaited)

    def _make_report(self) -> StepReport:
        return StepReport(step=self.step, metrics=_metrics(self.trial, self.step), trained_seconds=float(self.step))

    def _commit(self) -> CheckpointCommitted:
        ref = CheckpointRef(sequence=self.state.next_sequence, size_bytes=1 << 26, **self._make_report().model_dump())
        return CheckpointCommitted(trial=self.trial, checkpoint=ref, retired_sequences=self.retired_sequences(ref))

    def retired_sequences(self, new: CheckpointRef) -> tuple[int, ...]:
        """Return what a checkpoint retires: nothing."""
        del new
        return ()


def _metrics(trial: str, step: int) -> Mapping[str, object]:
    quality = random.Random(f"{trial} of the executor").random()
    return {"loss": quality + 1 / (step + 1), "accuracy": 1 - quality, "examples": 60_000 * step}
