"""The two directions between nodes: one thread writes this node's messages, one reads those of another node.

Both write and read while the target answers. An outage delays the messages, and does not count as silence: a node is
lost when the target answers, and the node has written nothing for `SILENCE`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import AlreadyExists, CommitUnknown, StoreRefused, StoreUnavailable, TuneError
from prefect_tune.core.messages.target_messages import NodeMessage, NodeMessages, read_messages, write_messages
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.storage.layout import NodesKey, numbered
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.journal_access import new_write_id

ALIVE_EVERY = timedelta(seconds=5)
"""How often a node says that it is alive."""
SILENCE = timedelta(seconds=40)
"""From which silence on a node is lost."""
"""What is said of a lost node; a search reads it in the state of the run that says so."""
_REQUEST = timedelta(seconds=30)
_PAUSES_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
_AFTER_ERROR_SECONDS = 1.0
_LAST_MESSAGES = timedelta(seconds=20)


class NodeWriter:
    """Writes the messages of one node, in order; `send` never waits."""

    def __init__(self, target: StorageTarget, key: NodesKey, node: int, secret: str, log: Log) -> None:
        self.node, self.secret = node, secret
        self._target, self._key, self._log = target, key, log
        self._messages: queue.SimpleQueue[NodeMessage | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._write_id = new_write_id().write_id
        self._number = 0
        self._deleted_up_to = 1  # the first stays while the attempt lasts: it says who leads it
        self.has_read: dict[int, int] = {}
        """By node, the number of its last object that was read here."""
        self.read_up_to: dict[int, int] = {}
        """By node, the number of this node's last object that it has read."""
        self.is_displaced = threading.Event()
        """Set when another process writes as this node."""
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="node-writer", daemon=True)
        self._thread.start()

    def send(self, *messages: NodeMessage) -> None:
        """Queue messages."""
        for each in messages:
            self._messages.put(each)

    def delete(self, path: str) -> None:
        """Delete an object with the next write."""
        self._done.put(path)

    @property
    def is_read(self) -> bool:
        """Whether all readers have read what was written."""
        return min(self.read_up_to.values(), default=0) >= self._number

    def close(self) -> None:
        """Write what is queued, for 20 s at most, and nothing more."""
        self._messages.put(None)
        self._thread.join(_LAST_MESSAGES.total_seconds())

    def _run(self) -> None:
        is_open = True
        while is_open and not self.is_displaced.is_set():
            taken = self._taken()
            is_open = None not in taken
            self._write([each for each in taken if each is not None])  # the last one says how far this node has read

    def _taken(self) -> Sequence[NodeMessage | None]:
        """Return all queued messages; none if none is queued for `ALIVE_EVERY`."""
        taken: list[NodeMessage | None] = []
        with suppress(queue.Empty):
            taken.append(self._messages.get(timeout=ALIVE_EVERY.total_seconds() if self._number else 0))
            while True:
                taken.append(self._messages.get_nowait())
        return taken

    def _write(self, messages: Sequence[NodeMessage]) -> None:
        self._number += 1
        has_read = {str(node): number for node, number in self.has_read.items()}
        written = NodeMessages(write_id=self._write_id, has_read=has_read, messages=tuple(messages))
        while not self.is_displaced.is_set():
            try:
                with self._target.open(timeout=_REQUEST) as store:
                    write_messages(store, self._key, self.node, self._number, written, self.secret)
                    self._delete(store)
            except AlreadyExists:
                self.is_displaced.set()
            except (StoreUnavailable, StoreRefused, CommitUnknown) as error:
                self._log.warning("the nodes' messages are written again in a second: %s", error)
                time.sleep(_AFTER_ERROR_SECONDS)
            except TuneError as error:
                self._log.error("node %d writes no more messages: %s", self.node, error)
                return
            else:
                return

    def _delete(self, store: ObjectStore) -> None:
        """Delete the objects that every reader has read, and the paths of `delete`."""
        with suppress(queue.Empty):
            while True:
                store.delete([self._done.get_nowait()])
        read = min(self.read_up_to.values(), default=0)
        folder = self._key.messages(self.node)
        if done := [numbered(folder, each) for each in range(self._deleted_up_to + 1, min(read, self._number - 1) + 1)]:
            store.delete(done)
            self._deleted_up_to += len(done)


class NodeReader:
    """Reads the messages of another node in a thread, and hands them over in order."""

    def __init__(
        self,
        target: StorageTarget,
        key: NodesKey,
        node: int,
        writer: NodeWriter,
        receive: Callable[[NodeMessage], None],
        lost: Callable[[Reason], None],
    ) -> None:
        self._target, self._key, self._node, self._writer = target, key, node, writer
        self._receive, self._lost = receive, lost
        writer.read_up_to.setdefault(node, 0)
        self._number = 0
        self.seen_at = time.monotonic()
        """When an object was read last, in seconds of the monotonic clock."""
        self._silent_since: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="node-reader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read nothing more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with self._target.open(timeout=_REQUEST) as store:
                    self._read_from(store)
            except (StoreUnavailable, StoreRefused):
                self._silent_since = None
                self._closed.wait(_AFTER_ERROR_SECONDS)
            except TuneError as error:  # damaged, or of another version
                self._over(make_reason("node-unreadable", node=self._node, error=str(error)))

    def _read_from(self, store: ObjectStore) -> None:
        """Read until half of the store's time is over, or the node is silent."""
        until, tries = time.monotonic() + _REQUEST.total_seconds() / 2, 0
        while time.monotonic() < until and not self._closed.is_set():
            found = read_messages(store, self._key, self._node, self._number + 1, self._writer.secret)
            if found is None:
                self._require_alive()
                self._closed.wait(_PAUSES_SECONDS[min(tries, len(_PAUSES_SECONDS) - 1)])
                tries += 1
                continue
            tries, self._number = 0, self._number + 1
            self.seen_at, self._silent_since = time.monotonic(), None
            self._writer.has_read[self._node] = self._number
            self._writer.read_up_to[self._node] = found.has_read.get(str(self._writer.node), 0)
            for each in found.messages:
                self._receive(each)

    def _require_alive(self) -> None:
        if self._node and not self._number:
            return  # it has not arrived yet
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if now - self._silent_since > SILENCE.total_seconds():
            self._over(make_reason("node-silent", node=self._node, seconds=SILENCE.total_seconds()))

    def _over(self, reason: Reason) -> None:
        self._closed.set()
        self._lost(reason)
