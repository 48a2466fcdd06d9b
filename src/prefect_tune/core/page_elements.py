"""The elements of reports and displays, and their HTML for a page or for the output of a notebook cell.

All text is escaped. Pictures are part of the markup, so a page loads nothing from elsewhere.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, TypeAlias, assert_never

from prefect_tune.core.display_text import make_visible, make_visible_line, shorten


@dataclass(frozen=True)
class Link:
    """Text with a hyperlink."""

    text: str
    address: str


@dataclass(frozen=True)
class Verbatim:
    """Text that a reader may want to copy, such as a path or a command."""

    text: str


Cell: TypeAlias = str | Link | Verbatim


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title of the page."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    parts: Sequence[Cell]
    kind: Literal["", "strong", "legend", "bad"] = ""
    """The emphasis; empty for normal text."""


@dataclass(frozen=True)
class Figure:
    """A picture, its description and its legend."""

    svg: str
    description: str
    legend: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells. If `head` is empty, the first cell of a row is the name of the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Code:
    """Preformatted lines."""

    text: str
    language: str = "json"


PageElement: TypeAlias = Heading | Text | Figure | Table | Code

_MAX_VALUES = 60


def make_values_table(name: str, values: Mapping[str, object]) -> Table:
    """Return a table of parameters or metrics, with the first 60 values and the number of omitted values."""
    shown = {key: f"{value:.6g}" if isinstance(value, float) else str(value) for key, value in values.items()}
    rows = [(shorten(make_visible_line(key), 60), shorten(make_visible_line(text), 300)) for key, text in shown.items()]
    more = [("", f"and {len(rows) - _MAX_VALUES} more")] if len(rows) > _MAX_VALUES else []
    return Table((name, "value"), [*rows[:_MAX_VALUES], *more])


def render_element(element: PageElement) -> Iterator[str]:
    """Yield the HTML of an element."""
    match element:
        case Heading(text=text, level=level):
            yield f"<h{level}>{escape_html(text)}</h{level}>"
        case Text(parts=parts, kind=kind):
            attribute = f' class="{kind}"' if kind else ""
            yield f"<p{attribute}>{''.join(map(_render_cell, parts))}</p>"
        case Figure():
            yield f'<img src="{make_data_uri(element.svg)}" alt="{escape_html(element.description)}">'
            if element.legend:
                yield f'<p class="legend">{escape_html(element.legend)}</p>'
        case Table(head=head, rows=rows):
            if not rows:
                return
            yield '<div class="wide"><table>' if head else '<div class="wide"><table class="facts">'
            if head:
                yield f"<tr>{''.join(f'<th>{escape_html(name)}</th>' for name in head)}</tr>"
            for row in rows:
                yield f"<tr>{''.join(f'<td>{_render_cell(cell)}</td>' for cell in row)}</tr>"
            yield "</table></div>"
        case Code(text=text):
            yield f"<pre>{escape_html(text)}</pre>"
        case never:
            assert_never(never)


def _render_cell(cell: Cell) -> str:
    match cell:
        case Link(text=text, address=address):
            return f'<a href="{escape_html(address)}" target="_blank" rel="noopener">{escape_html(text)}</a>'
        case Verbatim(text=text):
            return f"<code>{escape_html(text)}</code>"
        case str():
            return escape_html(cell)


def escape_html(text: str) -> str:
    """Return the markup that displays `text`."""
    return escape(make_visible(text))


def make_data_uri(svg: str) -> str:
    """Return the picture as a `data:` URI."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


# The output of a notebook cell. Selectors repeat the class to override JupyterLab's rules for tables. Lines are half
# transparent, so that they are visible in light and dark themes; text has the color of the page.
_STYLE = """
.prefect-tune{font-size:13px;line-height:1.5;color:inherit;overflow-x:auto}
.prefect-tune p{margin:.3em 0}.prefect-tune .strong{font-size:15px;font-weight:600}.prefect-tune .legend{opacity:.7}
.prefect-tune .bad{border-left:3px solid #df4b4b;padding-left:8px}
.prefect-tune h1,.prefect-tune h2{font-size:15px;font-weight:600;margin:.6em 0 .2em}
.prefect-tune.prefect-tune table{border-collapse:collapse;margin:.5em 0;border:none;font-size:inherit;color:inherit;
width:auto}
.prefect-tune.prefect-tune table tr,.prefect-tune.prefect-tune table tr:nth-child(n){background:none}
.prefect-tune.prefect-tune table td,.prefect-tune.prefect-tune table th{text-align:left;vertical-align:top;border:none;
padding:3px 16px 3px 0;color:inherit;background:none;font-variant-numeric:tabular-nums;white-space:nowrap;
border-bottom:1px solid rgba(128,128,128,.3)}
.prefect-tune.prefect-tune table th,.prefect-tune.prefect-tune table.facts td:first-child{opacity:.7}
.prefect-tune.prefect-tune table.facts td{border:none;white-space:normal;overflow-wrap:anywhere}
.prefect-tune.prefect-tune code,.prefect-tune.prefect-tune pre{font-family:ui-monospace,"SF Mono",Menlo,Consolas,
monospace;font-size:12px;background:none;color:inherit;padding:0;border:none}
.prefect-tune pre{white-space:pre;margin:0;max-height:40em;overflow:auto}
.prefect-tune img{max-width:min(100%,760px);height:auto;display:block}
"""


def render_notebook_cell(*elements: PageElement) -> str:
    """Return the HTML of a notebook cell's output."""
    markup = "".join(line for element in elements for line in render_element(element))
    return f'<div class="prefect-tune"><style>{_STYLE}</style>{markup}</div>'
