"""Rungs: the steps at which trials are compared, and the losses of the trials that have reached them."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import TypeAlias

from prefect_tune.core.models import TrialId

__all__ = ["Rung", "RungEntry", "ladder"]

RungEntry: TypeAlias = tuple[float, int, TrialId]
"""A trial on a rung: its loss there, and the number of trials before it, so that of equals the earlier is better."""


def ladder(first: int, max_t: int, reduction_factor: float) -> Iterator[int]:
    """Return `first` times each power of `reduction_factor`, rounded up as in Ray, below `max_t`."""
    steps = (math.ceil(first * reduction_factor**power) for power in count())
    return takewhile(lambda step: step < max_t, steps)


@dataclass(slots=True)
class Rung:
    """The trials that have reached a step, best first, and those of them that are paused there.

    Both lists are kept sorted, so that finding a rank takes logarithmic time.
    """

    step: int
    reached: list[tuple[float, int]] = field(default_factory=list)
    paused: list[RungEntry] = field(default_factory=list)

    def admit(self, trial: TrialId, loss: float) -> RungEntry:
        """Add a trial that has reached the rung, not paused."""
        place = (loss, len(self.reached), trial)
        insort(self.reached, place[:2])
        return place

    def hold(self, place: RungEntry) -> None:
        """Mark an admitted trial as paused here."""
        insort(self.paused, place)

    def release(self, place: RungEntry) -> None:
        """Mark a paused trial as not paused; its loss stays."""
        del self.paused[bisect_left(self.paused, place)]

    def rank(self, place: RungEntry) -> int:
        """Return the number of trials at the rung that are better."""
        return bisect_left(self.reached, place[:2])

    def quota(self, reduction_factor: float) -> int:
        """Return the number of trials to promote: the best 1 / `reduction_factor`."""
        return int(len(self.reached) / reduction_factor)

    def cutoff(self, reduction_factor: float) -> float | None:
        """Return the loss that the best 1 / `reduction_factor` do not exceed, interpolated; None for an empty rung."""
        if not self.reached:
            return None
        position = (len(self.reached) - 1) / reduction_factor
        below, share = int(position), position % 1
        low, high = self.reached[below][0], self.reached[min(below + 1, len(self.reached) - 1)][0]
        return low + (high - low) * share

    def promotable(self, reduction_factor: float) -> TrialId | None:
        """Return the best paused trial if it is to be promoted, else None."""
        if self.paused and self.rank(self.paused[0]) < self.quota(reduction_factor):
            return self.paused[0][2]
        return None
