"""Cases of a parametrized test that run only in the long suite, and the numbers of examples of the deep suite."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

DEEP_FACTOR = float(os.environ.get("PREFECT_TUNE_TEST_DEPTH", "1"))
"""The factor of the deep suite's numbers of examples and kills: 1 takes 45 minutes, 8 a night."""


def deep_count(usual: int) -> int:
    """Return the number of examples or kills of a deep test."""
    return max(1, round(usual * DEEP_FACTOR))


def long_after(count: int, cases: Iterable[Any]) -> list[ParameterSet]:
    """Return the cases for `pytest.mark.parametrize`, all after the first `count` with the mark `long`.

    A case is a `pytest.param`, the tuple of its values, or its one value. Raises `ValueError` if no case is after them.
    """
    params = [case if isinstance(case, ParameterSet) else _make_param(case) for case in cases]
    if count >= len(params):
        raise ValueError(f"expected more than {count} cases, found {len(params)}: leave out `long_after`")
    return params[:count] + [param._replace(marks=(*param.marks, pytest.mark.long)) for param in params[count:]]


def _make_param(case: Any) -> ParameterSet:
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
