"""The interface of a scheduler: it decides on trials at milestones, deterministically for the same history.

`FIFO` lets every trial continue. To add a scheduler, write a file next to this one, and a line in `registry.py`
(CONTRIBUTING, *Add a scheduler*). Examples: `StoppingSchedule` in `asha.py` decides by a quantile,
`median_stopping.py` by the median.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.renamed import Renamed
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.space_json import NamedOptions
from prefect_tune.core.values import StepReport, TrialId, Value


class Continue(Value):
    """Continue training to the next milestone."""

    type: Literal["continue"] = "continue"


class Pause(Value):
    """Save, and release the slot until `Schedule.next_trial_to_resume` returns the trial.

    If `next_trial_to_resume` returns this trial at once, the trial keeps its slot: it is `on_trial_resumed`, and
    continues in place.
    """

    type: Literal["pause"] = "pause"
    reason: AnyReason
    """Shown to users; kept in the journal."""


class Stop(Value):
    """The trial is finished."""

    type: Literal["stop"] = "stop"
    reason: AnyReason
    """Shown to users; kept in the journal."""
    early: bool = True
    """Whether the trial is stopped early; False if it has trained all steps of the scheduler."""


class Exploit(Value):
    """Continue from the newest checkpoint of `source`, with this `config` (Jaderberg et al. 2017).

    If `source` no longer has a checkpoint, the trial continues from its own newest checkpoint with this `config`.
    """

    type: Literal["exploit"] = "exploit"
    source: TrialId
    config: Mapping[str, object]
    reason: AnyReason
    """Shown to users; kept in the journal."""


Decision: TypeAlias = Annotated[Continue | Pause | Stop | Exploit, Field(discriminator="type")]
"""The decision of a schedule on a report."""


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A trial's report at a milestone."""

    trial: TrialId
    report: StepReport
    """Its step, metrics and training time."""
    config: Mapping[str, Any] | None = None
    """Its present configuration; None if unchanged since the trial was added or last exploited another one."""


class Scheduler(NamedOptions, Renamed, ABC):
    """The configuration of a scheduler: a frozen value. Its state is the `Schedule` that `begin` returns."""

    _renamed: ClassVar[Mapping[str, str]] = {"require_serves": "require_supported_space"}

    @abstractmethod
    def begin(self, objective: Objective, seed: int) -> Schedule:
        """Return the schedule for an experiment without trials.

        Raises:
            InvalidInput: the scheduler does not support this objective.
        """

    def require_supported_space(self, space: Mapping[str, object]) -> None:
        """Raise unless the scheduler supports trials of a valid `space`; most ignore configurations.

        Raises:
            InvalidInput: the scheduler does not support the space.
        """
        del space


class Schedule(Renamed, ABC):
    """The state of a scheduler: a deterministic function of the sequence of calls.

    Whenever a slot is free, the driver stops the trials that `next_trial_to_stop` returns, until it returns None. Then
    it resumes the trial that `next_trial_to_resume` returns; if that is None and `is_waiting` is false, it starts a new
    trial. After `on_search_exhausted`, while no trial is running and one is paused, `next_trial_to_resume` or
    `next_trial_to_stop` must return a trial.

    A resumed experiment replays the journal to a new schedule, in the journal's order: each `on_trial_added`, `decide`
    (whose decision is ignored: the journaled one was carried out), `on_trial_resumed` and `on_trial_ended`. Both
    schedules are then in the same state. So a schedule reads no clock, and draws random numbers only from the seed
    given to `begin`. If the scheduler was changed, its decisions may differ: a trial that only the old scheduler paused
    is `on_trial_resumed`, and a trial that the old scheduler stopped stays stopped.
    """

    _renamed: ClassVar[Mapping[str, str]] = {
        "added": "on_trial_added",
        "ended": "on_trial_ended",
        "resumed": "on_trial_resumed",
        "exhausted": "on_search_exhausted",
        "milestone": "next_milestone",
        "resume_next": "next_trial_to_resume",
        "stop_next": "next_trial_to_stop",
    }
    saves_first: ClassVar[bool] = False
    """Whether a trial commits a checkpoint of the same step before `decide` is called, so others can clone it."""

    @abstractmethod
    def on_trial_added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        """Record a new trial before it starts, or an ended one that continues."""

    @abstractmethod
    def next_milestone(self, trial: TrialId, step: int) -> int | None:
        """Return the first step after `step` at which the trial reports and waits for a decision; None for never.

        Called for each attempt that starts, and after each decision; it changes no state. If a trial cannot save at
        exactly that step (a function trainable), its milestone is the first report at or after it.
        """

    @abstractmethod
    def decide(self, report: TrialReport) -> Decision:
        """Decide on a report at or after the trial's milestone.

        A repeated report of a decided step (an attempt repeats lost steps) gets the same kind of decision, and is not
        counted twice.

        Raises:
            BadMetric: the report lacks the objective's metric.
        """

    def next_trial_to_resume(self) -> TrialId | None:
        """Return the paused trial that gets the next free slot; None to start a new trial instead.

        Changes no state: `on_trial_resumed` does.
        """
        return None

    def on_trial_resumed(self, trial: TrialId) -> None:
        """Record that a paused trial got a slot."""
        del trial

    def next_trial_to_stop(self) -> tuple[TrialId, Stop] | None:
        """Return a paused trial to stop, because it will not be resumed; None if there is none.

        Changes no state: `on_trial_ended` does.
        """
        return None

    def is_waiting(self) -> bool:
        """Return whether new trials must wait although slots are free, such as while a full bracket is undecided."""
        return False

    def on_search_exhausted(self) -> None:
        """Record that no new trial is available, so paused trials need not wait for more trials to compare with.

        Either the search is exhausted, or it waits for a trial to end while none is running. This may change the
        results of `next_trial_to_resume` and `next_trial_to_stop`, but not a decision: it is not journaled, and is
        called again if it still holds after a resume. The next `on_trial_added` revokes it.
        """
        return

    @abstractmethod
    def on_trial_ended(self, trial: TrialId) -> None:
        """Record that a trial ended: stopped, finished or errored. Called once for each end."""


@dataclass(frozen=True, slots=True)
class FIFO(Scheduler):
    """First in, first out: trials start in the order in which they are proposed, and none is stopped or paused."""

    def begin(self, objective: Objective, seed: int) -> Schedule:
        del objective, seed
        return _FifoSchedule()


class _FifoSchedule(Schedule):
    """A schedule without state."""

    def on_trial_added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        del trial, config

    def next_milestone(self, trial: TrialId, step: int) -> int | None:
        del trial, step
        return None

    def decide(self, report: TrialReport) -> Decision:
        del report
        return Continue()

    def on_trial_ended(self, trial: TrialId) -> None:
        del trial


# Helpers for all schedulers: the loss of a report, and its display.


def loss_of(trial_report: TrialReport, objective: Objective) -> float:
    """Return the loss that the trial is compared by; smaller is better.

    Raises:
        BadMetric: the report lacks the metric, or it is not a finite number.
    """
    return objective.loss(trial_report.report.metrics, f"trial {trial_report.trial!r}, step {trial_report.report.step}")


def metric_from_loss(loss: float, objective: Objective) -> float:
    """Return the value of the objective's metric whose loss is `loss`."""
    return loss if objective.modes[0] == "min" else -loss


def metric_reason_arguments(loss: float, objective: Objective) -> dict[str, object]:
    """Return the arguments of a reason that name the objective's metric and its value."""
    return {"metric": objective.metrics[0], "value": metric_from_loss(loss, objective)}
