"""Which stretch of the journal each segment holds: a digit system, so that few segments make up any number of entries.

The segment at entry 48,260 holds what changed since 48,200: the number with its last digit that is not
zero set to zero. So the first 48,263 entries are the segments at 40,000, 48,000, 48,200 and 48,260 and
three entries: at most nine objects for the digits before the last, and nine for that one, however many
entries there are.
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
    """Return where the segments end that make up the first `number` entries, but for the last few entries."""
    found: list[int] = []
    end = number // _BASE * _BASE
    while end:
        found.insert(0, end)
        end = begin_of(end)
    return found
