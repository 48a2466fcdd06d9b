"""What a scheduler is: asked at milestones, it answers with a decision; fed the same history, the same ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from prefect_tune.core.objective import Objective
from prefect_tune.core.values import StepReport, TrialId, Value

__all__ = ["Continue", "Decision", "Exploit", "Pause", "Schedule", "Scheduler", "Stop", "TrialReport"]


class Continue(Value):
    """Train on to the next milestone."""

    type: Literal["continue"] = "continue"


class Pause(Value):
    """Save, and give the slot away until `Schedule.resume_next` names the trial.

    If it names this very trial as soon as it is asked, nothing is given away: `resumed`, and train on where it is.
    """

    type: Literal["pause"] = "pause"
    reason: str
    """For the journal, and whoever reads it."""


class Stop(Value):
    """The trial is done."""

    type: Literal["stop"] = "stop"
    reason: str
    """For the journal, and whoever reads it."""
    early: bool = True
    """Whether that is before its time; not where it has trained all the steps that there are."""


class Exploit(Value):
    """Go on from the newest checkpoint of `source`, with this `config` (Jaderberg et al. 2017).

    If that has none any more, the trial goes on from its own newest one, with this configuration all the same.
    """

    type: Literal["exploit"] = "exploit"
    source: TrialId
    config: Mapping[str, object]
    reason: str
    """For the journal, and whoever reads it."""


Decision: TypeAlias = Annotated[Continue | Pause | Stop | Exploit, Field(discriminator="type")]
"""What a schedule answers to a report."""


@dataclass(frozen=True, slots=True)
class TrialReport:
    """What a trial reported at a milestone."""

    trial: TrialId
    report: StepReport
    """Its step, metrics and training time."""
    config: Mapping[str, object] | None = None
    """What it trains with now; None where that is what it was added with or was last told to exploit."""


class Scheduler(ABC):
    """How one is configured: a frozen value. Its state is the `Schedule` that it begins."""

    @abstractmethod
    def begin(self, objective: Objective, seed: int) -> Schedule:
        """Return the schedule of an experiment that has no trial yet.

        Raises:
            InvalidInput: it cannot serve this objective.
        """

    def require_serves(self, space: Mapping[str, object]) -> None:
        """Return if it can serve trials that are drawn from a valid `space`; most look at no configuration.

        Raises:
            InvalidInput: it cannot.
        """
        del space


class Schedule(ABC):
    """The state of a scheduler: a function of what it was told, in that order, and of nothing else.

    Whenever a slot is free, the driver ends who `stop_next` names, until it names nobody; then resumes who
    `resume_next` names; and if that is nobody, and it is not `is_waiting`, starts a new trial. Once no trial
    runs and `exhausted` was said, one of the two names a trial for as long as one is paused.

    A resumed experiment tells a new one everything that the journal holds, in the journal's order: each
    `added`, each `decide` (the answer is thrown away: the one in the journal was acted on), each `resumed`
    and `ended`. Then both are in the same state. It reads no clock and draws only from a generator seeded
    by the seed it was begun with. Where the scheduler is another one than before, so are its answers: a trial
    that only the earlier one has paused is `resumed`, and one that it had stopped stays so.
    """

    saves_first: ClassVar[bool] = False
    """Whether a trial commits a checkpoint of the very step before `decide` is asked: others may go on from it.

    Where it is set, a target that serves one runner only is refused: to exploit is to write to another's journal.
    """

    @abstractmethod
    def added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        """Hear of a new trial, before it starts; or of one that had ended and is to go on."""

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

    def stop_next(self) -> tuple[TrialId, Stop] | None:
        """Return a paused trial that is to be stopped, since it will not be resumed; None if there is none.

        It changes nothing: `ended` does.
        """
        return None

    def is_waiting(self) -> bool:
        """Whether a new trial would be too early, though there are slots: a bracket is full, or all wait for one."""
        return False

    def exhausted(self) -> None:
        """Hear that there is no new trial to be had: who waits for more to compare with waits in vain.

        Either the search has no more, or it waits for a trial to end while none runs. It changes what
        `resume_next` and `stop_next` answer, and never a decision: it is not journaled, but said again after a
        resume when it is found out again. A trial that is `added` takes it back.
        """
        return

    @abstractmethod
    def ended(self, trial: TrialId) -> None:
        """Hear that a trial is over for good: stopped, finished or given up. Said once, whoever ended it."""
