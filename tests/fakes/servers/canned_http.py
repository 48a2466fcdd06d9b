"""HTTP servers of a test, also with one fixed answer: errors of clouds that no emulator produces."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class CannedServer:
    """The server's address, the headers and bodies of all requests so far, and its answer, which a test may change."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    url: str = ""
    request_headers: list[Mapping[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


def s3_error(code: str, message: str) -> bytes:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    ).encode()


@contextmanager
def canned_server(
    status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, *, tls: ssl.SSLContext | None = None
) -> Iterator[CannedServer]:
    """Yield a server that answers every request the same, until the answer is changed."""
    canned = CannedServer(status, body, headers or {})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _answer(self) -> None:
            canned.request_headers.append({name.lower(): value for name, value in self.headers.items()})
            canned.bodies.append(self.rfile.read(int(self.headers.get("content-length") or 0)))
            status, body, sent = canned.status, canned.body, canned.headers  # they may be changed from here on
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **sent}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815  the names that http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    with http_server(Handler, tls=tls) as port:
        canned.url = f"{'https' if tls else 'http'}://localhost:{port}"
        yield canned


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler], *, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Answer by `handler` in threads of this process; yield the port on loopback."""
    server = _Quiet(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what these tests are about."""
