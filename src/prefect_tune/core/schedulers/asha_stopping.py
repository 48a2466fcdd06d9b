"""ASHA, stopping variant: a trial that is not among the best 1 / eta of those before it at a rung is stopped."""

from __future__ import annotations

from prefect_tune.core.models import TrialId, plural
from prefect_tune.core.schedulers.asha_brackets import Climb, Climbing
from prefect_tune.core.schedulers.base import Continue, Decision, Stop
from prefect_tune.core.schedulers.common import shown

__all__ = ["StoppingSchedule"]


class StoppingSchedule(Climbing):
    """Stops a trial whose loss is above the 1 / eta quantile of those that reached the rung before it.

    Decides as Ray's AsyncHyperBandScheduler does: the quantile is interpolated; the first trial at a rung, and one
    that equals the quantile, continue.
    """

    def ended(self, trial: TrialId) -> None:
        """Change nothing: the trial's losses at the rungs stay, for comparisons."""
        del trial

    def _compared(self, trial: TrialId, climb: Climb, loss: float) -> Decision:
        rung = climb.rungs[climb.reached]
        cutoff, before = rung.cutoff(self._brackets.reduction_factor), len(rung.reached)
        rung.admit(trial, loss)
        if cutoff is None or loss <= cutoff:
            return Continue()
        judges = plural(before, "trial", "trials")
        needed = f"needed {shown(cutoff, self._objective)} or better, judging by {judges} before it"
        climb.stopped = Stop(reason=f"{shown(loss, self._objective)} at step {rung.step}: {needed}")
        return climb.stopped

    def _again(self, climb: Climb) -> Decision:
        return climb.stopped or Continue()
