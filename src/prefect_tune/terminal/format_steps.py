"""Format steps for people: ranges in place of every number."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = 4
"""The shortest run of steps that is written as a range."""


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
    return length if length >= _LEAST else 1


def _range(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return str(steps[0])
    first, second, last = steps[0], steps[1], steps[-1]
    return f"{first}-{last}" if second == first + 1 else f"{first}, {second} … {last}"
