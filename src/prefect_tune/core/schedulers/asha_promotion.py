"""ASHA, promotion variant: every trial pauses at each rung, and the best 1 / eta continue as slots become free."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_tune.core.models import TrialId, plural
from prefect_tune.core.schedulers.asha_brackets import Brackets, Climb, Climbing
from prefect_tune.core.schedulers.base import Continue, Decision, Pause, Stop
from prefect_tune.core.schedulers.common import shown
from prefect_tune.core.schedulers.rungs import Rung, RungEntry
from prefect_tune.core.search.objective import Objective

__all__ = ["PromotionSchedule"]


class PromotionSchedule(Climbing):
    """Algorithm 2 of Li et al. 2020: a free slot goes to the highest rung with a promotable trial.

    A trial that is promotable when it reaches the rung continues without a pause. When no new trial is available and
    no trial is running, and none was ever promoted from a highest rung, the best trial of the highest rung with a
    paused one is resumed, so that even a small search trains one trial to the end. Then paused trials are stopped.
    """

    def __init__(self, brackets: Brackets, objective: Objective) -> None:
        super().__init__(brackets, objective)
        rungs = [rung for bracket in brackets.rungs for rung in bracket]
        self._highest_first = sorted(rungs, key=lambda rung: -rung.step)
        self._running: set[TrialId] = set()
        self._no_more = False
        self._has_finalist = False

    def added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        super().added(trial, config)
        self._running.add(trial)
        self._no_more = False

    def resume_next(self) -> TrialId | None:
        return self._promotable() or (None if self._has_finalist else self._best_of_the_highest_rung())

    def resumed(self, trial: TrialId) -> None:
        self._release(trial)
        climb = self._climbs[trial]
        self._has_finalist |= climb.reached == len(climb.rungs) - 1
        self._running.add(trial)

    def stop_next(self) -> tuple[TrialId, Stop] | None:
        if self._running or not self._no_more or self.resume_next() is not None:
            return None
        rung = next((rung for rung in reversed(self._highest_first) if rung.paused), None)
        if rung is None:
            return None
        return rung.paused[-1][2], Stop(reason=self._standing(rung, rung.paused[-1]))

    def exhausted(self) -> None:
        self._no_more = True

    def ended(self, trial: TrialId) -> None:
        self._release(trial)
        self._running.discard(trial)

    def _compared(self, trial: TrialId, climb: Climb, loss: float) -> Decision:
        self._release(trial)  # it reports, so it was not paused, even if the last answer to it was a pause
        rung = climb.rungs[climb.reached]
        place = rung.admit(trial, loss)
        climb.paused = (rung, place)
        rung.hold(place)
        self._running.discard(trial)
        if self._promotable() == trial:
            self.resumed(trial)
            return Continue()
        return Pause(reason=self._standing(rung, place))

    def _again(self, climb: Climb) -> Decision:
        return Pause(reason=self._standing(*climb.paused)) if climb.paused else Continue()

    def _release(self, trial: TrialId) -> None:
        climb = self._climbs[trial]
        if climb.paused:
            rung, place = climb.paused
            rung.release(place)
            climb.paused = None

    def _promotable(self) -> TrialId | None:
        found = (rung.promotable(self._brackets.reduction_factor) for rung in self._highest_first)
        return next((trial for trial in found if trial), None)

    def _best_of_the_highest_rung(self) -> TrialId | None:
        if self._running or not self._no_more:
            return None
        return next((rung.paused[0][2] for rung in self._highest_first if rung.paused), None)

    def _standing(self, rung: Rung, place: RungEntry) -> str:
        """Return the reason of a decision: the trial's rank among the trials that have reached the rung."""
        promoted = plural(rung.quota(self._brackets.reduction_factor), "is promoted", "are promoted")
        rank = f"number {rung.rank(place) + 1} of {len(rung.reached)}, of which {promoted}"
        return f"{shown(place[0], self._objective)} at step {rung.step}: {rank}"
