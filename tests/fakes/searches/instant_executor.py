"""An executor that trains nothing: its trials report at once what real ones report in hours."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from prefect_tune.attempt.search_link import EntryWritten, StepReported
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.journal_events import (
    Adopted,
    CheckpointRef,
    Cloned,
    Committed,
    Event,
    Finished,
    Reported,
    Started,
)
from prefect_tune.core.messages.process_messages import Leave, Proceed
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import Exploit
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import AttemptExited, Message


class InstantExecutor:
    """Every trial reports each step, saves at its milestone and at its end, and ends after `steps` steps.

    Its metrics depend on its name and the step only. `started` is called whenever a trial starts.
    """

    survives_search = False

    def __init__(self, steps: int, started: Callable[[str], None] = lambda _: None) -> None:
        self._steps = steps
        self._started = started
        self._inbox: deque[Message] = deque()
        self._trials: dict[str, _Attempt] = {}
        self._saved: dict[str, CheckpointRef] = {}
        self.report_count = 0

    def __len__(self) -> int:
        return len(self._trials)

    def __contains__(self, trial: str) -> bool:
        return trial in self._trials

    def start(self, spec: TrialSpec, request: AttemptRequest, attempt: int, absorbed: int) -> None:
        trial = spec.trial.trial
        assert trial not in self, f"trial {trial}: attempt {attempt} begins beside another"
        self._started(trial)
        self._trials[trial] = simulated = _Attempt(trial, absorbed, self._saved)
        if request.exploit is not None:
            self._inbox.append(simulated.exploit(request.exploit, spec.trial.experiment, before=self._steps))
        self._inbox.extend(simulated.begin(attempt))
        self._train(simulated, request.milestone, saves=request.saves_first)

    def answer(self, trial: str, said: Proceed | Leave, step: int | None = None) -> None:
        del step
        simulated = self._trials[trial]
        if isinstance(said, Leave):
            self._inbox.extend(simulated.leave(said))
        else:
            self._train(simulated, said.milestone, saves=simulated.saves_first)

    def _train(self, simulated: _Attempt, milestone: int | None, *, saves: bool) -> None:
        simulated.saves_first = saves
        end = min(self._steps, milestone or self._steps)
        if simulated.step >= end and milestone is not None:  # the restored checkpoint is at its milestone
            self._inbox.append(simulated.ask())
            return
        self.report_count += end - simulated.step
        self._inbox.extend(simulated.train(end, asks=end == milestone, is_last=end == self._steps))

    def stop(self) -> None:
        raise AssertionError("unexpected call of stop()")

    def poll(self, patience: timedelta) -> list[Message]:
        """Return one message at a time, as slow trials would send them."""
        del patience
        return [self._inbox.popleft()]

    def forget(self, trial: str) -> None:
        del self._trials[trial]


class _Attempt:
    """One simulated attempt."""

    def __init__(self, trial: str, absorbed: int, saved: dict[str, CheckpointRef]) -> None:
        self.trial = trial
        self.number = absorbed
        self.saved = saved
        self.saves_first = False
        start = saved.get(trial)
        self.step, self.sequence = (start.step, start.sequence) if start else (0, None)

    def begin(self, attempt: int) -> Iterator[Message]:
        start = Started(trial=self.trial, attempt=attempt, from_step=self.step, from_sequence=self.sequence)
        yield self._wrote(Adopted(), start)

    def exploit(self, exploit: Exploit, experiment: str, *, before: int) -> Message:
        """Continue from the newest checkpoint of the source; from its own if that has none `before` the last step."""
        known = self.saved.get(exploit.source)
        source = exploit.source if known is not None and known.step < before else self.trial
        found = self.saved[source]
        self.saved[self.trial] = copy = found.model_copy(update={"sequence": self.number})
        self.step, self.sequence = copy.step, copy.sequence
        key = TrialKey(experiment=experiment, generation=1, trial=source).checkpoint_key(found)
        config, reason = exploit.config, exploit.reason
        return self._wrote(Cloned(trial=self.trial, checkpoint=copy, source=key, config=config, reason=reason))

    def ask(self) -> Message:
        return StepReported(self.trial, self._report(), asks=True)

    def train(self, end: int, *, asks: bool, is_last: bool) -> Iterator[Message]:
        while self.step < end:
            self.step += 1
            yield StepReported(self.trial, self._report(), asks=asks and not is_last and self.step == end)
        saves = [self._committed()] if is_last or self.saves_first else []
        yield self._wrote(Reported(trial=self.trial, report=self._report()), *saves)
        if is_last:
            yield self._wrote(Finished(trial=self.trial, reason=make_reason("step-limit", step=end, limit=end)))
            yield AttemptExited(self.trial)

    def leave(self, said: Leave) -> Iterator[Message]:
        saves = [self._committed()] if said.save and not self.saves_first else []
        yield self._wrote(*saves, said.outcome)
        yield AttemptExited(self.trial)

    def _wrote(self, *events: Event) -> EntryWritten:
        self.number += 1
        return EntryWritten(self.trial, self.number, events)

    def _report(self) -> StepReport:
        return StepReport(step=self.step, metrics=_metrics(self.trial, self.step), trained_seconds=float(self.step))

    def _committed(self) -> Committed:
        report = self._report()
        ref = CheckpointRef(sequence=self.number, size_bytes=1 << 26, **report.model_dump())
        self.saved[self.trial] = ref
        return Committed(trial=self.trial, checkpoint=ref)


def _metrics(trial: str, step: int) -> Mapping[str, object]:
    quality = random.Random(f"{trial} of the executor").random()
    return {"loss": quality + 1 / (step + 1), "accuracy": 1 - quality, "examples": 60_000 * step}
