"""Two to four concurrent owners of one experiment: every order of their operations, and random orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.storage.layout import CheckpointKey
from tests.core.driver import JOURNAL, KEY, Session
from tests.core.protocol.exploring import Act, run_all_orders, run_random
from tests.core.protocol.owners import (
    at_decisions,
    delete_retired,
    make_old_owner,
    save,
    take_over,
    take_over_and_save,
    upload,
)
from tests.long_cases import deep_count, long_after

pytestmark = pytest.mark.usefixtures("tiny_blobs", "decode_cache")

Record = Callable[[str, object], None]


def at_creates(method: str, path: str) -> bool:
    del path
    return method == "create"


PAIRS = [
    pytest.param(2, [save, take_over], id="a zombie saves while it is superseded"),
    pytest.param(2, [upload, take_over_and_save], id="a zombie's upload comes late"),
    pytest.param(3, [delete_retired, take_over], id="a zombie's deletion comes late"),
    pytest.param(2, [take_over, take_over], id="two open at once"),
    pytest.param(3, [delete_retired, take_over_and_save], id="it comes later still", marks=pytest.mark.deep),
    pytest.param(3, [take_over, take_over], id="two open and clear away at once", marks=pytest.mark.deep),
    pytest.param(2, [save, take_over_and_save], id="both save", marks=pytest.mark.deep),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("checkpoints", "acts"), long_after(2, PAIRS))
def test_two_owners_in_every_order_break_no_promise(
    checkpoints: int, acts: Sequence[Act[Session]], record_property: Record
) -> None:
    explored = run_all_orders(make_old_owner(checkpoints), acts, at_decisions, limit=20_000)
    explored.require_kept(record_property, "orders of two owners, every one")


def test_an_unreadable_foreign_manifest_with_a_huge_sequence_does_not_end_the_commits_of_its_trial() -> None:
    old = make_old_owner()
    foreign = CheckpointKey(trial=KEY, step=1, sequence=9_999_999_999)
    old.store.create(foreign.manifest_path, b"of another program")
    take_over_and_save(old)
    new = load_experiment(old.store, JOURNAL).trial(KEY.trial)
    assert (new.attempt, new.quarantined_sequences) == (2, ())
    assert new.checkpoints[-1].step == new.step == 3


@pytest.mark.long
def test_three_owners_in_every_order_break_no_promise(record_property: Record) -> None:
    explored = run_all_orders(make_old_owner(1), [save, take_over, take_over], at_creates, limit=20_000)
    explored.require_kept(record_property, "orders of three owners, every one")


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("checkpoints", [0, 1, 3])
def test_many_random_orders_of_four_owners_break_no_promise(checkpoints: int, record_property: Record) -> None:
    acts = [save, take_over_and_save, take_over_and_save, take_over_and_save]
    explored = run_random(make_old_owner(checkpoints), acts, range(deep_count(1000)))
    explored.require_kept(record_property, "orders of four owners, at random")
