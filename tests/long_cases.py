"""Cases of a parametrized test that run only in the long suite, and how many examples the deep suite draws."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

DEEP_FACTOR = float(os.environ.get("PREFECT_TUNE_TEST_DEPTH", "1"))
"""The deep suite draws its usual number of examples and kills times this: 1 takes 45 minutes, 8 a night."""


def deep_count(usual: int) -> int:
    """Return how many examples or kills a deep test draws whose number is arbitrary."""
    return max(1, round(usual * DEEP_FACTOR))


def long_after(count: int, cases: Iterable[Any]) -> list[ParameterSet]:
    """Return the cases for `pytest.mark.parametrize`, all after the first `count` with the mark `long`.

    A case is a `pytest.param`, the tuple of its values, or its one value. Raises `ValueError` if no case is after them.
    """
    found = list(cases)
    if count >= len(found):
        raise ValueError(f"expected more than {count} cases, found {len(found)}: leave out `long_after`")
    return [_case(each, () if place < count else (pytest.mark.long,)) for place, each in enumerate(found)]


def _case(given: Any, marks: tuple[pytest.MarkDecorator, ...]) -> ParameterSet:
    if isinstance(given, ParameterSet):
        return given._replace(marks=(*given.marks, *marks))
    return pytest.param(*(given if isinstance(given, tuple) else (given,)), marks=marks)
