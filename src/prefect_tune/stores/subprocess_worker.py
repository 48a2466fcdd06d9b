"""The child process of an `IsolatedStore`: opens one store and serves one operation at a time."""

from __future__ import annotations

import os
import pickle
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import cast

from prefect_tune.core.errors import StoreRefused, TuneError
from prefect_tune.core.storage.object_store import Buffer, Listed, ObjectStore
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.subprocess_store import Head, receive, send

_ORPHANED = 75


def _main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=(channel.fileno(),), daemon=True).start()
    try:
        store = _opened(channel)
        while store is not None:
            _answer(channel, store)
    except (EOFError, ConnectionError):  # the parent closed the channel: end
        pass


def _end_with_parent(channel: int) -> None:
    """Exit at once when the parent's end of the channel closes: an orphan must not continue to write."""
    hang_up = select.poll()
    hang_up.register(channel, 0)
    hang_up.poll()
    os._exit(_ORPHANED)


def _opened(channel: socket.socket) -> ObjectStore | None:
    _, pickled = receive(channel, deadline=Deadline.never())
    try:
        # Pickled by the parent process and sent over a socket pair that no other process has.
        factory = cast("Callable[[], ObjectStore]", pickle.loads(pickled))  # noqa: S301  from our parent
        store = factory()
        reply: Head = {"conditional_create": store.conditional_create}
    except TuneError as error:
        store, reply = None, _error_reply(error)
    except Exception as error:  # noqa: BLE001  the edge of a process: the parent raises it
        refused = StoreRefused(f"the store cannot be opened: {type(error).__name__}: {error}")
        store, reply = None, _error_reply(refused)
    send(channel, reply, deadline=Deadline.never())
    return store


def _answer(channel: socket.socket, store: ObjectStore) -> None:
    request, body = receive(channel, deadline=Deadline.never())
    result: Buffer = b""
    reply: Head = {}
    try:
        match _done(store, request, body):
            case bytes() | bytearray() | memoryview() as result:
                pass
            case [*entries]:
                reply = {"listed": [[entry.path, entry.size_bytes] for entry in entries]}
            case size_or_none:
                reply = {"size": size_or_none}
    except TuneError as error:
        reply = _error_reply(error)
    except Exception:  # noqa: BLE001  the edge of a process: the parent raises it
        reply = {"bug": traceback.format_exc()}
    send(channel, reply, result, deadline=Deadline.never())


def _done(store: ObjectStore, request: Head, body: bytearray) -> Buffer | list[Listed] | int | None:
    match request:
        case {"method": "create", "path": path}:
            store.create(path, body)
        case {"method": "put", "path": path}:
            store.put(path, body)
        case {"method": "delete", "paths": paths}:
            store.delete(paths)
        case {"method": "size", "path": path}:
            return store.size(path)
        case {"method": "read", "path": path, "offset": offset, "length": length}:
            return store.read(path, offset=offset, length=length)
        case {"method": "list", "path": prefix, "after": after}:
            return list(store.list(prefix, after=after))
        case _:
            raise ValueError(request)
    return None


def _error_reply(error: TuneError) -> Head:
    return {"error": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    _main()
