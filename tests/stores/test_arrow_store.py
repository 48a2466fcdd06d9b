from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import pyarrow.fs as arrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from prefect_tune.core.errors import AlreadyExists, CommitUnknown, DeadlineExceeded, StoreRefused, StoreUnavailable
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.arrow_store import ArrowStore, arrow_store_error, open_fsspec
from prefect_tune.stores.deadline import Deadline, named_lock
from tests.fakes.servers.s3_sink import Fault, S3Sink
from tests.fakes.stores.racers import race_to_create
from tests.stores.contract import StoreContract


class TestArrowStoreOnLocalFiles(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ArrowStore:
        return ArrowStore(arrow.LocalFileSystem(), str(tmp_path))


class TestArrowStoreOnMemory(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ArrowStore:
        return open_fsspec("memory", f"/{tmp_path.name}")

    @pytest.mark.long
    def test_a_listing_has_all_of_more_than_a_thousand_entries(self, store: ObjectStore) -> None:
        super().test_a_listing_has_all_of_more_than_a_thousand_entries(store)


@pytest.fixture
def sink() -> Iterator[S3Sink]:
    with S3Sink() as sink:
        yield sink


def _connect(sink: S3Sink, timeout_seconds: float = 1) -> arrow.S3FileSystem:
    return arrow.S3FileSystem(
        access_key="key",
        secret_key="secret",
        endpoint_override=sink.endpoint,
        region="us-east-1",
        connect_timeout=timeout_seconds,
        request_timeout=timeout_seconds,
        retry_strategy=arrow.AwsStandardS3RetryStrategy(max_attempts=1),
    )


class TestArrowStoreOnS3(StoreContract):
    @pytest.fixture
    def store(self, sink: S3Sink) -> ArrowStore:
        return ArrowStore(_connect(sink, timeout_seconds=60), "bucket/root")

    @pytest.mark.deep  # pyarrow's deletes are the slowest: three requests each
    def test_a_listing_has_all_of_more_than_a_thousand_entries(self, store: ObjectStore) -> None:
        super().test_a_listing_has_all_of_more_than_a_thousand_entries(store)


def test_it_says_that_its_create_is_not_atomic(tmp_path: Path) -> None:
    assert not ArrowStore(arrow.LocalFileSystem(), str(tmp_path)).has_conditional_create


def test_of_threads_that_create_the_same_object_one_wins_whatever_store_they_opened(tmp_path: Path) -> None:
    stores = [ArrowStore(arrow.LocalFileSystem(), str(tmp_path)) for _ in range(2)]
    assert race_to_create(stores, 100) == [1] * 100


def test_who_waits_too_long_for_its_turn_says_so(tmp_path: Path) -> None:
    store = ArrowStore(arrow.LocalFileSystem(), str(tmp_path), deadline=Deadline.after(timedelta(seconds=0.2)))
    with (
        named_lock(f"local {tmp_path}/a", "another create", Deadline.never()),
        pytest.raises(DeadlineExceeded, match="create of 'a'"),
    ):
        store.create("a", b"bytes")


def test_a_client_that_reports_success_for_nothing_is_not_believed(sink: S3Sink) -> None:
    store = ArrowStore(_connect(sink), "bucket")
    sink.fault = lambda request: Fault.PRETEND if request.method in ("PUT", "POST") else None
    with pytest.raises(StoreUnavailable, match="the target has no object"):
        store.put("a", b"bytes")


class _HalfWritingFile:
    """A file whose writes fail half-way, and which commits on close, like s3fs."""

    def __init__(self, inner: BinaryIO) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, data: bytes) -> int:
        self.inner.write(bytes(data)[: len(data) // 2])
        raise OSError("the connection was lost")


class _HalfWritingMemory(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    protocol = "halfwriting"
    cachable = False
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super().open(path, mode, **kwargs)
        return _HalfWritingFile(file) if mode == "wb" else file


def test_a_write_that_fails_half_way_leaves_no_object_and_no_hidden_file() -> None:
    memory = _HalfWritingMemory()
    store = ArrowStore(arrow.PyFileSystem(arrow.FSSpecHandler(memory)), "/root", create_root=True)
    with pytest.raises(StoreUnavailable, match="connection was lost"):
        store.put("a/b", b"0123456789")
    assert store.size("a/b") is None
    assert memory.find("/root") == []


def test_each_reader_of_memory_has_its_own_position() -> None:
    store = open_fsspec("memory", "/positions")
    store.create("a", b"0123456789")
    reader = MemoryFileSystem().open("/positions/a")
    reader.read(5)
    assert bytes(store.read("a")) == b"0123456789"
    assert reader.read() == b"56789"


def test_deleting_a_name_with_wildcards_spares_what_would_match() -> None:
    store = open_fsspec("memory", "/wildcards")
    for name in ("a?", "ab", "a*", "axx"):
        store.put(name, b"")
    store.delete(["a?", "a*"])
    assert [listed.path for listed in store.list("")] == ["ab", "axx"]


def test_a_missing_root_is_not_an_empty_one(tmp_path: Path) -> None:
    store = ArrowStore(arrow.LocalFileSystem(), str(tmp_path / "unmounted"))
    for operation in (lambda: store.list(""), lambda: store.size("a"), lambda: store.read("a")):
        with pytest.raises(StoreUnavailable, match="root"):
            operation()
    (tmp_path / "unmounted").mkdir()
    assert store.list("") == []


@pytest.mark.parametrize("fault", [Fault.FAIL_500, Fault.FAIL_503, Fault.RESET, Fault.LOSE_REPLY, Fault.REFUSE_403])
def test_a_server_that_fails_or_forbids_is_unavailable_and_not_empty(sink: S3Sink, fault: Fault) -> None:
    store = ArrowStore(_connect(sink), "bucket")
    store.put("a", b"1")
    sink.fault = lambda _request: fault
    operations = [
        lambda: store.put("b", b""),
        lambda: store.read("a"),
        lambda: store.size("a"),
        lambda: store.list(""),
        lambda: store.delete(["a"]),
    ]
    for operation in operations:
        with pytest.raises(StoreUnavailable):
            operation()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("AWS Error ACCESS_DENIED: no text of a client decides"), StoreUnavailable),
        (OSError(errno.EINVAL, "the body was truncated"), StoreUnavailable),
        (OSError(errno.EBUSY, "slow down"), StoreUnavailable),
        (OSError(errno.EPERM, "the method is not allowed"), StoreRefused),
        (PermissionError("access denied"), StoreRefused),
        (NotImplementedError("no such operation"), StoreRefused),
    ],
)
def test_an_error_of_a_client_is_final_by_its_number_or_its_class(error: Exception, kind: type[Exception]) -> None:
    assert type(arrow_store_error(error, "write")) is kind


def test_a_create_whose_completion_was_not_answered_is_not_known(sink: S3Sink) -> None:
    store = ArrowStore(_connect(sink), "bucket")
    sink.fault = lambda request: Fault.LOSE_REPLY if request.query.startswith("uploadId") else None
    with pytest.raises((CommitUnknown, AlreadyExists)):
        store.create("a", b"bytes")
    sink.fault = lambda _request: None
    assert bytes(store.read("a")) == b"bytes"


def test_a_folder_that_takes_no_files_is_named() -> None:
    store = ArrowStore(arrow.LocalFileSystem(), "/proc")
    with pytest.raises((StoreRefused, StoreUnavailable), match="/proc"):
        store.put("a", b"1")


def test_hidden_files_of_the_dead_are_swept_a_day_later(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    for name, age_seconds in (("dead", 90_000), ("alive", 3_000)):
        (tmp_path / ".tmp" / name).write_bytes(b"half")
        os.utime(tmp_path / ".tmp" / name, (time.time() - age_seconds,) * 2)
    store = ArrowStore(arrow.LocalFileSystem(), str(tmp_path))
    store.put("a", b"1")
    assert [listed.path for listed in store.list("")] == ["a"]
    assert [path.name for path in (tmp_path / ".tmp").iterdir()] == ["alive"]


def test_nothing_is_begun_after_the_deadline(tmp_path: Path) -> None:
    store = ArrowStore(arrow.LocalFileSystem(), str(tmp_path), deadline=Deadline.after(timedelta(milliseconds=-1)))
    with pytest.raises(DeadlineExceeded):
        store.put("a", b"1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["nosuchscheme", "hdfsx"])
def test_a_scheme_that_is_not_known_is_refused(scheme: str) -> None:
    with pytest.raises(StoreRefused, match=scheme):
        open_fsspec(scheme, "/")
