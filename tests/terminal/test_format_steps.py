"""Ranges of steps in short form."""

from __future__ import annotations

import pytest

from prefect_tune.terminal.formatting import format_steps


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2, 3], "1, 2, 3"),
        (range(60), "0-59 (60)"),
        (range(10, 70, 10), "10, 20 … 60 (6)"),
        ([1, 2, 5, 6, 7, 8, 9], "1, 2, 5-9 (7)"),
        ([*range(1, 1001), 2000, 2010, 2020, 2030], "1-1000, 2000, 2010 … 2030 (1,004)"),
        ([4, 4, 4, 4, 5], "4, 4, 4, 4, 5"),
        ([1, 3, 4, 8, 9], "1, 3, 4, 8, 9"),
    ],
)
def test_ranges_stand_for_steps_that_are_equally_far_apart(steps: list[int], shown: str) -> None:
    assert format_steps(list(steps)) == shown
