from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
from moto import settings as moto_settings
from obstore.store import LocalStore

from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    DeadlineExceeded,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores import obstore_store
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.obstore_store import ObstoreStore
from tests.fakes.servers.moto_server import aws_client, moto_server
from tests.fakes.servers.s3_sink import Fault, S3Sink, SinkRequest
from tests.fakes.stores.object_stores import Once, object_store, until
from tests.stores.contract import StoreContract


def _calls(store: ObjectStore) -> dict[str, Callable[[], object]]:
    return {
        "create": lambda: store.create("a", b"1"),
        "put": lambda: store.put("a", b"1"),
        "replace": lambda: store.replace("a", [b"1"]),
        "replace by parts": lambda: store.replace("a", [bytes(8 << 20), b"1"]),
        "read": lambda: store.read("a"),
        "read a range": lambda: store.read("a", offset=1, length=1),
        "size": lambda: store.size("a"),
        "list": lambda: store.list("a"),
        "delete": lambda: store.delete(["a"]),
    }


_ACTS = sorted(_calls(None))  # type: ignore[arg-type]  # only the names are asked for


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def sink() -> Iterator[S3Sink]:
    with S3Sink() as started:
        yield started


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_store, "_REQUEST_PAUSES_SECONDS", (0.0, 0.01, 0.02, 0.04))


class TestOnARealServer(StoreContract):
    numbers = count()

    @pytest.fixture
    def store(self, moto: str) -> ObstoreStore:
        bucket = f"bucket-{next(self.numbers)}"
        aws_client(moto).create_bucket(Bucket=bucket)
        return object_store(moto, bucket=bucket)

    @pytest.mark.long
    def test_a_listing_has_all_of_more_than_a_thousand_entries(self, store: ObjectStore) -> None:
        super().test_a_listing_has_all_of_more_than_a_thousand_entries(store)


class TestOnTheSink(StoreContract):
    @pytest.fixture
    def store(self, sink: S3Sink) -> ObstoreStore:
        return object_store(sink.endpoint)


@pytest.mark.parametrize("act", _ACTS)
def test_a_bucket_that_does_not_exist_is_said_to_be_missing(moto: str, act: str) -> None:
    store = object_store(moto, bucket="never-created")
    with pytest.raises(StoreRefused, match="no such bucket"):
        _calls(store)[act]()


def test_what_is_not_there_is_asked_for_once_more_only_until_the_bucket_was_seen(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)
    for _ in range(3):
        assert store.size("a") is None
    assert sink.requests == {"HEAD": 3, "GET": 1}


@pytest.mark.parametrize("act", _ACTS)
def test_wrong_credentials_are_refused(moto: str, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    with pytest.raises(StoreRefused, match="credentials"):
        _calls(object_store(moto, bucket="never-created"))[act]()


@pytest.mark.parametrize("act", _ACTS)
def test_a_refusal_is_final(sink: S3Sink, act: str) -> None:
    sink.fault = lambda _request: Fault.REFUSE_403
    with pytest.raises(StoreRefused, match="permission"):
        _calls(object_store(sink.endpoint))[act]()
    assert len(sink.log) == (2 if act == "size" else 1)  # the answer to a HEAD has no body: a listing says why


@pytest.mark.parametrize("act", _ACTS)
def test_what_does_not_pass_is_tried_so_many_times(sink: S3Sink, act: str) -> None:
    sink.fault = lambda _request: Fault.FAIL_503
    uncertain = act == "create"
    with pytest.raises(CommitUnknown if uncertain else StoreUnavailable, match="4 times"):
        _calls(object_store(sink.endpoint))[act]()


def test_a_server_that_is_not_there_has_certainly_written_nothing() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed_port = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(StoreUnavailable):
            object_store(closed_port).create("a", b"1")


def test_a_create_whose_reply_was_lost_finds_its_own_write(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)
    sink.fault = Once(Fault.LOSE_REPLY)
    with pytest.raises(AlreadyExists):
        store.create("a", b"mine")
    assert bytes(store.read("a")) == b"mine"


def test_a_create_that_got_no_reply_at_all_is_unknown(sink: S3Sink) -> None:
    sink.fault = lambda _request: Fault.STALL
    with pytest.raises(CommitUnknown, match="read it back"):
        object_store(sink.endpoint, seconds=0.5).create("a", b"1")


def test_a_refusal_after_a_lost_reply_leaves_a_create_unknown(sink: S3Sink) -> None:
    faults = iter([Fault.LOSE_REPLY, Fault.REFUSE_403])
    sink.fault = lambda _request: next(faults)
    with pytest.raises(CommitUnknown):
        object_store(sink.endpoint).create("a", b"1")


@pytest.mark.parametrize("act", _ACTS)
def test_a_server_that_never_answers_is_left_at_the_deadline_with_nothing_behind(sink: S3Sink, act: str) -> None:
    sink.fault = lambda _request: Fault.STALL
    store = object_store(sink.endpoint, seconds=1)
    before = threading.active_count()
    started = time.monotonic()
    with pytest.raises({"create": CommitUnknown, "replace by parts": StoreUnavailable}.get(act, DeadlineExceeded)):
        _calls(store)[act]()
    assert time.monotonic() - started < 1.2
    assert until(lambda: not sink.connections)
    assert until(lambda: threading.active_count() <= before)  # the server's own end with their connections


def test_a_large_range_that_stops_arriving_ends_at_the_deadline(sink: S3Sink) -> None:
    writer = object_store(sink.endpoint, seconds=60)
    writer.put("blob", bytes(3 << 20))
    writer.close()  # else its connection may stay, idle in the pool
    store = object_store(sink.endpoint, seconds=1)
    sink.fault = lambda _request: Fault.STALL_BODY
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        store.read("blob", length=2 << 20)
    assert time.monotonic() - started < 30  # the server never sends the rest
    assert until(lambda: not sink.connections)


def test_many_writers_into_a_hung_store_all_end_and_none_is_left(sink: S3Sink) -> None:
    sink.fault = lambda _request: Fault.STALL
    store = object_store(sink.endpoint, seconds=1.5, request_limit=timedelta(seconds=0.5))
    body = bytes(4 << 20)

    def write(number: int) -> TuneError | None:
        try:
            store.put(f"blobs/{number}", body)
        except TuneError as error:
            return error
        return None

    started = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(write, range(16)))
    assert time.monotonic() - started < 2.5
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    assert until(lambda: not sink.connections)
    sink.fault = lambda _request: None
    time.sleep(0.2)
    assert sink.names() == []


