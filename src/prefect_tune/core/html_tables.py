"""HTML for a notebook's cells: it takes the cell's colors, loads nothing, and shows users' text as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NewType

from prefect_tune.core.shown_text import visible
from prefect_tune.core.values import flat

Html = NewType("Html", str)
"""Markup. Any other text is escaped when it becomes a part of markup."""

_LONGEST = 300
_LONGEST_LINES = 4_000
_MOST_FACTS = 60
# The class is named twice, to outweigh JupyterLab's own rules for tables. Lines are half transparent, so that they are
# visible on a light page and on a dark one; text has the page's color.
_STYLE = """
.prefect-tune{font-size:13px;line-height:1.5;color:inherit;overflow-x:auto}
.prefect-tune p{margin:.3em 0}.prefect-tune .pt-title{font-size:15px;font-weight:600}.prefect-tune .pt-soft{opacity:.7}
.prefect-tune .pt-bad{border-left:3px solid #df4b4b;padding-left:8px}
.prefect-tune.prefect-tune table{border-collapse:collapse;margin:.5em 0;border:none;font-size:inherit;color:inherit;
width:auto}
.prefect-tune.prefect-tune table tr,.prefect-tune.prefect-tune table tr:nth-child(n){background:none}
.prefect-tune.prefect-tune table td,.prefect-tune.prefect-tune table th{text-align:left;vertical-align:top;border:none;
padding:3px 16px 3px 0;color:inherit;background:none;font-variant-numeric:tabular-nums}
.prefect-tune.prefect-tune table th{font-weight:600;opacity:.7;white-space:nowrap}
.prefect-tune.prefect-tune table.pt-rows td,.prefect-tune.prefect-tune table.pt-rows th{white-space:nowrap;
border-bottom:1px solid rgba(128,128,128,.3)}
.prefect-tune.prefect-tune table.pt-facts td{overflow-wrap:anywhere}
.prefect-tune.prefect-tune table.pt-facts table{margin:0}
.prefect-tune.prefect-tune table.pt-facts table tr:first-child>*{padding-top:0}
.prefect-tune.prefect-tune code,.prefect-tune.prefect-tune pre{font-family:ui-monospace,"SF Mono",Menlo,Consolas,
monospace;font-size:12px;background:none;color:inherit;padding:0;border:none}
.prefect-tune pre{white-space:pre;margin:0;max-height:40em;overflow:auto}
.prefect-tune svg{max-width:min(100%,760px);height:auto;display:block}
"""


def cell_html(*parts: Html) -> Html:
    """Return the output of a cell."""
    return Html(f'<div class="prefect-tune"><style>{_STYLE}</style>{"".join(parts)}</div>')


def escaped(text: str, most: int = _LONGEST) -> Html:
    """Return text from anywhere as markup that shows it, on one line and in at most `most` characters."""
    line = visible(" ".join(text.split()))
    return Html(escape(line if len(line) <= most else f"{line[: most - 1]}…"))


def code(text: str, most: int = _LONGEST_LINES) -> Html:
    """Return preformatted lines; of very long ones the last `most` characters, where a traceback has its error."""
    return Html(f"<pre>{escape(visible(text if len(text) <= most else f'…{text[-most:]}'))}</pre>")


def soft(text: str) -> Html:
    """Return text that is less visible than the text around it."""
    return Html(f'<span class="pt-soft">{escaped(text)}</span>')


def paragraph(*parts: Html, kind: str = "") -> Html:
    """Return a paragraph; `kind` is a class of the style."""
    return Html(f"<p{f' class={kind}' if kind else ''}>{''.join(parts)}</p>")


def facts_table(facts: Mapping[str, Html]) -> Html:
    """Return a table with a row for each name, with markup beside it; those that are empty are left out."""
    shown = [(name, value) for name, value in facts.items() if value]
    rows = "".join(f"<tr><th>{escaped(name, 60)}</th><td>{value}</td></tr>" for name, value in shown[:_MOST_FACTS])
    more = f"<tr><th></th><td>and {len(shown) - _MOST_FACTS} more</td></tr>" if len(shown) > _MOST_FACTS else ""
    return Html(f'<table class="pt-facts">{rows}{more}</table>')


def rows_table(names: Sequence[str], rows: Iterable[Sequence[Html]]) -> Html:
    """Return a table of markup with a header."""
    head = "".join(f"<th>{escaped(name, 60)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return Html(f'<table class="pt-rows"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def format_html_value(value: object) -> Html:
    """Return a parameter or a metric; a nested one as a list of its leaves."""
    match value:
        case Mapping():
            return escaped(", ".join(f"{name} {_format_leaf(each)}" for name, each in flat(value).items()))
        case _:
            return escaped(_format_leaf(value))


def _format_leaf(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
