"""A small S3 server on loopback that counts requests and stores the bytes that it receives.

It signs nothing and checks no credentials; it honours `If-None-Match: *`, ranges, copies, listings
(version 2), batch deletes and multipart uploads, can add a latency to every reply, and can be set to fail
on chosen requests. Every bucket exists. Used by tests in process (`S3Sink`) and by the benchmarks as a
process of its own (`S3SinkProcess`), which is not the bottleneck for clients of this machine's size.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs

from tests.fakes.servers.s3_objects import Arena, Asked, Extents, Objects, Reply, cut, failure, size_of
from tests.fakes.servers.s3_wire import Chunked, Source, Wire, parsed_head

_REPOSITORY = Path(__file__).parents[3]


class Fault(Enum):
    """What the server does instead of a correct answer."""

    FAIL_500 = "500 before doing anything"
    FAIL_503 = "503 SlowDown before doing anything"
    REFUSE_403 = "403 before doing anything"
    RESET = "close the connection before doing anything"
    LOSE_REPLY = "do it, then close the connection without a reply"
    STALL = "never answer"
    STALL_BODY = "send the head and half of the body, then nothing"
    HALF_BODY = "send half of the body, then close"
    PRETEND = "answer 200 and keep nothing"
    # These only a `ChaosS3` can do.
    THROTTLE_429 = "429 before doing anything"
    DONE_500 = "do it, then answer 500"
    DRIP = "do it, and answer byte by byte, one each `drip_period`"
    EXPIRE_403 = "403 ExpiredToken before doing anything"
    NO_BUCKET = "404 NoSuchBucket before doing anything"
    SHORT_LENGTH = "send half of the body and call it the whole"
    STORE_HALF = "keep half of what was sent, and answer 200"
    STALE_LISTING = "list what was there at `freeze_listing`"


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """One request as the server saw it."""

    method: str
    path: str
    query: str
    bytes_in: int = 0
    bytes_out: int = 0
    conditional: bool = False


_FAULTS = {
    Fault.FAIL_500: failure("500 Internal Server Error", "InternalError"),
    Fault.FAIL_503: failure("503 Slow Down", "SlowDown"),
    Fault.REFUSE_403: failure("403 Forbidden", "AccessDenied"),
}


class S3Sink:
    """The server, in threads of this process, for the time of a `with` block."""

    def __init__(self, *, latency: timedelta = timedelta(0)) -> None:
        self.latency = latency
        self.fault: Callable[[SinkRequest], Fault | None] = lambda _request: None
        self.log: list[SinkRequest] = []
        self.connections: set[socket.socket] = set()
        self._objects = Objects(Arena())
        self._listener = socket.socket()

    def __enter__(self) -> Self:
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(512)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in tuple(self.connections):
            _hang_up(sock)

    @property
    def requests(self) -> Counter[str]:
        """Requests so far, by method."""
        return Counter(request.method for request in tuple(self.log))

    @property
    def bytes_in(self) -> int:
        """Bytes of request bodies so far."""
        return sum(request.bytes_in for request in tuple(self.log))

    @property
    def bytes_out(self) -> int:
        """Bytes of reply bodies so far."""
        return sum(request.bytes_out for request in tuple(self.log))

    def reset(self) -> None:
        """Reset all counts; keep the objects."""
        self.log.clear()

    def prefault(self, size_bytes: int) -> None:
        """Make room for `size_bytes` beforehand, so that no request pays for it."""
        self._objects.arena.prefault(size_bytes)

    def names(self, prefix: str = "") -> list[str]:
        """Return the `bucket/key` names that start with `prefix`."""
        return sorted(name for name in tuple(self._objects.objects) if name.startswith(prefix))

    @property
    def upload_count(self) -> int:
        """Uploads by parts that are neither completed nor removed."""
        return len(self._objects.uploads)

    def bytes_of(self, name: str) -> bytes:
        """Return the bytes kept as `bucket/key`."""
        return self._objects.arena.bytes_of(self._objects.objects[name])

    def drop(self, prefix: str = "") -> None:
        """Remove the objects whose `bucket/key` starts with `prefix`."""
        for name in self.names(prefix):
            self._objects.arena.free(self._objects.objects.pop(name))
        if not self._objects.objects and not self._objects.uploads:
            self._objects.arena.forget()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed by __exit__
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections.add(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            wire = Wire(sock)
            while head := wire.until(b"\r\n\r\n", 2048):
                self._one(wire, head)
        except OSError:  # the client went away, or a fault closed the connection
            pass
        finally:
            self.connections.discard(sock)
            _hang_up(sock)

    def _one(self, wire: Wire, head: bytes) -> None:
        method, path, query, headers = parsed_head(head)
        if headers.get("expect") == "100-continue":
            wire.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        extents, text = self._body(wire, method, headers)
        asked = Asked(
            method,
            path.lstrip("/"),
            {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()},
            headers,
            extents,
            text,
        )
        request = SinkRequest(method, asked.key, query, size_of(extents) + len(text), 0, "if-none-match" in headers)
        fault = self.fault(request)
        if self.latency:
            time.sleep(self.latency.total_seconds())
        if fault in (Fault.STALL, Fault.RESET):
            self.log.append(request)
        reply = self._reply(wire, asked, fault)
        sent = 0 if reply.head_only else size_of(reply.extents) + len(reply.text)
        self.log.append(replace(request, bytes_out=sent))
        if fault is Fault.LOSE_REPLY:
            raise ConnectionResetError
        self._send(wire, reply, fault)

    def _body(self, wire: Wire, method: str, headers: dict[str, str]) -> tuple[Extents, bytes]:
        layers: list[Chunked] = []
        source: Source = wire
        for name, value in (("transfer-encoding", "chunked"), ("content-encoding", "aws-chunked")):
            if value in headers.get(name, ""):
                layers.append(source := Chunked(source))
        size = int(headers.get("x-amz-decoded-content-length") or headers.get("content-length", "0"))
        if method == "PUT":
            extent = self._objects.arena.allocate(size)
            source.fill(self._objects.arena.view[extent[0] : sum(extent)])
            body: tuple[Extents, bytes] = ((extent,), b"")
        else:
            buffer = bytearray(size)
            source.fill(memoryview(buffer))
            body = ((), bytes(buffer))
        for layer in reversed(layers):
            layer.finish()
        return body

    def _reply(self, wire: Wire, asked: Asked, fault: Fault | None) -> Reply:
        if fault is Fault.STALL:
            wire.wait_until_closed()
        if fault in (Fault.STALL, Fault.RESET):
            raise ConnectionResetError
        if fault is Fault.PRETEND:
            return Reply("200 OK", 'ETag: "0"\r\n')
        if fault in _FAULTS:
            return _FAULTS[fault]
        return self._objects.answer(asked)

    def _send(self, wire: Wire, reply: Reply, fault: Fault | None) -> None:
        length = size_of(reply.extents) or len(reply.text)
        half = fault in (Fault.HALF_BODY, Fault.STALL_BODY)
        head = f"HTTP/1.1 {reply.status}\r\n{reply.headers}Content-Length: {length}\r\n\r\n".encode()
        wire.sock.sendall(head if reply.head_only else head + reply.text[: length // 2 if half else None])
        if reply.head_only:
            return
        extents = cut(reply.extents, 0, length // 2) if half else reply.extents
        for start, size in extents:
            sent = 0
            while sent < size:
                sent += os.sendfile(wire.sock.fileno(), self._objects.arena.fd, start + sent, size - sent)
        if fault is Fault.STALL_BODY:
            wire.wait_until_closed()
        if half:
            raise ConnectionResetError


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):  # the other side was first
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class S3SinkProcess:
    """The same server in a process of its own, so that it shares no interpreter with a measured client."""

    def __init__(self, *, prefault_bytes: int = 0) -> None:
        self._prefault_bytes = prefault_bytes

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.fakes.servers.s3_sink", str(self._prefault_bytes)]
        self._process = subprocess.Popen(
            command, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.endpoint = str(self._hear())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait(timeout=10)
        if self._process.stdout:
            self._process.stdout.close()

    def counted(self) -> dict[str, int]:
        """Return the counts since the last call: requests, bytes_in, bytes_out and one per method."""
        return dict(self._ask("counted"))

    def set_latency(self, latency: timedelta) -> None:
        """Add `latency` to every reply from now on."""
        self._ask(f"latency {latency.total_seconds()}")

    def drop(self, prefix: str = "") -> None:
        """Remove the objects whose `bucket/key` starts with `prefix`."""
        self._ask(f"drop {prefix}")

    def _ask(self, command: str) -> dict[str, int]:
        if self._process.stdin is None:
            raise RuntimeError("the sink was started without a pipe")
        self._process.stdin.write(command + "\n")
        answer = self._hear()
        if not isinstance(answer, dict):
            raise TypeError(answer)
        return answer

    def _hear(self) -> object:
        if self._process.stdout is None:
            raise RuntimeError("the sink was started without a pipe")
        return json.loads(self._process.stdout.readline())


def _obey(sink: S3Sink, command: str) -> dict[str, int]:
    verb, _, argument = command.strip().partition(" ")
    match verb:
        case "latency":
            sink.latency = timedelta(seconds=float(argument))
        case "drop":
            sink.drop(argument)
        case "counted":
            counts = {"requests": len(sink.log), "bytes_in": sink.bytes_in, "bytes_out": sink.bytes_out}
            counts |= dict(sink.requests)
            sink.reset()
            return counts
    return {}


def _main() -> None:
    sys.setswitchinterval(0.0005)
    with S3Sink() as sink:
        sink.prefault(int(sys.argv[1]))
        sys.stdout.write(json.dumps(sink.endpoint) + "\n")
        sys.stdout.flush()
        for command in sys.stdin:
            sys.stdout.write(json.dumps(_obey(sink, command)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _main()
