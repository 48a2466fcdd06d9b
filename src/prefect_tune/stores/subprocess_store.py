"""A store in child processes that are killed at the deadline, because nothing else ends a blocking C call.

At the deadline, a timer kills the child that serves a call; the kill also ends the caller's blocked send or receive.
The child is `python -m prefect_tune.stores.subprocess_store`. It opens one store and serves one operation at a time.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, cast

import cloudpickle

from prefect_tune.core.errors import CommitUnknown, StoreRefused, StoreUnavailable, TuneError
from prefect_tune.core.storage.object_store import Buffer, ListedObject, ObjectStore, validate_folder, validate_path
from prefect_tune.stores.deadline import Deadline, named_lock
from prefect_tune.stores.parallel_map import ParallelStore

_CHILD_MODULE = "prefect_tune.stores.subprocess_store"
_REAP_TIMEOUT_SECONDS = 2.0
_ORPHAN_EXIT_CODE = 75


class SubprocessStore(ParallelStore):
    """Passes every operation to a store in a child process, which is killed at the deadline.

    `factory` is pickled; the child calls it to make the store. Children start on demand, at most `max_children`, each
    in its own session and without Prefect. If no child is free, a caller waits, at most until the deadline. A child
    also exits when this process exits, even by SIGKILL. This class is not for a store that keeps objects in memory
    (`memory://`), because a child's exit would lose the objects. Call `close`, or use `with`; both kill all children.
    """

    def __init__(
        self, factory: Callable[[], ObjectStore], *, deadline: Deadline | None = None, max_children: int = 4
    ) -> None:
        self._factory = factory
        self._deadline = deadline or Deadline.never()
        self._child_slots = threading.Semaphore(max_children)
        self._guard = threading.Lock()
        self._children: list[_ChildProcess] = []
        self._idle_children: list[_ChildProcess] = []
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the children: a running `create` raises `CommitUnknown`; other running calls, `StoreUnavailable`."""
        with self._guard:
            self._is_closed = True
            children, self._children, self._idle_children = self._children, [], []
        for child in children:
            child.kill()

    @property
    def has_conditional_create(self) -> bool:
        with self._lease_child("opening the store") as child:
            return child.has_conditional_create

    def create(self, path: str, data: Buffer) -> None:
        """Raise `CommitUnknown` if the child dies or does not answer in time."""
        operation = f"create of {validate_path(path)!r}"
        with self._lease_child(operation) as child:
            # This process holds the lock, since a lock in one child would not lock out the other children.
            lock = named_lock(f"{self._factory} {path}", operation, self._deadline)
            with nullcontext() if child.has_conditional_create else lock:
                try:
                    child.call(operation, "create", path, body=data)
                except StoreUnavailable as error:
                    if child.is_alive:
                        raise
                    raise CommitUnknown(f"{error}; the object may have been written: read it back") from error

    def put(self, path: str, data: Buffer) -> None:
        self._call_child("put", validate_path(path), body=data)

    def copy(self, source: str, path: str) -> None:
        self._call_child("copy", validate_path(source), path=validate_path(path))

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        self._call_child("replace", validate_path(path), pieces=pieces)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return cast("bytes", self._call_child("read", validate_path(path), offset=offset, length=length))

    def size(self, path: str) -> int | None:
        return cast("int | None", self._call_child("size", validate_path(path)))

    def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
        return cast("Sequence[ListedObject]", self._call_child("list", validate_folder(prefix), after=after))

    def delete(self, paths: Sequence[str]) -> None:
        self._call_child("delete", [validate_path(path) for path in paths])

    def _call_child(self, method: str, argument: object, **options: Any) -> object:
        operation = f"{method} of {argument!r}"
        with self._lease_child(operation) as child:
            return child.call(operation, method, argument, **options)

    @contextmanager
    def _lease_child(self, operation: str) -> Iterator[_ChildProcess]:
        """Yield a child for one operation; if the child survives the operation, another operation can use it."""
        if not self._child_slots.acquire(timeout=min(self._deadline.remaining_seconds, threading.TIMEOUT_MAX)):
            raise self._deadline.exceeded_error(operation)
        try:
            self._deadline.check(operation)
            with self._guard:
                if self._is_closed:
                    raise StoreUnavailable(f"{operation}: the store was closed")
                is_new = not self._idle_children
                try:
                    child = _ChildProcess(self._deadline) if is_new else self._idle_children.pop()
                except OSError as error:  # this machine is out of processes, files or memory
                    raise StoreUnavailable(f"{operation}: its child process cannot be started: {error}") from error
                if is_new:
                    self._children = [*(old for old in self._children if old.is_alive), child]
            if is_new:
                child.open(self._factory, operation)
            try:
                yield child
            finally:
                with self._guard:
                    if child.is_alive and not self._is_closed:
                        self._idle_children.append(child)
        finally:
            self._child_slots.release()


