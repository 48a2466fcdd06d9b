"""The picture of the regrets: a panel for each problem, a line and a band for each search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_tune.reporting.svg import (
    ANCHOR_MIDDLE,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VIOLET,
    Drawing,
    Pen,
    PlotArea,
    Scale,
    draw_axes,
)

__all__ = ["Panel", "Point", "draw_panels"]

Point = tuple[float, tuple[float, float, float]]
"""A share of a training to the end, and the quartiles of the regret there."""
_PENS = (
    Pen(BLUE, 2.8),
    Pen(ORANGE, 2, dash="7 3"),
    Pen(GREEN, 2, dash="2 3"),
    Pen(VIOLET, 2, dash="9 3 2 3"),
    Pen(GREY, 1.6, dash="4 4"),
)
"""The dashes differ too, for readers without colour vision."""
_PANEL, _GAP, _HEAD = (400.0, 230.0), 46.0, 34.0
_SHADE = 0.1
_LOG_FROM = 30.0
"""Regrets that span this factor are drawn by orders of magnitude."""


@dataclass(frozen=True, slots=True)
class Panel:
    """The searches of one problem."""

    title: str
    bands: Mapping[str, Sequence[Point]]
    """By the name of the search."""
    seconds: float
    """Average seconds of a complete training."""


def draw_panels(panels: Sequence[Panel], columns: int = 2) -> str:
    """Return the SVG."""
    rows = math.ceil(len(panels) / columns)
    (width, height), names = _PANEL, list(panels[0].bands)
    drawing = Drawing(columns * width, _legend_height(names) + rows * (height + _GAP + _HEAD) + 8)
    _draw_legend(drawing, names)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        left, top = column * width + 46, _legend_height(names) + row * (height + _GAP + _HEAD) + _HEAD
        _draw_panel(drawing, panel, PlotArea(left, top, left + width - 66, top + height))
    return drawing.to_svg()


def _legend_height(names: Sequence[str]) -> float:
    return 20.0 * math.ceil(len(names) / 2) + 14


def _draw_legend(drawing: Drawing, names: Sequence[str]) -> None:
    for index, (name, pen) in enumerate(zip(names, _PENS, strict=True)):
        left, y = 46 + (index % 2) * _PANEL[0], 18 + 20.0 * (index // 2)
        drawing.line([(left, y), (left + 40, y)], pen)
        drawing.text((left + 48, y + 4), name)


def _draw_panel(drawing: Drawing, panel: Panel, area: PlotArea) -> None:
    begin = min(band[0][0] for band in panel.bands.values()) * panel.seconds
    end = max(band[-1][0] for band in panel.bands.values()) * panel.seconds
    values = [value for band in panel.bands.values() for _, quartiles in band for value in quartiles if value > 0]
    x = Scale(begin, end, area.left, area.right, is_log=True)
    most = max(values)
    least = max(min(values), most / 1e4)
    is_log = most / least >= _LOG_FROM
    y = Scale(least if is_log else 0.0, most, area.bottom, area.top, is_log)
    draw_axes(drawing, area, x, y, ("seconds of training", "regret"))
    drawing.text(((area.left + area.right) / 2, area.top - 9), panel.title, f'font-weight="600" {ANCHOR_MIDDLE}')
    for name, pen in zip(panel.bands, _PENS, strict=True):
        low, middle, high = (_line(panel, name, quartile, (x, y)) for quartile in range(3))
        drawing.area([*low, *reversed(high)], Pen(pen.color, opacity=_SHADE))
        drawing.line(middle, pen)


def _line(panel: Panel, name: str, quartile: int, scales: tuple[Scale, Scale]) -> Sequence[tuple[float, float]]:
    x, y = scales
    points = panel.bands[name]
    return [(x.to_position(share * panel.seconds), y.to_position(values[quartile])) for share, values in points]
