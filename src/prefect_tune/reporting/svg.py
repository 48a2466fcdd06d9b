"""Draw SVG, in colors that are readable on white and on black.

No plotting library: matplotlib was tried, and needs 1.2 CPU s to be imported, 0.3 s and 84 kB for each chart, and
80 MiB; this takes milliseconds and a tenth of the bytes. A picture is shown as an `<img>`, which does not know the
theme of its page. So it has no background, and colors halfway between black and white.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from prefect_tune.core.shown_text import visible_line
from prefect_tune.terminal.formatting import format_number

Point = tuple[float, float]

BLUE, ORANGE, GREEN, RED, VIOLET, TEAL, GREY = (
    *("#3f87e0", "#cf6e0e", "#2f9e58", "#df4b4b", "#9a6ee8", "#14949c"),
    "#78808a",
)
INKS = (BLUE, ORANGE, GREEN, VIOLET, "#c2529b", TEAL, "#a98413", "#6b7fd7")
FAINT, PALE = 0.5, 0.6
"""Opacities of a grid, and of marks in the background: below 0.5 they vanish on a dark page, or on a light one."""
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
_MOST_CHARACTERS = 80
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
    opacity: float = 1.0


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

    def bar(self, corner: Point, size: Point, fill: Fill, *, title: str = "") -> None:
        """Draw a rectangle; `corner` is its upper left one. A viewer of the SVG shows the title."""
        self._rectangle("bar", corner, size, fill, title)

    def swatch(self, corner: Point, fill: Fill) -> None:
        """Show in a legend how something is filled."""
        self._rectangle("swatch", corner, (22, 10), fill, "")

    def _rectangle(self, kind: str, corner: Point, size: Point, fill: Fill, title: str) -> None:
        (x, y), (width, height) = corner, size
        place = f'x="{_short(x)}" y="{_short(y)}" width="{_short(max(0.5, width))}" height="{_short(height)}"'
        inner = f"><title>{safe(title)}</title></rect>" if title else "/>"
        self._shapes.append(f'<rect class="{kind}" {place} rx="{min(2.0, height / 4):g}" {self._filled(fill)}{inner}')

    def _filled(self, fill: Fill) -> str:
        match fill.style:
            case "solid":
                return Pen(fill.ink, opacity=fill.opacity).fill()
            case "hatch":
                return f'fill="url(#{self._hatch(fill.ink)})" stroke="{fill.ink}" stroke-width="1"'
            case "outline":
                return f'fill="{fill.ink}" fill-opacity="0.2" stroke="{fill.ink}" stroke-width="1.2"'

    def _hatch(self, ink: str) -> str:
        """Return the id of a pattern of diagonal stripes."""
        name = f"hatch{ink.removeprefix('#')}"
        self._hatches[ink] = (
            f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="6" height="6" fill="{ink}" fill-opacity="0.25"/><rect width="3" height="6" fill="{ink}"/>'
            "</pattern>"
        )
        return name

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


def data_uri(svg: str) -> str:
    """Return the picture as a `data:` URI."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def safe(text: str) -> str:
    """Return untrusted text on one line, shortened to 80 characters and escaped."""
    line = " ".join(_NO_XML.sub("", visible_line(text)).split())
    return escape(line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 1]}…")


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
