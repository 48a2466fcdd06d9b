"""No early stopping: every trial trains until its stopper, or the trainable itself, ends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefect_tune.core.models import TrialId
from prefect_tune.core.schedulers.base import Continue, Decision, Schedule, Scheduler, TrialReport
from prefect_tune.core.search.objective import Objective

__all__ = ["FIFO"]


@dataclass(frozen=True, slots=True)
class FIFO(Scheduler):
    """First in, first out: trials start in the order in which they are proposed, and none is stopped or paused."""

    def begin(self, objective: Objective, seed: int) -> Schedule:
        del objective, seed
        return _FifoSchedule()


class _FifoSchedule(Schedule):
    """A schedule without state."""

    def added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        del trial, config

    def milestone(self, trial: TrialId, step: int) -> int | None:
        del trial, step
        return None

    def decide(self, report: TrialReport) -> Decision:
        del report
        return Continue()

    def ended(self, trial: TrialId) -> None:
        del trial
