"""The state that a round of maintenance stores for the next: crashes, late writes, concurrent rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.journal.journal import append, take_over
from prefect_tune.core.journal.tolerant_read import Unreadable
from prefect_tune.core.journal_events.experiment_events import Adopted, Owner
from prefect_tune.core.models import Stamp
from prefect_tune.core.operations.maintenance_state import (
    NOTHING_YET,
    Remembered,
    Round,
    UnreportedDamage,
    after_report,
    amended,
    last_round,
    leave_round,
    next_round,
    reported_folders,
)
from prefect_tune.core.operations.scrub import Inspected, Inspection
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey, maintenance_path
from tests.fakes.stores.memory_store import MemoryStore

NAME = "e"
FOLDER = TrialKey(experiment=NAME, trial="t")
BAD, WORSE = (CheckpointKey(trial=FOLDER, step=step, sequence=step) for step in (3, 7))


def stamp(name: str = "m") -> Stamp:
    return Stamp(write_id=name, at="2026-11-21T08:00:00Z")


def untold(key: CheckpointKey) -> UnreportedDamage:
    return UnreportedDamage(trial="t", step=key.step, folder=key.folder, damage="torn")


def found(*damaged: CheckpointKey, **also: object) -> Inspection:
    seen = tuple(Inspected(key, damage="torn") for key in damaged)
    return Inspection(live=(BAD, WORSE), inspected=seen, **also)  # type: ignore[arg-type]  # given by the caller


@pytest.fixture
def store() -> MemoryStore:
    """A store with an experiment."""
    store = MemoryStore()
    opened = take_over(store, NAME, Owner(name="o", host="h", pid=1), stamp("o"), side_by_side=map)
    append(store, opened, [Adopted()], stamp("a"))
    return store


def rounds_on(store: MemoryStore) -> list[str]:
    return [path for path in store.objects if "/maintenance/" in path]


def test_what_a_round_leaves_the_next_one_finds_and_earlier_ones_are_deleted(store: MemoryStore) -> None:
    known = last_round(store, NAME)
    assert known == Remembered()
    for number in (1, 2, 3):
        left = Round(write_id=f"w{number}", at=stamp().at, begins_at=number)
        known = leave_round(store, NAME, known, stamp(f"w{number}"), lambda _, left=left: left)
        assert known == last_round(store, NAME) == Remembered(number, left)
    assert rounds_on(store) == [maintenance_path(NAME, 3)]


def test_of_two_at_the_same_time_neither_loses_what_it_has_to_tell(store: MemoryStore) -> None:
    known = last_round(store, NAME)
    for name, key in (("first", BAD), ("second", WORSE)):
        leave_round(store, NAME, known, stamp(name), partial(amended, unreported=[untold(key)]))
    assert last_round(store, NAME).last.untold == (untold(BAD), untold(WORSE))


def test_who_comes_so_late_that_its_number_is_free_again_writes_after_the_last(store: MemoryStore) -> None:
    late = last_round(store, NAME)
    for key in (BAD, WORSE):
        leave_round(store, NAME, last_round(store, NAME), stamp(), partial(amended, unreported=[untold(key)]))
    assert rounds_on(store) == [maintenance_path(NAME, 2)]
    left = leave_round(store, NAME, late, stamp("late"), partial(amended, known=["e/journal"]))
    assert (left.number, rounds_on(store)) == (3, [maintenance_path(NAME, 3)])
    assert (left.last.told, left.last.untold) == (("e/journal",), (untold(BAD), untold(WORSE)))


def test_who_is_never_fast_enough_says_so(store: MemoryStore) -> None:
    def faster(last: Round) -> Round:
        number = last_round(store, NAME).number + 1
        store.objects[maintenance_path(NAME, number)] = seal(Round(write_id=f"w{number}", at="now"))
        return amended(last)

    with pytest.raises(StoreUnavailable, match="faster"):
        leave_round(store, NAME, Remembered(), stamp(), faster)


def test_a_round_that_cannot_be_read_is_none_and_its_number_is_taken(store: MemoryStore) -> None:
    store.objects[maintenance_path(NAME, 7)] = b"torn"
    assert last_round(store, NAME) == Remembered(7)


@pytest.mark.parametrize(("times", "expected"), [(1, 4), (99, 3)])
def test_a_round_that_a_later_one_deletes_meanwhile_is_looked_for_again(times: int, expected: int) -> None:
    last = Round(write_id="last", at="now")
    vanishing = _Vanishing(times, lambda: vanishing.objects.update({maintenance_path(NAME, 4): seal(last)}))
    vanishing.objects[maintenance_path(NAME, 3)] = seal(last)
    assert last_round(vanishing, NAME) == (Remembered(expected, last) if expected == 4 else Remembered(expected))


class _Vanishing(MemoryStore):
    """A store whose first reads find the object deleted; then a function is called."""

    def __init__(self, times: int, then: Callable[[], None]) -> None:
        super().__init__()
        self._left = times
        self._then = then

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if self._left:
            self._left -= 1
            if not self._left:
                self._then()
            return super().read("nothing/there")
        return super().read(path, offset=offset, length=length)


def test_nothing_is_left_beside_an_experiment_that_is_gone() -> None:
    store = MemoryStore()
    assert leave_round(store, NAME, Remembered(), stamp(), amended) == Remembered()
    assert store.objects == {}


# --------------------------------------------------------------------------------------------- known damage


def test_damage_that_was_reported_is_known_until_it_is_mended_or_put_aside() -> None:
    first = next_round(NOTHING_YET, found(BAD, WORSE), [WORSE])
    assert reported_folders(first) == {BAD.folder}
    assert reported_folders(NOTHING_YET) == frozenset()
    assert reported_folders(next_round(first, found(), ())) == {BAD.folder}
    whole = Inspection(live=(BAD,), inspected=(Inspected(BAD),))
    assert reported_folders(next_round(first, whole, ())) == frozenset()


def test_what_is_untold_stays_so_until_it_is_reported_whatever_becomes_of_it() -> None:
    before = amended(Round(write_id="w", at="then", begins_at=5), unreported=[untold(WORSE)])
    assert (before.begins_at, before.untold, reported_folders(before)) == (5, (untold(WORSE),), frozenset())
    after = next_round(before, found(BAD, WORSE, ends_at=9), [WORSE], [untold(BAD)])
    assert (after.begins_at, after.told) == (9, (BAD.folder,))
    assert after.untold == (untold(WORSE), untold(BAD))
    assert reported_folders(after) == frozenset()
    after_reporting = after_report(after, [WORSE.folder, BAD.folder])
    assert (after_reporting.begins_at, after_reporting.untold) == (9, ())
    assert reported_folders(after_reporting) == {BAD.folder}


def test_a_damaged_journal_is_known_until_it_is_read_again() -> None:
    own, whole = JournalKey(experiment=NAME, trial="t").entries, JournalKey(experiment=NAME).entries
    bad = Unreadable(own, "torn", "t", is_damage=True)
    first = next_round(NOTHING_YET, found(unreadable=(bad, Unreadable(BAD.folder, "away"))), ())
    assert reported_folders(first) == {own}
    second = next_round(first, found(journals=(whole,)), ())
    assert reported_folders(second) == {own}
    assert reported_folders(next_round(second, found(journals=(whole, own)), ())) == frozenset()