class _ChildProcess:
    """One child process and the connection to it."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._guard = threading.Lock()
        self.is_alive = True
        self.has_conditional_create = False
        self._connection, child_end = Pipe()
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _CHILD_MODULE, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(part or str(Path.cwd()) for part in sys.path)},
                pass_fds=[child_end.fileno()],
                start_new_session=True,
            )

    def open(self, factory: Callable[[], ObjectStore], operation: str) -> None:
        """Let the child make its store; kill the child if that fails."""
        try:
            self.has_conditional_create = self.call(operation, "open", body=cloudpickle.dumps(factory))
        except BaseException:
            self.kill()
            raise

    def call(
        self,
        operation: str,
        method: str,
        *arguments: object,
        body: Buffer | None = None,
        pieces: Iterable[Buffer] | None = None,
        **options: object,
    ) -> Any:
        """Call `method` of the child's store; return its result, or raise its error.

        Each piece is sent as one message; an empty message follows the last piece.

        Raises:
            DeadlineExceeded: no reply in time; the child was killed.
            StoreUnavailable: the child died.
            RuntimeError: the store raised an error that is not a store error.
        """
        timer = threading.Timer(min(self._deadline.remaining_seconds, threading.TIMEOUT_MAX), self.kill)
        timer.daemon = True
        timer.start()
        try:
            self._connection.send((method, arguments, options, body is not None))
            if body is not None:
                self._connection.send_bytes(memoryview(body).cast("B"))
            if pieces is not None:
                for piece in pieces:
                    if len(piece):
                        self._connection.send_bytes(memoryview(piece).cast("B"))
                self._connection.send_bytes(b"")
            kind, result = self._connection.recv()
            if kind == "bytes":
                result = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            exit_text = self.kill()
            self._deadline.check(operation)
            message = f"{operation}: its child process died ({exit_text}); the operation may have been done"
            raise StoreUnavailable(message) from error
        except BaseException:  # e.g. from a signal: kill the child, or the next call would get this call's reply
            self.kill()
            raise
        finally:
            timer.cancel()
        if kind == "error":
            raise result
        if kind == "bug":
            raise RuntimeError(f"{operation}: expected a store error, but the store raised:\n{result}")
        return result

    def kill(self) -> str:
        """Kill the process and its process group; return its exit code as text.

        The connection stays open: after a close, another file could get the descriptor from which a thread still reads.
        """
        with self._guard:
            if self.is_alive:
                self.is_alive = False
                with suppress(ProcessLookupError, PermissionError):  # the child has exited (PermissionError on macOS)
                    os.killpg(self._process.pid, signal.SIGKILL)
        # Wait with a timeout, since a process in an uninterruptible system call ends only when that call returns.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_TIMEOUT_SECONDS)
        return f"exit code {self._process.returncode}"


# The child process.


def _exit_with_parent(channel: int) -> None:
    """Exit at once when the parent's end of the channel closes, since an orphan must not continue to write."""
    poll = select.poll()
    poll.register(channel, 0)
    poll.poll()
    os._exit(_ORPHAN_EXIT_CODE)


def _serve_requests(connection: Connection) -> None:
    store: Any = None
    while True:
        method, arguments, options, has_body = connection.recv()
        if has_body:
            arguments = *arguments, connection.recv_bytes()
        try:
            if method == "open":
                store = _open_store(*arguments)
                reply = "value", store.has_conditional_create
            elif method == "replace":
                pieces = iter(connection.recv_bytes, b"")
                try:
                    reply = "value", store.replace(arguments[0], pieces)
                finally:
                    for _ in pieces:  # discard unread pieces, so that the next message is a request
                        pass
            else:
                reply = "value", getattr(store, method)(*arguments, **options)
        except TuneError as error:
            reply = "error", error
        except Exception:  # noqa: BLE001  the edge of a process: the parent raises the error
            reply = "bug", traceback.format_exc()
        if isinstance(reply[1], bytes | bytearray | memoryview):
            connection.send(("bytes", None))
            connection.send_bytes(reply[1])
        else:
            connection.send(reply)


def _open_store(pickled_factory: bytes) -> ObjectStore:
    try:
        # Safe to load, since the parent pickled it, and sent it over a socket pair that no other process has.
        store: ObjectStore = pickle.loads(pickled_factory)()  # noqa: S301  from our parent
    except TuneError:
        raise
    except Exception as error:
        raise StoreRefused(f"the store cannot be opened: {type(error).__name__}: {error}") from error
    return store


if __name__ == "__main__":
    _connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_exit_with_parent, args=(_connection.fileno(),), daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent closed the channel, so this process ends
        _serve_requests(_connection)
