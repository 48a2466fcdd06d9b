"""A store in child processes that are killed at the deadline: no other timeout ends a blocking C call."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import cloudpickle

from prefect_tune.core import errors
from prefect_tune.core.errors import CommitUnknown, StoreUnavailable, TuneError
from prefect_tune.core.storage.object_store import Buffer, Listed, ObjectStore, checked_folder, checked_path
from prefect_tune.stores.deadline import Deadline, one_at_a_time

# The protocol between an `IsolatedStore` and its child: frames of one JSON object and raw bytes.

Head: TypeAlias = Mapping[str, Any]
_LENGTHS = struct.Struct(">QQ")
_LONGEST_WAIT_SECONDS = 86_400.0  # of one system call; without a deadline the wait is repeated


def send(channel: socket.socket, head: Head, body: Buffer = b"", *, deadline: Deadline) -> None:
    """Send one frame.

    Raises:
        TimeoutError: the deadline passed; a frame may be half sent, so the channel cannot be used again.
        OSError: the other side is gone.
    """
    text = json.dumps(head).encode()
    raw = memoryview(body).cast("B")
    _wait_until(channel, deadline)
    channel.sendall(_LENGTHS.pack(len(text), len(raw)) + text)
    while raw:
        _wait_until(channel, deadline)
        raw = raw[channel.send(raw) :]


def receive(channel: socket.socket, *, deadline: Deadline) -> tuple[Head, bytearray]:
    """Return the next frame.

    Raises:
        TimeoutError: the deadline passed; a frame may be half read, so the channel cannot be used again.
        EOFError: the other side closed.
        OSError: the other side is gone.
    """
    head_length, body_length = _LENGTHS.unpack(_exactly(channel, _LENGTHS.size, deadline))
    head = json.loads(_exactly(channel, head_length, deadline))
    return head, _exactly(channel, body_length, deadline)


def _exactly(channel: socket.socket, length: int, deadline: Deadline) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        _wait_until(channel, deadline)
        count = channel.recv_into(view)
        if not count:
            raise EOFError("the other side closed the channel")
        view = view[count:]
    return data


def _wait_until(channel: socket.socket, deadline: Deadline) -> None:
    left = deadline.remaining_seconds
    if not left:
        raise TimeoutError("the deadline has passed")
    channel.settimeout(min(left, _LONGEST_WAIT_SECONDS))


_CHILD_MODULE = "prefect_tune.stores.subprocess_worker"
_REAP_SECONDS = 2.0


class IsolatedStore:
    """Passes every operation to a store in a child process, which is killed when the deadline passes.

    `factory` makes the store; it is pickled and called in the child. Children start on demand, at most
    `children_max`, each in its own session and without Prefect. A caller that finds no free child waits until
    its deadline. A child also ends when this process ends, even by SIGKILL. Do not use it for a store that keeps
    its objects in memory (`memory://`): they would be lost with the child.

    The caller closes it, by `close` or `with`; then all its children are killed.
    """

    def __init__(
        self,
        factory: Callable[[], ObjectStore],
        *,
        deadline: Deadline | None = None,
        children_max: int = 4,
    ) -> None:
        self._factory = factory
        self._deadline = deadline or Deadline.never()
        self._children_max = children_max
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []
        self._starting = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the children. A running operation raises `StoreUnavailable` (`create`: `CommitUnknown`)."""
        with self._changed:
            self._is_closed = True
            children = tuple(self._children)
            self._children.clear()
            self._idle.clear()
            self._changed.notify_all()
        for child in children:
            child.kill()

    @property
    def conditional_create(self) -> bool:
        with self._taken("opening the store") as child:
            return child.conditional_create

    def create(self, path: str, data: Buffer) -> None:
        """If the child dies or does not answer in time: `CommitUnknown`."""
        what = f"create of {checked_path(path)!r}"
        with self._taken(what) as child, self._alone(child, path, what):
            try:
                child.ask(what, {"method": "create", "path": path}, data)
            except StoreUnavailable as error:
                if child.is_alive:
                    raise
                raise CommitUnknown(f"{error}; the object may have been written: read it back") from error

    def _alone(self, child: _Child, path: str, what: str) -> AbstractContextManager[None]:
        """Without conditional create, let one thread at a time create `path`: children cannot lock each other out."""
        place = f"{self._factory} {path}"
        return nullcontext() if child.conditional_create else one_at_a_time(place, what, self._deadline)

    def put(self, path: str, data: Buffer) -> None:
        self._ask({"method": "put", "path": checked_path(path)}, data)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytearray:
        request = {"method": "read", "path": checked_path(path), "offset": offset, "length": length}
        return self._ask(request)[1]

    def size(self, path: str) -> int | None:
        size: int | None = self._ask({"method": "size", "path": checked_path(path)})[0]["size"]
        return size

    def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
        reply, _ = self._ask({"method": "list", "path": checked_folder(prefix), "after": after})
        return [Listed(path, size_bytes) for path, size_bytes in reply["listed"]]

    def delete(self, paths: Sequence[str]) -> None:
        self._ask({"method": "delete", "paths": [checked_path(path) for path in paths]})

    def _ask(self, request: Head, body: Buffer = b"") -> tuple[Head, bytearray]:
        what = f"{request['method']} of {request.get('path', 'objects')!r}"
        with self._taken(what) as child:
            return child.ask(what, request, body)

    @contextmanager
    def _taken(self, what: str) -> Iterator[_Child]:
        """Yield a child for one operation; afterwards it is idle again, if it is still alive."""
        child = self._take(what)
        try:
            yield child
        finally:
            self._give_back(child)

    def _take(self, what: str) -> _Child:
        with self._changed:
            while not self._idle and len(self._children) + self._starting >= self._children_max:
                self._check_open(what)
                left = self._deadline.remaining_seconds
                if not self._changed.wait(min(left, threading.TIMEOUT_MAX)):
                    self._deadline.check(what)
            self._check_open(what)
            if self._idle:
                return self._idle.pop()
            self._starting += 1
        return self._started(what)

    def _check_open(self, what: str) -> None:
        self._deadline.check(what)
        if self._is_closed:
            raise StoreUnavailable(f"{what}: the store was closed")

    def _started(self, what: str) -> _Child:
        child = None
        try:
            child = _Child(self._deadline)
            child.open(self._factory, what)
        finally:
            with self._changed:
                self._starting -= 1
                is_wanted = child is not None and child.is_alive and not self._is_closed
                if child is not None and is_wanted:
                    self._children.add(child)
                self._changed.notify()
            if child is not None and not is_wanted:
                child.kill()
        return child

    def _give_back(self, child: _Child) -> None:
        with self._changed:
            if not child.is_alive:
                self._children.discard(child)
            elif child in self._children:
                self._idle.append(child)
            self._changed.notify()


