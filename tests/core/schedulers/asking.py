"""Drives a schedule by hand, for tests with few trials."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_tune.core.schedulers.base import Decision, Schedule, Scheduler, TrialReport
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport

LOSS = Objective(metrics=("loss",), modes=("min",))
SCORE = Objective(metrics=("score",), modes=("max",))


class ScheduleDriver:
    """A schedule with short calls of its methods."""

    def __init__(
        self,
        scheduler: Scheduler,
        *trials: str,
        objective: Objective = LOSS,
        seed: int = 0,
        config: Mapping[str, object] | None = None,
    ) -> None:
        self.schedule: Schedule = scheduler.begin(objective, seed)
        self._metric = objective.metrics[0]
        self.add(*trials, config=config)

    def add(self, *trials: str, config: Mapping[str, object] | None = None) -> None:
        for trial in trials:
            self.schedule.on_trial_added(trial, config or {})

    def report(self, trial: str, step: int, value: object, config: Mapping[str, object] | None = None) -> Decision:
        report = StepReport(step=step, metrics={self._metric: value})
        return self.schedule.decide(TrialReport(trial, report, config))

    def decide(self, trial: str, step: int, value: float) -> str:
        """Report a value; return the type of the decision."""
        return self.report(trial, step, value).type

    def end(self, *trials: str) -> None:
        for trial in trials:
            self.schedule.on_trial_ended(trial)

    def resume(self) -> str | None:
        """Give a slot to the next trial, if any."""
        trial = self.schedule.next_trial_to_resume()
        if trial is not None:
            self.schedule.on_trial_resumed(trial)
        return trial

    def resume_all(self) -> list[str]:
        return list(iter(self.resume, None))

    def stop_all(self) -> list[str]:
        trials = []
        while (stopped := self.schedule.next_trial_to_stop()) is not None:
            trials.append(stopped[0])
            self.end(stopped[0])
        return trials
