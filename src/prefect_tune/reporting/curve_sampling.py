"""A learning curve with a bounded number of points."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from prefect_tune.core.models import leaves
from prefect_tune.core.numbers import is_number


class Series:
    """Numbers by step, the first and the last among them; of more than `most`, every second, fourth, ... is kept."""

    __slots__ = ("_most", "_since", "_steps", "_stride", "_values")

    def __init__(self, points: Iterable[tuple[float, float]] = (), *, most: int = 96) -> None:
        self._most = most
        self._steps = array("d")
        self._values = array("d")
        self._stride = 1
        self._since = 1
        for step, value in points:
            self.add(step, value)

    def add(self, step: float, value: float) -> None:
        """Add the next number; a step that is not after the last one is ignored. `cut` first to replace steps."""
        if self._steps and step <= self._steps[-1]:
            return
        if self._since < self._stride and len(self._steps) > 1:
            self._since += 1
            self._steps[-1], self._values[-1] = step, value
            return
        self._since = 1
        self._steps.append(step)
        self._values.append(value)
        if len(self._steps) > self._most:
            self._thin()

    def cut(self, step: float) -> None:
        """Remove the points after `step`."""
        kept = bisect_right(self._steps, step)
        if kept < len(self._steps):
            del self._steps[kept:], self._values[kept:]
            self._since = self._stride

    def points(self) -> Sequence[tuple[float, float]]:
        """Return the points, by step."""
        return list(zip(self._steps, self._values, strict=True))

    def _thin(self) -> None:
        """An odd number of points, so that the last one stays as the first does."""
        self._steps, self._values = self._steps[::2], self._values[::2]
        self._stride *= 2
        self._since = self._stride


def numbers_in(metrics: Mapping[str, object]) -> Mapping[str, float]:
    """Return the numeric metrics, which can be drawn."""
    found = ((name, _number(value)) for name, value in leaves(metrics))
    return {name: number for name, number in found if number is not None}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and is_number(value) else None
