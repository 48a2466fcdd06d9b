"""Render a page as one self-contained HTML file, light or dark as the browser prefers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import assert_never

from prefect_tune.core.texts import visible
from prefect_tune.reporting.charts.svg import data_uri
from prefect_tune.reporting.elements import Block, Cell, Code, Figure, Heading, Link, Table, Text, Verbatim

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
            yield f"<p{_STRONG if strong else ''}>{''.join(map(_cell, parts))}</p>"
        case Figure():
            yield f'<img src="{data_uri(block.svg)}" alt="{_text(block.shows)}">'
            if block.legend:
                yield f'<p class="legend">{_text(block.legend)}</p>'
        case Table():
            yield from _table(block)
        case Code(text=text):
            yield f"<pre>{_text(text)}</pre>"
        case never:
            assert_never(never)


def _table(table: Table) -> Iterator[str]:
    yield '<div class="wide"><table>' if table.head else '<div class="wide"><table class="facts">'
    if table.head:
        yield f"<tr>{''.join(f'<th>{_text(name)}</th>' for name in table.head)}</tr>"
    for row in table.rows:
        yield f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>"
    yield "</table></div>"


def _cell(cell: Cell) -> str:
    match cell:
        case Link(text=text, address=address):
            return f'<a href="{_text(address)}">{_text(text)}</a>'
        case Verbatim(text=text):
            return f"<code>{_text(text)}</code>"
        case str():
            return _text(cell)


def _text(text: str) -> str:
    return escape(visible(text))
