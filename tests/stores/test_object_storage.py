from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path

import boto3
import pytest
from moto import settings as moto_settings
from moto.server import ThreadedMotoServer
from obstore.store import LocalStore, S3Store

from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    DeadlineExceeded,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.store import ObjectStore
from prefect_tune.stores import object_storage
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.memory import SpareMemory
from prefect_tune.stores.object_storage import ObstoreStore, client_times
from tests.fakes.s3_sink import Fault, S3Sink, SinkRequest
from tests.stores.contract import StoreContract

_SECRETS = {"access_key_id": "AKIAIOSFODNN7EXAMPLE", "secret_access_key": "x" * 40}


def _store(
    endpoint: str,
    *,
    seconds: float = 60,
    request_limit: timedelta = timedelta(seconds=60),
    bucket: str = "bucket",
    prefix: str = "below/a prefix",
) -> ObstoreStore:
    def connect(request_timeout: timedelta) -> S3Store:
        times = client_times(request_timeout)
        return S3Store(
            bucket,
            prefix=prefix,
            endpoint=endpoint,
            region="us-east-1",
            unsigned_payload=True,
            client_options={**times["client_options"], "allow_http": True},
            retry_config=times["retry_config"],
            **_SECRETS,
        )

    deadline = Deadline.after(timedelta(seconds=seconds))
    return ObstoreStore(connect, deadline=deadline, request_limit=request_limit)


def _calls(store: ObjectStore) -> dict[str, Callable[[], object]]:
    return {
        "create": lambda: store.create("a", b"1"),
        "put": lambda: store.put("a", b"1"),
        "read": lambda: store.read("a"),
        "read a range": lambda: store.read("a", offset=1, length=1),
        "size": lambda: store.size("a"),
        "list": lambda: store.list("a"),
        "delete": lambda: store.delete(["a"]),
    }


_ACTS = sorted(_calls(None))  # type: ignore[arg-type]  # only the names are asked for


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def sink() -> Iterator[S3Sink]:
    with S3Sink() as started:
        yield started


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "_PAUSES_SECONDS", (0.0, 0.01, 0.02, 0.04))


class TestOnARealServer(StoreContract):
    numbers = count()

    @pytest.fixture
    def store(self, moto: str) -> ObstoreStore:
        bucket = f"bucket-{next(self.numbers)}"
        client = boto3.client(
            "s3",
            endpoint_url=moto,
            region_name="us-east-1",
            aws_access_key_id=_SECRETS["access_key_id"],
            aws_secret_access_key=_SECRETS["secret_access_key"],
        )
        client.create_bucket(Bucket=bucket)
        return _store(moto, bucket=bucket)


class TestOnTheSink(StoreContract):
    @pytest.fixture
    def store(self, sink: S3Sink) -> ObstoreStore:
        return _store(sink.endpoint)


@pytest.mark.parametrize("act", _ACTS)
def test_a_bucket_that_does_not_exist_is_said_to_be_missing(moto: str, act: str) -> None:
    store = _store(moto, bucket="never-created")
    with pytest.raises(StoreRefused, match="no such bucket: create it, or correct"):
        _calls(store)[act]()


def test_what_is_not_there_is_asked_for_once_more_only_until_the_bucket_was_seen(sink: S3Sink) -> None:
    store = _store(sink.endpoint)
    for _ in range(3):
        assert store.size("a") is None
    assert sink.requests == {"HEAD": 3, "GET": 1}


