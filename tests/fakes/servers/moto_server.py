"""moto's S3 server with atomic conditional writes: one of two racers wins, as on a real server.

moto looks whether a key is there and writes it in two steps (`S3Response.put_object` of 5.2.5), between which another
thread may do the same: both get a success reply. A target's `check()` detects that, one time in hundreds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import boto3
from moto import server
from moto.s3.responses import S3Response

_writing = threading.Lock()
_put_object = S3Response.put_object


def _put_object_locked(response: S3Response) -> tuple[int, dict[str, Any], str | bytes]:
    with _writing:
        return _put_object(response)


S3Response.put_object = _put_object_locked  # type: ignore[method-assign, assignment]  # for every server of this process


@contextmanager
def moto_server() -> Iterator[str]:
    """Serve from a thread of this process, and yield the URL.

    All servers of a process show the same buckets, also after their end: give each test module buckets of its own.
    Speak with them through a `boto3.Session()`: the default one keeps the first keys that it finds.
    """
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        moto.stop()


@cache
def aws_client(url: str, service: str = "s3") -> Any:
    """Return Amazon's own client of the server; it is cached, since it takes 0.3 CPU seconds."""
    keys = {"aws_access_key_id": "test-key-id", "aws_secret_access_key": "test-secret-key"}
    return boto3.Session().client(service, endpoint_url=url, region_name="us-east-1", **keys)


if __name__ == "__main__":
    server.main(sys.argv[1:])
