"""Searches in virtual time: slots that train trials step by step, at no cost but that of the tuner."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from benchmarks.quality.problems import Curve, Problem

__all__ = ["Answer", "Report", "Start", "Tuner", "simulate"]


class Answer(Enum):
    """To a report; after the last step it counts for nothing, and the trial has ended."""

    CONTINUE = "continue"
    PAUSE = "pause"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Start:
    """Train this trial: a new one from step 0, or a paused one from where it paused."""

    trial: int
    config: Mapping[str, Any]


class Tuner(Protocol):
    """A search algorithm and a scheduler or pruner, with the steps of a trial as they come."""

    def start(self) -> Start | None:
        """Return what a free slot trains now; None for nothing before the next report."""
        ...

    def report(self, trial: int, step: int, loss: float) -> Answer:
        """Return what a trial does after a step."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """A trial has finished a step."""

    seconds: float
    """Of training until then: the time that has passed, in all slots, the idle ones included."""
    trial: int
    step: int
    loss: float
    final: float
    """Its loss after the last step, which only the simulation knows."""


def simulate(tuner: Tuner, problem: Problem, seed: int, slots: int, seconds: float) -> Sequence[Report]:
    """Return the reports of a search until it has had so many seconds of its slots."""
    curves: dict[int, Curve] = {}
    trained: dict[int, int] = {}
    steps: list[tuple[float, int, int]] = []
    reports: list[Report] = []
    now, free = 0.0, slots

    def train(trial: int) -> None:
        heapq.heappush(steps, (now + curves[trial].step_seconds, len(reports), trial))

    while True:
        while free and (start := tuner.start()) is not None:
            free -= 1
            if start.trial not in curves:
                curves[start.trial] = problem.train(start.config, seed)
            train(start.trial)
        if not steps or steps[0][0] * slots > seconds:
            return reports
        now, _, trial = heapq.heappop(steps)
        step = trained[trial] = trained.get(trial, 0) + 1
        curve = curves[trial]
        reports.append(Report(now * slots, trial, step, curve.losses[step - 1], curve.losses[-1]))
        answer = tuner.report(trial, step, curve.losses[step - 1])
        if answer is Answer.CONTINUE and step < problem.max_t:
            train(trial)
        else:
            free += 1
