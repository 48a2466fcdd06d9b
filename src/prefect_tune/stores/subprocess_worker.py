"""The child process of an `IsolatedStore`: opens one store and serves one operation at a time."""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from prefect_tune.core.errors import StoreRefused, TuneError
from prefect_tune.core.storage.object_store import ObjectStore

_ORPHANED = 75


def _main() -> None:
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent closed the channel: end
        _serve(connection)


def _end_with_parent(channel: int) -> None:
    """Exit at once when the parent's end of the channel closes: an orphan must not continue to write."""
    hang_up = select.poll()
    hang_up.register(channel, 0)
    hang_up.poll()
    os._exit(_ORPHANED)


def _serve(connection: Connection) -> None:
    store: Any = None
    while True:
        method, arguments, options, has_body = connection.recv()
        if has_body:
            arguments = *arguments, connection.recv_bytes()
        try:
            if method == "open":
                store = _open_store(*arguments)
                reply = "value", store.conditional_create
            elif method == "replace":
                _replace(store, arguments[0], iter(connection.recv_bytes, b""))
                reply = "value", None
            else:
                reply = "value", getattr(store, method)(*arguments, **options)
        except TuneError as error:
            reply = "error", error
        except Exception:  # noqa: BLE001  the edge of a process: the parent raises it
            reply = "bug", traceback.format_exc()
        if isinstance(reply[1], bytes | bytearray | memoryview):
            connection.send(("bytes", None))
            connection.send_bytes(reply[1])
        else:
            connection.send(reply)


def _replace(store: ObjectStore, path: str, pieces: Iterator[bytes]) -> None:
    try:
        store.replace(path, pieces)
    finally:
        for _ in pieces:  # the next message is a request
            pass


def _open_store(pickled_factory: bytes) -> ObjectStore:
    try:
        # Pickled by the parent process and sent over a socket pair that no other process has.
        store: ObjectStore = pickle.loads(pickled_factory)()  # noqa: S301  from our parent
    except TuneError:
        raise
    except Exception as error:
        raise StoreRefused(f"the store cannot be opened: {type(error).__name__}: {error}") from error
    return store


if __name__ == "__main__":
    _main()
