"""Values in events of the journal: which of two owners was started first; fields of questions, and valid answers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.journal_events import Owner, answer_to, default_of, valid_fields


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


FIELDS: dict[str, Any] = {"go_on": True, "count": 3, "rate": 0.5, "why": "", "how": ["slow", "fast"]}


def test_every_field_has_a_value_whatever_was_left_out() -> None:
    fields = valid_fields(FIELDS)
    assert answer_to(fields, {}) == {"go_on": True, "count": 3, "rate": 0.5, "why": "", "how": "slow"}
    given = {"go_on": False, "count": 4, "rate": 1, "why": "so", "how": "fast"}
    assert answer_to(fields, given) == {**given, "rate": 1.0}
    assert default_of(None) == "None"


@pytest.mark.parametrize(
    "fields", [{}, {"a b": 1}, {3: 1}, {"x": None}, {"x": []}, {"x": [1]}, {"x": {}}, {"x": math.nan}]
)
def test_what_no_form_could_show_is_refused(fields: Any) -> None:
    with pytest.raises(InvalidInput, match="fields: "):
        valid_fields(fields)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"other": 1}, "other: unknown field"),
        ({"go_on": 1}, "go_on: expected yes or no"),
        ({"count": True}, "count: expected a whole number"),
        ({"count": 1.5}, "count: expected a whole number"),
        ({"rate": math.inf}, "rate: expected a number"),
        ({"rate": True}, "rate: expected a number"),
        ({"why": 3}, "why: expected a text"),
        ({"how": "soon"}, "how: expected one of slow, fast"),
    ],
)
def test_what_is_no_answer_says_why(given: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        answer_to(FIELDS, given)
