"""One transfer by one client, measured from inside: `python -m benchmarks.measuring.clients ours save ...` prints JSON.

Each client is a process of its own, so that none pays for another's imports, memory or threads. Imports are not
measured; its connecting is.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from mmap import mmap
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.measuring.resident import resident_bytes

__all__ = ["BUCKET", "CLIENTS", "VERIFY_INTERVAL", "Measurement", "client_act"]

BUCKET = "bucket"
KEYS = ("AKIAIOSFODNN7EXAMPLE", "x" * 40)
CLIENTS = ("ray", "ours", "raw")
VERIFY_INTERVAL = 16
"""As `SyncConfig.verify_reused_every` is, unless it is set."""
_TIMEOUT = timedelta(minutes=10)
_BLOB_BYTES = 16 << 20
_RAW_CONNECTIONS = 4

Act = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one transfer cost."""

    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    loaded_rss_bytes: int
    """Peak before the transfer began: the memory of imports."""


def _measure(act: Act) -> Measurement:
    loaded = resident_bytes("VmHWM")
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    act()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measurement(wall, cpu, resident_bytes("VmHWM"), loaded)


def _ours(endpoint: str, act: str, directory: Path, step: int) -> Act:
    """What the tasks `save_checkpoint` and `restore_checkpoint` do, without Prefect around it."""
    from obstore.store import S3Store

    from prefect_tune.core.checkpoints.commit import Reverification, commit_checkpoint, find_reusable_bytes
    from prefect_tune.core.checkpoints.manifest import CheckpointMetadata
    from prefect_tune.core.restore import read_manifest, restore_files
    from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
    from prefect_tune.stores.deadline import Deadline
    from prefect_tune.stores.local.staging import StagedFiles, restoring_directory
    from prefect_tune.stores.obstore_store import ObstoreStore, make_client

    trial = TrialKey(experiment="experiment", generation=1, trial="trial")
    key = CheckpointKey(trial=trial, step=step, sequence=step)
    parent = CheckpointKey(trial=trial, step=step - 1, sequence=step - 1) if step > 1 else None
    metadata = CheckpointMetadata(attempt=1, term=1, write_id=f"write-{step}", created_at="2026-11-02T10:00:00+00:00")

    @contextmanager
    def open_store() -> Iterator[ObstoreStore]:
        make_store: Any = partial(
            S3Store,
            BUCKET,
            endpoint=endpoint,
            region="us-east-1",
            access_key_id=KEYS[0],
            secret_access_key=KEYS[1],
            unsigned_payload=True,  # as over TLS, and as Ray's client does
        )

        def connect(limit: timedelta) -> Any:
            return make_client(make_store, limit, {"allow_http": True})

        store = ObstoreStore(connect, deadline=Deadline.after(_TIMEOUT))
        yield store
        store.close()

    def save() -> None:
        with open_store() as store:
            reuse = find_reusable_bytes(store, trial, read_manifest(store, parent) if parent else None, 0)
            reverification = Reverification(step - 1, VERIFY_INTERVAL)
            staged = StagedFiles(directory)
            commit_checkpoint(store, key, staged, metadata, reuse=reuse, reverification=reverification)

    def fetch() -> None:
        with open_store() as store:
            manifest = read_manifest(store, key)
            with restoring_directory(manifest, directory) as sink:
                restore_files(store, manifest, sink)

    return save if act == "save" else fetch


def _ray(endpoint: str, act: str, directory: Path, step: int) -> Act:
    """Ray's way (ray.train's checkpoint upload and download): `copy_files` with `use_threads=False`."""
    import pyarrow.fs

    remote = f"{BUCKET}/checkpoint-{step}"

    def copy() -> None:
        store = pyarrow.fs.S3FileSystem(
            access_key=KEYS[0],
            secret_key=KEYS[1],
            region="us-east-1",
            scheme="http",
            endpoint_override=urlsplit(endpoint).netloc,
        )
        local = pyarrow.fs.LocalFileSystem()
        ends = (str(directory), remote, local, store) if act == "save" else (remote, str(directory), store, local)
        if act == "restore":
            directory.mkdir()
        pyarrow.fs.copy_files(  # noqa: TID251  measured, not used
            ends[0], ends[1], source_filesystem=ends[2], destination_filesystem=ends[3], use_threads=False
        )

    return copy


