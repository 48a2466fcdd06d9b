"""Format values and tables for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

from rich.console import Console
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, bidirectional marks, line separators, and surrogates, which cannot be encoded."""


def visible(text: str) -> str:
    """Return `text` with control characters escaped, so that text from a target cannot control the terminal."""
    return _CONTROL.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def print_parts(*parts: Table | str) -> None:
    """Print tables and lines to stdout; lines are not parsed as markup, nor wrapped."""
    console = Console(highlight=False)
    for part in parts:
        console.print(visible(part) if isinstance(part, str) else part, markup=False, soft_wrap=isinstance(part, str))


def borderless_table(*names: str) -> Table:
    """Return an empty table without borders."""
    return Table(*names, box=None, header_style="dim", pad_edge=False)


def plain_cells(cells: Iterable[str]) -> Iterator[Text]:
    """Return cells as plain text: names chosen by users are not parsed as markup."""
    return (Text(visible(cell)) for cell in cells)


def facts_table(facts: Mapping[str, object]) -> Table:
    """Return a table with a row for each name and value."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(visible(name), style="dim"), Text(visible(format_value(value))))
    return table


def format_value(value: object) -> str:
    """Format a value for people."""
    match value:
        case Mapping():
            return ", ".join(f"{name} {format_value(each)}" for name, each in value.items())
        case list() | tuple():
            return ", ".join(format_value(each) for each in value)
        case float():
            return f"{value:.6g}"
        case None:
            return ""
        case _:
            return str(value)


def format_counts(counts: Mapping[str, int]) -> str:
    """Return `7 completed, 2 errored`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def format_time(at: str) -> str:
    """Format a time of the journal to the second."""
    return at.replace("T", " ")[:19]


def parse_time(at: str) -> datetime | None:
    """Return a time of the target in UTC; None for another text."""
    try:
        found = datetime.fromisoformat(at)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)


def format_duration(span: timedelta) -> str:
    """Format a duration: `8 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    seconds = max(0, round(span.total_seconds()))
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = seconds % size // smaller
            return f"{seconds // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{seconds} s"
