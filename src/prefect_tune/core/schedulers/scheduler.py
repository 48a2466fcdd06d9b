"""What a scheduler is: asked at milestones, it answers with a decision; fed the same history, the same ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from prefect_tune.core.objective import Objective
from prefect_tune.core.values import StepReport, TrialId, Value

__all__ = ["Continue", "Decision", "Exploit", "Pause", "Schedule", "Scheduler", "Stop", "TrialReport"]


class Continue(Value):
    """Train on to the next milestone."""

    type: Literal["continue"] = "continue"


class Pause(Value):
    """Save, and give the slot away until `Schedule.resume_next` names the trial."""

    type: Literal["pause"] = "pause"
    reason: str


class Stop(Value):
    """The trial is done."""

    type: Literal["stop"] = "stop"
    reason: str


class Exploit(Value):
    """Go on from the newest checkpoint of `source`, with this configuration (Jaderberg et al. 2017)."""

    type: Literal["exploit"] = "exploit"
    source: TrialId
    config: Mapping[str, object]
    reason: str


Decision: TypeAlias = Annotated[Continue | Pause | Stop | Exploit, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class TrialReport:
    """What a trial reported at a milestone."""

    trial: TrialId
    report: StepReport


class Scheduler(ABC):
    """How one is configured: a frozen value. Its state is the `Schedule` that it begins."""

    @abstractmethod
    def begin(self, objective: Objective, seed: int) -> Schedule:
        """Return the schedule of an experiment that has no trial yet.

        Raises:
            InvalidInput: it cannot serve this objective.
        """


class Schedule(ABC):
    """The state of a scheduler: a function of what it was told, in that order, and of nothing else.

    A resumed experiment tells a new one everything that the journal holds, in the journal's order: each
    `added`, each `decide` (the answer is thrown away: the one in the journal was acted on), each `resumed`
    and `ended`. Then both are in the same state. It reads no clock and draws only from a generator seeded
    by the seed it was begun with.
    """

    @abstractmethod
    def added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        """Hear of a new trial, before it starts."""

    @abstractmethod
    def milestone(self, trial: TrialId, step: int) -> int | None:
        """Return the first step after `step` at which the trial reports and waits for a decision; None for never.

        Asked for each attempt that starts and after each decision; it changes nothing. A trial that cannot
        save at that very step (a function trainable) is asked at the first report at or after it.
        """

    @abstractmethod
    def decide(self, report: TrialReport) -> Decision:
        """Decide after a report at or after the trial's milestone.

        A report at a step that was decided before (an attempt that lost steps trains them again) gets the
        same kind of answer, and is not counted twice.

        Raises:
            BadMetric: the objective's metric is not in it.
        """

    def resume_next(self) -> TrialId | None:
        """Return the paused trial that is to have the next free slot; None to start a new trial instead.

        It changes nothing: `resumed` does.
        """
        return None

    def resumed(self, trial: TrialId) -> None:
        """Hear that a paused trial has been given a slot."""
        del trial

    def is_waiting(self) -> bool:
        """Whether a new trial would be too early, though there are slots: a bracket is full, or all wait for one."""
        return False

    def exhausted(self) -> None:
        """Hear that there will be no new trial: who waits for more to compare with waits in vain."""
        return

    @abstractmethod
    def ended(self, trial: TrialId) -> None:
        """Hear that a trial is over for good: stopped, finished or given up. Said once, whoever ended it."""
