"""The contract of `ObjectStore`, as tests that each store's own test class inherits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefect_tune.core.errors import AlreadyExists, InvalidInput, ObjectNotFound
from prefect_tune.core.storage.object_store import Buffer, ListedObject, ObjectStore

_ESCAPES = ["", "/", "/etc/passwd", "..", "../x", "a/../x", "a/./x", "a//x", "a/", "./a", "nul\0l"]
_ODD_NAMES = ["with space", "ünïcode/日本", "per%20cent", "plus+and&=?#", "quote'\"", "a.b-c_d", "~tilde", "x" * 200]

_RANGES: list[tuple[int, int | None, bytes]] = [
    (0, None, b"0123456789"),
    (0, 10, b"0123456789"),
    (3, 4, b"3456"),
    (3, None, b"3456789"),
    (8, 100, b"89"),
    (9, 1, b"9"),
    (0, 0, b""),
    (4, 0, b""),
    (10, 5, b""),
    (10, None, b""),
    (50, 5, b""),
]


def _operations(store: ObjectStore, path: str) -> list[Callable[[], object]]:
    return [
        lambda: store.create(path, b""),
        lambda: store.put(path, b""),
        lambda: store.copy(path, "a"),
        lambda: store.copy("a", path),
        lambda: store.replace(path, [b""]),
        lambda: store.read(path),
        lambda: store.size(path),
        lambda: store.delete([path]),
    ]


class StoreContract:
    """Inherit, and define the fixture `store`: an open, empty store."""

    racers = 16  # concurrent creators
    maps_in_parallel = True

    def test_calls_of_a_map_run_at_once_and_their_results_are_in_order(self, store: ObjectStore) -> None:
        barrier = threading.Barrier(2 if self.maps_in_parallel else 1)

        def call(number: int) -> int:
            if number < 2:
                barrier.wait(20)  # passes only if the first two run at once
            return number

        assert list(store.map(call, range(20))) == list(range(20))

    def test_what_is_put_is_read_back(self, store: ObjectStore) -> None:
        store.put("folder/object", b"some bytes")
        assert bytes(store.read("folder/object")) == b"some bytes"
        assert store.size("folder/object") == 10

    def test_what_is_created_is_read_back(self, store: ObjectStore) -> None:
        store.create("folder/object", b"some bytes")
        assert bytes(store.read("folder/object")) == b"some bytes"
        assert store.size("folder/object") == 10

    def test_a_second_create_is_refused_and_changes_nothing(self, store: ObjectStore) -> None:
        store.create("a/b", b"first")
        with pytest.raises(AlreadyExists, match="a/b"):
            store.create("a/b", b"second")
        assert bytes(store.read("a/b")) == b"first"

    def test_equal_bytes_are_refused_as_well(self, store: ObjectStore) -> None:
        store.create("a", b"same")
        with pytest.raises(AlreadyExists):
            store.create("a", b"same")

    def test_a_create_over_a_put_is_refused(self, store: ObjectStore) -> None:
        store.put("a", b"first")
        with pytest.raises(AlreadyExists):
            store.create("a", b"second")

    def test_one_of_many_racing_creators_wins(self, store: ObjectStore) -> None:
        if not store.has_conditional_create:
            pytest.skip("this store says that its create is not atomic between writers")
        start = threading.Barrier(self.racers)

        def race(racer: int) -> int | None:
            start.wait()
            try:
                store.create("raced/for", b"%d" % racer)
            except AlreadyExists:
                return None
            return racer

        for _ in range(3):
            with ThreadPoolExecutor(self.racers) as pool:
                winners = [racer for racer in pool.map(race, range(self.racers)) if racer is not None]
            assert len(winners) == 1
            assert bytes(store.read("raced/for")) == b"%d" % winners[0]
            store.delete(["raced/for"])

    def test_a_put_is_idempotent(self, store: ObjectStore) -> None:
        store.put("a", b"bytes")
        store.put("a", b"bytes")
        assert bytes(store.read("a")) == b"bytes"
        assert [listed.path for listed in store.list("")] == ["a"]

    def test_a_put_heals_what_has_the_wrong_size(self, store: ObjectStore) -> None:
        store.put("blobs/a", b"by")
        store.put("blobs/a", b"bytes")
        assert bytes(store.read("blobs/a")) == b"bytes"

    def test_a_copy_has_the_bytes_of_its_source_and_does_not_need_it(self, store: ObjectStore) -> None:
        data = bytes(range(256)) * (17 << 12)  # 17 MiB: more than any blob, and than a file store copies at once
        store.put("from/big", data)
        store.put("from/empty?*", b"")
        store.put("to/torn", data[:100])
        for source, path in (("from/big", "to/a/big"), ("from/big", "to/torn"), ("from/empty?*", "to/empty?*")):
            store.copy(source, path)
            store.copy(source, path)
        assert list(store.list("to")) == [
            ListedObject("to/a/big", len(data)),
            ListedObject("to/empty?*", 0),
            ListedObject("to/torn", len(data)),
        ]
        store.delete(["from/big", "from/empty?*"])
        assert bytes(store.read("to/a/big")) == bytes(store.read("to/torn")) == data
        assert [listed.path.partition("/")[0] for listed in store.list("")] == ["to"] * 3

    def test_a_copy_of_what_is_not_there_is_told_as_such(self, store: ObjectStore) -> None:
        store.put("a/b", b"")
        for source in ("x", "a/x", "a"):
            with pytest.raises(ObjectNotFound):
                store.copy(source, "copied")
        assert [listed.path for listed in store.list("")] == ["a/b"]

    def test_a_replace_leaves_its_own_bytes_whatever_was_there(self, store: ObjectStore) -> None:
        for pieces in ([b"first"], [b"other"], [], [b"in ", b"", bytearray(b"2 "), memoryview(b"pieces")], [b"first"]):
            store.replace("logs/a", pieces)
            assert bytes(store.read("logs/a")) == b"".join(pieces)
            assert list(store.list("")) == [ListedObject("logs/a", sum(len(piece) for piece in pieces))]
        with pytest.raises(AlreadyExists):
            store.create("logs/a", b"created")

    def test_a_replace_of_many_megabytes_is_whole(self, store: ObjectStore) -> None:
        pieces = [bytes([number]) * (8 << 20) for number in range(3)]
        store.replace("big", [b"small"])
        store.replace("big", [*pieces, b"end"])
        assert store.size("big") == (24 << 20) + 3
        assert bytes(store.read("big", offset=(16 << 20) - 1)) == b"\x01" + pieces[2] + b"end"

    def test_a_range_ends_where_the_object_does(self, store: ObjectStore) -> None:
        store.put("digits", b"0123456789")
        for offset, length, expected in _RANGES:
            assert bytes(store.read("digits", offset=offset, length=length)) == expected, (offset, length)

    def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        store.put("put", b"")
        store.create("created", b"")
        assert bytes(store.read("put")) == bytes(store.read("created")) == b""
        assert bytes(store.read("put", length=10)) == b""
        assert store.size("put") == store.size("created") == 0
        assert list(store.list("")) == [ListedObject("created", 0), ListedObject("put", 0)]

    def test_megabytes_come_back_the_same(self, store: ObjectStore) -> None:
        data = bytes(range(256)) * (20 << 12)  # 20 MiB: several chunks for every store
        store.put("big", data)
        assert store.size("big") == len(data)
        assert bytes(store.read("big")) == data
        assert bytes(store.read("big", offset=12 << 20, length=5 << 20)) == data[12 << 20 : 17 << 20]

    def test_every_kind_of_buffer_is_taken(self, store: ObjectStore) -> None:
        data = b"some bytes"
        kinds: list[Buffer] = [data, bytearray(data), memoryview(data), memoryview(b"__" + data)[2:]]
        for number, buffer in enumerate(kinds):
            store.put(f"put/{number}", buffer)
            store.create(f"created/{number}", buffer)
            assert bytes(store.read(f"put/{number}")) == bytes(store.read(f"created/{number}")) == data, number

    def test_a_caller_may_reuse_its_buffer(self, store: ObjectStore) -> None:
        buffer = bytearray(b"first")
        store.put("a", buffer)
        buffer[:] = b"xxxxx"
        assert bytes(store.read("a")) == b"first"

    def test_an_odd_name_is_a_name(self, store: ObjectStore) -> None:
        for path in (f"odd/{name}" for name in _ODD_NAMES):
            store.put(path, b"1")
            with pytest.raises(AlreadyExists):
                store.create(path, b"2")
            assert bytes(store.read(path)) == b"1"
            assert list(store.list("odd")) == [ListedObject(path, 1)]
            store.delete([path])
            assert store.size(path) is None

    def test_a_path_that_is_not_relative_and_normal_is_refused(self, store: ObjectStore) -> None:
        for path in _ESCAPES:
            for operation in _operations(store, path):
                with pytest.raises(InvalidInput):
                    operation()

    def test_what_is_not_there_is_told_as_such(self, store: ObjectStore) -> None:
        store.put("a/b", b"")
        for path in ("x", "a/x", "x/y/z", "a"):
            assert store.size(path) is None
            with pytest.raises(ObjectNotFound):
                store.read(path)
            with pytest.raises(ObjectNotFound):
                store.read(path, offset=1, length=1)

    def test_an_empty_store_lists_nothing(self, store: ObjectStore) -> None:
        assert list(store.list("")) == []
        assert list(store.list("no/such/folder")) == []

    def test_a_listing_is_recursive_sorted_and_has_sizes(self, store: ObjectStore) -> None:
        paths = ["b/c/d", "b/a", "b-", "b.c", "b0", "a", "b/c.d", "b/c/a", "é"]
        for path in paths:
            store.put(path, path.encode())
        assert list(store.list("")) == [ListedObject(path, len(path.encode())) for path in sorted(paths)]
        assert [listed.path for listed in store.list("b")] == ["b/a", "b/c.d", "b/c/a", "b/c/d"]

    def test_a_prefix_is_a_folder_and_not_the_start_of_a_name(self, store: ObjectStore) -> None:
        for path in ("run/1", "run-2/1", "run2", "runs/1"):
            store.put(path, b"")
        assert [listed.path for listed in store.list("run")] == ["run/1"]
        assert [listed.path for listed in store.list("run/")] == ["run/1"]
        assert list(store.list("ru")) == []
        assert list(store.list("run2")) == []

    def test_a_listing_goes_on_beyond_a_path(self, store: ObjectStore) -> None:
        paths = ["f/a", "f/b", "f/c-", "f/c/1", "f/c/2", "f/c0", "f/d/1"]
        for path in paths:
            store.put(path, b"")
        for after in ("", "f", "f/b", "f/bb", "f/c", "f/c/1", "f/c/5", "f/d", "f/zzz", "g", "a"):
            assert [listed.path for listed in store.list("f", after=after)] == [path for path in paths if path > after]

    def test_a_listing_has_all_of_more_than_a_thousand_entries(self, store: ObjectStore) -> None:
        names = [f"many/{number % 7}/{number:05d}" for number in range(1100)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda name: store.put(name, b"1"), names))
        expected = sorted(names)
        assert [listed.path for listed in store.list("many")] == expected
        assert [listed.path for listed in store.list("many", after=expected[1040])] == expected[1041:]
        store.delete(names)
        assert list(store.list("many")) == []

    def test_deleting_is_idempotent_and_leaves_neighbours(self, store: ObjectStore) -> None:
        for path in ("a/1", "a/2", "a/2x", "b"):
            store.put(path, b"")
        store.delete(["a/1", "a/2", "never/there"])
        store.delete(["a/1", "a/2", "never/there"])
        store.delete([])
        assert [listed.path for listed in store.list("")] == ["a/2x", "b"]

    def test_deleting_a_folder_by_its_name_deletes_nothing(self, store: ObjectStore) -> None:
        store.put("a/b", b"")
        store.delete(["a"])
        assert store.size("a/b") == 0

    def test_what_was_deleted_can_be_created_again(self, store: ObjectStore) -> None:
        store.create("a/b", b"1")
        store.delete(["a/b"])
        store.create("a/b", b"2")
        assert bytes(store.read("a/b")) == b"2"

    def test_many_threads_at_once_do_not_disturb_each_other(self, store: ObjectStore) -> None:
        def work(number: int) -> None:
            data = bytes([number]) * (1000 + number)
            for attempt in range(2):
                path = f"threads/{number}/{attempt}"
                store.create(path, data)
                assert bytes(store.read(path, offset=1)) == data[1:]
                assert store.size(path) == len(data)
                assert [listed.path for listed in store.list(f"threads/{number}")] == [path]
                store.delete([path])

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))
        assert list(store.list("")) == []
