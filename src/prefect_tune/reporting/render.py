"""The elements of a report page, and their rendering as Markdown and as one HTML file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias, assert_never

from prefect_tune.core.shown_text import visible, visible_line
from prefect_tune.reporting.svg import data_uri


@dataclass(frozen=True)
class Link:
    """Text with a hyperlink."""

    text: str
    address: str


@dataclass(frozen=True)
class Verbatim:
    """Text to copy: a path, a command."""

    text: str


Cell: TypeAlias = str | Link | Verbatim


@dataclass(frozen=True)
class Heading:
    """A title; level 1 is the page's."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    parts: Sequence[Cell]
    strong: bool = False


@dataclass(frozen=True)
class Figure:
    """A picture, its description, and its legend."""

    svg: str
    shows: str
    legend: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells; without names of columns, the first cell of each row names it."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Code:
    """Preformatted lines."""

    text: str
    language: str = "json"


Block: TypeAlias = Heading | Text | Figure | Table | Code


# Render a page as Markdown with embedded pictures, for the Prefect UI, GitHub and editors.

_MARKUP = re.compile(r"([\\`*_\[\]<>|#~$!&])")
_SHORT = 16


def as_markdown(blocks: Sequence[Block], *, has_pictures: bool = True) -> str:
    """Return the page, with its pictures or with what each of them shows. Names chosen by users are escaped."""
    return "\n".join(line for block in blocks for line in _lines(block, has_pictures=has_pictures)) + "\n"


def _lines(block: Block, *, has_pictures: bool) -> Iterator[str]:
    match block:
        case Heading(text=text, level=level):
            yield f"{'#' * level} {escaped(text)}"
        case Text(parts=parts, strong=strong):
            text = "".join(map(_markdown_cell, parts))
            yield f"**{text.strip()}**" if strong else text
        case Figure():
            shows = escaped(block.shows)
            yield f"![{shows}]({data_uri(block.svg)})" if has_pictures else f"[{shows}: a picture, see --output]"
            if block.legend:
                yield from ("", f"*{escaped(block.legend)}*")
        case Table():
            yield from _markdown_table(block)
        case Code(text=text, language=language):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            yield from (f"{fence}{language}", visible(text), fence)
        case never:
            assert_never(never)
    yield ""


def _markdown_table(table: Table) -> Iterator[str]:
    """Markdown has no table without a header: without one, the first row is the header."""
    rows = [
        [_unbroken(_markdown_cell(cell)) if table.head else _markdown_cell(cell) for cell in row] for row in table.rows
    ]
    if not rows:
        return
    if not table.head:
        rows = [[f"**{row[0]}**", *row[1:]] for row in rows]
    head, *body = [list(map(escaped, table.head)), *rows] if table.head else rows
    yield from (f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _unbroken(cell: str) -> str:
    """Return a short cell with no place to break a line: Prefect's UI has little room for a table."""
    return cell.replace(" ", "\N{NO-BREAK SPACE}") if len(cell) <= _SHORT else cell


def _markdown_cell(cell: Cell) -> str:
    match cell:
        case Link(text=text, address=address):
            quoted = visible_line(address).replace("(", "%28").replace(")", "%29").replace(" ", "%20")
            return f"[{escaped(text)}]({quoted})"
        case Verbatim(text=text):
            return _verbatim(text)
        case str():
            return escaped(cell)


def _verbatim(text: str) -> str:
    line = visible_line(text)
    return escaped(line) if "`" in line or "|" in line else f"`{line}`"


def escaped(text: str) -> str:
    """Return `text` on one line, with markup characters escaped by a backslash."""
    return _MARKUP.sub(r"\\\1", visible_line(text))


# Render a page as one self-contained HTML file, light or dark as the browser prefers.

_STRONG = ' class="strong"'
_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--soft:#59636e;--line:#d8dee4;--wash:#f6f8fa;--link:#0969da}
@media(prefers-color-scheme:dark){:root{--paper:#0e1116;--ink:#e6edf3;--soft:#9198a1;--line:#30363d;--wash:#161b22;
--link:#58a6ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1000px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:28px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:18px;margin:36px 0 10px}
p{margin:8px 0}.strong{font-size:17px;font-weight:600}.legend{color:var(--soft);font-size:13px;margin:2px 0 0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13.5px;margin:12px 0}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);white-space:nowrap;
font-variant-numeric:tabular-nums;vertical-align:top}
th{color:var(--soft);font-weight:600;white-space:normal}table.facts td{white-space:normal;overflow-wrap:anywhere}
table.facts td:first-child{color:var(--soft);white-space:nowrap}
code,pre{font:12.5px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,monospace}pre{background:var(--wash);padding:12px 14px;
border-radius:6px;overflow-x:auto}a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
img{max-width:100%;height:auto;display:block}
"""


def as_html(blocks: Sequence[Block]) -> str:
    """Return the page. Names chosen by users are escaped."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "")
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body><main>\n"
    )
    return head + "\n".join(each for block in blocks for each in _elements(block)) + "\n</main></body></html>\n"


def _elements(block: Block) -> Iterator[str]:
    match block:
        case Heading(text=text, level=level):
            yield f"<h{level}>{_text(text)}</h{level}>"
        case Text(parts=parts, strong=strong):
            yield f"<p{_STRONG if strong else ''}>{''.join(map(_html_cell, parts))}</p>"
        case Figure():
            yield f'<img src="{data_uri(block.svg)}" alt="{_text(block.shows)}">'
            if block.legend:
                yield f'<p class="legend">{_text(block.legend)}</p>'
        case Table():
            yield from _html_table(block)
        case Code(text=text):
            yield f"<pre>{_text(text)}</pre>"
        case never:
            assert_never(never)


def _html_table(table: Table) -> Iterator[str]:
    yield '<div class="wide"><table>' if table.head else '<div class="wide"><table class="facts">'
    if table.head:
        yield f"<tr>{''.join(f'<th>{_text(name)}</th>' for name in table.head)}</tr>"
    for row in table.rows:
        yield f"<tr>{''.join(f'<td>{_html_cell(cell)}</td>' for cell in row)}</tr>"
    yield "</table></div>"


def _html_cell(cell: Cell) -> str:
    match cell:
        case Link(text=text, address=address):
            return f'<a href="{_text(address)}">{_text(text)}</a>'
        case Verbatim(text=text):
            return f"<code>{_text(text)}</code>"
        case str():
            return _text(cell)


def _text(text: str) -> str:
    return escape(visible(text))
