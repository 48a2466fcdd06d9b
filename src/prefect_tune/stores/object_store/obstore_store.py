"""An object store on S3, Google Cloud Storage and Azure through obstore, a client written in Rust.

It uses obstore's blocking calls, from the caller's threads. They need as much CPU as its asyncio calls for a write,
and a quarter less for a read (one thread collects and frees the reply, so its memory is used again). A blocking
call cannot be interrupted from outside; only the timeout of its client ends it and its connection. Therefore
clients are made for a series of timeouts, and a request goes to the client with the longest timeout that still
ends before the deadline.

Large ranges are read by the same client. A reader of our own, over signed URLs into buffers that are used again, saved
0.25 of 2.0 CPU seconds per GiB restored without TLS and nothing over TLS, and took twice the time (obstore 0.12.1).

The client's own retries are switched off, because they know neither the deadline nor that the outcome of a create
may be unknown. This module retries instead.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from prefect_tune.core.errors import AlreadyExists, CommitUnknown, ObjectNotFound, TuneError
from prefect_tune.core.storage.object_store import Buffer, Listed
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.object_store.obstore_errors import Fault
from prefect_tune.stores.path_validation import checked_folder, checked_path

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Client

_T = TypeVar("_T")
_Faults: TypeAlias = list[Fault]
_REQUEST_PAUSES_SECONDS: Final = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
_SMALL_BYTES: Final = 1 << 20
_PAGE_COUNT: Final = 1000  # what S3 lists, and deletes, in one request
_RUNG: Final = 0.8
_SHORTEST_SECONDS: Final = 0.02


class ClientTimes(TypedDict):
    """The arguments of an obstore client's constructor that limit its time."""

    client_options: ClientConfig
    retry_config: RetryConfig


def client_times(request_timeout: timedelta) -> ClientTimes:
    """Return the settings of a client that does not retry, and ends every request within `request_timeout`."""
    return {
        "client_options": {
            "timeout": request_timeout,
            "connect_timeout": min(request_timeout, timedelta(seconds=10)),
        },
        "retry_config": {"max_retries": 0, "retry_timeout": request_timeout},
    }


def connected(constructor: Callable[..., Client], limit: timedelta, options: Mapping[str, Any]) -> Client:
    """Return a client that ends every request within `limit`.

    Raises:
        ValueError: the client does not accept its settings.
    """
    times = client_times(limit)
    try:
        return constructor(client_options={**times["client_options"], **options}, retry_config=times["retry_config"])
    except (BaseError, ValueError) as error:
        raise ValueError(str(error).partition("\n")[0]) from error


