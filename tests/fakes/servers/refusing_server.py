"""A Prefect server that refuses some requests, as one does whose plan or roles do not allow them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import httpx

from tests.fakes.servers.canned_http import http_server


@contextmanager
def refusing_server(api_url: str, word: str, status: int, refusal: bytes) -> Iterator[str]:
    """Yield the URL of an API that passes requests on to `api_url`, except those with `word` in their path."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if word in self.path:
                self._reply(status, refusal)
                return
            url = f"{api_url.removesuffix('/api')}{self.path}"
            headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            answer = httpx.request(self.command, url, content=body, headers=headers, timeout=60)
            self._reply(answer.status_code, answer.content)

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815  the names that http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    with http_server(Handler) as port:
        yield f"http://127.0.0.1:{port}/api"
