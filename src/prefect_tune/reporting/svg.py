"""Draw the charts of a report as SVG: learning curves, parallel coordinates, and the timeline.

No plotting library: matplotlib was tried, and needs 1.2 CPU s to be imported, 0.3 s and 84 kB for each chart, and
80 MiB; this takes milliseconds and a tenth of the bytes. A picture is shown as an `<img>`, which does not know the
theme of its page. So it has no background, and colors halfway between black and white, readable on both.
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

from prefect_tune.core.experiment.trial_transitions import ENDED, Status
from prefect_tune.core.search_view import AttemptPeriod, numbers_in
from prefect_tune.core.shown_text import format_duration, shorten, visible_line
from prefect_tune.reporting.facts import ReportInput, spread
from prefect_tune.terminal.formatting import ends_words, format_number

Point = tuple[float, float]

BLUE, ORANGE, GREEN, RED, VIOLET, TEAL, GREY = (
    *("#3f87e0", "#cf6e0e", "#2f9e58", "#df4b4b", "#9a6ee8", "#14949c"),
    "#78808a",
)
INKS = (BLUE, ORANGE, GREEN, VIOLET, "#c2529b", TEAL, "#a98413", "#6b7fd7")
FAINT, PALE = 0.5, 0.6
"""Opacities of a grid, and of marks in the background: below 0.5 they vanish on a dark page, or on a light one."""
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
_MAX_CHARACTERS = 80
_NO_XML = re.compile("[\ufffe\uffff]")  # the control characters that XML lacks are visible


@dataclass(frozen=True, slots=True)
class Pen:
    """How a line is drawn, or how an area is filled."""

    ink: str = GREY
    width: float = 1.0
    opacity: float = 1.0
    dash: str = ""

    def stroke(self) -> str:
        dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        return f'fill="none" stroke="{self.ink}" stroke-width="{self.width:g}"{self._seen("stroke")}{dash}'

    def fill(self) -> str:
        return f'fill="{self.ink}"{self._seen("fill")}'

    def _seen(self, what: str) -> str:
        return f' {what}-opacity="{self.opacity:g}"' if self.opacity < 1 else ""


@dataclass(frozen=True, slots=True)
class Fill:
    """How a rectangle is filled: in whole, by diagonal stripes, or only faintly within an outline."""

    ink: str = GREY
    style: Literal["solid", "hatch", "outline"] = "solid"


class Drawing:
    """A picture of a given size in pixels, to which shapes are added."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._shapes: list[str] = []
        self._hatches: dict[str, str] = {}  # the patterns by color

    def line(self, points: Iterable[Point], pen: Pen) -> None:
        """Draw through the points."""
        self._shapes.append(f'<path class="line" d="{_path(points)}" {pen.stroke()}/>')

    def lines(self, lines: Iterable[Sequence[Point]], pen: Pen) -> None:
        """Draw many lines with one pen, each by itself, so that where they cross it is darker."""
        drawn = "".join(f'<path class="line" d="{_path(each)}"/>' for each in lines if each)
        if drawn:
            self._shapes.append(f"<g {pen.stroke()}>{drawn}</g>")

    def area(self, points: Iterable[Point], pen: Pen) -> None:
        """Fill what the points enclose."""
        self._shapes.append(f'<path d="{_path(points)}z" {pen.fill()}/>')

    def dots(self, points: Sequence[Point], pen: Pen) -> None:
        """Draw a dot, as wide as the pen, at each of the points."""
        if points:
            path = "".join(f"M{_short(x)} {_short(y)}h0" for x, y in points)
            self._shapes.append(f'<path class="dots" d="{path}" stroke-linecap="round" {pen.stroke()}/>')

    def bar(self, corner: Point, size: Point, fill: Fill, *, title: str = "", kind: str = "bar") -> None:
        """Draw a rectangle; `corner` is its upper left one. A viewer of the SVG shows the title."""
        (x, y), (width, height) = corner, size
        match fill.style:
            case "solid":
                filled = Pen(fill.ink).fill()
            case "hatch":
                name = f"hatch{fill.ink.removeprefix('#')}"
                filled = f'fill="url(#{name})" stroke="{fill.ink}" stroke-width="1"'
                self._hatches[fill.ink] = (
                    f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
                    f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{fill.ink}" fill-opacity="0.25"/>'
                    f'<rect width="3" height="6" fill="{fill.ink}"/></pattern>'
                )
            case "outline":
                filled = f'fill="{fill.ink}" fill-opacity="0.2" stroke="{fill.ink}" stroke-width="1.2"'
        place = f'x="{_short(x)}" y="{_short(y)}" width="{_short(max(0.5, width))}" height="{_short(height)}"'
        inner = f"><title>{safe(title)}</title></rect>" if title else "/>"
        self._shapes.append(f'<rect class="{kind}" {place} rx="{min(2.0, height / 4):g}" {filled}{inner}')

    def cross(self, center: Point, pen: Pen, reach: float = 3.5) -> None:
        """Mark a place where something broke."""
        x, y = center
        down, back = f"{2 * reach:g}", f"{-2 * reach:g}"
        ends = f"M{_short(x - reach)} {_short(y - reach)}l{down} {down}m0 {back}l{back} {down}"
        self._shapes.append(f'<path class="cross" d="{ends}" {pen.stroke()}/>')

    def text(self, at: Point, said: str, style: str = "", ink: str = GREY) -> None:
        """Write; `style` holds SVG attributes such as `text-anchor="end"`."""
        if said:
            place = f'x="{_short(at[0])}" y="{_short(at[1])}"'
            self._shapes.append(f'<text {place} fill="{ink}"{" " if style else ""}{style}>{safe(said)}</text>')

    def svg(self) -> str:
        """Return the picture."""
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}" font-size="12">'
        patterns = f"<defs>{''.join(self._hatches.values())}</defs>" if self._hatches else ""
        return f"{head}{patterns}{''.join(self._shapes)}</svg>"


