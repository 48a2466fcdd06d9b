"""Experiments in virtual time: a driver that asks a schedule as the real one does, and trains in no time.

Slots, attempts that die and resume from their last checkpoint, pauses, exploits: whatever a scheduler has to be right
about. A run is a function of its arguments. `RecordingSchedule` records the calls of a schedule, to replay them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.schedulers.base import Continue, Decision, Exploit, Pause, Schedule, Stop, TrialReport
from prefect_tune.core.values import StepReport

Config = Mapping[str, object]
State = object


class Training(Protocol):
    """The training of one trial: states are values, so that a checkpoint is the state itself."""

    def begin(self, config: Config) -> State: ...

    def advance(self, config: Config, state: State, steps: int) -> State: ...

    def metrics(self, config: Config, state: State, step: int) -> Mapping[str, object]: ...


@dataclass(frozen=True)
class Table:
    """Recorded learning curves: a configuration names its row, and a state is nothing."""

    rows: list[list[float]]
    metric: str = "loss"

    def begin(self, config: Config) -> State:
        del config
        return None

    def advance(self, config: Config, state: State, steps: int) -> State:
        del config, state, steps
        return None

    def metrics(self, config: Config, state: State, step: int) -> Mapping[str, object]:
        del state
        curve = self.rows[int(str(config["row"]))]
        return {self.metric: curve[min(step, len(curve)) - 1]}


@dataclass(frozen=True)
class World:
    """The conditions of a run."""

    slots: int = 1
    max_steps: int = 10**9
    """The step at which the trainable returns, or a stopper ends it."""
    death_probability: float = 0.0
    """The probability that an attempt dies in a step."""
    saves_every: int = 1
    """Steps between checkpoints, besides those that decisions ask for; 0 for none."""
    reports_every: int = 1
    """The trial cannot answer at other steps: it comes late to its milestones."""
    deaths_allowed: int = 10**9
    """How often a trial is started again before it is given up."""
    seed: int = 0


@dataclass
class VirtualTrial:
    """A trial as the driver knows it."""

    id: str
    config: Config
    state: State
    step: int = 0
    saved: tuple[int, State] | None = None
    status: str = "running"
    reason: AnyReason = ""
    deaths: int = 0


@dataclass(frozen=True)
class Segment:
    """A trial trained the steps after `start` up to `end`, and stood there at `time`."""

    time: float
    trial: str
    start: int
    end: int


@dataclass
class Outcome:
    """What happened, in order."""

    trials: dict[str, VirtualTrial] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    decisions: list[tuple[TrialReport, Decision]] = field(default_factory=list)
    time: float = 0.0

    @property
    def steps(self) -> int:
        return sum(segment.end - segment.start for segment in self.segments)

    def trials_reaching(self, step: int) -> set[str]:
        """Return the trials that trained to `step`."""
        return {segment.trial for segment in self.segments if segment.end >= step}

    def steps_until(self, is_met: Callable[[Segment], bool]) -> int | None:
        """Count all steps up to the end of the first segment for which it holds."""
        total = 0
        for segment in self.segments:
            total += segment.end - segment.start
            if is_met(segment):
                return total
        return None


class VirtualRun:
    """One experiment. `run` trains until nothing is left to do, or until `time`."""

    def __init__(self, schedule: Schedule, training: Training, configs: Iterable[Config], world: World) -> None:
        self._schedule = schedule
        self._training = training
        self._configs: Iterator[Config] = iter(configs)
        self._world = world
        self._random = random.Random(world.seed)
        self._free = world.slots
        self._events: list[tuple[float, int, VirtualTrial, int, bool]] = []
        self._count = 0
        self.outcome = Outcome()

    def run(self, time: float = math.inf) -> Outcome:
        self._fill()
        while self._events and self._events[0][0] <= time:
            self.outcome.time, _, trial, end, dies = heapq.heappop(self._events)
            self.outcome.segments.append(Segment(self.outcome.time, trial.id, trial.step, end))
            self._train(trial, end)
            self._resume_after_death(trial) if dies else self._decide(trial)
            self._fill()
        return self.outcome

    def _start(self, trial: VirtualTrial) -> None:
        """Give a slot to the trial until its next report that is asked for, its end, or its death."""
        trial.status = "running"
        self._free -= 1
        self._continue(trial)

    def _continue(self, trial: VirtualTrial) -> None:
        milestone = self._schedule.next_milestone(trial.id, trial.step)
        every = self._world.reports_every
        target = self._world.max_steps if milestone is None else -(-milestone // every) * every
        target, last_step = min(target, self._world.max_steps), trial.step + self._draw_lifetime()
        assert target > trial.step, f"{trial} is to train to {target}"
        end, dies = min(target, last_step), last_step < target
        self._count += 1
        heapq.heappush(self._events, (self.outcome.time + end - trial.step + dies, self._count, trial, end, dies))

    def _draw_lifetime(self) -> int:
        """Return the number of whole steps before the attempt dies."""
        if not self._world.death_probability:
            return 10**12
        return int(math.log(1 - self._random.random()) / math.log(1 - self._world.death_probability))

    def _train(self, trial: VirtualTrial, end: int) -> None:
        every = self._world.saves_every
        last_save = end // every * every if every else 0
        if last_save > trial.step:
            trial.state = self._training.advance(trial.config, trial.state, last_save - trial.step)
            trial.step, trial.saved = last_save, (last_save, trial.state)
        trial.state = self._training.advance(trial.config, trial.state, end - trial.step)
        trial.step = end

    def _resume_after_death(self, trial: VirtualTrial) -> None:
        trial.deaths += 1
        self._restore(trial, trial.saved)
        if trial.deaths > self._world.deaths_allowed:
            self._end(trial, "given up")
        else:
            self._continue(trial)

    def _restore(self, trial: VirtualTrial, saved: tuple[int, State] | None) -> None:
        trial.step, trial.state = saved or (0, self._training.begin(trial.config))

    def _decide(self, trial: VirtualTrial) -> None:
        if trial.step >= self._world.max_steps:
            self._end(trial, "finished")
            return
        if self._schedule.saves_first:
            trial.saved = (trial.step, trial.state)
        metrics = self._training.metrics(trial.config, trial.state, trial.step)
        report = TrialReport(trial.id, StepReport(step=trial.step, metrics=metrics), trial.config)
        decision = self._schedule.decide(report)
        self.outcome.decisions.append((report, decision))
        match decision:
            case Continue():
                self._continue(trial)
            case Stop(reason=reason):
                self._end(trial, reason)
            case Pause(reason=reason):
                self._pause(trial, reason)
            case Exploit(source=source, config=config):
                trial.config = config
                trial.saved = self.outcome.trials[source].saved
                self._restore(trial, trial.saved)
                self._continue(trial)

    def _pause(self, trial: VirtualTrial, reason: AnyReason) -> None:
        trial.status, trial.reason = "paused", reason
        trial.saved = (trial.step, trial.state)
        self._free += 1

    def _end(self, trial: VirtualTrial, reason: AnyReason) -> None:
        self._free += trial.status == "running"
        trial.status, trial.reason = "ended", reason
        self._schedule.on_trial_ended(trial.id)

    def _fill(self) -> None:
        """Fill every free slot."""
        while self._free:
            self._end_stopped_trials()
            trial = self._schedule.next_trial_to_resume()
            if trial is not None:
                paused = self.outcome.trials[trial]
                assert paused.status == "paused", f"{paused} is to be resumed"
                self._schedule.on_trial_resumed(trial)
                self._restore(paused, paused.saved)
                self._start(paused)
            elif self._schedule.is_waiting() or not self._start_new_trial():
                break

    def _end_stopped_trials(self) -> None:
        while (stopped := self._schedule.next_trial_to_stop()) is not None:
            trial = self.outcome.trials[stopped[0]]
            assert trial.status == "paused", f"{trial} is to be stopped"
            self._end(trial, stopped[1].reason)

    def _start_new_trial(self) -> bool:
        """Start a new trial, or tell the schedule that there is none; return whether anything has changed."""
        config = next(self._configs, None)
        if config is None:
            before = (self._schedule.next_trial_to_resume(), self._schedule.next_trial_to_stop())
            self._schedule.on_no_new_trial()
            return before != (self._schedule.next_trial_to_resume(), self._schedule.next_trial_to_stop())
        trial = VirtualTrial(f"t{len(self.outcome.trials)}", config, self._training.begin(config))
        self.outcome.trials[trial.id] = trial
        self._schedule.on_trial_added(trial.id, config)
        self._start(trial)
        return True


@dataclass(frozen=True)
class RecordedCall:
    """A call of a schedule, and its answer; `state` holds what it would have answered next."""

    name: str
    arguments: tuple[object, ...]
    answer: object
    state: object

    def replay_on(self, schedule: Schedule) -> object:
        return getattr(schedule, self.name)(*self.arguments)


def probe_schedule(schedule: Schedule, trials: Iterable[str]) -> object:
    """Return the answers of all calls that change nothing."""
    milestones = {trial: [schedule.next_milestone(trial, step) for step in (0, 1, 4, 26, 90)] for trial in trials}
    return schedule.next_trial_to_resume(), schedule.next_trial_to_stop(), schedule.is_waiting(), milestones


class RecordingSchedule(Schedule):
    """Another schedule, with a record of its calls."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.saves_first = schedule.saves_first
        self.trials: dict[str, None] = {}
        self.calls: list[RecordedCall] = []

    def on_trial_added(self, trial: str, config: Config) -> None:
        self.trials[trial] = None
        self._record("on_trial_added", trial, config)

    def decide(self, report: TrialReport) -> Decision:
        return self._record("decide", report)

    def on_trial_resumed(self, trial: str) -> None:
        self._record("on_trial_resumed", trial)

    def on_trial_ended(self, trial: str) -> None:
        self._record("on_trial_ended", trial)

    def on_no_new_trial(self) -> None:
        self._record("on_no_new_trial")

    def next_milestone(self, trial: str, step: int) -> int | None:
        return self._schedule.next_milestone(trial, step)

    def next_trial_to_resume(self) -> str | None:
        return self._schedule.next_trial_to_resume()

    def next_trial_to_stop(self) -> tuple[str, Stop] | None:
        return self._schedule.next_trial_to_stop()

    def is_waiting(self) -> bool:
        return self._schedule.is_waiting()

    def _record(self, name: str, *arguments: object) -> Any:
        answer = getattr(self._schedule, name)(*arguments)
        self.calls.append(RecordedCall(name, arguments, answer, probe_schedule(self._schedule, self.trials)))
        return answer
