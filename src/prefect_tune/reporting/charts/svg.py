"""Draw SVG, in colors that are readable on white and on black.

No plotting library: matplotlib was tried, and needs 1.2 CPU s to be imported, 0.3 s and 84 kB for each chart, and
80 MiB; this takes milliseconds and a tenth of the bytes. A picture is shown as an `<img>`, which does not know the
theme of its page. So it has no background, and colors halfway between black and white.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from prefect_tune.core.texts import visible_line

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