def safe(text: str) -> str:
    """Return untrusted text on one line, shortened to 80 characters and escaped."""
    line = " ".join(_NO_XML.sub("", visible_line(text)).split())
    return escape(shorten(line, _MAX_CHARACTERS))


def _path(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in points)


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


# The axes of a chart: scales, ticks, grid and labels.

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
    low, high = ordered[0], ordered[-1]
    if len(ordered) >= 20 and low <= 0:  # positive outliers have room on a logarithmic axis; others would squeeze it
        near, far = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
        reach = (far - near) * _FAR or high - low
        low, high = max(low, near - reach), min(high, far + reach)
    if low == high:
        beside = abs(low) * 0.1 or 1.0
        return Scale(low - beside, high + beside, begin, end)
    if is_log is None and (is_log := low > 0 and high / low >= _LOG_FROM):
        # Do the numbers spread more evenly over orders of magnitude than over the range?
        middle = ordered[len(ordered) // 2]
        by_magnitude = (math.log(middle) - math.log(low)) / (math.log(high) - math.log(low))
        is_log = abs(by_magnitude - 0.5) <= abs((middle - low) / (high - low) - 0.5)
    if is_log and low > 0:
        beside = (high / low) ** room
        return Scale(low / beside, high * beside, begin, end, is_log=True)
    beside = (high - low) * room
    return Scale(low - beside, high + beside, begin, end)


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


# Learning curves.

WIDTH = 880
SMALL_CURVES = 12
"""The most curves in a small panel."""
_NAMED = 4
_SMALL_COLUMNS = 3
_SMALL_HEIGHT = 150
_MAX_NAME = 36
_BEST = Pen(ORANGE, 2.4)
_GOOD = Pen(BLUE, 1.6)
_OTHERS = Pen(BLUE, 1, PALE)
_UNRANKED = Pen(GREY, 1.2, 0.8)


def learning_curves(report: ReportInput) -> str | None:
    """Draw a panel for each metric, a small one for each that is not of the objective; None if nothing was reported."""
    history = report.history
    metrics, others = (
        [name for name in names if any(name in curves for curves in history.curves.values())]
        for names in (history.metrics, history.others)
    )
    columns = 1 if len(metrics) == 1 else 2
    height = 300 if columns == 1 else 230
    bottom = height * -(-len(metrics) // columns)
    drawing = Drawing(WIDTH, bottom + _SMALL_HEIGHT * -(-len(others) // _SMALL_COLUMNS))
    for index, name in enumerate(metrics):
        left, top = WIDTH / columns * (index % columns), height * (index // columns)
        right = left + WIDTH / columns - (70 if columns == 1 else 56)
        _draw_curves(drawing, Frame(left + 62, top + 26, right, top + height - 42), report, name)
    for index, name in enumerate(others):
        left = WIDTH / _SMALL_COLUMNS * (index % _SMALL_COLUMNS)
        top = bottom + _SMALL_HEIGHT * (index // _SMALL_COLUMNS)
        frame = Frame(left + 62, top + 26, left + WIDTH / _SMALL_COLUMNS - 12, top + _SMALL_HEIGHT - 36)
        _draw_curves(drawing, frame, report, name, is_small=True)
    return drawing.svg() if metrics or others else None


def _draw_curves(drawing: Drawing, frame: Frame, report: ReportInput, metric: str, *, is_small: bool = False) -> None:
    curves = {trial: points[metric] for trial, points in report.history.curves.items() if points.get(metric)}
    if is_small and len(curves) > SMALL_CURVES:
        first = [trial.trial for trial in spread(report.ranking, SMALL_CURVES) if trial.trial in curves]
        curves = {trial: curves[trial] for trial in list(dict.fromkeys([*first, *curves]))[:SMALL_CURVES]}
    x = fitted([step for points in curves.values() for step, _ in points], frame.left, frame.right, is_log=False)
    x = replace(x, is_whole=True)
    y = fitted([value for points in curves.values() for _, value in points], frame.bottom, frame.top, room=0.03)
    draw_axes(drawing, frame, x, y, ("step", metric[-_MAX_NAME:]))
    lines = {trial: [(x.at(step), y.at(value)) for step, value in points] for trial, points in curves.items()}
    ranked = [trial.trial for trial in report.ranking if trial.trial in lines]
    best = [trial.trial for trial in report.best if trial.trial in lines]
    named = [trial for trial in ranked[:_NAMED] if trial not in best] if len(best) <= 1 else []
    others = [trial for trial in ranked if trial not in best and trial not in named]
    unranked = [trial for trial in lines if trial not in report.losses]
    for index, trial in enumerate(unranked):
        drawing.lines([lines[trial]], Pen(INKS[index], 1.8) if len(unranked) <= len(INKS) else _UNRANKED)
    drawing.lines([lines[trial] for trial in reversed(others)], _OTHERS)
    drawing.lines([lines[trial] for trial in named], _GOOD)
    drawing.lines([lines[trial] for trial in best], _BEST if len(best) == 1 else Pen(ORANGE, 1.5, 0.8))
    drawing.dots([line[-1] for line in lines.values() if len(line) == 1], Pen(BLUE, 4, PALE))
    # Each name is beside the end of its curve, unless it would overlap another name.
    taken: list[Point] = []
    for trial in () if is_small else (*best[:1], *named):
        right, end = lines[trial][-1]
        at = (min(right, frame.right) + 6, min(frame.bottom, max(frame.top + 8, end + 4)))
        if all(abs(at[1] - other[1]) >= 12 or abs(at[0] - other[0]) > 48 for other in taken):
            taken.append(at)
            weight = ' font-weight="600"' if trial in best else ""
            drawing.text(at, trial[-9:], SMALL + weight, ORANGE if trial in best else BLUE)


# Parallel coordinates.

_AXES = 8
_LINES = 160
_CATEGORIES = 12
_AXIS_LABEL = 'font-size="10.5" font-weight="700"'


@dataclass(frozen=True)
class Axis:
    """A parameter, or a metric, as a vertical line."""

    name: str
    values: Mapping[str, object] = field(repr=False)
    numbers: Scale | None = None
    categories: Sequence[str] = ()

    def at(self, trial: str, frame: Frame) -> float:
        """Return where the trial's line crosses; a missing value is below the axis."""
        value = self.values.get(trial)
        if value is None:
            return frame.bottom + 10
        if self.numbers is not None:
            return self.numbers.at(float(str(value)))
        return self.place_of(self.categories.index(_category_of(value)), frame)

    def place_of(self, index: int, frame: Frame) -> float:
        """Return where a category is."""
        return frame.bottom - (index + 0.5) * (frame.bottom - frame.top) / len(self.categories)


def parallel_coordinates(report: ReportInput) -> str | None:
    """Draw each trial as a line through its parameters to its metric; None with fewer than two trials or no metric."""
    if report.objective is None or len(report.ranking) < 2:
        return None
    frame = Frame(70, 44, WIDTH - 70, 280)
    axes = axes_of(report, frame)
    if len(axes) < 2:
        return None
    drawing = Drawing(WIDTH, 300)
    places = [frame.left + index * (frame.right - frame.left) / (len(axes) - 1) for index in range(len(axes))]
    drawn = spread(report.ranking, _LINES)
    lines = [
        [(place, axis.at(trial.trial, frame)) for axis, place in zip(axes, places, strict=True)] for trial in drawn
    ]
    best = {trial.trial for trial in report.best}
    good = max(1, len(drawn) // 5)
    drawing.lines(reversed(lines[good:]), Pen(BLUE, 1, FAINT if len(lines) > 40 else PALE))
    drawing.lines([line for line, trial in zip(lines[:good], drawn, strict=False) if trial.trial not in best], _GOOD)
    drawing.lines([line for line, trial in zip(lines, drawn, strict=True) if trial.trial in best], _BEST)
    for axis, x in zip(axes, places, strict=True):
        drawing.line([(x, frame.top), (x, frame.bottom)], Pen(GREY, 1, 0.8))
        drawing.text((x, frame.top - 22), axis.name[-22:], f'{SMALL} {MIDDLE} font-weight="600"')
        for y, label in axis.numbers.ticks(4) if axis.numbers else ():
            drawing.line([(x - 3, y), (x + 3, y)], Pen(GREY, 1, 0.8))
            drawing.text((x - 6, y + 4), label, f"{_AXIS_LABEL} {END}")
        for index, category in enumerate(axis.categories):
            try:
                label = format_number(float(category))
            except ValueError:
                label = category[:14]
            drawing.text((x, axis.place_of(index, frame) - 7), label, f"{_AXIS_LABEL} {MIDDLE}")
    return drawing.svg()


def axes_of(report: ReportInput, frame: Frame) -> Sequence[Axis]:
    """Return the axes of the first parameters in which the trials differ, and of the metrics."""
    names = [trial.trial for trial in report.trials]
    columns = ((name, dict(zip(names, values, strict=True))) for name, values in report.cells.items())
    parameters = [_axis_of(name, values, frame, is_log=report.is_log(name)) for name, values in columns]
    axes = [axis for axis in parameters if axis is not None][: _AXES - 1]
    for metric in report.objective.metrics if report.objective else ():
        values = {trial.trial: report.compared(trial.trial).get(metric) for trial in report.ranking}
        if (axis := _axis_of(metric, values, frame)) is not None:
            axes.append(axis)
    return axes


def _axis_of(name: str, values: Mapping[str, object], frame: Frame, *, is_log: bool | None = None) -> Axis | None:
    """Return the axis of a parameter; None for text with too many different values."""
    there = [value for value in values.values() if value is not None]
    numbers = numbers_in({str(index): value for index, value in enumerate(there)})
    if there and len(numbers) == len(there) and len(set(there)) > 3:
        return Axis(name, values, numbers=fitted(list(numbers.values()), frame.bottom, frame.top, is_log=is_log))
    categories = sorted(set(map(_category_of, there)), key=float if len(numbers) == len(there) else None)
    return Axis(name, values, categories=categories) if 0 < len(categories) <= _CATEGORIES else None


def _category_of(value: object) -> str:
    """A number is the same with and without a fraction."""
    return str(next(iter(numbers_in({"": value}).values()), value))


# The timeline: the owners of the experiment and, below them, all attempts.

_LEFT, _RIGHT = 92.0, WIDTH - 16.0
_TOP = 44.0
_ROW = 13.0
_ROWS = 26
_BARS = 500
_BREAK = 26.0
"""The width, in pixels, of a long time in which no attempt ran."""
_BREAK_LABEL = 90.0
"""The width that the label of such a time needs."""
FILLS: Mapping[Status, Fill] = {
    Status.COMPLETED: Fill(GREEN),
    Status.PRUNED: Fill(TEAL, "outline"),
    Status.INTERRUPTED: Fill(ORANGE, "hatch"),
    Status.ERRORED: Fill(RED),
    Status.RUNNING: Fill(BLUE),
    Status.PAUSED: Fill(VIOLET, "outline"),
}
"""How an attempt is drawn, by the status that it ended with: told apart by more than a color."""


_Bar: TypeAlias = tuple[AttemptPeriod, float, float]
"""An attempt, and where its bar begins and ends."""


@dataclass(frozen=True)
class _Clock:
    """A time axis on which long idle times are compressed."""

    begin: datetime
    knots: Sequence[tuple[float, float]]
    """Pairs of seconds and horizontal position."""
    breaks: Sequence[tuple[float, timedelta]]
    """The position and length of each idle time that is left out."""

    def at(self, when: datetime) -> float:
        seconds = (when - self.begin).total_seconds()
        for (before, left), (after, right) in pairwise(self.knots):
            if seconds <= after:
                return left + max(0.0, seconds - before) / max(1e-9, after - before) * (right - left)
        return self.knots[-1][1]


def timeline(report: ReportInput) -> str | None:
    """Draw the owners of the experiment and all attempts; None if no attempt has started."""
    ownerships = report.history.ownerships
    if not ownerships:
        return None
    # An attempt without an end lasts until the last journal entry of its owner.
    attempts = [
        (attempt, attempt.ended or max(attempt.began, ownerships[-1].last)) for attempt in report.history.attempts
    ]
    clock = _clock_of([(each.began, each.last) for each in ownerships] + [(each.began, end) for each, end in attempts])
    bars = [(attempt, clock.at(attempt.began), clock.at(end)) for attempt, end in attempts]
    is_crowded = len(bars) > _BARS
    lanes = [] if is_crowded else _lanes_of(bars)
    row = min(20.0, max(_ROW, 120 / max(1, len(lanes)))) if len(lanes) <= 40 else 520 / len(lanes)
    bottom = _TOP + (120.0 if is_crowded else max(1, len(lanes)) * row)
    drawing = Drawing(WIDTH, bottom + (44 if is_crowded else 66))
    for ownership in ownerships:
        left, right = clock.at(ownership.began), clock.at(ownership.last)
        title = f"owner {ownership.term}: {ownership.owner}"
        drawing.bar((left, 14), (max(2.0, right - left - 1), 19), Fill(GREY), title=title)
        name = ownership.owner.name if right - left > 7 * len(ownership.owner.name) + 30 else ""
        label = f"{ownership.term} {name}".strip()
        if right - left > 7 * len(label):
            drawing.text((left + 6, 27.5), label, f'{SMALL} font-weight="600"', "#fff")
    if is_crowded:
        _draw_load(drawing, bars, bottom)
    else:
        _draw_attempts(drawing, report, lanes, row, bottom)
    y = bottom + 6
    drawing.line([(_LEFT, y), (_RIGHT, y)], Pen(GREY, 1, 0.8))
    labelled_at = -_BREAK_LABEL
    for x, left_out in clock.breaks:
        for shift in (-3, 3):
            drawing.line([(x + shift - 3, y + 6), (x + shift + 3, y - 6)], Pen(GREY, 1.2))
        if x - labelled_at >= _BREAK_LABEL:
            drawing.text((x, y + 31), f"{format_duration(left_out)} later", f'font-size="10" {MIDDLE}')
            labelled_at = x
    began, ended = clock.begin, clock.begin + timedelta(seconds=clock.knots[-1][0])
    drawing.text((_LEFT, y + 17), f"{began:%Y-%m-%d %H:%M:%S} UTC", SMALL)
    pattern = "%H:%M:%S" if ended.date() == began.date() else "%Y-%m-%d %H:%M:%S"
    drawing.text((_RIGHT, y + 17), f"{ended:{pattern}}", f"{SMALL} {END}")
    return drawing.svg()


def _clock_of(periods: Sequence[tuple[datetime, datetime]]) -> _Clock:
    begin = min(start for start, _ in periods)
    merged: list[tuple[float, float]] = []
    for start, end in sorted(
        ((start - begin).total_seconds(), (end - begin).total_seconds()) for start, end in periods
    ):
        if merged and start <= merged[-1][1] + 1e-6:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    busy = sum(end - start for start, end in merged) or 1.0
    gaps = [later[0] - earlier[1] for earlier, later in pairwise(merged)]
    straight = busy + sum(gap for gap in gaps if gap <= busy * 0.15)
    scale = (_RIGHT - _LEFT - _BREAK * sum(gap > busy * 0.15 for gap in gaps)) / straight
    knots, breaks, x = [(merged[0][0], _LEFT)], [], _LEFT
    for index, (start, end) in enumerate(merged):
        x += (end - start) * scale
        knots.append((end, x))
        if index == len(gaps):
            break
        if gaps[index] > busy * 0.15:
            breaks.append((x + _BREAK / 2, timedelta(seconds=gaps[index])))
            x += _BREAK
        else:
            x += gaps[index] * scale
        knots.append((merged[index + 1][0], x))
    return _Clock(begin, knots, breaks)


def _lanes_of(bars: Sequence[_Bar]) -> Sequence[tuple[str, Sequence[_Bar]]]:
    """Return a row per trial; for many trials a row per slot, with trials one after the other."""
    of_trials: dict[str, list[_Bar]] = {}
    for bar in bars:
        of_trials.setdefault(bar[0].trial, []).append(bar)
    if len(of_trials) <= _ROWS:
        return sorted(of_trials.items())
    slots: list[list[_Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar[0].began):
        _, left, _ = bar
        free = next((slot for slot in slots if slot[-1][2] <= left), None)
        if free is None:
            slots.append([bar])
        else:
            free.append(bar)
    return [(f"slot {number}", slot) for number, slot in enumerate(slots, 1)]


def _draw_attempts(
    drawing: Drawing, report: ReportInput, lanes: Sequence[tuple[str, Sequence[_Bar]]], row: float, bottom: float
) -> None:
    """Draw each attempt as a bar, by the status that it ended with, and a legend of the statuses."""
    trials = {trial.trial: trial for trial in report.trials}
    height, shown = max(1.0, row - 3), set[Status]()
    for index, (name, bars) in enumerate(lanes):
        y = _TOP + index * row
        if row >= 11:
            drawing.text((_LEFT - 8, y + row / 2 + 2), name[-13:], f'font-size="10" {END}')
        for attempt, left, right in bars:
            trial = trials[attempt.trial]
            # The last attempt of a trial that has ended has its status: a paused one is pruned if it was not promoted.
            is_last = attempt.attempt == trial.attempt and trial.phase in ENDED
            has_ended_well = attempt.status in (Status.COMPLETED, Status.PAUSED)
            status = trial.status if is_last and has_ended_well else attempt.status
            shown.add(status)
            title = f"{attempt.trial}, attempt {attempt.attempt}, steps {attempt.from_step} to {attempt.step}: {status}"
            if attempt.rank_ends:
                title = f"{title}; {ends_words(attempt.rank_ends)}"
            drawing.bar((left, y), (max(1.5, right - left - 0.8), height), FILLS[status], title=title)
            if attempt.is_lost or attempt.status is Status.ERRORED:
                drawing.cross((right, y + height / 2), Pen(RED, 2), min(3.5, height / 2))
    x, y = _LEFT, bottom + 56
    for status in Status:
        if status in shown:
            drawing.bar((x, y - 9), (22, 10), FILLS[status], kind="swatch")
            drawing.text((x + 28, y), str(status), SMALL)
            x += 28 + 7 * len(status) + 18


def _draw_load(drawing: Drawing, bars: Sequence[_Bar], bottom: float) -> None:
    """For too many attempts to draw each: draw how many ran at once, and where attempts were lost."""
    columns = [0] * int(_RIGHT - _LEFT + 1)
    for _, left, right in bars:
        for column in range(int(left - _LEFT), max(int(left - _LEFT) + 1, int(right - _LEFT))):
            columns[min(column, len(columns) - 1)] += 1
    y = fitted([0, max(columns)], bottom, _TOP + 6, is_log=False)
    draw_y_axis(drawing, Frame(_LEFT, _TOP, _RIGHT, bottom), y, 4)
    outline = [(_LEFT + column, y.at(count)) for column, count in enumerate(columns)]
    drawing.area([(_LEFT, bottom), *outline, (_LEFT + len(columns) - 1, bottom)], Pen(BLUE, 1, PALE))
    lost = [(right, bottom - 4) for attempt, _, right in bars if attempt.is_lost]
    drawing.dots(lost[:_BARS], Pen(RED, 5, 0.8))
