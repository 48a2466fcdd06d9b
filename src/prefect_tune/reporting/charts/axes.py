"""The axes of a chart: scales, ticks, grid and labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prefect_tune.reporting.charts.svg import FAINT, GREY, Drawing, Pen
from prefect_tune.reporting.number_format import format_number

GRID = Pen(GREY, 1, FAINT)
SMALL = 'font-size="11"'
END, MIDDLE = 'text-anchor="end"', 'text-anchor="middle"'

_LOG_FROM = 50.0
"""A range of positive numbers that spans this factor may be drawn by orders of magnitude."""
_FAR = 8.0
"""Outliers further away than this many times the range of the middle 90 % are drawn at the edge."""
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps numbers from `low` to `high` to positions from `begin` to `end`; numbers beyond are at the edge."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False
    is_whole: bool = False
    """Whether only whole numbers have a tick."""

    def at(self, value: float) -> float:
        """Return the position of `value`."""
        low, high = self._on_axis(self.low), self._on_axis(self.high)
        share = (self._on_axis(value) - low) / (high - low)
        return self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin)

    def ticks(self, most: int = 6) -> Sequence[tuple[float, str]]:
        """Return at most `most` positions with their labels."""
        values = self._decades(most) if self.is_log else self._round_numbers(most)
        return [(self.at(value), format_number(value)) for value in values]

    def _on_axis(self, value: float) -> float:
        return math.log10(max(value, self.low * 1e-3)) if self.is_log else value

    def _round_numbers(self, most: int) -> Sequence[float]:
        rough = max((self.high - self.low) / max(1, most - 1), 1.0 if self.is_whole else 0.0)
        size = 10.0 ** math.floor(math.log10(rough))
        steps = (each * size for each in _STEPS if not self.is_whole or each * size % 1 == 0)
        step = next(each for each in steps if each >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    def _decades(self, most: int) -> Sequence[float]:
        low, high = math.log10(self.low), math.log10(self.high)
        first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
        every = max(1, math.ceil((last - first + 1) / most))
        decades = [10.0**each for each in range(first, last + 1, every)]
        if len(decades) >= 3 or (len(decades) == 2 and most <= 3):
            return decades
        factors = (factor * 10.0**each for each in range(first - 1, last + 1) for factor in (1, 2, 5))
        within = [each for each in factors if self.low * 0.999 <= each <= self.high * 1.001]
        return within[:: max(1, math.ceil(len(within) / most))] if len(within) > 1 else self._round_numbers(most)


def fitted(
    values: Sequence[float], begin: float, end: float, *, is_log: bool | None = None, room: float = 0.0
) -> Scale:
    """Return a scale that fits these numbers; `values` may be empty.

    Args:
        values: the numbers to show.
        begin: the position of the smallest.
        end: the position of the largest.
        is_log: whether the scale is logarithmic, if the numbers are positive. Default: if they span orders of
            magnitude.
        room: the share of the range that is left free on both sides.
    """
    ordered = sorted(values) or [0.0, 1.0]
    low, high = _without_outliers(ordered)
    if low == high:
        beside = abs(low) * 0.1 or 1.0
        return Scale(low - beside, high + beside, begin, end)
    if is_log is None:
        is_log = low > 0 and high / low >= _LOG_FROM and _is_by_magnitude(ordered, low, high)
    if is_log and low > 0:
        beside = (high / low) ** room
        return Scale(low / beside, high * beside, begin, end, is_log=True)
    beside = (high - low) * room
    return Scale(low - beside, high + beside, begin, end)


def _is_by_magnitude(ordered: Sequence[float], low: float, high: float) -> bool:
    """Whether the numbers spread more evenly over orders of magnitude than over the range."""
    middle = ordered[len(ordered) // 2]
    by_magnitude = (math.log(middle) - math.log(low)) / (math.log(high) - math.log(low))
    return abs(by_magnitude - 0.5) <= abs((middle - low) / (high - low) - 0.5)


def _without_outliers(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the range of the numbers, without outliers that would squeeze the others into one line."""
    low, high = ordered[0], ordered[-1]
    if len(ordered) < 20 or low > 0:  # positive ones have room on a logarithmic axis
        return low, high
    near, far = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    room = (far - near) * _FAR or high - low
    return max(low, near - room), min(high, far + room)


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area of a chart."""

    left: float
    top: float
    right: float
    bottom: float


def draw_axes(drawing: Drawing, frame: Frame, x: Scale, y: Scale, names: tuple[str, str]) -> None:
    """Draw a grid at the ticks of two scales, and label the axes."""
    draw_y_axis(drawing, frame, y, max(5, int((frame.bottom - frame.top) / 38)))
    for place, said in x.ticks(max(5, int((frame.right - frame.left) / 80))):
        drawing.line([(place, frame.bottom), (place, frame.bottom + 4)], Pen(GREY, 1, 0.8))
        drawing.text((place, frame.bottom + 17), said, f"{SMALL} {MIDDLE}")
    drawing.line([(frame.left, frame.bottom), (frame.right, frame.bottom)], Pen(GREY, 1, 0.8))
    x_name, y_name = names
    drawing.text((frame.right, frame.bottom + 32), x_name, f"{SMALL} {END}")
    drawing.text((frame.left - 7, frame.top - 9), y_name, f'{SMALL} font-weight="600"')


def draw_y_axis(drawing: Drawing, frame: Frame, y: Scale, most: int) -> None:
    """Draw a line across the frame at each of at most `most` ticks, and its number beside it."""
    for place, said in y.ticks(most):
        drawing.line([(frame.left, place), (frame.right, place)], GRID)
        drawing.text((frame.left - 7, place + 4), said, f"{SMALL} {END}")
