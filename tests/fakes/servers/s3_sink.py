"""A small S3 server on loopback that counts requests and stores the bytes that it receives.

It checks no credentials. It honours `If-None-Match: *`, ranges, copies, listings (version 2), batch deletes and
multipart uploads, and can be slow or fail on chosen requests. Every bucket exists.
"""

from __future__ import annotations

import io
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from itertools import islice
from typing import IO, Self
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape, unescape


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


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """One request as the server saw it."""

    method: str
    path: str
    query: str
    bytes_in: int = 0
    bytes_out: int = 0
    conditional: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One parsed request."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes | bytearray


@dataclass(frozen=True, slots=True)
class Reply:
    status: str
    headers: str = ""
    body: bytes | bytearray | memoryview = b""
    head_only: bool = False


def error_reply(status: str, code: str) -> Reply:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Reply(status, "Content-Type: application/xml\r\n", text.encode())


def _xml(text: str) -> Reply:
    return Reply("200 OK", "Content-Type: application/xml\r\n", f"<?xml version='1.0'?>{text}".encode())


_FAULTS = {
    Fault.FAIL_500: error_reply("500 Internal Server Error", "InternalError"),
    Fault.FAIL_503: error_reply("503 Slow Down", "SlowDown"),
    Fault.REFUSE_403: error_reply("403 Forbidden", "AccessDenied"),
}
_NOT_FOUND = error_reply("404 Not Found", "NoSuchKey")
_NO_UPLOAD = error_reply("404 Not Found", "NoSuchUpload")


