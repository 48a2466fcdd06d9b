"""The axes, grid and labels of a chart."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_tune.reporting.scales import Scale
from prefect_tune.reporting.svg import GREY, Drawing, Pen

__all__ = ["GRID", "SMALL", "Frame", "framed"]

GRID = Pen(GREY, 1, 0.22)
SMALL = 'font-size="11"'
END, MIDDLE = 'text-anchor="end"', 'text-anchor="middle"'


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area of a chart."""

    left: float
    top: float
    right: float
    bottom: float


def framed(drawing: Drawing, frame: Frame, x: Scale, y: Scale, names: tuple[str, str]) -> None:
    """Draw a grid at the ticks of two scales, and label the axes."""
    width, height = frame.right - frame.left, frame.bottom - frame.top
    for place, said in y.ticks(max(3, int(height / 38))):
        drawing.line([(frame.left, place), (frame.right, place)], GRID)
        drawing.text((frame.left - 7, place + 4), said, f"{SMALL} {END}")
    for place, said in x.ticks(max(3, int(width / 80))):
        drawing.line([(place, frame.bottom), (place, frame.bottom + 4)], Pen(GREY, 1, 0.5))
        drawing.text((place, frame.bottom + 17), said, f"{SMALL} {MIDDLE}")
    drawing.line([(frame.left, frame.bottom), (frame.right, frame.bottom)], Pen(GREY, 1, 0.5))
    x_name, y_name = names
    drawing.text((frame.right, frame.bottom + 32), x_name, f"{SMALL} {END}")
    drawing.text((frame.left - 7, frame.top - 9), y_name, f'{SMALL} font-weight="600"')
