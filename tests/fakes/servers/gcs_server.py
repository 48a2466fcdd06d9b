"""Google Cloud Storage's XML API on loopback, written after its documentation.

It checks the signature of the self-signed tokens that service accounts send, knows only the buckets it was
given, and honours `x-goog-if-generation-match: 0`. No emulator that can be installed speaks this API whole.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from tests.fakes.servers.canned_http import http_server


def service_account() -> tuple[str, rsa.RSAPublicKey]:
    """Return a new service account's key file, and the key that its tokens are checked with."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    content = {
        "type": "service_account",
        "project_id": "loopback",
        "private_key_id": "1",
        "private_key": private,
        "client_email": "runner@loopback.example",
        "token_uri": "http://127.0.0.1:9/token",
    }
    return json.dumps(content), key.public_key()


@dataclass
class GcsServer:
    buckets: set[str]
    public_key: rsa.RSAPublicKey | None
    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_authorized(self, authorization: str) -> bool:
        if self.public_key is None:
            return True
        signed, _, signature = authorization.removeprefix("Bearer ").rpartition(".")
        try:
            padded = signature + "=" * (-len(signature) % 4)
            self.public_key.verify(
                base64.urlsafe_b64decode(padded), signed.encode(), padding.PKCS1v15(), hashes.SHA256()
            )
        except (InvalidSignature, ValueError):
            return False
        return True


@contextmanager
def gcs_server(*buckets: str, public_key: rsa.RSAPublicKey | None = None) -> Iterator[GcsServer]:
    """Yield a running server; without a key it checks no signature."""
    state = GcsServer(set(buckets), public_key)
    with http_server(type("Handler", (_Handler,), {"state": state})) as port:
        state.url = f"http://127.0.0.1:{port}"
        yield state


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: GcsServer

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = urlsplit(self.path)
        bucket, _, name = unquote(parts.path).removeprefix("/").partition("/")
        if not self.state.is_authorized(self.headers.get("authorization", "")):
            self._reply(401, _error("AuthenticationRequired", "Authentication required."))
        elif bucket not in self.state.buckets:
            self._reply(404, _error("NoSuchBucket", "The specified bucket does not exist."))
        elif not name:
            self._list(bucket, parse_qs(parts.query))
        else:
            getattr(self, f"_{self.command.lower()}")(f"{bucket}/{name}", body)

    do_GET = do_PUT = do_HEAD = do_DELETE = _handle  # noqa: N815  the names that http.server looks for

    def _put(self, path: str, body: bytes) -> None:
        with self.state.lock:
            if self.headers.get("x-goog-if-generation-match") == "0" and path in self.state.objects:
                status, answer = 412, _error("PreconditionFailed", "At least one condition did not hold.")
            else:
                self.state.objects[path] = body
                status, answer = 200, b""
        self._reply(status, answer, {"etag": '"1"', "x-goog-generation": "1"})

    def _get(self, path: str, _: bytes) -> None:
        data = self.state.objects.get(path)
        if data is None:
            self._reply(404, _error("NoSuchKey", "The specified key does not exist."))
            return
        byte_range = self.headers.get("range", "").removeprefix("bytes=").partition("-")
        first, last = int(byte_range[0] or 0), min(int(byte_range[2] or len(data) - 1), len(data) - 1)
        headers = {"etag": '"1"', "last-modified": "Wed, 01 Jan 2025 00:00:00 GMT", "x-goog-generation": "1"}
        if byte_range[1]:
            headers["content-range"] = f"bytes {first}-{last}/{len(data)}"
        self._reply(206 if byte_range[1] else 200, data[first : last + 1], headers)

    _head = _get

    def _delete(self, path: str, _: bytes) -> None:
        if self.state.objects.pop(path, None) is None:
            self._reply(404, _error("NoSuchKey", "The specified key does not exist."))
        else:
            self._reply(204)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix = f"{bucket}/{query.get('prefix', [''])[0]}"
        contents = "".join(
            f"<Contents><Key>{escape(path.partition('/')[2])}</Key><Size>{len(data)}</Size>"
            '<LastModified>2025-01-01T00:00:00.000Z</LastModified><ETag>"1"</ETag></Contents>'
            for path, data in sorted(self.state.objects.items())
            if path.startswith(prefix)
        )
        self._reply(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode())

    def _reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def _error(code: str, message: str) -> bytes:
    return (
        f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    )