class ObstoreStore:
    """An open `ObjectStore` on a bucket, or below a prefix of one.

    `connect` makes an obstore client with `client_times(request_timeout)`; it is called a few times. No
    request takes longer than `request_limit` (a quarter of it for at most 1 MiB), so that a lost request is
    tried again before the deadline: at most eight tries, with growing pauses. Every method, and its connection,
    ends at the deadline.
    """

    def __init__(
        self,
        connect: Callable[[timedelta], Client],
        *,
        deadline: Deadline,
        request_limit: timedelta = timedelta(seconds=60),
        conditional_create: bool = True,
    ) -> None:
        self._deadline = deadline
        self._conditional_create = conditional_create
        self._limit_seconds = request_limit.total_seconds()
        self._clients = _Ladder(connect, min(request_limit, deadline.timeout).total_seconds())
        self._bucket_seen = False

    @property
    def conditional_create(self) -> bool:
        return self._conditional_create

    def close(self) -> None:
        """Close the connections."""
        self._clients.clear()

    def create(self, path: str, data: Buffer) -> None:
        def write(client: Client) -> None:
            try:
                obstore.put(client, checked_path(path), data, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                if not Fault.of(error).is_present:
                    raise
                raise AlreadyExists(f"{path}: an object with this name exists already") from error

        faults: list[Fault] = []
        try:
            self._ask(f"create {path}", write, moved_bytes=len(data), faults=faults)
        except AlreadyExists:
            raise
        except TuneError as error:
            if any(fault.perhaps_done for fault in faults):
                raise CommitUnknown(f"{error}; the object may have been written: read it back") from error
            raise

    def put(self, path: str, data: Buffer) -> None:
        checked = checked_path(path)
        self._ask(
            f"write {path}",
            lambda client: obstore.put(client, checked, data, use_multipart=False),
            moved_bytes=len(data),
        )

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Buffer:
        checked = checked_path(path)
        if length == 0:
            if self.size(path) is None:
                raise ObjectNotFound(f"{path}: no such object")
            return b""

        def fetch(client: Client) -> Buffer:
            try:
                return memoryview(_fetch(client, checked, offset, length))
            except BaseError as error:
                if Fault.of(error).beyond_the_end:
                    return b""
                raise

        return self._ask(f"read {path}", fetch, moved_bytes=length)

    def size(self, path: str) -> int | None:
        checked = checked_path(path)

        def look_up(client: Client) -> int:
            try:
                return obstore.head(client, checked)["size"]
            except BaseError as error:
                if Fault.of(error).says_no_reason:
                    _page(client, count=1)  # the answer to a HEAD has no error code; that to a listing has
                raise

        try:
            return self._ask(f"look up {path}", look_up)
        except ObjectNotFound:
            return None

    def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
        folder = checked_folder(prefix)
        entries = [entry for page in self._pages(folder, after) for entry in page]
        return sorted((Listed(entry["path"], entry["size"]) for entry in entries), key=attrgetter("path"))

    def delete(self, paths: Sequence[str]) -> None:
        checked = [checked_path(path) for path in paths]
        for start in range(0, len(checked), _PAGE_COUNT):
            batch = checked[start : start + _PAGE_COUNT]
            try:
                self._delete(batch)
            except ObjectNotFound:  # clouds without a batch request stop at the first missing object
                for path in batch:
                    self._delete_one(path)

    def _delete(self, paths: Sequence[str]) -> None:
        what = paths[0] if len(paths) == 1 else f"{len(paths)} objects from {paths[0]}"
        self._ask(f"delete {what}", lambda client: obstore.delete(client, paths))

    def _delete_one(self, path: str) -> None:
        with suppress(ObjectNotFound):  # deleted already
            self._delete([path])

    def _pages(self, folder: str, after: str) -> Iterator[Sequence[Any]]:
        """Yield the listing page by page; each page is a request with retries of its own."""
        page: Sequence[Any] = ()
        while not page or len(page) == _PAGE_COUNT:
            begin = page[-1]["path"] if page else after
            page = self._ask(f"list {folder or '/'}", partial(_page, folder=folder, after=begin))
            yield page
            if not page:
                return

    def _ask(
        self,
        doing: str,
        request: Callable[[Client], _T],
        *,
        moved_bytes: int | None = 0,
        faults: _Faults | None = None,
    ) -> _T:
        """Make `request`, and retry after transient faults; every fault is appended to `faults`."""
        small = moved_bytes is not None and moved_bytes <= _SMALL_BYTES
        limit_seconds = self._limit_seconds / 4 if small else self._limit_seconds
        faults = [] if faults is None else faults
        for pause_seconds in _REQUEST_PAUSES_SECONDS:
            self._pause(pause_seconds)
            client = self._client(doing, limit_seconds, faults)
            try:
                answer = request(client)
            except FileNotFoundError as absent:
                raise self._absence(doing, Fault.of(absent)) from absent
            except BaseError as error:
                faults.append(Fault.of(error))
                if faults[-1].is_absent:
                    raise self._absence(doing, faults[-1]) from error
                if not faults[-1].transient:
                    raise faults[-1].error(doing) from error
            else:
                self._bucket_seen = True
                return answer
        raise faults[-1].error(f"{doing}, {len(faults)} times")

    def _pause(self, seconds: float) -> None:
        if seconds:
            jitter = random.uniform(0.5, 1.5)  # noqa: S311  it spreads retries, it keeps no secret
            time.sleep(min(seconds * jitter, self._deadline.remaining_seconds))

    def _client(self, doing: str, limit_seconds: float, faults: Sequence[Fault]) -> Client:
        left_seconds = min(limit_seconds, self._deadline.remaining_seconds)
        if left_seconds < _SHORTEST_SECONDS:
            raise self._deadline.exceeded(f"{doing} ({faults[-1].said})" if faults else doing)
        return self._clients.within(left_seconds)

    def _absence(self, doing: str, fault: Fault) -> TuneError:
        """Return the error for a 404: the object is missing only if the bucket exists, so look that up once."""
        if fault.no_bucket:
            return fault.error(doing)
        if not self._bucket_seen:
            self._ask("list the bucket", lambda client: _page(client, count=1))
        return ObjectNotFound(f"{doing}: no such object")


def _fetch(client: Client, path: str, offset: int, length: int | None) -> obstore.Bytes:
    if length is not None:
        return obstore.get_range(client, path, start=offset, length=length)
    if offset:
        return obstore.get(client, path, options={"range": {"offset": offset}}).bytes()
    return obstore.get(client, path).bytes()


def _page(client: Client, *, folder: str = "", after: str = "", count: int = _PAGE_COUNT) -> Sequence[Any]:
    stream = obstore.list(client, folder or None, offset=after or None, chunk_size=count)
    return next(stream, ())


class _Ladder:
    """Clients with decreasing timeouts, each 20 % shorter than the one before, made when first needed."""

    def __init__(self, connect: Callable[[timedelta], Client], longest_seconds: float) -> None:
        self._connect = connect
        self._longest_seconds = longest_seconds
        self._clients: dict[int, Client] = {}
        self._lock = threading.Lock()

    def within(self, seconds: float) -> Client:
        """Return a client whose requests end within `seconds`."""
        rung = max(0, math.ceil(math.log(seconds / self._longest_seconds, _RUNG)))
        with self._lock:
            if rung not in self._clients:
                self._clients[rung] = self._connect(timedelta(seconds=self._longest_seconds * _RUNG**rung))
            return self._clients[rung]

    def clear(self) -> None:
        with self._lock:
            self._clients.clear()
