"""A search and a scheduler of prefect-tune, called in the order in which a search's driver calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.quality.problems import Parameter, Problem
from benchmarks.quality.simulation import Answer, Start, Tuner
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Continue, Pause, Scheduler, Stop, TrialReport
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.search.base import Proposed, Search
from prefect_tune.core.search.domains import Domain, choice, lograndint, loguniform, randint, uniform
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import UNLIMITED, RandomSearch
from prefect_tune.core.values import StepReport
from prefect_tune.integrations.optuna import OptunaSearch

__all__ = ["OURS"]

_LOSS = Objective(metrics=("loss",), modes=("min",))


class OurTuner:
    """Trials report at their milestones, and after their last step."""

    def __init__(self, search: Search, scheduler: Scheduler, problem: Problem, seed: int) -> None:
        space = {name: _domain(parameter) for name, parameter in problem.parameters.items()}
        self._proposals = search.begin(space, _LOSS, seed)
        self._schedule = scheduler.begin(_LOSS, seed)
        self._max_t = problem.max_t
        self._configs: list[Mapping[str, object]] = []
        self._milestones: dict[str, int | None] = {}
        self._last: dict[str, StepReport] = {}

    def start(self) -> Start | None:
        while (stopped := self._schedule.next_trial_to_stop()) is not None:
            self._end(stopped[0], stopped[1])
        paused = self._schedule.next_trial_to_resume()
        if paused is not None:
            self._schedule.on_trial_resumed(paused)
            return self._start_trial(paused)
        if self._schedule.is_waiting():
            return None
        proposed = self._proposals.suggest(len(self._configs))
        assert isinstance(proposed, Proposed)
        trial = str(len(self._configs))
        self._configs.append(proposed.config)
        self._schedule.on_trial_added(trial, proposed.config)
        return self._start_trial(trial)

    def report(self, trial: int, step: int, loss: float) -> Answer:
        name, milestone = str(trial), self._milestones[str(trial)]
        self._last[name] = StepReport(step=step, metrics={"loss": loss})
        if step < self._max_t and (milestone is None or step < milestone):
            return Answer.CONTINUE
        decision: object = Continue()
        if milestone is not None and step >= milestone:
            self._proposals.on_report(trial, self._last[name])
            decision = self._schedule.decide(TrialReport(name, self._last[name]))
        if isinstance(decision, Stop) or step >= self._max_t:
            self._end(name, decision if isinstance(decision, Stop) else None)
            return Answer.STOP
        if isinstance(decision, Pause):
            return Answer.PAUSE
        self._milestones[name] = self._schedule.next_milestone(name, step)
        return Answer.CONTINUE

    def _start_trial(self, trial: str) -> Start:
        step = self._last[trial].step if trial in self._last else 0
        self._milestones[trial] = self._schedule.next_milestone(trial, step)
        return Start(int(trial), self._configs[int(trial)])

    def _end(self, trial: str, stop: Stop | None) -> None:
        self._schedule.on_trial_ended(trial)
        if stop is not None and stop.early:
            self._proposals.on_trial_stopped(int(trial))
        self._proposals.on_trial_ended(int(trial), self._last[trial], failed=False)


def _domain(parameter: Parameter) -> Domain:
    if parameter.options:
        return choice(list(parameter.options))
    if parameter.is_whole:
        whole = lograndint if parameter.scale == "log" else randint
        return whole(int(parameter.low), int(parameter.high) + 1)
    return (loguniform if parameter.scale == "log" else uniform)(parameter.low, parameter.high)


def _tuner(search: Search, scheduler: Callable[[int], Scheduler]) -> Callable[[Problem, int], Tuner]:
    return lambda problem, seed: OurTuner(search, scheduler(problem.max_t), problem, seed)


_RANDOM, _TPE = RandomSearch(UNLIMITED), OptunaSearch(num_samples=UNLIMITED)
OURS: Mapping[str, Callable[[Problem, int], Tuner]] = {
    "ours: no search or scheduler named": _tuner(_RANDOM, lambda _: FIFO()),
    "ours: random, Hyperband": _tuner(_RANDOM, Hyperband),
    "ours: random, ASHA": _tuner(_RANDOM, lambda max_t: ASHA(max_t, variant="stopping")),
    "ours: random, ASHA promotion": _tuner(_RANDOM, lambda max_t: ASHA(max_t, variant="promotion")),
    "ours: OptunaSearch, ASHA": _tuner(_TPE, lambda max_t: ASHA(max_t, variant="stopping")),
    "ours: OptunaSearch, ASHA promotion": _tuner(_TPE, lambda max_t: ASHA(max_t, variant="promotion")),
}
