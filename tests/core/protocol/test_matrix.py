"""Open, save, restore, delete and sync: every operation fails in every way, on both kinds of store."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.core.protocol.exploring import Findings
from tests.core.protocol.matrix import (
    ObjectWorld,
    PosixWorld,
    Story,
    delay_every_write,
    die_before_entry,
    fail_everywhere,
    run_fresh,
    run_resumed,
    start_after_unknown_save,
)
from tests.fakes.stores.dying_store import Failure
from tests.long_cases import long_after

pytestmark = pytest.mark.usefixtures("tiny_blobs", "decode_cache", "frequent_snapshots")

STORIES = [pytest.param(None, run_fresh, id="fresh run"), pytest.param(die_before_entry, run_resumed, id="resumed run")]
ENDS = (Failure.CRASH_AFTER, Failure.TORN)
"""On a disk, before one call is after the one before it."""
Record = Callable[[str, object], None]


def every_fifth(total: int) -> Iterable[int]:
    return range(1, total + 1, 5)


@pytest.mark.parametrize(("before", "story"), long_after(1, STORIES))
def test_no_failure_of_an_object_store_breaks_a_promise(
    before: Story | None, story: Story, record_property: Record
) -> None:
    explored = fail_everywhere(ObjectWorld, story, before=before)
    explored.require_kept(record_property, "points explored, object store")
    assert explored.points > 100


@pytest.mark.long
@pytest.mark.parametrize(("before", "story"), STORIES)
def test_no_power_cut_at_any_call_of_a_file_store_breaks_a_promise(
    before: Story | None, story: Story, record_property: Record
) -> None:
    explored = fail_everywhere(PosixWorld, story, before=before, failures=ENDS)
    explored.require_kept(record_property, "points explored, file store")
    assert explored.points > 100


@pytest.mark.parametrize("seed", [1])
def test_whatever_a_disk_keeps_of_its_cache_breaks_no_promise(seed: int, record_property: Record) -> None:
    explored = fail_everywhere(
        lambda: PosixWorld(seed=seed), run_fresh, failures=[Failure.CRASH_AFTER], points=every_fifth
    )
    explored.require_kept(record_property, "points explored, file store")


@pytest.mark.long
def test_a_save_that_was_given_up_is_never_mixed_into_the_next_attempt(record_property: Record) -> None:
    explored = fail_everywhere(
        ObjectWorld, run_resumed, before=start_after_unknown_save, failures=[Failure.CRASH_AFTER]
    )
    explored.require_kept(record_property, "points explored, object store")


@pytest.mark.parametrize("failure", long_after(1, [Failure.CRASH_AFTER, Failure.REPLY_LOST, Failure.UNAVAILABLE]))
def test_no_failure_of_a_file_store_that_keeps_its_power_breaks_a_promise(
    failure: Failure, record_property: Record
) -> None:
    explored = fail_everywhere(lambda: PosixWorld(loses_power=False), run_fresh, failures=[failure], points=every_fifth)
    explored.require_kept(record_property, "points explored, file store")


@pytest.mark.long
@pytest.mark.parametrize("story", [run_fresh, die_before_entry, start_after_unknown_save])
def test_no_write_that_arrives_late_or_never_breaks_a_promise(story: Story, record_property: Record) -> None:
    delay_every_write(story, [None, 0, 2, 10, 30]).require_kept(record_property, "points explored, late writes")


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("before", "story"), STORIES)
@pytest.mark.parametrize("seed", [None, *range(6)])
def test_every_way_every_call_and_every_loss_of_a_file_store(
    before: Story | None, story: Story, seed: int | None, record_property: Record
) -> None:
    kept = fail_everywhere(lambda: PosixWorld(loses_power=False), story, before=before) if seed is None else Findings()
    lost = fail_everywhere(lambda: PosixWorld(seed=seed), story, before=before)

    explored = Findings(kept.points + lost.points, kept.broken + lost.broken)
    explored.require_kept(record_property, "points explored, file store")