class _RawConnections(threading.local):
    """A connection and a buffer for each thread."""

    def __init__(self, endpoint: str) -> None:
        address = urlsplit(endpoint)
        self.socket = socket.create_connection((address.hostname, address.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = memoryview(mmap(-1, _BLOB_BYTES))  # begins at a page: copied to and from faster

    def head(self) -> bytes:
        """Return what came with the head of a reply, beyond it."""
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.socket.recv(4096)
        return head.partition(b"\r\n\r\n")[2]


def _raw(endpoint: str, act: str, directory: Path, step: int) -> Act:
    """The limit: the same bytes in bodies of the same size, over plain sockets, nothing hashed or verified."""
    index = directory.with_name("raw-index.json")
    connections = _RawConnections(endpoint)

    def put(packed: tuple[int, list[tuple[str, int, int]]]) -> None:
        number, parts = packed
        filled = 0
        for name, offset, length in parts:
            with (directory / name).open("rb", buffering=0) as file:
                file.seek(offset)
                filled += file.readinto(connections.buffer[filled : filled + length]) or 0
        connections.socket.sendall(
            b"PUT /%s/raw-%d-%d HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BUCKET.encode(), step, number, filled)
        )
        connections.socket.sendall(connections.buffer[:filled])
        connections.head()

    def get(packed: tuple[int, list[tuple[str, int, int]]]) -> None:
        number, parts = packed
        connections.socket.sendall(b"GET /%s/raw-%d-%d HTTP/1.1\r\n\r\n" % (BUCKET.encode(), step, number))
        ahead = connections.head()
        length = sum(part[2] for part in parts)
        connections.buffer[: len(ahead)] = ahead
        have = len(ahead)
        while have < length:
            view = connections.buffer[have:length]
            have += connections.socket.recv_into(view, 0, socket.MSG_WAITALL)
        begin = 0
        for name, offset, part_length in parts:
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT)
            os.pwrite(descriptor, connections.buffer[begin : begin + part_length], offset)
            os.close(descriptor)
            begin += part_length

    def save() -> None:
        packs = _packs(directory)
        index.write_text(json.dumps(packs))
        with ThreadPoolExecutor(_RAW_CONNECTIONS) as pool:
            list(pool.map(put, enumerate(packs)))

    def fetch() -> None:
        directory.mkdir()
        with ThreadPoolExecutor(_RAW_CONNECTIONS) as pool:
            list(pool.map(get, enumerate(json.loads(index.read_text()))))

    return save if act == "save" else fetch


def _packs(directory: Path) -> list[list[tuple[str, int, int]]]:
    packs: list[list[tuple[str, int, int]]] = [[]]
    filled = 0
    for path in sorted(directory.iterdir()):
        size = path.stat().st_size
        for offset in range(0, size, _BLOB_BYTES):
            length = min(_BLOB_BYTES, size - offset)
            if filled + length > _BLOB_BYTES:
                packs.append([])
                filled = 0
            packs[-1].append((path.name, offset, length))
            filled += length
    return packs


def client_act(client: str, act: str, endpoint: str, directory: Path, step: int) -> Act:
    """Return the act of `client` that moves `directory` to or from `endpoint` as the checkpoint of `step`."""
    return {"ours": _ours, "ray": _ray, "raw": _raw}[client](endpoint, act, directory, step)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("act", choices=["save", "restore"])
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--directory", required=True, type=Path)
    parser.add_argument("--step", default=1, type=int)
    parser.add_argument("--with-prefect", action="store_true", help="load what a task has loaded")
    args = parser.parse_args()
    if args.with_prefect:
        import_module("prefect_tune.tasks.checkpoints")
    measured = _measure(client_act(args.client, args.act, args.endpoint, args.directory, args.step))
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    _main()
