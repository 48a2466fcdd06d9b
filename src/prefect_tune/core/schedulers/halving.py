"""One bracket of Hyperband: a group of trials that is halved at each of its rungs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefect_tune.core.values import TrialId

__all__ = ["Bracket"]


@dataclass(slots=True)
class Bracket:
    """Trials that train to one rung after the other, and are compared once all of them are there.

    Who ends on the way leaves a place that nobody fills: it counts as the worst.
    """

    size: int
    """How many trials it takes; once it is closed, how many it has taken."""
    steps: Sequence[int]
    """Of its rungs; at the last one nobody is compared: training ends there."""
    reduction_factor: float
    level: int = 0
    """The rung that is to be reached now."""
    places: int = 0
    """How many trials were let on to it."""
    training: set[TrialId] = field(default_factory=set)
    """Who is to reach it and has not; among them who waits for a slot."""
    reached: dict[TrialId, float] = field(default_factory=dict)
    """The losses at it, in the order in which trials came there."""

    @property
    def is_full(self) -> bool:
        """Whether it takes no more trials."""
        return self.level > 0 or self.places >= self.size

    @property
    def is_complete(self) -> bool:
        """Whether nobody is to come to the rung any more, and somebody is there."""
        return self.is_full and not self.training and bool(self.reached)

    @property
    def quota(self) -> int:
        """How many go on from the rung."""
        return max(1, int(self.places / self.reduction_factor))

    def enter(self, trial: TrialId) -> None:
        """Take in a new trial."""
        self.places += 1
        self.training.add(trial)

    def reach(self, trial: TrialId, loss: float) -> None:
        """Hear that a trial is at the rung, with this loss."""
        self.training.discard(trial)
        self.reached[trial] = loss

    def leave(self, trial: TrialId) -> None:
        """Hear that a trial is over."""
        self.training.discard(trial)
        self.reached.pop(trial, None)

    def best(self) -> TrialId | None:
        """Return the best at the rung; of equal ones the first that came."""
        return min(self.reached, key=self.reached.__getitem__, default=None)

    def close(self) -> None:
        """Take no more trials."""
        self.size = self.places

    def halve(self) -> Sequence[TrialId]:
        """Let the best of a complete rung on to the next one; return everybody, the best first, these `places`."""
        ranking = sorted(self.reached, key=self.reached.__getitem__)
        self.places = self.quota
        self.level += 1
        self.training = set(ranking[: self.places])
        self.reached = {}
        return ranking
