"""The interface of schedulers. At milestones, a scheduler decides about trials; equal histories give equal decisions.

`FIFO` lets every trial continue. To add a scheduler, write a file in this folder, and a line in `registry.py`
(CONTRIBUTING, *Add a scheduler*). For examples, see `StoppingSchedule` in `asha.py`, and `median_stopping.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.renamed import RenamedMembers
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.space_json import NamedOptions
from prefect_tune.core.values import StepReport, TrialId, Value


class Continue(Value):
    """Continue training to the next milestone."""

    type: Literal["continue"] = "continue"


class Pause(Value):
    """Save the trial, and release its slot until `Schedule.next_trial_to_resume` returns the trial.

    If that method returns the trial at once, the driver calls `on_trial_resumed`, and the trial keeps its slot.
    """

    type: Literal["pause"] = "pause"
    reason: AnyReason
    """Shown to users; kept in the journal."""


class Stop(Value):
    """End the trial, which is then *pruned*, or *completed* if `early` is False."""

    type: Literal["stop"] = "stop"
    reason: AnyReason
    """Shown to users; kept in the journal."""
    early: bool = True
    """Whether the trial ends early; False if it has trained all steps that the scheduler allows."""


class Exploit(Value):
    """Continue with `config` from the newest checkpoint of the trial `source` (Jaderberg et al. 2017).

    If `source` no longer has a checkpoint, the trial continues with `config` from its own newest checkpoint.
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
    """The step, its metrics, and the training time up to this step."""
    config: Mapping[str, Any] | None = None
    """The trial's configuration; None if it has not changed since `on_trial_added` or the trial's last `Exploit`."""


class Scheduler(NamedOptions, RenamedMembers, ABC):
    """The configuration of a scheduler: a frozen value. Its state is the `Schedule` that `begin` returns."""

    _renamed: ClassVar[Mapping[str, str]] = {"require_serves": "require_supported_space"}

    @abstractmethod
    def begin(self, objective: Objective, seed: int) -> Schedule:
        """Return the schedule of an experiment that has no trials yet.

        Raises:
            InvalidInput: the scheduler does not support this objective.
        """

    def require_supported_space(self, space: Mapping[str, object]) -> None:
        """Raise `InvalidInput` if the scheduler does not support `space`; most schedulers support every valid space."""
        del space


