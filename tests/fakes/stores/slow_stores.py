"""Stores for a child process: they hang, crash, or raise undocumented errors for object names that say so."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.stores.posix_store import PosixStore


class MoodyStore(PosixStore):
    """A file store whose writes do what the object's name says."""

    def __init__(self, root: str) -> None:
        super().__init__(Path(root))

    def put(self, path: str, data: Buffer) -> None:
        """`hang`, `die` or `bug` instead of writing; `drip` writes a byte every 50 ms to `<root>/dripped`."""
        _act(path)
        if path.startswith("drip"):
            _drip(self.root / "dripped")
        super().put(path, data)

    def create(self, path: str, data: Buffer) -> None:
        _act(path)
        super().create(path, data)
        if path.endswith("then-die"):
            os.kill(os.getpid(), signal.SIGKILL)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if path == "pid":
            return b"%d" % os.getpid()
        if path == "modules":
            return "\n".join(sys.modules).encode()
        if path.startswith("sleep"):
            time.sleep(0.3)
            return b"slept"
        return super().read(path, offset=offset, length=length)


class HangsInConstructor(PosixStore):
    """A client that resolves something for ever before it can be used."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))
        time.sleep(3600)


def _act(path: str) -> None:
    if path.startswith("hang"):
        time.sleep(3600)
    if path.startswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if path.startswith("bug"):
        raise KeyError("a bug of the store's")


def _drip(into: Path) -> None:
    with into.open("ab", buffering=0) as file:
        while True:
            file.write(b".")
            time.sleep(0.05)
