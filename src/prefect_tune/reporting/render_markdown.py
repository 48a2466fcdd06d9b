"""Render a page as Markdown with embedded pictures, for the Prefect UI, GitHub and editors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import assert_never

from prefect_tune.core.texts import visible, visible_line
from prefect_tune.reporting.charts.svg import data_uri
from prefect_tune.reporting.elements import Block, Cell, Code, Figure, Heading, Link, Table, Text, Verbatim

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
            text = "".join(map(_cell, parts))
            yield f"**{text.strip()}**" if strong else text
        case Figure():
            shows = escaped(block.shows)
            yield f"![{shows}]({data_uri(block.svg)})" if has_pictures else f"[{shows}: a picture, see --output]"
            if block.legend:
                yield from ("", f"*{escaped(block.legend)}*")
        case Table():
            yield from _table(block)
        case Code(text=text, language=language):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            yield from (f"{fence}{language}", visible(text), fence)
        case never:
            assert_never(never)
    yield ""


def _table(table: Table) -> Iterator[str]:
    """Markdown has no table without a header: without one, the first row is the header."""
    rows = [[_unbroken(_cell(cell)) if table.head else _cell(cell) for cell in row] for row in table.rows]
    if not rows:
        return
    if not table.head:
        rows = [[f"**{row[0]}**", *row[1:]] for row in rows]
    head, *body = [list(map(escaped, table.head)), *rows] if table.head else rows
    yield from (f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _unbroken(cell: str) -> str:
    """Return a short cell with no place to break a line: Prefect's UI has little room for a table."""
    return cell.replace(" ", "\N{NO-BREAK SPACE}") if len(cell) <= _SHORT else cell


def _cell(cell: Cell) -> str:
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
