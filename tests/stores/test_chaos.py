"""Stores against a faulty server: each fault raises its error in time; no wrong reply reads as an absent object."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import pyarrow.fs as arrow
import pytest

from prefect_tune.blocks.storage_target import probe_target
from prefect_tune.core.errors import AlreadyExists, CommitUnknown, DeadlineExceeded, ObjectNotFound, StoreUnavailable
from prefect_tune.core.storage.object_store import ListedObject, ObjectStore, create_idempotently
from prefect_tune.stores import obstore_store
from prefect_tune.stores.arrow_store import ArrowStore
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.subprocess_store import SubprocessStore
from tests.fakes.servers.chaos_s3 import TRANSIENT, ChaosS3
from tests.fakes.servers.s3_sink import Fault
from tests.fakes.stores.object_stores import object_store
from tests.fakes.trial_processes import wait_until
from tests.long_cases import deep_count, long_after

DATA = bytes(range(256)) * 64


@pytest.fixture
def chaos() -> Iterator[ChaosS3]:
    with ChaosS3(drip_period=timedelta(seconds=0.2)) as server:
        yield server


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_store, "_REQUEST_PAUSES_SECONDS", (0.0, 0.01, 0.02, 0.04))


@contextmanager
def _open_obstore(endpoint: str, *, seconds: float, request_seconds: float = 0.4) -> Iterator[ObjectStore]:
    limit = timedelta(seconds=request_seconds)
    store = object_store(endpoint, seconds=seconds, request_timeout=limit, prefix="root")
    yield store
    store.close()


def _make_arrow_store(endpoint: str) -> ArrowStore:
    """Make the store, in the child, with the client's own long timeouts."""
    filesystem = arrow.S3FileSystem(
        access_key="key",
        secret_key="secret",
        endpoint_override=endpoint,
        region="us-east-1",
        retry_strategy=arrow.AwsStandardS3RetryStrategy(max_attempts=2),
    )
    return ArrowStore(filesystem, "bucket/root")


@contextmanager
def _open_arrow_subprocess(endpoint: str, *, seconds: float) -> Iterator[ObjectStore]:
    deadline = Deadline.after(timedelta(seconds=seconds))
    with SubprocessStore(partial(_make_arrow_store, endpoint), deadline=deadline, max_children=2) as store:
        yield store


def _operations(store: ObjectStore) -> dict[str, Callable[[], object]]:
    return {
        "create": lambda: store.create("new", DATA),
        "put": lambda: store.put("other", DATA),
        "replace": lambda: store.replace("log", [DATA]),
        "read": lambda: store.read("there"),
        "range": lambda: store.read("there", offset=10, length=100),
        "size": lambda: store.size("there"),
        "list": lambda: store.list(""),
        "delete": lambda: store.delete(["there"]),
    }


def _run_all(store: ObjectStore) -> dict[str, BaseException | None]:
    """Run all operations concurrently, and return the error of each."""
    operations = _operations(store)
    with ThreadPoolExecutor(len(operations)) as pool:
        calls = {name: pool.submit(operation) for name, operation in operations.items()}
        return {name: call.exception() for name, call in calls.items()}


def _put_object(chaos: ChaosS3) -> None:
    with _open_obstore(chaos.endpoint, seconds=30, request_seconds=30) as store:
        store.put("there", DATA)


def _check_unavailable(outcomes: dict[str, BaseException | None], fault: Fault) -> None:
    for operation, error in outcomes.items():
        expected = (StoreUnavailable, CommitUnknown) if operation == "create" else (StoreUnavailable,)
        assert isinstance(error, expected), f"{operation}: {fault.name} was reported as {error!r}"


# ------------------------------------------------------------------------------------ transient faults

_NO_ANSWER = [fault for fault in TRANSIENT if fault not in (Fault.HALF_BODY, Fault.STALL_BODY)]


@pytest.mark.parametrize("fault", [*_NO_ANSWER, Fault.DRIP], ids=lambda fault: fault.name)
def test_what_does_not_pass_is_unavailable_in_time_and_never_absent(chaos: ChaosS3, fault: Fault) -> None:
    _put_object(chaos)
    chaos.always(fault)
    start = time.monotonic()
    with _open_obstore(chaos.endpoint, seconds=1.5) as store:
        outcomes = _run_all(store)
    assert time.monotonic() - start < 2.5
    outcomes = {name: error for name, error in outcomes.items() if not _is_own_object(name, error, fault)}
    _check_unavailable(outcomes, fault)


def _is_own_object(operation: str, error: BaseException | None, fault: Fault) -> bool:
    """A create that succeeded before the server failed finds its own object at the retry."""
    return operation == "create" and fault in (Fault.LOSE_REPLY, Fault.DONE_500) and isinstance(error, AlreadyExists)


@pytest.mark.parametrize("fault", [Fault.HALF_BODY, Fault.STALL_BODY], ids=lambda fault: fault.name)
def test_half_a_body_is_never_an_answer(chaos: ChaosS3, fault: Fault) -> None:
    _put_object(chaos)
    chaos.always(fault, only=lambda request: request.method == "GET")
    with _open_obstore(chaos.endpoint, seconds=1.5) as store:
        outcomes = _run_all(store)
    for operation in ("read", "range", "list"):
        assert isinstance(outcomes[operation], StoreUnavailable), f"{operation}: {outcomes[operation]!r}"


