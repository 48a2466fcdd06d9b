"""The store requests and bytes of saving a checkpoint, counted at the store (acceptance 6).

    python -m benchmarks.traffic [--write]

Counts, not times: they are the same on any machine. `tests/stores/test_traffic.py` holds the first two to their limits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.measuring.clients import VERIFY_INTERVAL, client_act
from benchmarks.measuring.tables import describe_setup, format_table, publish_section
from prefect_tune.core.errors import StoreRefused
from tests.fakes.servers.s3_sink import Fault, S3Sink, SinkRequest

__all__ = ["Traffic", "save_interrupted", "save_many_files", "save_one_of_ten", "save_unchanged"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one save sent and read: requests of any kind, blobs, and the bytes of blobs."""

    requests: int
    blobs: int
    blob_bytes: int
    read_bytes: int


@contextmanager
def _checkpoint(file_count: int, file_bytes: int) -> Iterator[tuple[S3Sink, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="prefect-tune-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    random = Random(0)
    try:
        for number in range(file_count):
            (folder / f"file-{number:05d}").write_bytes(random.randbytes(file_bytes))
        with S3Sink() as sink:
            yield sink, folder
    finally:
        shutil.rmtree(folder)


def _save(sink: S3Sink, directory: Path, step: int, client: str = "ours") -> Traffic:
    sink.reset()
    client_act(client, "save", sink.endpoint, directory, step)()
    blobs = [request for request in sink.log if is_blob(request)]
    read = [request.bytes_out for request in sink.log if request.method == "GET" and "/blobs/" in request.path]
    return Traffic(len(sink.log), len(blobs), sum(request.bytes_in for request in blobs), sum(read))


def is_blob(request: SinkRequest) -> bool:
    """Whether the request sends a checkpoint's bytes."""
    return request.method == "PUT" and not request.path.endswith("manifest.json")


def save_many_files(client: str = "ours") -> Traffic:
    """Save 256 MiB as 2,000 files."""
    with _checkpoint(2000, 256 * MIB // 2000) as (sink, directory):
        return _save(sink, directory, 1, client)


def save_unchanged(times: int = VERIFY_INTERVAL, file_count: int = 2000) -> Sequence[Traffic]:
    """Save files of 128 KiB, 256 MiB unless said otherwise, and save them again so many times."""
    with _checkpoint(file_count, 256 * MIB // 2000) as (sink, directory):
        _save(sink, directory, 1)
        return [_save(sink, directory, step) for step in range(2, 2 + times)]


def save_one_of_ten() -> Traffic:
    """Save ten files of 25.6 MiB, change one from end to end, and save them again."""
    with _checkpoint(10, 256 * MIB // 10) as (sink, directory):
        _save(sink, directory, 1)
        (directory / "file-00004").write_bytes(os.urandom(256 * MIB // 10))
        return _save(sink, directory, 2)


def save_interrupted(after_blobs: int) -> tuple[Traffic, set[str]]:
    """Save 256 MiB as 64 files, refuse everything after so many blobs, and save again.

    Return what the second try sent, and the paths that both of them sent.
    """
    with _checkpoint(64, 4 * MIB) as (sink, directory):
        sink.fault = _refuse_after(after_blobs)
        with suppress(StoreRefused):
            _save(sink, directory, 1)
        stored = set(sink.names("bucket/experiment/1/trials/trial/blobs"))
        sink.fault = lambda _request: None
        again = _save(sink, directory, 1)
        return again, stored & {request.path for request in sink.log if is_blob(request)}


def _refuse_after(blobs: int) -> Callable[[SinkRequest], Fault | None]:
    seen: list[SinkRequest] = []

    def fault(request: SinkRequest) -> Fault | None:
        if is_blob(request):
            seen.append(request)
        return Fault.REFUSE_403 if len(seen) > blobs else None

    return fault


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    rays, again, same, count = save_many_files("ray"), save_interrupted(10), save_unchanged(), VERIFY_INTERVAL
    most = max(same, key=lambda traffic: traffic.read_bytes)
    fewest = min(same, key=lambda traffic: traffic.read_bytes)
    rows = [
        _row("256 MiB as 2,000 files, Ray's way", rays, ""),
        _row("256 MiB as 2,000 files", save_many_files(), "at most 40 requests"),
        _row(f"the same again, unchanged: the save of {count} that reads least back", fewest, "no blob bytes"),
        _row(f"the save of {count} that reads most back", most, f"all {count} together: each blob once"),
        _row("one of ten files of 25.6 MiB changed", save_one_of_ten(), "at most 29.6 MiB: the file and one chunk"),
        _row("again after an upload that broke off behind 10 of 16 blobs", again[0], "at most 6 blobs"),
    ]
    head = ["saving", "requests", "blobs sent", "MiB of blobs sent", "MiB of blobs read", "limit"]
    text = f"{format_table(head, rows)}\n\n{describe_setup('pyarrow', 'obstore')}"
    publish_section("traffic", text, write=args.write)


def _row(name: str, sent: Traffic, limit: str) -> list[str]:
    sizes = (f"{size / MIB:.1f}" for size in (sent.blob_bytes, sent.read_bytes))
    return [name, f"{sent.requests:,}", f"{sent.blobs:,}", *sizes, limit]


if __name__ == "__main__":
    _main()
