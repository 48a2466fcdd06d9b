"""Every system call of a file store, every way to crash at it, and the state of the disk after a power loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from prefect_tune.core.errors import AlreadyExists, CommitUnknown, ObjectNotFound, StoreUnavailable
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.stores.dying_store import Crash, Failure
from tests.fakes.stores.memory_posix import DyingCalls, MemoryPosix, posix_store
from tests.long_cases import long_after
from tests.stores.contract import StoreContract

NEW = b"the new bytes, whole"
Operation = Callable[[PosixStore], None]
LOSSES: list[int | str | None] = ["only the process dies", None, *range(6)]


class TestPosixStoreOnAMemoryDisk(StoreContract):
    maps_in_parallel = False

    @pytest.fixture
    def store(self) -> PosixStore:
        return posix_store(MemoryPosix())


def _create(store: PosixStore) -> None:
    store.create("a/b/object", NEW)


def _put(store: PosixStore) -> None:
    store.put("a/b/object", NEW)


def _heal(store: PosixStore) -> None:
    store.put("spoilt/object", NEW)


def _replace(store: PosixStore) -> None:
    store.replace("spoilt/object", [NEW[:5], NEW[5:]])


def _delete(store: PosixStore) -> None:
    store.delete(["old/object", "old/other"])


def _make_disk() -> MemoryPosix:
    disk = MemoryPosix()
    store = posix_store(disk)
    store.put("old/object", b"old")
    store.put("old/other", b"old")
    store.put("spoilt/object", b"short")
    disk.lose_power()
    return disk


def _iter_failures(operation: Operation) -> Iterator[tuple[int, Failure]]:
    """Yield every system call of the operation with every way to fail."""
    calls = DyingCalls(_make_disk(), nth=0)
    operation(posix_store(calls))
    for nth in range(1, calls.total + 1):
        for failure in Failure:
            yield nth, failure


def _iter_disks(operation: Operation) -> Iterator[tuple[str, MemoryPosix, bool]]:
    """Run the operation with every failure and loss; yield a label, the disk, and whether it was acknowledged."""
    for nth, failure in _iter_failures(operation):
        for loss in LOSSES:
            disk = _make_disk()
            calls = DyingCalls(disk, nth, failure)
            acknowledged = False
            with suppress(Crash, StoreUnavailable, CommitUnknown):
                operation(posix_store(calls))
                acknowledged = True
            disk.die_with_process()
            if not isinstance(loss, str):
                disk.lose_power(loss)
            yield f"{calls.failed_at} #{nth}, {failure.name}, {loss}", disk, acknowledged


def _read(disk: MemoryPosix, path: str) -> bytes | None:
    try:
        return posix_store(disk).read(path)
    except ObjectNotFound:
        return None


@pytest.mark.parametrize("operation", [_create, _put])
def test_a_write_that_fails_anywhere_leaves_the_whole_object_or_none(operation: Operation) -> None:
    points = 0
    for label, disk, acknowledged in _iter_disks(operation):
        points += 1
        data = _read(disk, "a/b/object")
        assert data in (None, NEW), label
        assert data == NEW or not acknowledged, label
        assert _read(disk, "old/object") == b"old", label
    print(f"{operation.__name__}: {points} points")
    assert points > 170


@pytest.mark.parametrize("operation", [_create, _put])
def test_what_was_once_read_survives_the_next_power_cut(operation: Operation) -> None:
    for label, disk, _ in _iter_disks(operation):
        data = _read(disk, "a/b/object")
        size = posix_store(disk).size("a/b/object")
        disk.lose_power()
        assert _read(disk, "a/b/object") == data, label
        assert posix_store(disk).size("a/b/object") == size, label


@pytest.mark.parametrize("operation", [_create, _put])
def test_what_a_second_write_found_survives_the_next_power_cut(operation: Operation) -> None:
    for label, disk, _ in _iter_disks(operation):
        with suppress(AlreadyExists):
            operation(posix_store(disk))
        disk.lose_power()
        assert _read(disk, "a/b/object") == NEW, label


@pytest.mark.parametrize("operation", [_heal, _replace])
def test_healing_or_replacing_that_fails_anywhere_leaves_the_old_bytes_or_the_new_ones(operation: Operation) -> None:
    for label, disk, acknowledged in _iter_disks(operation):
        data = _read(disk, "spoilt/object")
        assert data in (b"short", NEW), label
        assert data == NEW or not acknowledged, label
        operation(posix_store(disk))
        disk.lose_power()
        assert _read(disk, "spoilt/object") == NEW, label


def test_a_delete_that_fails_anywhere_can_be_repeated_and_then_holds() -> None:
    for label, disk, acknowledged in _iter_disks(_delete):
        remaining = {_read(disk, "old/object"), _read(disk, "old/other")}
        assert remaining <= ({None} if acknowledged else {None, b"old"}), label
        _delete(posix_store(disk))
        disk.lose_power()
        assert (_read(disk, "old/object"), _read(disk, "old/other")) == (None, None), label


@pytest.mark.parametrize("operation", long_after(1, [_create, _put, _heal, _replace]))
def test_hidden_files_of_the_dead_are_swept_by_a_later_writer(operation: Operation) -> None:
    for label, disk, _ in _iter_disks(operation):
        disk.clock_ns += 90_000 * 10**9
        posix_store(disk).put("later", b"1")
        assert [path for path in disk.tree() if path.startswith(".tmp/")] == [], label


def test_sweeping_a_published_object_that_is_not_safe_yet_makes_it_safe() -> None:
    disk = MemoryPosix()
    with pytest.raises(Crash):
        _create(posix_store(DyingCalls(disk, _find_call(_create, "link"), Failure.CRASH_AFTER)))
    disk.die_with_process()
    disk.clock_ns += 90_000 * 10**9
    posix_store(disk).put("later", b"1")
    disk.lose_power()
    assert _read(disk, "a/b/object") == NEW


def _find_call(operation: Operation, call: str) -> int:
    for nth, _ in _iter_failures(operation):
        calls = DyingCalls(MemoryPosix(), nth, Failure.CRASH_BEFORE)
        with suppress(Crash):
            operation(posix_store(calls))
        if calls.failed_at == call:
            return nth
    raise LookupError(call)


def test_a_link_whose_reply_was_lost_is_recognized_as_done() -> None:
    disk = MemoryPosix()
    _create(posix_store(DyingCalls(disk, _find_call(_create, "link"), Failure.REPLY_LOST)))
    disk.lose_power()
    assert _read(disk, "a/b/object") == NEW


def test_a_folder_that_cannot_be_synced_leaves_the_outcome_unknown() -> None:
    folder_syncs = DyingCalls(MemoryPosix(), nth=0)
    _create(posix_store(folder_syncs))
    last_sync = folder_syncs.total - 1  # the hidden name is removed after it
    with pytest.raises(CommitUnknown, match="cannot be synced"):
        _create(posix_store(DyingCalls(MemoryPosix(), last_sync, Failure.UNAVAILABLE)))


def test_a_disk_that_does_not_sync_is_found_out_by_these_tests() -> None:
    disk = MemoryPosix(fsync_works=False)
    _create(posix_store(disk))
    disk.lose_power()
    assert _read(disk, "a/b/object") is None
