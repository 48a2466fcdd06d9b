"""The owner of a journal: which of two attempts was started first."""

from __future__ import annotations

import pytest

from prefect_tune.core.journal_events import Owner


@pytest.mark.parametrize(
    ("mine", "theirs", "behind"),
    [
        ((1, 2), (1, 2), False),
        ((1, 2), (1, 3), True),
        ((1, 3), (1, 2), False),
        ((1, 3), (2, 1), True),
        ((2, 1), (1, 3), False),
        ((1, 1), (0, 0), False),  # an owner without a request
        ((0, 0), (1, 1), False),
    ],
)
def test_whose_orders_are_older_is_behind_where_both_had_any(
    mine: tuple[int, int], theirs: tuple[int, int], *, behind: bool
) -> None:
    one, other = (
        Owner(name="n", host="h", pid=1, search_term=term, attempt=attempt) for term, attempt in (mine, theirs)
    )
    assert one.is_behind(other) is behind