def test_a_hung_request_is_tried_again_before_the_deadline(sink: S3Sink) -> None:
    store = object_store(sink.endpoint, seconds=30, request_limit=timedelta(seconds=2))
    sink.fault = Once(Fault.STALL)
    started = time.monotonic()
    store.put("a", b"small: a quarter of the limit")
    assert time.monotonic() - started < 1.5
    assert bytes(store.read("a")).startswith(b"small")


def test_after_the_deadline_nothing_is_asked(sink: S3Sink) -> None:
    store = object_store(sink.endpoint, seconds=0.05)
    time.sleep(0.1)
    for act in _ACTS:
        with pytest.raises(DeadlineExceeded):
            _calls(store)[act]()
    assert not sink.log


def test_a_listing_that_fails_in_the_middle_goes_on_where_it_was(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)
    names = [f"f/{number:04d}" for number in range(2500)]
    for name in names:
        store.put(name, b"")
    sink.reset()
    asked = count()
    sink.fault = lambda _request: Fault.FAIL_500 if next(asked) == 1 else None
    assert [listed.path for listed in store.list("f")] == names
    assert sink.requests == {"GET": 4}


def test_one_request_is_made_for_each_act(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)
    acts = [
        lambda: store.put("a", bytes(16 << 20)),
        lambda: store.create("b", b"1"),
        lambda: store.replace("b", [b"2"]),
        lambda: store.read("a"),
        lambda: store.read("a", offset=5, length=1 << 20),
        lambda: store.size("a"),
        lambda: store.list(""),
        lambda: store.delete(["a", "b"]),
    ]
    for number, act in enumerate(acts, 1):
        act()
        assert len(sink.log) == number


def test_an_upload_by_parts_that_fails_leaves_the_object_and_no_part_and_is_tried_again(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)
    store.replace("a", [b"old"])
    pieces = [b"1" * (8 << 20), b"2" * (8 << 20), b"3"]
    sink.fault = lambda request: Fault.REFUSE_403 if "partNumber=3" in request.query else None
    with pytest.raises(StoreRefused):
        store.replace("a", pieces)
    assert bytes(store.read("a")) == b"old"
    faults = {"partNumber=2": Fault.RESET}
    sink.fault = lambda request: faults.pop(request.query.partition("&")[0], None)
    store.replace("a", pieces)
    assert not faults
    assert bytes(store.read("a")) == b"".join(pieces)
    assert sink.upload_count == 0


def test_an_upload_by_parts_that_is_too_slow_ends_before_the_deadline(sink: S3Sink) -> None:
    store = object_store(sink.endpoint, seconds=2)
    sink.latency = timedelta(seconds=0.15)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        store.replace("a", [bytes(8 << 20)] * 50)
    assert time.monotonic() - started < 2.2
    assert sink.names() == []
    assert sink.upload_count == 0


def test_no_upload_by_parts_begins_that_cannot_end_before_the_deadline(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)

    def fail_late(_request: SinkRequest) -> Fault:
        store._deadline = Deadline.after(timedelta(seconds=5))
        return Fault.FAIL_503

    sink.fault = fail_late
    with pytest.raises(DeadlineExceeded):
        store.replace("a", [bytes(8 << 20), b"1"])
    assert sink.requests == {"POST": 1}


def test_a_missing_object_is_not_there_even_for_no_bytes(sink: S3Sink) -> None:
    with pytest.raises(ObjectNotFound):
        object_store(sink.endpoint).read("a", length=0)


def test_closing_lets_go_of_the_connections(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)
    store.put("a", b"1")
    assert sink.connections
    store.close()
    assert until(lambda: not sink.connections)


def test_a_bucket_that_was_deleted_meanwhile_is_not_taken_for_an_empty_one(moto: str) -> None:
    client = aws_client(moto)
    client.create_bucket(Bucket="short-lived")
    store = object_store(moto, bucket="short-lived")
    store.put("a", b"1")
    store.delete(["a"])
    client.delete_bucket(Bucket="short-lived")
    with pytest.raises(StoreRefused, match="no such bucket"):
        store.read("a")


def test_where_each_object_is_deleted_by_itself_what_is_gone_does_not_keep_the_rest(tmp_path: Path) -> None:
    deadline = Deadline.after(timedelta(seconds=10))
    store = ObstoreStore(lambda _limit: LocalStore(tmp_path), deadline=deadline)
    for path in ("a", "b", "c"):
        store.put(path, b"1")
    store.delete(["never/there", "a", "gone", "c"])
    assert [listed.path for listed in store.list("")] == ["b"]