@pytest.mark.parametrize("fault", TRANSIENT, ids=lambda fault: fault.name)
def test_what_passes_is_not_noticed(chaos: ChaosS3, fault: Fault) -> None:
    _put_object(chaos)
    expected = {"read": DATA, "range": DATA[10:110], "size": len(DATA), "list": [ListedObject("there", len(DATA))]}
    with _open_obstore(chaos.endpoint, seconds=60, request_seconds=0.8) as store:
        for count, operation in enumerate(("read", "range", "size", "list", "put", "replace", "delete"), 1):
            chaos.script([fault])
            result = _operations(store)[operation]()
            assert chaos.injected == {fault: count}, operation
            assert (bytes(result) if operation in ("read", "range") else result) == expected.get(operation), operation  # type: ignore[call-overload]  # a buffer then


@pytest.mark.parametrize("fault", TRANSIENT, ids=lambda fault: fault.name)
def test_a_create_is_done_once_whatever_passes(chaos: ChaosS3, fault: Fault) -> None:
    chaos.script([fault])
    with _open_obstore(chaos.endpoint, seconds=20, request_seconds=0.8) as store:
        create_idempotently(store, "new", b"write id 1")
        with pytest.raises(AlreadyExists):
            create_idempotently(store, "new", b"write id 2")
        assert bytes(store.read("new")) == b"write id 1"


class _ProbedTarget:
    uri = "s3://bucket/root"

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        with _open_obstore(self._endpoint, seconds=timeout.total_seconds(), request_seconds=20) as store:
            yield store

    def iter_secret_values(self) -> Iterator[str]:
        yield from ()


@pytest.mark.parametrize(
    ("fault", "lost"),
    long_after(
        4,
        [
            *((Fault.LOSE_REPLY, 0), (Fault.LOSE_REPLY, 3), (Fault.DONE_500, 1), (Fault.DONE_500, "all")),
            *((Fault.LOSE_REPLY, lost) for lost in (1, 2, 4, 5, "all")),
            *((Fault.DONE_500, lost) for lost in (0, 2, 3, 4, 5)),
        ],
    ),
)
def test_a_check_recognises_its_probe_when_the_reply_is_lost(chaos: ChaosS3, fault: Fault, lost: int | str) -> None:
    """A check writes six times: its probe, the same again, and four concurrently. Three checks run at once."""
    plan: list[Fault | None] = [fault] * 60 if lost == "all" else [None] * int(lost) + [fault]
    chaos.script(plan, only=lambda request: request.method == "PUT")
    target = _ProbedTarget(chaos.endpoint)
    with ThreadPoolExecutor(3) as runs:
        results = list(runs.map(lambda _: probe_target(target, timeout=timedelta(seconds=60)), range(3)))
    assert [(result.ok, result.conditional_create) for result in results] == [(True, True)] * 3, results
    assert chaos.injected == {fault: 60 if lost == "all" else 1}


# -------------------------------------------------------------------------------------- false replies


def test_a_listing_in_small_pages_is_whole_and_sorted() -> None:
    with ChaosS3(page_count=3) as pages, _open_obstore(pages.endpoint, seconds=20, request_seconds=10) as store:
        for number in range(11):
            store.put(f"f/{number:02d}", b"")
        assert [listed.path for listed in store.list("f")] == [f"f/{number:02d}" for number in range(11)]
        assert [listed.path for listed in store.list("f", after="f/07")] == ["f/08", "f/09", "f/10"]


# ---------------------------------------------------------------------------------------------- storms


def _retry(operation: Callable[[], object]) -> object:
    for _ in range(50):
        with suppress(StoreUnavailable, CommitUnknown):
            return operation()
    raise AssertionError("50 times in a row")


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1000, 1000 + deep_count(27)))]
)
def test_in_a_storm_every_answer_is_true(chaos: ChaosS3, seed: int) -> None:
    """A quarter of all requests fail, by every transient fault; retries succeed, and no result is wrong."""
    chaos.storm(seed, 0.25, [fault for fault in TRANSIENT if fault not in (Fault.STALL, Fault.STALL_BODY)])
    with _open_obstore(chaos.endpoint, seconds=60, request_seconds=5) as store:

        def work(number: int) -> None:
            path, data = f"f/{number:02d}", bytes([number]) * 3000
            assert _retry(lambda: store.size(path)) is None
            with pytest.raises(ObjectNotFound):
                _retry(lambda: store.read(path))
            if number % 2:
                _retry(lambda: create_idempotently(store, path, data))
            else:
                _retry(lambda: store.put(path, data))
            assert bytes(_retry(lambda: store.read(path))) == data  # type: ignore[call-overload]  # a buffer

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(24)))
        listed = _retry(lambda: store.list("f"))
        assert listed == [ListedObject(f"f/{number:02d}", 3000) for number in range(24)]
        _retry(lambda: store.delete([f"f/{number:02d}" for number in range(0, 24, 2)]))
        chaos.calm()
        assert len(store.list("f")) == 12
    assert sum(chaos.injected.values()) > 10


# ------------------------------------------------------------- a client that does not know our deadline


@pytest.mark.parametrize("fault", long_after(1, [Fault.STALL, Fault.DRIP]), ids=lambda fault: fault.name)
def test_an_isolated_client_that_hangs_ends_in_time_and_leaves_no_connection(chaos: ChaosS3, fault: Fault) -> None:
    _put_object(chaos)
    chaos.always(fault)
    seconds = 4.0  # most of it for starting children that import pyarrow, on a busy machine
    start = time.monotonic()
    with _open_arrow_subprocess(chaos.endpoint, seconds=seconds) as store:
        outcomes = _run_all(store)
        assert time.monotonic() - start < seconds + 2
    _check_unavailable(outcomes, fault)
    assert sum(isinstance(error, DeadlineExceeded) for error in outcomes.values()) >= 6
    wait_until(lambda: not chaos.connections)