class Schedule(RenamedMembers, ABC):
    """The state of a scheduler: a deterministic function of the sequence of calls.

    Whenever a slot is free, the driver calls `next_trial_to_stop` and ends the returned trial, until None is returned.
    Then the driver resumes the trial that `next_trial_to_resume` returns. If that is None, and `is_waiting` returns
    False, the driver starts a new trial. After `on_no_new_trial`, while no trial is running and a trial is paused,
    `next_trial_to_resume` or `next_trial_to_stop` must return a trial. An example with one slot, `ASHA(max_t=9)`, and
    three trials, of which the first is the best:

        on_trial_added("a"), next_milestone("a", 0) → 1, decide("a" at step 1) → Pause
        next_trial_to_resume() → None: the driver starts "b", then "c"; both pause in the same way
        next_trial_to_resume() → "a", the best of three: on_trial_resumed("a"), next_milestone("a", 1) → 3
        decide("a" at step 3) → Pause; the search is exhausted: on_no_new_trial(), next_trial_to_resume() → "a"
        on_trial_resumed("a"), next_milestone("a", 3) → 9, decide("a" at step 9) → Stop(early=False); on_trial_ended
        next_trial_to_stop() → ("c", Stop), on_trial_ended("c"), and the same for "b"

    When an experiment resumes, its journal is replayed to a new schedule: `on_trial_added`, `decide`,
    `on_trial_resumed` and `on_trial_ended` are called again, in the order of the journal. What `decide` returns is then
    ignored, because the journaled decisions were carried out already. Afterwards, the new schedule must be in the same
    state as the old one. So a schedule reads no clock, and derives random numbers only from the seed of `begin`. If the
    user changed the scheduler, `on_trial_resumed` may name trials that only the old one paused. Pruned trials stay so.
    """

    _renamed: ClassVar[Mapping[str, str]] = {
        "added": "on_trial_added",
        "ended": "on_trial_ended",
        "resumed": "on_trial_resumed",
        "exhausted": "on_no_new_trial",
        "milestone": "next_milestone",
        "resume_next": "next_trial_to_resume",
        "stop_next": "next_trial_to_stop",
    }
    saves_first: ClassVar[bool] = False
    """Whether a trial commits a checkpoint before `decide` is called, so that other trials can clone the checkpoint."""

    @abstractmethod
    def on_trial_added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        """Record a new trial before it starts, or an ended trial before it continues."""

    @abstractmethod
    def next_milestone(self, trial: TrialId, step: int) -> int | None:
        """Return the first step after `step` at which the trial reports and waits for a decision; None for never.

        `step` is the step of the last decision on the trial; after an exploit, of the last decision on the exploited
        trial; 0 without a decision. The driver calls this method, which changes no state, when an attempt starts and
        after each decision. A function cannot save at every step, so its report for a decision may be of a later step.
        """

    @abstractmethod
    def decide(self, report: TrialReport) -> Decision:
        """Decide on a report at or after the trial's milestone.

        An attempt that repeats lost steps also repeats their reports. For a repeated report, return the same kind of
        decision as before, and do not count the report again.

        Raises:
            BadMetric: the report lacks the objective's metric.
        """

    def next_trial_to_resume(self) -> TrialId | None:
        """Return the paused trial that gets the next free slot; None to start a new trial instead.

        This method changes no state; `on_trial_resumed` does.
        """
        return None

    def on_trial_resumed(self, trial: TrialId) -> None:
        """Record that a paused trial got a slot."""
        del trial

    def next_trial_to_stop(self) -> tuple[TrialId, Stop] | None:
        """Return a paused trial that the driver must end, because it will never resume; None if there is no such trial.

        This method changes no state; `on_trial_ended` does.
        """
        return None

    def is_waiting(self) -> bool:
        """Return whether new trials must wait although slots are free, for example until a full bracket is decided."""
        return False

    def on_no_new_trial(self) -> None:
        """Record that no new trial can start; this holds until the next `on_trial_added`.

        The search is exhausted, or waits until a trial ends, but none is running. So there is no reason to let
        paused trials wait for other trials. The call may change what `next_trial_to_resume` and `next_trial_to_stop`
        return, but not what `decide` returns. It is not journaled; the driver repeats it after a resume if necessary.
        """
        return

    @abstractmethod
    def on_trial_ended(self, trial: TrialId) -> None:
        """Record that a trial ended, for whatever reason. Called again if the trial continues and ends again."""


@dataclass(frozen=True, slots=True)
class FIFO(Scheduler):
    """First in, first out: trials start in the order of their proposals; the scheduler prunes and pauses no trial."""

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


# Helpers for all schedulers: compute the loss of a report, and convert a loss to the metric's value for messages.


def compute_loss(trial_report: TrialReport, objective: Objective) -> float:
    """Return the loss by which trials are compared (smaller is better). Raises like `Objective.losses`."""
    return objective.loss(trial_report.report.metrics, f"trial {trial_report.trial!r}, step {trial_report.report.step}")


def loss_to_metric(loss: float, objective: Objective) -> float:
    """Convert a loss back to the value of the objective's metric."""
    return loss if objective.modes[0] == "min" else -loss


def make_metric_reason_arguments(loss: float, objective: Objective) -> dict[str, object]:
    """Return the arguments `metric` and `value` of a reason: the metric's name, and its value for this loss."""
    return {"metric": objective.metrics[0], "value": loss_to_metric(loss, objective)}
