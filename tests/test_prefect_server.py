"""What stands before the application of a server of our own."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from prefect_tune.prefect_server import Patient


@dataclass
class Moody:
    """An application that is too busy for the first requests, and repeats what later ones say."""

    refusals: int
    heard: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.heard.append(body := await Request(scope, receive).body())
        is_busy = len(self.heard) <= self.refusals
        await PlainTextResponse(body, 503 if is_busy else 201)(scope, receive, send)
        if is_busy:
            raise OSError("database is locked")  # as Starlette does, for the log


def answered(app: Moody) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Patient(app, pauses_seconds=(0.0, 0.0)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/api", content=b"flow run" * 100_000)

    return anyio.run(ask)


@pytest.mark.parametrize("refusals", [0, 1, 2])
def test_who_is_refused_since_somebody_else_writes_hears_of_it_only_when_it_lasts(refusals: int) -> None:
    app = Moody(refusals)
    answer = answered(app)
    assert (answer.status_code, answer.content) == (201, b"flow run" * 100_000)
    assert app.heard == [answer.content] * (refusals + 1)


def test_a_refusal_that_lasts_is_told_as_it_is() -> None:
    app = Moody(100)
    assert answered(app).status_code == 503
    assert len(app.heard) == 3
