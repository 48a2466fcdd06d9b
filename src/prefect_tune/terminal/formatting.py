"""Format values, numbers, steps, errors and tables, for a terminal, a notebook and a report."""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.metrics import shown
from prefect_tune.core.reasons import format_error
from prefect_tune.core.shown_text import visible
from prefect_tune.core.values import flat

_LEAST_RANGE = 4
"""The shortest run of steps that is written as a range."""
_NAMED = 3


UNLIMITED_WIDTH = 100_000
"""The width of what is no terminal: a pipe or a file gets every column, and whole cells."""


def output_width() -> int:
    """Return the width of stdout: that of its terminal, or of `COLUMNS` where that is set; else it is unlimited."""
    has_width = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    return Console().width if has_width else UNLIMITED_WIDTH


def print_parts(*parts: Table | str) -> None:
    """Print tables and lines to stdout; lines are not parsed as markup, nor wrapped."""
    console = Console(highlight=False, width=output_width())
    with console.capture() as printed:
        for part in parts:
            shown = visible(part) if isinstance(part, str) else part
            console.print(shown, markup=False, soft_wrap=isinstance(part, str))
    lines = (line.rstrip(" ") for line in printed.get().split("\n"))  # a table fills its rows with blanks
    console.file.write("\n".join(lines))


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


def format_steps(steps: Sequence[int]) -> str:
    """Return steps as `1-40 (40)`, `10, 20 … 60 (6)` or `1, 2, 5-9 (7)`: with the count if any is left out."""
    parts, rest = [], list(steps)
    while rest:
        length = _length_of_run(rest)
        parts.append(_range(rest[:length]))
        rest = rest[length:]
    is_shortened = len(parts) < len(steps)
    return ", ".join(parts) + (f" ({len(steps):,})" if is_shortened else "")


def _length_of_run(steps: Sequence[int]) -> int:
    """Return how many of the first steps are equally far apart; 1 if they are too few for a range."""
    length = 1
    while length < len(steps) and steps[length] - steps[length - 1] == steps[1] - steps[0] > 0:
        length += 1
    return length if length >= _LEAST_RANGE else 1


def _range(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return str(steps[0])
    first, second, last = steps[0], steps[1], steps[-1]
    return f"{first}-{last}" if second == first + 1 else f"{first}, {second} … {last}"


def with_last_output(reason: object, output: str) -> str:
    """Return how an attempt or a process ended, followed by its last output unless that is shown already: `visible`."""
    ended, last_output = visible(reason).strip(), visible(output.rstrip())
    return ended if ended.endswith(last_output) else f"{ended}\nlast output:\n{last_output}"


def errors_by_cause(trials: Iterable[Trial]) -> Sequence[tuple[str, Sequence[Trial]]]:
    """Return each different error of these errored trials with its trials, the most frequent error first."""
    causes: dict[str, list[Trial]] = defaultdict(list)
    for each in trials:
        causes[format_error(each.end_reason)].append(each)
    return sorted(causes.items(), key=lambda cause: -len(cause[1]))


def names_of(trials: Sequence[Trial]) -> str:
    """Return the names of the first trials, and how many more there are: `00000, 00001, 00002 and 5 more`."""
    more = len(trials) - _NAMED
    named = ", ".join(each.trial for each in trials[:_NAMED])
    return f"{named} and {more} more" if more > 0 else named


# Numbers in a report: four significant digits, commas between thousands, durations with units.

_DIGITS = 4
_LARGE = 10_000_000
_SMALL = 0.001
"""Numbers with a fraction, from `_LARGE` on and below `_SMALL`, are written with an exponent."""
_LONGEST_INT = 10**15


def format_number(value: float) -> str:
    """Return a number: `0.02041`, `27`, `12,346`, `2.148e-28`."""
    if not math.isfinite(value):
        return str(value)
    if value and not _SMALL <= abs(value) < _LARGE:
        mantissa, _, exponent = f"{value:.{_DIGITS - 1}e}".partition("e")
        return f"{_trimmed(mantissa)}e{int(exponent)}"
    places = _DIGITS - 1 - math.floor(math.log10(abs(value))) if value else 0
    return _trimmed(f"{value:,.{max(0, places)}f}")


def format_cell(value: object) -> str:
    """Return a parameter or a metric."""
    match value:
        case bool():
            return str(value)
        case int():
            return f"{value:,}" if abs(value) < _LONGEST_INT else shown(value)
        case float():
            return format_number(value)
        case None:
            return ""
        case Mapping():
            return format_metrics(value)
        case str():
            return value
        case Sequence():
            return ", ".join(map(format_cell, value))
        case _:
            return str(value)


def format_metrics(metrics: Mapping[str, object]) -> str:
    """Return metrics on one line: `loss 0.02041, accuracy 0.9931`."""
    return ", ".join(f"{name} {format_cell(value)}" for name, value in flat(metrics).items())


def _trimmed(digits: str) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits else digits
