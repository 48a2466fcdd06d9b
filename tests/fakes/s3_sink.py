"""A small S3 server on loopback that counts what it is asked and keeps the bytes it is sent.

It signs nothing and checks no credentials; it honours `If-None-Match: *`, ranges, listings
(version 2), batch deletes and multipart uploads, can add a latency to every reply, and can be told to fail
on chosen requests. Every bucket exists. Used by tests in process (`S3Sink`) and by the benchmarks as a
process of its own (`S3SinkProcess`), which is not the bottleneck for clients of this machine's size.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from itertools import islice
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape, unescape

__all__ = ["Fault", "S3Sink", "S3SinkProcess", "SinkRequest"]

_PIECE_BYTES = 1 << 20
_ARENA_BYTES = 1 << 36


class Fault(Enum):
    """What the server does instead of answering as it should."""

    FAIL_500 = "500 before doing anything"
    FAIL_503 = "503 SlowDown before doing anything"
    REFUSE_403 = "403 before doing anything"
    RESET = "close the connection before doing anything"
    LOSE_REPLY = "do it, then close the connection without a reply"
    STALL = "never answer"
    STALL_BODY = "send the head and half of the body, then nothing"
    HALF_BODY = "send half of the body, then close"
    PRETEND = "answer 200 and keep nothing"


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """One request as the server saw it."""

    method: str
    path: str
    query: str
    bytes_in: int = 0
    bytes_out: int = 0
    conditional: bool = False


Extent = tuple[int, int]
Extents = tuple[Extent, ...]


class _Arena:
    """Bytes in one memory file, so that a reply is a `sendfile`; freed extents are reused by size."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("s3-sink")
        os.ftruncate(self.fd, _ARENA_BYTES)
        self.view = memoryview(mmap.mmap(self.fd, _ARENA_BYTES))
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def allocate(self, size_bytes: int) -> Extent:
        with self._lock:
            free = self._free.get(size_bytes)
            if free:
                return free.pop(), size_bytes
            start, self._end = self._end, self._end + -(-size_bytes // 4096) * 4096
            return start, size_bytes

    def free(self, extents: Iterable[Extent]) -> None:
        with self._lock:
            for start, size_bytes in extents:
                self._free.setdefault(size_bytes, []).append(start)

    def prefault(self, size_bytes: int) -> None:
        """Touch the first bytes of the arena, so that no measured request pays for page faults."""
        zeros = bytes(_PIECE_BYTES)
        for start in range(0, size_bytes, _PIECE_BYTES):
            self.view[start : start + _PIECE_BYTES] = zeros

    def bytes_of(self, extents: Extents) -> bytes:
        return b"".join(self.view[start : start + size] for start, size in extents)


def _size(extents: Extents) -> int:
    return sum(size for _, size in extents)


def _cut(extents: Extents, offset: int, length: int) -> Extents:
    """Return the extents of `length` bytes from `offset` within `extents`."""
    wanted: list[Extent] = []
    for start, size in extents:
        skip = min(offset, size)
        take = min(size - skip, length)
        if take > 0:
            wanted.append((start + skip, take))
        offset, length = offset - skip, length - take
    return tuple(wanted)


class _Source:
    """Bytes that come in order; what was read beyond the last answer stays in `ahead`."""

    def __init__(self) -> None:
        self.ahead = bytearray()

    def more(self, limit_bytes: int) -> bytes:
        """Return 1 to `limit_bytes` new bytes, or none at the end."""
        raise NotImplementedError

    def pour(self, view: memoryview) -> None:
        """Read exactly `len(view)` new bytes into `view`."""
        raise NotImplementedError

    def until(self, mark: bytes, piece_bytes: int) -> bytes | None:
        """Return what comes before `mark` and skip the mark; None at the end."""
        while (end := self.ahead.find(mark)) < 0:
            piece = self.more(piece_bytes)
            if not piece:
                return None
            self.ahead += piece
        before = bytes(self.ahead[:end])
        del self.ahead[: end + len(mark)]
        return before

    def fill(self, view: memoryview) -> None:
        """Read exactly `len(view)` bytes into `view`."""
        have = min(len(self.ahead), len(view))
        view[:have] = self.ahead[:have]
        del self.ahead[:have]
        if have < len(view):
            self.pour(view[have:])


class _Wire(_Source):
    """A connection."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.sock = sock

    def more(self, limit_bytes: int) -> bytes:
        return self.sock.recv(limit_bytes)

    def pour(self, view: memoryview) -> None:
        have = 0
        while have < len(view):
            got = self.sock.recv_into(view[have:], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionResetError
            have += got

    def wait_until_closed(self) -> None:
        while self.sock.recv(65536):
            pass


class _Chunked(_Source):
    """The bytes inside HTTP's chunks, or inside those that AWS clients wrap a body in (`aws-chunked`)."""

    def __init__(self, outer: _Source) -> None:
        super().__init__()
        self._outer = outer
        self._left: int | None = None

    def _chunk(self) -> int:
        """Return how many bytes of the current chunk are left, beginning the next one; 0 at the end."""
        if self._left:
            return self._left
        if self._left == 0:
            self._outer.until(b"\r\n", 16)
        line = self._outer.until(b"\r\n", 16)
        if line is None:
            raise ConnectionResetError
        self._left = int(line.split(b";")[0], 16)
        return self._left

    def more(self, limit_bytes: int) -> bytes:
        piece = bytearray(min(limit_bytes, self._chunk()))
        self._take(memoryview(piece))
        return bytes(piece)

    def pour(self, view: memoryview) -> None:
        have = 0
        while have < len(view):
            count = min(len(view) - have, self._chunk())
            if not count:
                raise ConnectionResetError
            self._take(view[have : have + count])
            have += count

    def _take(self, view: memoryview) -> None:
        self._outer.fill(view)
        self._left = (self._left or 0) - len(view)

    def finish(self) -> None:
        """Read the last, empty chunk and the trailers."""
        if self._chunk():
            raise ConnectionResetError
        while self._outer.until(b"\r\n", 16):
            pass
        self._left = None


@dataclass(frozen=True, slots=True)
class _Reply:
    status: str
    headers: str = ""
    text: bytes = b""
    extents: Extents = ()
    head_only: bool = False


def _failure(status: str, code: str) -> _Reply:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return _Reply(status, "Content-Type: application/xml\r\n", text.encode())


_NOT_FOUND = _failure("404 Not Found", "NoSuchKey")
_EXISTS = _failure("412 Precondition Failed", "PreconditionFailed")
_FAULTS = {
    Fault.FAIL_500: _failure("500 Internal Server Error", "InternalError"),
    Fault.FAIL_503: _failure("503 Slow Down", "SlowDown"),
    Fault.REFUSE_403: _failure("403 Forbidden", "AccessDenied"),
}


@dataclass(frozen=True, slots=True)
class _Asked:
    """One parsed request; a body is already in the arena (`extents`) or small (`text`)."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    extents: Extents
    text: bytes


def _parse(head: bytes) -> tuple[str, str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    path, _, query = target.partition("?")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return method, unquote(path), query, headers


class _Objects:
    """The S3 verbs over one namespace of `bucket/key` names."""

    def __init__(self, arena: _Arena) -> None:
        self.arena = arena
        self.objects: dict[str, Extents] = {}
        self._uploads: dict[str, dict[int, Extents]] = {}
        self._lock = threading.Lock()
        self._serial = 0

    def answer(self, asked: _Asked) -> _Reply:
        is_object = bool(asked.key.partition("/")[2])
        verb = f"{asked.method} {'object' if is_object else 'bucket'}"
        with self._lock:
            match verb:
                case "PUT object":
                    return self._put(asked)
                case "GET object" | "HEAD object":
                    return self._get(asked)
                case "DELETE object":
                    return self._delete(asked)
                case "POST object":
                    return self._multipart(asked)
                case "POST bucket":
                    return self._delete_many(asked)
                case "GET bucket" if "location" not in asked.query:
                    return self._list(asked)
        return _Reply("200 OK")

    def _put(self, asked: _Asked) -> _Reply:
        self._serial += 1
        etag = f'ETag: "{self._serial:032x}"\r\n'
        if "uploadId" in asked.query:
            parts = self._uploads.get(asked.query["uploadId"])
            if parts is None:
                return _failure("404 Not Found", "NoSuchUpload")
            parts[int(asked.query["partNumber"])] = asked.extents
            return _Reply("200 OK", etag)
        if asked.headers.get("if-none-match") == "*" and asked.key in self.objects:
            self.arena.free(asked.extents)
            return _EXISTS
        self._replace(asked.key, asked.extents)
        return _Reply("200 OK", etag)

    def _replace(self, key: str, extents: Extents) -> None:
        self.arena.free(self.objects.get(key, ()))
        self.objects[key] = extents

    def _get(self, asked: _Asked) -> _Reply:
        extents = self.objects.get(asked.key)
        if extents is None:
            return _NOT_FOUND
        size = _size(extents)
        common = (
            f'ETag: "{abs(hash(extents)):032x}"\r\nAccept-Ranges: bytes\r\n'
            "Last-Modified: Mon, 02 Nov 2026 10:00:00 GMT\r\nContent-Type: application/octet-stream\r\n"
        )
        head_only = asked.method == "HEAD"
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", asked.headers.get("range", ""))
        if span is None:
            return _Reply("200 OK", common, extents=extents, head_only=head_only)
        first = int(span[1]) if span[1] else max(0, size - int(span[2]))
        last = min(int(span[2]), size - 1) if span[1] and span[2] else size - 1
        if first >= size:
            return _failure("416 Range Not Satisfiable", "InvalidRange")
        common += f"Content-Range: bytes {first}-{last}/{size}\r\n"
        wanted = _cut(extents, first, last - first + 1)
        return _Reply("206 Partial Content", common, extents=wanted, head_only=head_only)

    def _delete(self, asked: _Asked) -> _Reply:
        if "uploadId" in asked.query:
            for part in self._uploads.pop(asked.query["uploadId"], {}).values():
                self.arena.free(part)
        else:
            self.arena.free(self.objects.pop(asked.key, ()))
        return _Reply("204 No Content")

    def _multipart(self, asked: _Asked) -> _Reply:
        bucket, _, key = asked.key.partition("/")
        names = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
        if "uploads" in asked.query:
            self._serial += 1
            upload = f"upload-{self._serial}"
            self._uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult>{names}<UploadId>{upload}</UploadId>"
            return _xml(text + "</InitiateMultipartUploadResult>")
        parts = self._uploads.pop(asked.query["uploadId"], None)
        if parts is None:
            return _failure("404 Not Found", "NoSuchUpload")
        numbers = [int(n) for n in re.findall(rb"<PartNumber>(\d+)</PartNumber>", asked.text)]
        self._replace(asked.key, tuple(extent for n in numbers for extent in parts[n]))
        text = f'<CompleteMultipartUploadResult>{names}<ETag>"{self._serial:032x}"</ETag>'
        return _xml(text + "</CompleteMultipartUploadResult>")

    def _delete_many(self, asked: _Asked) -> _Reply:
        bucket = asked.key.rstrip("/")
        keys = re.findall(r"<Key>([^<]*)</Key>", asked.text.decode())
        for key in keys:
            self.arena.free(self.objects.pop(f"{bucket}/{_unescaped(key)}", ()))
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return _xml(f"<DeleteResult>{deleted}</DeleteResult>")

    def _list(self, asked: _Asked) -> _Reply:
        bucket = asked.key.rstrip("/") + "/"
        prefix = asked.query.get("prefix", "")
        after = asked.query.get("continuation-token") or asked.query.get("start-after", "")
        limit = int(asked.query.get("max-keys", "1000"))
        names = sorted(key[len(bucket) :] for key in self.objects if key.startswith(bucket + prefix))
        rows = list(islice(_rows(names, prefix, asked.query.get("delimiter", ""), after), limit + 1))
        text = "".join(self._row(bucket, name, is_folder=is_folder) for name, is_folder in rows[:limit])
        more = len(rows) > limit
        token = f"<NextContinuationToken>{escape(rows[limit - 1][0])}</NextContinuationToken>" if more else ""
        return _xml(
            f"<ListBucketResult><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows[:limit])}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{text}</ListBucketResult>"
        )

    def _row(self, bucket: str, name: str, *, is_folder: bool) -> str:
        if is_folder:
            return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        size = _size(self.objects[bucket + name])
        return (
            f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><ETag>&quot;0&quot;</ETag>"
            "<LastModified>2026-11-02T10:00:00.000Z</LastModified></Contents>"
        )


def _unescaped(text: str) -> str:
    return unescape(text, {"&quot;": '"', "&apos;": "'"})


def _rows(names: list[str], prefix: str, delimiter: str, after: str) -> Iterable[tuple[str, bool]]:
    """Yield (name, is_folder) beyond `after`, folding names below a delimiter into their folder."""
    last = ""
    for name in names:
        inner, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        row = prefix + inner + cut if cut else name
        if row > after and row != last:
            last = row
            yield row, bool(cut)


def _xml(text: str) -> _Reply:
    return _Reply("200 OK", "Content-Type: application/xml\r\n", f"<?xml version='1.0'?>{text}".encode())


class S3Sink:
    """The server, in threads of this process, for the time of a `with` block."""

    def __init__(self, *, latency: timedelta = timedelta(0)) -> None:
        self.latency = latency
        self.fault: Callable[[SinkRequest], Fault | None] = lambda _request: None
        self.log: list[SinkRequest] = []
        self.connections: set[socket.socket] = set()
        self._objects = _Objects(_Arena())
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
        """Forget what was counted; keep the objects."""
        self.log.clear()

    def prefault(self, size_bytes: int) -> None:
        """Make room for `size_bytes` beforehand, so that no request pays for it."""
        self._objects.arena.prefault(size_bytes)

    def names(self, prefix: str = "") -> list[str]:
        """Return the `bucket/key` names that start with `prefix`."""
        return sorted(name for name in tuple(self._objects.objects) if name.startswith(prefix))

    def bytes_of(self, name: str) -> bytes:
        """Return the bytes kept as `bucket/key`."""
        return self._objects.arena.bytes_of(self._objects.objects[name])

    def drop(self, prefix: str = "") -> None:
        """Remove the objects whose `bucket/key` starts with `prefix`."""
        for name in self.names(prefix):
            self._objects.arena.free(self._objects.objects.pop(name))

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
        wire = _Wire(sock)
        try:
            while head := wire.until(b"\r\n\r\n", 65536):
                self._one(wire, head)
        except OSError:  # the client went away, or a fault closed the connection
            pass
        finally:
            self.connections.discard(sock)
            _hang_up(sock)

    def _one(self, wire: _Wire, head: bytes) -> None:
        method, path, query, headers = _parse(head)
        if headers.get("expect") == "100-continue":
            wire.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        extents, text = self._body(wire, method, headers)
        asked = _Asked(
            method,
            path.lstrip("/"),
            {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()},
            headers,
            extents,
            text,
        )
        request = SinkRequest(
            method, asked.key, query, _size(extents) + len(text), 0, "if-none-match" in headers
        )
        fault = self.fault(request)
        if self.latency:
            time.sleep(self.latency.total_seconds())
        reply = self._reply(wire, asked, fault)
        sent = 0 if reply.head_only else _size(reply.extents) + len(reply.text)
        self.log.append(SinkRequest(method, asked.key, query, request.bytes_in, sent, request.conditional))
        if fault is Fault.LOSE_REPLY:
            raise ConnectionResetError
        self._send(wire, reply, fault)

    def _body(self, wire: _Wire, method: str, headers: dict[str, str]) -> tuple[Extents, bytes]:
        layers: list[_Chunked] = []
        source: _Source = wire
        for name, value in (("transfer-encoding", "chunked"), ("content-encoding", "aws-chunked")):
            if value in headers.get(name, ""):
                layers.append(source := _Chunked(source))
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

    def _reply(self, wire: _Wire, asked: _Asked, fault: Fault | None) -> _Reply:
        if fault is Fault.STALL:
            wire.wait_until_closed()
        if fault in (Fault.STALL, Fault.RESET):
            raise ConnectionResetError
        if fault is Fault.PRETEND:
            return _Reply("200 OK", 'ETag: "0"\r\n')
        if fault in _FAULTS:
            return _FAULTS[fault]
        return self._objects.answer(asked)

    def _send(self, wire: _Wire, reply: _Reply, fault: Fault | None) -> None:
        length = _size(reply.extents) or len(reply.text)
        half = fault in (Fault.HALF_BODY, Fault.STALL_BODY)
        head = f"HTTP/1.1 {reply.status}\r\n{reply.headers}Content-Length: {length}\r\n\r\n".encode()
        wire.sock.sendall(head if reply.head_only else head + reply.text[: length // 2 if half else None])
        if reply.head_only:
            return
        extents = _cut(reply.extents, 0, length // 2) if half else reply.extents
        for start, size in extents:
            while size:
                sent = os.sendfile(wire.sock.fileno(), self._objects.arena.fd, start, size)
                start, size = start + sent, size - sent
        if fault is Fault.STALL_BODY:
            wire.wait_until_closed()
        if half:
            raise ConnectionResetError


def _hang_up(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other side was first
        pass
    sock.close()


class S3SinkProcess:
    """The same server in a process of its own, so that it shares no interpreter with a measured client."""

    def __init__(self, *, prefault_bytes: int = 0) -> None:
        self._prefault_bytes = prefault_bytes

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, str(self._prefault_bytes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
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
