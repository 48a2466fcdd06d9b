"""Draw the charts of a report as SVG: learning curves, parallel coordinates, and the timeline.

No plotting library is used. Matplotlib would need 1.2 s of CPU time and 80 MiB for its import, and 0.3 s and 84 kB
per chart. This module takes milliseconds per chart, and its charts are ten times smaller. An `<img>` with a chart does
not know the theme of its page, so charts have no background, and their colors are readable on dark and light pages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from html import escape
from itertools import pairwise
from typing import Literal, TypeAlias

from prefect_tune.core.display_text import format_duration, make_visible_line, shorten
from prefect_tune.core.experiment.trial_transitions import ENDED_PHASES, Status
from prefect_tune.core.search_view import AttemptPeriod, select_numeric_metrics
from prefect_tune.reporting.facts import ReportInput, sample_trials
from prefect_tune.terminal.formatting import format_number, format_rank_ends

Point = tuple[float, float]

BLUE, ORANGE, GREEN, RED = "#3f87e0", "#cf6e0e", "#2f9e58", "#df4b4b"
VIOLET, TEAL, GREY = "#9a6ee8", "#14949c", "#78808a"
COLORS = (BLUE, ORANGE, GREEN, VIOLET, "#c2529b", TEAL, "#a98413", "#6b7fd7")
FAINT, PALE = 0.5, 0.6
"""The opacities of the grid and of less important marks; below 0.5, lines would be invisible on dark or light pages."""
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
_MAX_CHARACTERS = 80
_NO_XML = re.compile("[\ufffe\uffff]")  # the only characters that XML forbids but `make_visible_line` keeps


@dataclass(frozen=True, slots=True)
class Pen:
    """The style of a line or a filled area."""

    color: str = GREY
    width: float = 1.0
    opacity: float = 1.0
    dash: str = ""

    def format_stroke(self) -> str:
        opacity, dash = self._format_opacity("stroke"), f' stroke-dasharray="{self.dash}"' if self.dash else ""
        return f'fill="none" stroke="{self.color}" stroke-width="{self.width:g}"{opacity}{dash}'

    def format_fill(self) -> str:
        return f'fill="{self.color}"{self._format_opacity("fill")}'

    def _format_opacity(self, kind: str) -> str:
        return f' {kind}-opacity="{self.opacity:g}"' if self.opacity < 1 else ""


@dataclass(frozen=True, slots=True)
class Fill:
    """The fill of a rectangle: solid, diagonal stripes, or a faint fill within an outline."""

    color: str = GREY
    style: Literal["solid", "hatch", "outline"] = "solid"


class Drawing:
    """A picture of a given size in pixels, to which shapes are added."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._shapes: list[str] = []
        self._hatches: dict[str, str] = {}  # patterns, by color

    def line(self, points: Iterable[Point], pen: Pen) -> None:
        """Draw a line through the points."""
        self._shapes.append(f'<path class="line" d="{_format_path(points)}" {pen.format_stroke()}/>')

    def lines(self, lines: Iterable[Sequence[Point]], pen: Pen) -> None:
        """Draw several lines with one pen, as separate paths, so that crossings are darker."""
        paths = "".join(f'<path class="line" d="{_format_path(line)}"/>' for line in lines if line)
        if paths:
            self._shapes.append(f"<g {pen.format_stroke()}>{paths}</g>")

    def area(self, points: Iterable[Point], pen: Pen) -> None:
        """Fill the area that the points enclose."""
        self._shapes.append(f'<path d="{_format_path(points)}z" {pen.format_fill()}/>')

    def dots(self, points: Sequence[Point], pen: Pen) -> None:
        """Draw a dot at each point, as wide as the pen."""
        if points:
            path = "".join(f"M{_format_coordinate(x)} {_format_coordinate(y)}h0" for x, y in points)
            self._shapes.append(f'<path class="dots" d="{path}" stroke-linecap="round" {pen.format_stroke()}/>')

    def bar(self, corner: Point, size: Point, fill: Fill, *, title: str = "", kind: str = "bar") -> None:
        """Draw a rectangle whose upper left corner is at `corner`. Viewers show `title` as a tooltip."""
        (x, y), (width, height) = corner, size
        match fill.style:
            case "solid":
                style = Pen(fill.color).format_fill()
            case "hatch":
                name = f"hatch{fill.color.removeprefix('#')}"
                style = f'fill="url(#{name})" stroke="{fill.color}" stroke-width="1"'
                self._hatches[fill.color] = (
                    f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
                    f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{fill.color}" fill-opacity=".25"/>'
                    f'<rect width="3" height="6" fill="{fill.color}"/></pattern>'
                )
            case "outline":
                style = f'fill="{fill.color}" fill-opacity="0.2" stroke="{fill.color}" stroke-width="1.2"'
        left, top, *lengths = map(_format_coordinate, (x, y, max(0.5, width), height))
        bounds = f'x="{left}" y="{top}" width="{lengths[0]}" height="{lengths[1]}"'
        inner = f"><title>{escape_text(title)}</title></rect>" if title else "/>"
        self._shapes.append(f'<rect class="{kind}" {bounds} rx="{min(2.0, height / 4):g}" {style}{inner}')

    def cross(self, center: Point, pen: Pen, reach: float = 3.5) -> None:
        """Draw a cross, which marks a failure."""
        x, y = center
        down, back = f"{2 * reach:g}", f"{-2 * reach:g}"
        ends = f"M{_format_coordinate(x - reach)} {_format_coordinate(y - reach)}l{down} {down}m0 {back}l{back} {down}"
        self._shapes.append(f'<path class="cross" d="{ends}" {pen.format_stroke()}/>')

    def text(self, at: Point, text: str, style: str = "", ink: str = GREY) -> None:
        """Draw text; `style` holds SVG attributes such as `text-anchor="end"`."""
        if text:
            point = f'x="{_format_coordinate(at[0])}" y="{_format_coordinate(at[1])}"'
            self._shapes.append(f'<text {point} fill="{ink}"{" " if style else ""}{style}>{escape_text(text)}</text>')

    def to_svg(self) -> str:
        """Return the drawing as SVG."""
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}" font-size="12">'
        patterns = f"<defs>{''.join(self._hatches.values())}</defs>" if self._hatches else ""
        return f"{head}{patterns}{''.join(self._shapes)}</svg>"


