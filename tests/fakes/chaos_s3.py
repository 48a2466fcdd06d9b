"""An S3 server on loopback that misbehaves: by script, by seed, or always; and remembers how."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from itertools import chain, repeat

from tests.fakes.s3_objects import Asked, Objects, Reply, cut, failure, size_of
from tests.fakes.s3_sink import Fault, S3Sink, SinkRequest
from tests.fakes.s3_wire import Wire


class Chaos(Enum):
    """What the server does instead of answering as it should."""

    FAIL_500 = "500 before doing anything"
    FAIL_503 = "503 SlowDown before doing anything"
    THROTTLE_429 = "429 before doing anything"
    DONE_500 = "do it, then answer 500"
    RESET = "close the connection before doing anything"
    LOSE_REPLY = "do it, then close the connection without a reply"
    HANG = "never answer"
    HANG_IN_BODY = "send the head and half of the body, then nothing"
    HALF_BODY = "send half of the body, then close"
    DRIP = "do it, and answer byte by byte, one each `drip_period`"
    DENY_403 = "403 AccessDenied before doing anything"
    EXPIRE_403 = "403 ExpiredToken before doing anything"
    NO_BUCKET = "404 NoSuchBucket before doing anything"
    SHORT_LENGTH = "send half of the body and call it the whole"
    STORE_HALF = "keep half of what was sent, and answer 200"
    STORE_NOTHING = "keep nothing, and answer 200"
    STALE_LISTING = "list what was there at `freeze_listing`"


PASSING = (
    Chaos.FAIL_500,
    Chaos.FAIL_503,
    Chaos.THROTTLE_429,
    Chaos.DONE_500,
    Chaos.RESET,
    Chaos.LOSE_REPLY,
    Chaos.HALF_BODY,
    Chaos.HANG_IN_BODY,
    Chaos.HANG,
)
"""What may pass: a client may ask again."""

REFUSALS = (Chaos.DENY_403, Chaos.EXPIRE_403, Chaos.NO_BUCKET)
LIES = (Chaos.SHORT_LENGTH, Chaos.STORE_HALF, Chaos.STORE_NOTHING, Chaos.STALE_LISTING)

_AS_FAULT = {
    Chaos.FAIL_500: Fault.FAIL_500,
    Chaos.FAIL_503: Fault.FAIL_503,
    Chaos.RESET: Fault.RESET,
    Chaos.LOSE_REPLY: Fault.LOSE_REPLY,
    Chaos.HANG: Fault.STALL,
    Chaos.HANG_IN_BODY: Fault.STALL_BODY,
    Chaos.HALF_BODY: Fault.HALF_BODY,
    Chaos.DENY_403: Fault.REFUSE_403,
    Chaos.STORE_NOTHING: Fault.PRETEND,
}
_ANSWERS = {
    Chaos.THROTTLE_429: failure("429 Too Many Requests", "TooManyRequests"),
    Chaos.EXPIRE_403: failure("403 Forbidden", "ExpiredToken"),
    Chaos.NO_BUCKET: failure("404 Not Found", "NoSuchBucket"),
}
_DONE_500 = failure("500 Internal Server Error", "InternalError")

Matches = Callable[[SinkRequest], bool]


class ChaosS3(S3Sink):
    """`S3Sink` with more ways to fail, and a plan of when; without a plan it is honest.

    `page_count` caps a listing's pages. `injected` counts what was done. A plan looks only at the
    requests that `script`'s `only` matches; the others are answered honestly.
    """

    def __init__(
        self, *, page_count: int = 1000, drip_period: timedelta = timedelta(seconds=1), bucket: str = "bucket"
    ) -> None:
        super().__init__()
        self.injected: Counter[Chaos] = Counter()
        self.fault = self._next
        self._page_count = page_count
        self._drip_seconds = drip_period.total_seconds()
        self._bucket = bucket
        self._stale = Objects(self._objects.arena)
        self._plan: Callable[[], Chaos | None] = lambda: None
        self._only: Matches = lambda _request: True
        self._plan_lock = threading.Lock()
        self._now = threading.local()

    def script(
        self,
        steps: Iterable[Chaos | None],
        *,
        then: Chaos | None = None,
        only: Matches = lambda _request: True,
    ) -> None:
        """From now on: one step for each request, and `then` for all that follow."""
        following = chain(steps, repeat(then))
        self._set(lambda: next(following), only)

    def always(self, chaos: Chaos, *, only: Matches = lambda _request: True) -> None:
        """From now on: nothing else."""
        self.script([], then=chaos, only=only)

    def storm(self, seed: int, rate: float, among: Sequence[Chaos]) -> None:
        """From now on: any of `among` with the probability `rate`, the same for the same seed and requests."""
        rng = random.Random(seed)
        self._set(lambda: rng.choice(among) if rng.random() < rate else None, lambda _request: True)

    def calm(self) -> None:
        """From now on: honest."""
        self.script([])

    def freeze_listing(self) -> None:
        """Remember what a stale listing shows."""
        self._stale.objects = dict(self._objects.objects)

    def _set(self, plan: Callable[[], Chaos | None], only: Matches) -> None:
        with self._plan_lock:
            self._plan, self._only = plan, only

    def _next(self, request: SinkRequest) -> Fault | None:
        with self._plan_lock:
            chaos = self._plan() if self._only(request) else None
            if chaos is not None:
                self.injected[chaos] += 1
        self._now.chaos = chaos
        return None if chaos is None else _AS_FAULT.get(chaos)

    def _reply(self, wire: Wire, asked: Asked, fault: Fault | None) -> Reply:
        chaos = self._now.chaos
        if chaos in _ANSWERS:
            answer = _ANSWERS[chaos]
            return replace(answer, head_only=asked.method == "HEAD")
        if "list-type" in asked.query:
            count = min(self._page_count, int(asked.query.get("max-keys", "1000")))
            asked = replace(asked, query={**asked.query, "max-keys": str(count)})
            if chaos is Chaos.STALE_LISTING:
                return self._stale.answer(asked)
        if chaos is Chaos.STORE_HALF and asked.method == "PUT":
            asked = replace(asked, extents=cut(asked.extents, 0, size_of(asked.extents) // 2))
        reply = super()._reply(wire, asked, fault)
        if chaos is Chaos.DONE_500:
            return replace(_DONE_500, head_only=asked.method == "HEAD")
        if chaos is Chaos.SHORT_LENGTH and asked.method == "GET":
            half = reply.text[: len(reply.text) // 2]
            return replace(reply, text=half, extents=cut(reply.extents, 0, size_of(reply.extents) // 2))
        return reply

    def _send(self, wire: Wire, reply: Reply, fault: Fault | None) -> None:
        if self._now.chaos is not Chaos.DRIP:
            super()._send(wire, reply, fault)
            return
        body = b"" if reply.head_only else reply.text + self._objects.arena.bytes_of(reply.extents)
        length = size_of(reply.extents) or len(reply.text)
        head = f"HTTP/1.1 {reply.status}\r\n{reply.headers}Content-Length: {length}\r\n\r\n".encode()
        for byte in head + body:
            wire.sock.sendall(bytes([byte]))
            time.sleep(self._drip_seconds)