class _Child:
    """One child process and the socket to it."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._channel, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self.is_alive = True
        self.conditional_create = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _CHILD_MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(part or str(Path.cwd()) for part in sys.path)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def open(self, factory: Callable[[], ObjectStore], what: str) -> None:
        """Have the child make its store."""
        reply, _ = self.ask(what, {}, cloudpickle.dumps(factory))
        self.conditional_create = reply["conditional_create"]

    def ask(self, what: str, head: Head, body: Buffer = b"") -> tuple[Head, bytearray]:
        """Return the child's answer, or raise the store's error; kill the child if it does not answer.

        Raises:
            DeadlineExceeded: no answer in time; the child was killed.
            StoreUnavailable: the child died.
            RuntimeError: the store raised something else than a store error.
        """
        is_in_step = False
        try:
            send(self._channel, head, body, deadline=self._deadline)
            reply, result = receive(self._channel, deadline=self._deadline)
            is_in_step = True
        except TimeoutError as error:
            raise self._deadline.exceeded(what) from error
        except (EOFError, OSError) as error:
            message = f"{what}: its child process died ({self.kill()}); whether it was done is not known"
            raise StoreUnavailable(message) from error
        finally:
            if not is_in_step:
                self.kill()
        if "error" in reply:
            raise _error(reply)
        if "bug" in reply:
            raise RuntimeError(f"{what}: expected a store error, but the store raised:\n{reply['bug']}")
        return reply, result

    def kill(self) -> str:
        """Kill the process and its process group; return how it ended, for a message."""
        with self._lock:
            if self.is_alive:
                self.is_alive = False
                with suppress(ProcessLookupError):  # it died by itself
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._channel.close()
        # A process in an uninterruptible system call stays until that call returns, and then ends.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SECONDS)
        return f"exit code {self._process.returncode}"


def _error(reply: Head) -> TuneError:
    kind: type[TuneError] = getattr(errors, reply["error"])
    return kind(reply["message"])