def escape_text(text: str) -> str:
    """Return untrusted text escaped for SVG, on one line and shortened to 80 characters."""
    line = " ".join(_NO_XML.sub("", make_visible_line(text)).split())
    return escape(shorten(line, _MAX_CHARACTERS))


def _format_path(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{_format_coordinate(x)} {_format_coordinate(y)}" for x, y in points)


def _format_coordinate(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


# The axes of a chart: scales, ticks, grid and labels.

GRID_PEN = Pen(GREY, 1, FAINT)
SMALL_TEXT = 'font-size="11"'
ANCHOR_END, ANCHOR_MIDDLE = 'text-anchor="end"', 'text-anchor="middle"'

_MIN_LOG_RATIO = 50.0
"""By default, a scale may be logarithmic only if its largest number is at least this multiple of the smallest."""
_OUTLIER_FACTOR = 8.0
"""A number is an outlier if its distance to the middle 90 % of the numbers is over this multiple of that range."""
_TICK_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps the numbers from `low` to `high` to positions from `begin` to `end`, and other numbers to the nearer end."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False
    has_integer_ticks: bool = False
    """Whether ticks are only at integers."""

    def to_position(self, value: float) -> float:
        """Return the position of `value`."""
        low, high = self._to_axis_value(self.low), self._to_axis_value(self.high)
        share = (self._to_axis_value(value) - low) / (high - low)
        return self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin)

    def make_ticks(self, max_count: int = 6) -> Sequence[tuple[float, str]]:
        """Return the positions and labels of at most `max_count` ticks."""
        values = self._make_log_ticks(max_count) if self.is_log else self._make_linear_ticks(max_count)
        return [(self.to_position(value), format_number(value)) for value in values]

    def _to_axis_value(self, value: float) -> float:
        return math.log10(max(value, self.low * 1e-3)) if self.is_log else value

    def _make_linear_ticks(self, max_count: int) -> Sequence[float]:
        rough_step = max((self.high - self.low) / max(1, max_count - 1), 1.0 if self.has_integer_ticks else 0.0)
        size = 10.0 ** math.floor(math.log10(rough_step))
        steps = (step * size for step in _TICK_STEPS if not self.has_integer_ticks or step * size % 1 == 0)
        step = next(step for step in steps if step >= rough_step * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    def _make_log_ticks(self, max_count: int) -> Sequence[float]:
        low, high = math.log10(self.low), math.log10(self.high)
        first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
        stride = max(1, math.ceil((last - first + 1) / max_count))
        decades = [10.0**exponent for exponent in range(first, last + 1, stride)]
        if len(decades) >= 3 or (len(decades) == 2 and max_count <= 3):
            return decades
        numbers = (factor * 10.0**exponent for exponent in range(first - 1, last + 1) for factor in (1, 2, 5))
        ticks = [number for number in numbers if self.low * 0.999 <= number <= self.high * 1.001]
        stride = max(1, math.ceil(len(ticks) / max_count))
        return ticks[::stride] if len(ticks) > 1 else self._make_linear_ticks(max_count)


def fit_scale(
    values: Sequence[float], begin: float, end: float, *, is_log: bool | None = None, room: float = 0.0
) -> Scale:
    """Return a scale that fits `values`, which may be empty, between the positions `begin` and `end`.

    Args:
        is_log: whether a scale of positive numbers is logarithmic. By default, the distribution of `values` decides.
        room: the free space on each side, as a share of the range of `values`.
    """
    ordered = sorted(values) or [0.0, 1.0]
    low, high = ordered[0], ordered[-1]
    if len(ordered) >= 20 and low <= 0:  # draw outliers at the edge, since a logarithmic scale cannot show 0
        first, last = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
        margin = (last - first) * _OUTLIER_FACTOR or high - low
        low, high = max(low, first - margin), min(high, last + margin)
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        return Scale(low - margin, high + margin, begin, end)
    if is_log is None and (is_log := low > 0 and high / low >= _MIN_LOG_RATIO):
        # Choose the linear scale only if the median is closer to the middle on it than on the logarithmic scale.
        middle = ordered[len(ordered) // 2]
        log_share = (math.log(middle) - math.log(low)) / (math.log(high) - math.log(low))
        is_log = abs(log_share - 0.5) <= abs((middle - low) / (high - low) - 0.5)
    if is_log and low > 0:
        factor = (high / low) ** room
        return Scale(low / factor, high * factor, begin, end, is_log=True)
    margin = (high - low) * room
    return Scale(low - margin, high + margin, begin, end)


@dataclass(frozen=True, slots=True)
class PlotArea:
    """The plot area of a chart."""

    left: float
    top: float
    right: float
    bottom: float


def draw_axes(drawing: Drawing, area: PlotArea, x: Scale, y: Scale, names: tuple[str, str]) -> None:
    """Draw a grid at the ticks of two scales, and label the axes."""
    draw_y_axis(drawing, area, y, max(5, int((area.bottom - area.top) / 38)))
    for position, label in x.make_ticks(max(5, int((area.right - area.left) / 80))):
        drawing.line([(position, area.bottom), (position, area.bottom + 4)], Pen(GREY, 1, 0.8))
        drawing.text((position, area.bottom + 17), label, f"{SMALL_TEXT} {ANCHOR_MIDDLE}")
    drawing.line([(area.left, area.bottom), (area.right, area.bottom)], Pen(GREY, 1, 0.8))
    x_name, y_name = names
    drawing.text((area.right, area.bottom + 32), x_name, f"{SMALL_TEXT} {ANCHOR_END}")
    drawing.text((area.left - 7, area.top - 9), y_name, f'{SMALL_TEXT} font-weight="600"')


def draw_y_axis(drawing: Drawing, area: PlotArea, y: Scale, max_ticks: int) -> None:
    """Draw a grid line with a label at each tick."""
    for position, label in y.make_ticks(max_ticks):
        drawing.line([(area.left, position), (area.right, position)], GRID_PEN)
        drawing.text((area.left - 7, position + 4), label, f"{SMALL_TEXT} {ANCHOR_END}")


# Learning curves.

WIDTH = 880
MAX_SMALL_PANEL_CURVES = 12
"""The maximum number of curves in a small panel."""
_MAX_NAMED_CURVES = 4
_SMALL_COLUMNS = 3
_SMALL_HEIGHT = 150
_MAX_NAME_CHARACTERS = 36
_BEST_PEN = Pen(ORANGE, 2.4)
_GOOD_PEN = Pen(BLUE, 1.6)
_OTHER_PEN = Pen(BLUE, 1, PALE)
_UNRANKED_PEN = Pen(GREY, 1.2, 0.8)


def draw_learning_curves(report: ReportInput) -> str | None:
    """Draw a panel per objective metric, and a small panel per other metric; return None if there are no curves."""
    drawn = {name for curves in report.snapshot.curves.values() for name in curves}
    metrics = [name for name in report.snapshot.metrics if name in drawn]
    others = [name for name in report.snapshot.other_metrics if name in drawn]
    columns = 1 if len(metrics) == 1 else 2
    height = 300 if columns == 1 else 230
    bottom = height * -(-len(metrics) // columns)
    drawing = Drawing(WIDTH, bottom + _SMALL_HEIGHT * -(-len(others) // _SMALL_COLUMNS))
    for index, name in enumerate(metrics):
        left, top = WIDTH / columns * (index % columns), height * (index // columns)
        right = left + WIDTH / columns - (70 if columns == 1 else 56)
        _draw_panel(drawing, PlotArea(left + 62, top + 26, right, top + height - 42), report, name)
    for index, name in enumerate(others):
        left = WIDTH / _SMALL_COLUMNS * (index % _SMALL_COLUMNS)
        top = bottom + _SMALL_HEIGHT * (index // _SMALL_COLUMNS)
        area = PlotArea(left + 62, top + 26, left + WIDTH / _SMALL_COLUMNS - 12, top + _SMALL_HEIGHT - 36)
        _draw_panel(drawing, area, report, name, is_small=True)
    return drawing.to_svg() if metrics or others else None


def _draw_panel(drawing: Drawing, area: PlotArea, report: ReportInput, metric: str, *, is_small: bool = False) -> None:
    curves = {trial: points[metric] for trial, points in report.snapshot.curves.items() if points.get(metric)}
    if is_small and len(curves) > MAX_SMALL_PANEL_CURVES:
        first = [trial.id for trial in sample_trials(report.ranking, MAX_SMALL_PANEL_CURVES) if trial.id in curves]
        curves = {trial: curves[trial] for trial in list(dict.fromkeys([*first, *curves]))[:MAX_SMALL_PANEL_CURVES]}
    x = fit_scale([step for points in curves.values() for step, _ in points], area.left, area.right, is_log=False)
    x = replace(x, has_integer_ticks=True)
    y = fit_scale([value for points in curves.values() for _, value in points], area.bottom, area.top, room=0.03)
    draw_axes(drawing, area, x, y, ("step", metric[-_MAX_NAME_CHARACTERS:]))
    lines = {
        trial: [(x.to_position(step), y.to_position(value)) for step, value in points]
        for trial, points in curves.items()
    }
    ranked = [trial.id for trial in report.ranking if trial.id in lines]
    best = [trial.id for trial in report.best_trials if trial.id in lines]
    runners_up = [trial for trial in ranked[:_MAX_NAMED_CURVES] if trial not in best] if len(best) <= 1 else []
    others = [trial for trial in ranked if trial not in best and trial not in runners_up]
    unranked = [trial for trial in lines if trial not in report.losses]
    for index, trial in enumerate(unranked):
        drawing.lines([lines[trial]], Pen(COLORS[index], 1.8) if len(unranked) <= len(COLORS) else _UNRANKED_PEN)
    drawing.lines([lines[trial] for trial in reversed(others)], _OTHER_PEN)
    drawing.lines([lines[trial] for trial in runners_up], _GOOD_PEN)
    drawing.lines([lines[trial] for trial in best], _BEST_PEN if len(best) == 1 else Pen(ORANGE, 1.5, 0.8))
    drawing.dots([line[-1] for line in lines.values() if len(line) == 1], Pen(BLUE, 4, PALE))
    # Write each name beside the end of its curve, unless it would overlap another name.
    positions: list[Point] = []
    for trial in () if is_small else (*best[:1], *runners_up):
        right, end = lines[trial][-1]
        position = (min(right, area.right) + 6, min(area.bottom, max(area.top + 8, end + 4)))
        if all(abs(position[1] - other[1]) >= 12 or abs(position[0] - other[0]) > 48 for other in positions):
            positions.append(position)
            weight = ' font-weight="600"' if trial in best else ""
            drawing.text(position, trial[-9:], SMALL_TEXT + weight, ORANGE if trial in best else BLUE)


# Parallel coordinates.

_MAX_AXES = 8
_MAX_LINES = 160
_MAX_CATEGORIES = 12
_AXIS_LABEL_TEXT = 'font-size="10.5" font-weight="700"'


@dataclass(frozen=True)
class Axis:
    """A vertical axis for a parameter or a metric."""

    name: str
    values: Mapping[str, object] = field(repr=False)
    scale: Scale | None = None
    categories: Sequence[str] = ()

    def get_trial_y(self, trial: str, area: PlotArea) -> float:
        """Return the vertical position of a trial's value; a missing value is below the axis."""
        value = self.values.get(trial)
        if value is None:
            return area.bottom + 10
        if self.scale is not None:
            return self.scale.to_position(float(str(value)))
        return self.get_category_y(self.categories.index(_format_category(value)), area)

    def get_category_y(self, index: int, area: PlotArea) -> float:
        """Return the vertical position of a category."""
        return area.bottom - (index + 0.5) * (area.bottom - area.top) / len(self.categories)


def draw_parallel_coordinates(report: ReportInput) -> str | None:
    """Draw each ranked trial as a line through its parameters and metrics; None for fewer than two trials or axes."""
    if report.objective is None or len(report.ranking) < 2:
        return None
    area = PlotArea(70, 44, WIDTH - 70, 280)
    axes = make_axes(report, area)
    if len(axes) < 2:
        return None
    drawing = Drawing(WIDTH, 300)
    positions = [area.left + index * (area.right - area.left) / (len(axes) - 1) for index in range(len(axes))]
    trials = sample_trials(report.ranking, _MAX_LINES)
    placed_axes = list(zip(axes, positions, strict=True))
    lines = [[(x, axis.get_trial_y(trial.id, area)) for axis, x in placed_axes] for trial in trials]
    best = {trial.id for trial in report.best_trials}
    good_count = max(1, len(trials) // 5)
    drawing.lines(reversed(lines[good_count:]), Pen(BLUE, 1, FAINT if len(lines) > 40 else PALE))
    good = [line for line, trial in zip(lines[:good_count], trials, strict=False) if trial.id not in best]
    drawing.lines(good, _GOOD_PEN)
    drawing.lines([line for line, trial in zip(lines, trials, strict=True) if trial.id in best], _BEST_PEN)
    for axis, x in placed_axes:
        drawing.line([(x, area.top), (x, area.bottom)], Pen(GREY, 1, 0.8))
        drawing.text((x, area.top - 22), axis.name[-22:], f'{SMALL_TEXT} {ANCHOR_MIDDLE} font-weight="600"')
        for y, label in axis.scale.make_ticks(4) if axis.scale else ():
            drawing.line([(x - 3, y), (x + 3, y)], Pen(GREY, 1, 0.8))
            drawing.text((x - 6, y + 4), label, f"{_AXIS_LABEL_TEXT} {ANCHOR_END}")
        for index, category in enumerate(axis.categories):
            try:
                label = format_number(float(category))
            except ValueError:
                label = category[:14]
            drawing.text((x, axis.get_category_y(index, area) - 7), label, f"{_AXIS_LABEL_TEXT} {ANCHOR_MIDDLE}")
    return drawing.to_svg()


def make_axes(report: ReportInput, area: PlotArea) -> Sequence[Axis]:
    """Return the axes of the first parameters that differ between trials, and of the objective's metrics."""
    names = [trial.id for trial in report.trials]
    columns = ((name, dict(zip(names, values, strict=True))) for name, values in report.differing_parameters.items())
    parameters = [_make_axis(name, values, area, is_log=report.has_log_scale(name)) for name, values in columns]
    axes = [axis for axis in parameters if axis is not None][: _MAX_AXES - 1]
    for metric in report.objective.metrics if report.objective else ():
        values = {trial.id: report.get_objective_values(trial.id).get(metric) for trial in report.ranking}
        if (axis := _make_axis(metric, values, area)) is not None:
            axes.append(axis)
    return axes


def _make_axis(name: str, values: Mapping[str, object], area: PlotArea, *, is_log: bool | None = None) -> Axis | None:
    """Return the axis of a parameter or metric; None if it has no values, or more than 12 different texts as values."""
    present = [value for value in values.values() if value is not None]
    numbers = select_numeric_metrics({str(index): value for index, value in enumerate(present)})
    if present and len(numbers) == len(present) and len(set(present)) > 3:
        return Axis(name, values, scale=fit_scale(list(numbers.values()), area.bottom, area.top, is_log=is_log))
    categories = sorted(set(map(_format_category, present)), key=float if len(numbers) == len(present) else None)
    return Axis(name, values, categories=categories) if 0 < len(categories) <= _MAX_CATEGORIES else None


def _format_category(value: object) -> str:
    """Return a value as a category. Equal numbers such as 1 and 1.0 are one category."""
    return str(next(iter(select_numeric_metrics({"": value}).values()), value))


# Draw the timeline: the owners of the experiment, and all attempts below them.

_LEFT, _RIGHT = 92.0, WIDTH - 16.0
_TOP = 44.0
_MIN_ROW_HEIGHT = 13.0
_MAX_TRIAL_ROWS = 26
_MAX_BARS = 500
_BREAK_WIDTH = 26.0
"""The width, in pixels, of a compressed idle time."""
_BREAK_LABEL_WIDTH = 90.0
"""The width, in pixels, of the label of a compressed idle time."""
STATUS_FILLS: Mapping[Status, Fill] = {
    Status.COMPLETED: Fill(GREEN),
    Status.PRUNED: Fill(TEAL, "outline"),
    Status.INTERRUPTED: Fill(ORANGE, "hatch"),
    Status.ERRORED: Fill(RED),
    Status.RUNNING: Fill(BLUE),
    Status.PAUSED: Fill(VIOLET, "outline"),
}
"""The fill of an attempt's bar, by the attempt's status."""
_AttemptBar: TypeAlias = tuple[AttemptPeriod, float, float]
"""An attempt, with the positions of the left and right ends of its bar."""


@dataclass(frozen=True)
class _TimeAxis:
    """A time axis on which long idle times are compressed."""

    begin: datetime
    knots: Sequence[tuple[float, float]]
    """Pairs of a time, in seconds since `begin`, and its horizontal position; other positions are interpolated."""
    breaks: Sequence[tuple[float, timedelta]]
    """The position and duration of each compressed idle time."""

    def to_position(self, time: datetime) -> float:
        seconds = (time - self.begin).total_seconds()
        for (before, left), (after, right) in pairwise(self.knots):
            if seconds <= after:
                return left + max(0.0, seconds - before) / max(1e-9, after - before) * (right - left)
        return self.knots[-1][1]


def draw_timeline(report: ReportInput) -> str | None:
    """Draw the owners of the experiment, and all attempts; return None if no owner is known."""
    ownerships = report.snapshot.ownerships
    if not ownerships:
        return None
    now = ownerships[-1].last_entry_at  # the bar of an attempt that has not ended stops here
    attempts = [(attempt, attempt.ended_at or max(attempt.began_at, now)) for attempt in report.snapshot.attempts]
    periods = [(ownership.began_at, ownership.last_entry_at) for ownership in ownerships]
    time_axis = _make_time_axis(periods + [(attempt.began_at, end) for attempt, end in attempts])
    bars = [(attempt, time_axis.to_position(attempt.began_at), time_axis.to_position(end)) for attempt, end in attempts]
    is_crowded = len(bars) > _MAX_BARS
    lanes = [] if is_crowded else _make_lanes(bars)
    row = min(20.0, max(_MIN_ROW_HEIGHT, 120 / max(1, len(lanes)))) if len(lanes) <= 40 else 520 / len(lanes)
    bottom = _TOP + (120.0 if is_crowded else max(1, len(lanes)) * row)
    drawing = Drawing(WIDTH, bottom + (44 if is_crowded else 66))
    for ownership in ownerships:
        left, right = time_axis.to_position(ownership.began_at), time_axis.to_position(ownership.last_entry_at)
        title = f"owner {ownership.term}: {ownership.owner}"
        drawing.bar((left, 14), (max(2.0, right - left - 1), 19), Fill(GREY), title=title)
        name = ownership.owner.name if right - left > 7 * len(ownership.owner.name) + 30 else ""
        label = f"{ownership.term} {name}".strip()
        if right - left > 7 * len(label):
            drawing.text((left + 6, 27.5), label, f'{SMALL_TEXT} font-weight="600"', "#fff")
    if is_crowded:
        _draw_attempt_counts(drawing, bars, bottom)
    else:
        _draw_attempts(drawing, report, lanes, row, bottom)
    y = bottom + 6
    drawing.line([(_LEFT, y), (_RIGHT, y)], Pen(GREY, 1, 0.8))
    last_label_x = -_BREAK_LABEL_WIDTH
    for x, duration in time_axis.breaks:
        for shift in (-3, 3):
            drawing.line([(x + shift - 3, y + 6), (x + shift + 3, y - 6)], Pen(GREY, 1.2))
        if x - last_label_x >= _BREAK_LABEL_WIDTH:
            drawing.text((x, y + 31), f"{format_duration(duration)} later", f'font-size="10" {ANCHOR_MIDDLE}')
            last_label_x = x
    began, ended = time_axis.begin, time_axis.begin + timedelta(seconds=time_axis.knots[-1][0])
    drawing.text((_LEFT, y + 17), f"{began:%Y-%m-%d %H:%M:%S} UTC", SMALL_TEXT)
    pattern = "%H:%M:%S" if ended.date() == began.date() else "%Y-%m-%d %H:%M:%S"
    drawing.text((_RIGHT, y + 17), f"{ended:{pattern}}", f"{SMALL_TEXT} {ANCHOR_END}")
    return drawing.to_svg()


def _make_time_axis(periods: Sequence[tuple[datetime, datetime]]) -> _TimeAxis:
    begin = min(start for start, _ in periods)
    merged: list[tuple[float, float]] = []
    spans = (((start - begin).total_seconds(), (end - begin).total_seconds()) for start, end in periods)
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + 1e-6:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    busy = sum(end - start for start, end in merged) or 1.0
    gaps = [later[0] - earlier[1] for earlier, later in pairwise(merged)]
    uncompressed = busy + sum(gap for gap in gaps if gap <= busy * 0.15)
    scale = (_RIGHT - _LEFT - _BREAK_WIDTH * sum(gap > busy * 0.15 for gap in gaps)) / uncompressed
    knots, breaks, x = [(merged[0][0], _LEFT)], [], _LEFT
    for index, (start, end) in enumerate(merged):
        x += (end - start) * scale
        knots.append((end, x))
        if index == len(gaps):
            break
        if gaps[index] > busy * 0.15:
            breaks.append((x + _BREAK_WIDTH / 2, timedelta(seconds=gaps[index])))
            x += _BREAK_WIDTH
        else:
            x += gaps[index] * scale
        knots.append((merged[index + 1][0], x))
    return _TimeAxis(begin, knots, breaks)


def _make_lanes(bars: Sequence[_AttemptBar]) -> Sequence[tuple[str, Sequence[_AttemptBar]]]:
    """Return one lane per trial or, if there are many trials, one lane per slot, in which trials follow one another."""
    bars_by_trial: dict[str, list[_AttemptBar]] = {}
    for bar in bars:
        bars_by_trial.setdefault(bar[0].trial, []).append(bar)
    if len(bars_by_trial) <= _MAX_TRIAL_ROWS:
        return sorted(bars_by_trial.items())
    slots: list[list[_AttemptBar]] = []
    for bar in sorted(bars, key=lambda bar: bar[0].began_at):
        free = next((slot for slot in slots if slot[-1][2] <= bar[1]), None)
        if free is None:
            slots.append([bar])
        else:
            free.append(bar)
    return [(f"slot {number}", slot) for number, slot in enumerate(slots, 1)]


def _draw_attempts(
    drawing: Drawing, report: ReportInput, lanes: Sequence[tuple[str, Sequence[_AttemptBar]]], row: float, bottom: float
) -> None:
    """Draw each attempt as a bar with the fill for its status, and a legend of the statuses."""
    trials = {trial.id: trial for trial in report.trials}
    height, drawn_statuses = max(1.0, row - 3), set[Status]()
    for index, (name, bars) in enumerate(lanes):
        y = _TOP + index * row
        if row >= 11:
            drawing.text((_LEFT - 8, y + row / 2 + 2), name[-13:], f'font-size="10" {ANCHOR_END}')
        for attempt, left, right in bars:
            trial = trials[attempt.trial]
            # Draw an ended trial's last attempt with the trial's status, since the trial can be pruned after it paused.
            is_last = attempt.attempt == trial.attempt and trial.phase in ENDED_PHASES
            has_ended_well = attempt.status in (Status.COMPLETED, Status.PAUSED)
            status = trial.status if is_last and has_ended_well else attempt.status
            drawn_statuses.add(status)
            title = f"{attempt.trial}, attempt {attempt.attempt}, steps {attempt.from_step} to {attempt.step}: {status}"
            if attempt.rank_ends:
                title = f"{title}; {format_rank_ends(attempt.rank_ends)}"
            drawing.bar((left, y), (max(1.5, right - left - 0.8), height), STATUS_FILLS[status], title=title)
            if attempt.is_lost or attempt.status is Status.ERRORED:
                drawing.cross((right, y + height / 2), Pen(RED, 2), min(3.5, height / 2))
    x, y = _LEFT, bottom + 56
    for status in Status:
        if status in drawn_statuses:
            drawing.bar((x, y - 9), (22, 10), STATUS_FILLS[status], kind="swatch")
            drawing.text((x + 28, y), str(status), SMALL_TEXT)
            x += 28 + 7 * len(status) + 18


def _draw_attempt_counts(drawing: Drawing, bars: Sequence[_AttemptBar], bottom: float) -> None:
    """Draw how many attempts ran at the same time, and where attempts were lost."""
    columns = [0] * int(_RIGHT - _LEFT + 1)
    for _, left, right in bars:
        for column in range(int(left - _LEFT), max(int(left - _LEFT) + 1, int(right - _LEFT))):
            columns[min(column, len(columns) - 1)] += 1
    y = fit_scale([0, max(columns)], bottom, _TOP + 6, is_log=False)
    draw_y_axis(drawing, PlotArea(_LEFT, _TOP, _RIGHT, bottom), y, 4)
    outline = [(_LEFT + column, y.to_position(count)) for column, count in enumerate(columns)]
    drawing.area([(_LEFT, bottom), *outline, (_LEFT + len(columns) - 1, bottom)], Pen(BLUE, 1, PALE))
    lost = [(right, bottom - 4) for attempt, _, right in bars if attempt.is_lost]
    drawing.dots(lost[:_MAX_BARS], Pen(RED, 5, 0.8))
