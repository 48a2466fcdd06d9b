"""One bracket of Hyperband: a group of trials, of which only the best continue after each rung."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefect_tune.core.models import TrialId

__all__ = ["Bracket"]


@dataclass(slots=True)
class Bracket:
    """Trials that train from rung to rung, and are compared when all of them have reached it.

    The place of a trial that ends before the rung stays empty, and counts as the worst.
    """

    size: int
    """The number of trials that it takes; once it is closed, the number that it has taken."""
    steps: Sequence[int]
    """The steps of its rungs; at the last one training ends, without a comparison."""
    reduction_factor: float
    level: int = 0
    """The index of the rung that its trials train to now."""
    places: int = 0
    """The number of trials that were admitted to that rung."""
    training: set[TrialId] = field(default_factory=set)
    """The trials that have not reached it yet; some of them may wait for a slot."""
    reached: dict[TrialId, float] = field(default_factory=dict)
    """The losses of the trials that have reached it, in the order of arrival."""

    @property
    def is_full(self) -> bool:
        """Whether it takes no more trials."""
        return self.level > 0 or self.places >= self.size

    @property
    def is_complete(self) -> bool:
        """Whether all trials have reached the rung or ended, and at least one has reached it."""
        return self.is_full and not self.training and bool(self.reached)

    @property
    def quota(self) -> int:
        """The number of trials that continue after the rung."""
        return max(1, int(self.places / self.reduction_factor))

    def enter(self, trial: TrialId) -> None:
        """Add a new trial."""
        self.places += 1
        self.training.add(trial)

    def reach(self, trial: TrialId, loss: float) -> None:
        """Record that a trial has reached the rung, with this loss."""
        self.training.discard(trial)
        self.reached[trial] = loss

    def leave(self, trial: TrialId) -> None:
        """Remove a trial that has ended."""
        self.training.discard(trial)
        self.reached.pop(trial, None)

    def best(self) -> TrialId | None:
        """Return the best trial at the rung; of equals, the one that reached it first; None where there is none."""
        return min(self.reached, key=self.reached.__getitem__, default=None)

    def close(self) -> None:
        """Take no more trials."""
        self.size = self.places

    def halve(self) -> Sequence[TrialId]:
        """Advance to the next rung with the best trials; return all trials, best first: the first `places` continue."""
        ranking = sorted(self.reached, key=self.reached.__getitem__)
        self.places = self.quota
        self.level += 1
        self.training = set(ranking[: self.places])
        self.reached = {}
        return ranking
