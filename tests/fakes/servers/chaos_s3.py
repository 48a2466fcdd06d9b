"""An S3 server on loopback that fails by script, by seed, or always, and records its failures."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import chain, repeat

from tests.fakes.servers.s3_sink import Fault, ParsedRequest, Reply, S3Sink, SinkRequest, error_reply

TRANSIENT = (
    Fault.FAIL_500,
    Fault.FAIL_503,
    Fault.THROTTLE_429,
    Fault.DONE_500,
    Fault.RESET,
    Fault.LOSE_REPLY,
    Fault.HALF_BODY,
    Fault.STALL_BODY,
    Fault.STALL,
)
"""Transient faults: a client may retry."""

_REPLIES = {Fault.THROTTLE_429: error_reply("429 Too Many Requests", "TooManyRequests")}
_DONE_500 = error_reply("500 Internal Server Error", "InternalError")

Matches = Callable[[SinkRequest], bool]


class ChaosS3(S3Sink):
    """`S3Sink` with more faults, and a plan of when to inject them; without a plan it answers correctly.

    `page_count` limits a listing's pages. `injected` counts the faults. A plan sees only the requests that
    `script`'s `only` matches; the others are answered correctly.
    """

    def __init__(self, *, page_count: int = 1000, drip_period: timedelta = timedelta(seconds=1)) -> None:
        super().__init__()
        self.injected: Counter[Fault] = Counter()
        self.fault = self._next
        self._page_count = page_count
        self._drip_seconds = drip_period.total_seconds()
        self._plan: Callable[[], Fault | None] = lambda: None
        self._only: Matches = lambda _request: True
        self._plan_lock = threading.Lock()

    def script(
        self, steps: Iterable[Fault | None], *, then: Fault | None = None, only: Matches = lambda _request: True
    ) -> None:
        """From now on: apply one step to each request, and `then` to all later requests."""
        faults = chain(steps, repeat(then))
        self._set(lambda: next(faults), only)

    def always(self, fault: Fault, *, only: Matches = lambda _request: True) -> None:
        """From now on: inject this fault into every request."""
        self.script([], then=fault, only=only)

    def storm(self, seed: int, rate: float, among: Sequence[Fault]) -> None:
        """From now on: inject one of `among` with probability `rate`, the same for the same seed and requests."""
        rng = random.Random(seed)
        self._set(lambda: rng.choice(among) if rng.random() < rate else None, lambda _request: True)

    def calm(self) -> None:
        """From now on: answer correctly."""
        self.script([])

    def _set(self, plan: Callable[[], Fault | None], only: Matches) -> None:
        with self._plan_lock:
            self._plan, self._only = plan, only

    def _next(self, request: SinkRequest) -> Fault | None:
        with self._plan_lock:
            fault = self._plan() if self._only(request) else None
            if fault is not None:
                self.injected[fault] += 1
        return fault

    def _reply(self, request: ParsedRequest, fault: Fault | None) -> Reply:
        if fault in _REPLIES:
            return _REPLIES[fault]
        if "list-type" in request.query:
            count = min(self._page_count, int(request.query.get("max-keys", "1000")))
            request = replace(request, query={**request.query, "max-keys": str(count)})
        reply = super()._reply(request, fault)
        return _DONE_500 if fault is Fault.DONE_500 else reply

    def _send(self, sock: socket.socket, reply: Reply, fault: Fault | None) -> None:
        if fault is not Fault.DRIP:
            super()._send(sock, reply, fault)
            return
        head = f"HTTP/1.1 {reply.status}\r\n{reply.headers}Content-Length: {len(reply.body)}\r\n\r\n".encode()
        for byte in head + (b"" if reply.head_only else bytes(reply.body)):
            sock.sendall(bytes([byte]))
            time.sleep(self._drip_seconds)
