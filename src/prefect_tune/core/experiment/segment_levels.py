"""The range of journal entries that each segment holds: decimal levels, so that few segments cover all entries.

The segment at entry 48,260 holds the changes since 48,200: the number with its last non-zero digit set to zero.
So the first 48,263 entries are the segments at 40,000, 48,000, 48,200 and 48,260 and three entries: at most nine
objects for the digits before the last (a number has ten), and nine for that one, however many entries there are.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["begin_of", "boundaries", "is_boundary", "level_of"]

_BASE = 10


def is_boundary(number: int) -> bool:
    """Return whether a segment ends with entry `number`."""
    return number > 0 and number % _BASE == 0


def level_of(number: int) -> int:
    """Return how many zeros the number of a boundary ends with."""
    level = 0
    while number % _BASE == 0:
        number //= _BASE
        level += 1
    return level


def begin_of(number: int) -> int:
    """Return the number of the last entry before those that the segment at `number` holds."""
    wider: int = _BASE ** (level_of(number) + 1)
    return number // wider * wider


def boundaries(number: int) -> Sequence[int]:
    """Return the last entries of the segments that cover the first `number` entries, except the last 0 to 9."""
    found: list[int] = []
    end = number // _BASE * _BASE
    while end:
        found.insert(0, end)
        end = begin_of(end)
    return found