@pytest.mark.parametrize("act", _ACTS)
def test_wrong_credentials_are_refused(moto: str, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    with pytest.raises(StoreRefused, match="credentials"):
        _calls(_store(moto, bucket="never-created"))[act]()


@pytest.mark.parametrize("act", _ACTS)
def test_a_refusal_is_final(sink: S3Sink, act: str) -> None:
    sink.fault = lambda _request: Fault.REFUSE_403
    with pytest.raises(StoreRefused, match="permission"):
        _calls(_store(sink.endpoint))[act]()
    assert len(sink.log) == 1


class _Once:
    """The first request meets `fault`, the others are answered."""

    def __init__(self, fault: Fault) -> None:
        self._faults = iter([fault])
        self._lock = threading.Lock()

    def __call__(self, _request: SinkRequest) -> Fault | None:
        with self._lock:
            return next(self._faults, None)


@pytest.mark.parametrize("act", _ACTS)
@pytest.mark.parametrize("fault", [Fault.FAIL_500, Fault.FAIL_503, Fault.RESET])
def test_what_passes_is_not_noticed(sink: S3Sink, act: str, fault: Fault) -> None:
    store = _store(sink.endpoint)
    if act != "create":
        store.put("a", b"123")
    sink.fault = _Once(fault)
    _calls(store)[act]()
    assert len(sink.log) >= 1


@pytest.mark.parametrize("act", ["read", "read a range"])
@pytest.mark.parametrize("fault", [Fault.HALF_BODY, Fault.STALL_BODY])
def test_half_a_body_is_never_taken_for_the_whole(sink: S3Sink, act: str, fault: Fault) -> None:
    store = _store(sink.endpoint, request_limit=timedelta(seconds=1))
    store.put("a", bytes(range(256)) * 4096)
    sink.fault = _Once(fault)
    whole = memoryview(bytes(range(256)) * 4096)
    expected = whole if act == "read" else whole[1:500_000]
    length = None if act == "read" else len(expected)
    assert store.read("a", offset=0 if act == "read" else 1, length=length) == expected


@pytest.mark.parametrize("act", _ACTS)
@pytest.mark.parametrize("fault", [Fault.FAIL_500, Fault.FAIL_503, Fault.RESET])
def test_what_does_not_pass_is_unavailable_and_never_absent(sink: S3Sink, act: str, fault: Fault) -> None:
    sink.fault = lambda _request: fault
    uncertain = act == "create"
    with pytest.raises(CommitUnknown if uncertain else StoreUnavailable, match="4 times"):
        _calls(_store(sink.endpoint))[act]()


def test_a_server_that_is_not_there_has_certainly_written_nothing() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(StoreUnavailable):
            _store(nobody).create("a", b"1")


def test_a_create_whose_reply_was_lost_finds_its_own_write(sink: S3Sink) -> None:
    store = _store(sink.endpoint)
    sink.fault = _Once(Fault.LOSE_REPLY)
    with pytest.raises(AlreadyExists):
        store.create("a", b"mine")
    assert bytes(store.read("a")) == b"mine"


def test_a_create_that_got_no_reply_at_all_is_unknown(sink: S3Sink) -> None:
    sink.fault = lambda _request: Fault.STALL
    with pytest.raises(CommitUnknown, match="read it back"):
        _store(sink.endpoint, seconds=0.5).create("a", b"1")


def test_a_refusal_after_a_lost_reply_leaves_a_create_unknown(sink: S3Sink) -> None:
    faults = iter([Fault.LOSE_REPLY, Fault.REFUSE_403])
    sink.fault = lambda _request: next(faults)
    with pytest.raises(CommitUnknown):
        _store(sink.endpoint).create("a", b"1")


def _until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("act", _ACTS)
def test_a_server_that_never_answers_is_left_at_the_deadline_with_nothing_behind(sink: S3Sink, act: str) -> None:
    sink.fault = lambda _request: Fault.STALL
    store = _store(sink.endpoint, seconds=1)
    before = threading.active_count()
    started = time.monotonic()
    with pytest.raises(CommitUnknown if act == "create" else DeadlineExceeded):
        _calls(store)[act]()
    assert time.monotonic() - started < 1.2
    assert _until(lambda: not sink.connections)
    assert _until(lambda: threading.active_count() <= before)  # the server's own end with their connections


def test_many_writers_into_a_hung_store_all_end_and_none_is_left(sink: S3Sink) -> None:
    sink.fault = lambda _request: Fault.STALL
    store = _store(sink.endpoint, seconds=1.5, request_limit=timedelta(seconds=0.5))
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
    assert _until(lambda: not sink.connections)
    sink.fault = lambda _request: None
    time.sleep(0.2)
    assert sink.names() == []


def test_a_hung_request_is_tried_again_before_the_deadline(sink: S3Sink) -> None:
    store = _store(sink.endpoint, seconds=30, request_limit=timedelta(seconds=2))
    sink.fault = _Once(Fault.STALL)
    started = time.monotonic()
    store.put("a", b"small: a quarter of the limit")
    assert time.monotonic() - started < 1.5
    assert bytes(store.read("a")).startswith(b"small")


def test_after_the_deadline_nothing_is_asked(sink: S3Sink) -> None:
    store = _store(sink.endpoint, seconds=0.05)
    time.sleep(0.1)
    for act in _ACTS:
        with pytest.raises(DeadlineExceeded):
            _calls(store)[act]()
    assert not sink.log


def test_a_listing_that_fails_in_the_middle_goes_on_where_it_was(sink: S3Sink) -> None:
    store = _store(sink.endpoint)
    names = [f"f/{number:04d}" for number in range(2500)]
    for name in names:
        store.put(name, b"")
    sink.reset()
    asked = count()
    sink.fault = lambda _request: Fault.FAIL_500 if next(asked) == 1 else None
    assert [listed.path for listed in store.list("f")] == names
    assert sink.requests == {"GET": 4}


def test_one_request_is_made_for_each_act(sink: S3Sink) -> None:
    store = _store(sink.endpoint)
    acts = [
        lambda: store.put("a", bytes(16 << 20)),
        lambda: store.create("b", b"1"),
        lambda: store.read("a"),
        lambda: store.read("a", offset=5, length=1 << 20),
        lambda: store.size("a"),
        lambda: store.list(""),
        lambda: store.delete(["a", "b"]),
    ]
    for number, act in enumerate(acts, 1):
        act()
        assert len(sink.log) == number


def test_a_missing_object_is_not_there_even_for_no_bytes(sink: S3Sink) -> None:
    with pytest.raises(ObjectNotFound):
        _store(sink.endpoint).read("a", length=0)


def test_closing_lets_go_of_the_connections(sink: S3Sink) -> None:
    store = _store(sink.endpoint)
    store.put("a", b"1")
    assert sink.connections
    store.close()
    assert _until(lambda: not sink.connections)


_MIB = 1 << 20


def _blob(sink: S3Sink) -> bytes:
    data = random.Random(7).randbytes(3 * _MIB + 5)
    _store(sink.endpoint).put("blob", data)
    sink.reset()
    return data


def _signed(sink: S3Sink) -> list[SinkRequest]:
    return [request for request in sink.log if "X-Amz-Signature" in request.query]


def test_a_large_range_is_read_by_a_signed_url_over_one_connection(sink: S3Sink) -> None:
    data = _blob(sink)
    store = _store(sink.endpoint)
    for offset in (0, 1, 4097, len(data) - 2 * _MIB):
        assert store.read("blob", offset=offset, length=2 * _MIB) == data[offset : offset + 2 * _MIB]
    assert len(_signed(sink)) == len(sink.log) == 4


def test_a_range_beyond_the_end_is_read_by_the_client(sink: S3Sink) -> None:
    data = _blob(sink)
    store = _store(sink.endpoint)
    assert store.read("blob", offset=_MIB, length=64 * _MIB) == data[_MIB:]
    assert store.read("blob", length=2 * _MIB) == data[: 2 * _MIB]
    assert (len(_signed(sink)), len(sink.log)) == (2, 3)


def test_where_a_signed_url_is_refused_it_is_not_tried_again(sink: S3Sink) -> None:
    data = _blob(sink)
    store = _store(sink.endpoint)
    sink.fault = _Once(Fault.REFUSE_403)
    for _ in range(3):
        assert store.read("blob", length=2 * _MIB) == data[: 2 * _MIB]
    assert (len(_signed(sink)), len(sink.log)) == (1, 4)


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.HALF_BODY, Fault.STALL_BODY, Fault.STALL])
def test_a_signed_read_that_breaks_is_repeated_by_the_client(sink: S3Sink, fault: Fault) -> None:
    data = _blob(sink)
    store = _store(sink.endpoint, request_limit=timedelta(seconds=1))
    sink.fault = _Once(fault)
    assert store.read("blob", offset=5, length=2 * _MIB) == data[5 : 5 + 2 * _MIB]
    assert store.read("blob", offset=6, length=2 * _MIB) == data[6 : 6 + 2 * _MIB]
    assert len(_signed(sink)) == 2