class ObjectNamespace:
    """The S3 verbs over one namespace of `bucket/key` names."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes | bytearray] = {}
        self.uploads: dict[str, dict[int, bytes | bytearray]] = {}
        self._lock = threading.Lock()
        self._serial = 0

    def handle(self, request: ParsedRequest) -> Reply:
        is_object = bool(request.key.partition("/")[2])
        with self._lock:
            match f"{request.method} {'object' if is_object else 'bucket'}":
                case "PUT object":
                    return self._put(request)
                case "GET object" | "HEAD object":
                    return self._get(request)
                case "DELETE object" if "uploadId" in request.query:
                    self.uploads.pop(request.query["uploadId"], None)
                    return Reply("204 No Content")
                case "DELETE object":
                    self.objects.pop(request.key, None)
                    return Reply("204 No Content")
                case "POST object":
                    return self._multipart(request)
                case "POST bucket":
                    keys = re.findall(r"<Key>([^<]*)</Key>", request.body.decode())
                    for key in keys:
                        name = unescape(key, {"&quot;": '"', "&apos;": "'"})
                        self.objects.pop(f"{request.key.rstrip('/')}/{name}", None)
                    deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                    return _xml(f"<DeleteResult>{deleted}</DeleteResult>")
                case "GET bucket" if "location" not in request.query:
                    return self._list(request)
        return Reply("200 OK")

    def _put(self, request: ParsedRequest) -> Reply:
        self._serial += 1
        etag = f'"{self._serial:032x}"'
        if "uploadId" in request.query:
            if (parts := self.uploads.get(request.query["uploadId"])) is None:
                return _NO_UPLOAD
            parts[int(request.query["partNumber"])] = request.body
        elif (source := request.headers.get("x-amz-copy-source")) is not None:
            if (copied := self.objects.get(unquote(source).lstrip("/"))) is None:
                return _NOT_FOUND
            self.objects[request.key] = copied
            return _xml(f"<CopyObjectResult><ETag>{etag}</ETag></CopyObjectResult>")
        elif request.headers.get("if-none-match") == "*" and request.key in self.objects:
            return error_reply("412 Precondition Failed", "PreconditionFailed")
        else:
            self.objects[request.key] = request.body
        return Reply("200 OK", f"ETag: {etag}\r\n")

    def _get(self, request: ParsedRequest) -> Reply:
        data = self.objects.get(request.key)
        if data is None:
            return _NOT_FOUND
        common = (
            f'ETag: "{id(data):032x}"\r\nAccept-Ranges: bytes\r\n'
            "Last-Modified: Mon, 02 Nov 2026 10:00:00 GMT\r\nContent-Type: application/octet-stream\r\n"
        )
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if span is None:
            return Reply("200 OK", common, data)
        size = len(data)
        first = int(span[1]) if span[1] else max(0, size - int(span[2]))
        last = min(int(span[2]), size - 1) if span[1] and span[2] else size - 1
        if first >= size:
            return error_reply("416 Range Not Satisfiable", "InvalidRange")
        common += f"Content-Range: bytes {first}-{last}/{size}\r\n"
        return Reply("206 Partial Content", common, memoryview(data)[first : last + 1])

    def _multipart(self, request: ParsedRequest) -> Reply:
        bucket, _, key = request.key.partition("/")
        names = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
        if "uploads" in request.query:
            self._serial += 1
            upload = f"upload-{self._serial}"
            self.uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult>{names}<UploadId>{upload}</UploadId>"
            return _xml(text + "</InitiateMultipartUploadResult>")
        if (parts := self.uploads.pop(request.query["uploadId"], None)) is None:
            return _NO_UPLOAD
        numbers = [int(n) for n in re.findall(rb"<PartNumber>(\d+)</PartNumber>", request.body)]
        self.objects[request.key] = b"".join(parts[n] for n in numbers)
        text = f'<CompleteMultipartUploadResult>{names}<ETag>"{self._serial:032x}"</ETag>'
        return _xml(text + "</CompleteMultipartUploadResult>")

    def _list(self, request: ParsedRequest) -> Reply:
        bucket = request.key.rstrip("/") + "/"
        prefix = request.query.get("prefix", "")
        after = request.query.get("continuation-token") or request.query.get("start-after", "")
        limit = int(request.query.get("max-keys", "1000"))
        names = sorted(key[len(bucket) :] for key in self.objects if key.startswith(bucket + prefix))
        rows = list(islice(_rows(names, prefix, request.query.get("delimiter", ""), after), limit + 1))
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
        return (
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[bucket + name])}</Size>"
            "<ETag>&quot;0&quot;</ETag><LastModified>2026-11-02T10:00:00.000Z</LastModified></Contents>"
        )


def _rows(names: list[str], prefix: str, delimiter: str, after: str) -> Iterable[tuple[str, bool]]:
    """Yield (name, is_folder) beyond `after`, folding names below a delimiter into their folder."""
    last = ""
    for name in names:
        inner, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        row = prefix + inner + cut if cut else name
        if row > after and row != last:
            last = row
            yield row, bool(cut)


class S3Sink:
    """The server, in threads of this process, for the time of a `with` block."""

    def __init__(self, *, latency: timedelta = timedelta(0)) -> None:
        self.latency = latency
        self.fault: Callable[[SinkRequest], Fault | None] = lambda _request: None
        self.log: list[SinkRequest] = []
        self.connections: set[socket.socket] = set()
        self._objects = ObjectNamespace()
        self._listener = socket.socket()

    def __enter__(self) -> Self:
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(512)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in tuple(self.connections):
            _close(sock)

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

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in tuple(self._objects.objects) if name.startswith(prefix))

    @property
    def upload_count(self) -> int:
        """Uploads by parts that are neither completed nor removed."""
        return len(self._objects.uploads)

    def bytes_of(self, name: str) -> bytes:
        """Return the bytes kept as `bucket/key`."""
        return bytes(self._objects.objects[name])

    def drop(self, prefix: str = "") -> None:
        """Remove the objects whose `bucket/key` starts with `prefix`."""
        for name in self.names(prefix):
            del self._objects.objects[name]

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
            with sock.makefile("rb", 1 << 16) as stream:
                while first := stream.readline():
                    self._handle_request(sock, stream, first)
        except (OSError, ValueError):  # the client went away, or a fault closed the connection
            pass
        finally:
            self.connections.discard(sock)
            _close(sock)

    def _handle_request(self, sock: socket.socket, stream: IO[bytes], first: bytes) -> None:
        method, target, _ = first.decode("latin-1").split(" ", 2)
        headers = {}
        while line := stream.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("expect") == "100-continue":
            sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in headers.get("transfer-encoding", ""):
            body = _read_chunks(stream)
        else:
            body = _read_exactly(stream, int(headers.get("content-length", "0")))
        if "aws-chunked" in headers.get("content-encoding", ""):
            body = _read_chunks(io.BytesIO(body))
        path, _, query = target.partition("?")
        parameters = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
        parsed = ParsedRequest(method, unquote(path).lstrip("/"), parameters, headers, body)
        request = SinkRequest(method, parsed.key, query, len(body), 0, "if-none-match" in headers)
        fault = self.fault(request)
        if self.latency:
            time.sleep(self.latency.total_seconds())
        if fault in (Fault.STALL, Fault.RESET):
            self.log.append(request)
            if fault is Fault.STALL:
                _wait_until_closed(sock)
            raise ConnectionResetError
        # A body after the answer to a HEAD would be read as the answer to the connection's next request.
        reply = replace(self._reply(parsed, fault), head_only=method == "HEAD")
        self.log.append(replace(request, bytes_out=0 if reply.head_only else len(reply.body)))
        if fault is Fault.LOSE_REPLY:
            raise ConnectionResetError
        self._send(sock, reply, fault)

    def _reply(self, request: ParsedRequest, fault: Fault | None) -> Reply:
        if fault is Fault.PRETEND:
            return Reply("200 OK", 'ETag: "0"\r\n')
        if fault in _FAULTS:
            return _FAULTS[fault]
        return self._objects.handle(request)

    def _send(self, sock: socket.socket, reply: Reply, fault: Fault | None) -> None:
        half = fault in (Fault.HALF_BODY, Fault.STALL_BODY)
        sock.sendall(f"HTTP/1.1 {reply.status}\r\n{reply.headers}Content-Length: {len(reply.body)}\r\n\r\n".encode())
        if reply.head_only:
            return
        sock.sendall(reply.body[: len(reply.body) // 2] if half else reply.body)
        if fault is Fault.STALL_BODY:
            _wait_until_closed(sock)
        if half:
            raise ConnectionResetError


def _read_exactly(stream: IO[bytes], size: int) -> bytearray:
    body = bytearray(size)
    if stream.readinto(body) != size:  # type: ignore[attr-defined]  # of all binary streams that are buffered
        raise ConnectionResetError
    return body


def _read_chunks(stream: IO[bytes]) -> bytearray:
    """Return the bytes inside HTTP's chunks, or inside the chunks of AWS clients (`aws-chunked`)."""
    body = bytearray()
    while size := int(stream.readline().split(b";")[0], 16):
        body += _read_exactly(stream, size)
        stream.readline()
    while stream.readline().strip():  # the trailers
        pass
    return body


def _wait_until_closed(sock: socket.socket) -> None:
    while sock.recv(65536):
        pass


def _close(sock: socket.socket) -> None:
    with suppress(OSError):  # the other side was first
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
