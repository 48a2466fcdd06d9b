"""Two and three owners of one experiment, their operations in every order, and at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.core.owners import (
    Act,
    at_writes_and_lists,
    meet_at_random,
    meet_in_every_order,
    old_owner,
    save,
    takes_over,
    takes_over_and_saves,
)

pytestmark = pytest.mark.usefixtures("tiny_blobs")

Record = Callable[[str, object], None]


def at_creates(method: str, path: str) -> bool:
    del path
    return method == "create"


@pytest.mark.parametrize(
    "acts",
    [
        pytest.param([save, takes_over], id="a zombie saves while it is superseded"),
        pytest.param([takes_over, takes_over], id="two open at once"),
    ],
)
def test_two_owners_in_every_order_break_no_promise(acts: Sequence[Act], record_property: Record) -> None:
    explored = meet_in_every_order(old_owner(), acts, at_writes_and_lists, limit=20_000)
    record_property("figure: orders of two owners, every one", explored.points)
    assert explored.broken == []


def test_three_owners_in_every_order_break_no_promise(record_property: Record) -> None:
    acts = [save, takes_over, takes_over]
    explored = meet_in_every_order(old_owner(), acts, at_creates, limit=20_000)
    record_property("figure: orders of three owners, every one", explored.points)
    assert explored.broken == []


def test_three_owners_in_random_orders_of_everything_they_do_break_no_promise(record_property: Record) -> None:
    acts = [save, takes_over_and_saves, takes_over_and_saves]
    explored = meet_at_random(old_owner(), acts, range(200))
    record_property("figure: orders of three owners, at random", explored.points)
    assert explored.broken == []