def test_a_signed_read_of_what_trickles_ends_at_the_deadline(sink: S3Sink) -> None:
    _blob(sink)
    sink.fault = lambda _request: Fault.STALL_BODY
    store = _store(sink.endpoint, seconds=1)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        store.read("blob", length=2 * _MIB)
    assert time.monotonic() - started < 1.3
    store.close()
    assert _until(lambda: not sink.connections)


def test_a_large_object_that_is_missing_is_said_to_be_missing(sink: S3Sink) -> None:
    with pytest.raises(ObjectNotFound):
        _store(sink.endpoint).read("blob", length=2 * _MIB)


def test_what_was_read_stays_as_it_is_while_others_read(sink: S3Sink) -> None:
    data = _blob(sink)
    store = _store(sink.endpoint)
    offsets = range(0, _MIB, 65536)
    with ThreadPoolExecutor(8) as pool:
        views = list(pool.map(lambda offset: store.read("blob", offset=offset, length=2 * _MIB), offsets))
    slices = [memoryview(view)[10:] for view in views]
    del views
    for offset, tail in zip(offsets, slices, strict=True):
        assert tail == data[offset + 10 : offset + 2 * _MIB]


def test_a_proxy_is_left_to_the_client(sink: S3Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _blob(sink)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with S3Sink() as proxy:  # it takes a URL for a path, and finds nothing there
        monkeypatch.setenv("http_proxy", proxy.endpoint)
        with suppress(TuneError):
            _store(sink.endpoint).read("blob", length=2 * _MIB)
        assert proxy.log
        assert not sink.log
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert _store(sink.endpoint).read("blob", length=2 * _MIB) == data[: 2 * _MIB]
        assert _signed(sink)


def test_memory_is_handed_out_again_once_nobody_looks_at_it() -> None:
    memory = SpareMemory()
    first = memory.view(100)
    first[:] = b"x" * 100
    other = memory.view(100)
    other[:] = b"y" * 100
    tail = first[50:]
    del first
    third = memory.view(100)
    third[:] = b"z" * 100
    assert bytes(tail) == b"x" * 50
    del tail
    again = memory.view(100)
    assert bytes(again[:1]) == b"x"
    del again
    assert memory.view(17 << 20).nbytes == 17 << 20


def test_a_bucket_that_was_deleted_meanwhile_is_not_taken_for_an_empty_one(moto: str) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=moto,
        region_name="us-east-1",
        aws_access_key_id=_SECRETS["access_key_id"],
        aws_secret_access_key=_SECRETS["secret_access_key"],
    )
    client.create_bucket(Bucket="short-lived")
    store = _store(moto, bucket="short-lived")
    store.put("a", b"1")
    store.delete(["a"])
    client.delete_bucket(Bucket="short-lived")
    with pytest.raises(StoreRefused, match="no such bucket"):
        store.read("a")


def test_closing_lets_go_of_the_connections_of_signed_reads(sink: S3Sink) -> None:
    _blob(sink)
    store = _store(sink.endpoint)
    store.read("blob", length=2 * _MIB)
    store._clients.clear()  # the client's own connections are not meant
    assert _until(lambda: len(sink.connections) == 1)
    store.close()
    assert _until(lambda: not sink.connections)


def test_where_each_object_is_deleted_by_itself_what_is_gone_does_not_keep_the_rest(tmp_path: Path) -> None:
    deadline = Deadline.after(timedelta(seconds=10))
    store = ObstoreStore(lambda _limit: LocalStore(tmp_path), deadline=deadline)
    for path in ("a", "b", "c"):
        store.put(path, b"1")
    store.delete(["never/there", "a", "gone", "c"])
    assert [listed.path for listed in store.list("")] == ["b"]
