"""The ASGI middleware in front of the package's own Prefect server."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from dataclasses import dataclass, field

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from prefect_tune.prefect_api import local_server
from prefect_tune.prefect_api.local_server import RetryOn503Middleware, is_cut_short


@dataclass
class Moody:
    """An application that is too busy for the first requests, and echoes the later ones."""

    refusals: int
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append(body := await Request(scope, receive).body())
        is_busy = len(self.bodies) <= self.refusals
        await PlainTextResponse(body, 503 if is_busy else 201)(scope, receive, send)
        if is_busy:
            raise OSError("database is locked")  # as Starlette does, for the log


def answered(app: Moody) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(
            RetryOn503Middleware(app, pauses_seconds=(0.0, 0.0)), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/api", content=b"flow run" * 100_000)

    return anyio.run(ask)


@pytest.mark.parametrize("refusals", [0, 1, 2])
def test_who_is_refused_since_somebody_else_writes_hears_of_it_only_when_it_lasts(refusals: int) -> None:
    app = Moody(refusals)
    answer = answered(app)
    assert (answer.status_code, answer.content) == (201, b"flow run" * 100_000)
    assert app.bodies == [answer.content] * (refusals + 1)


def test_a_refusal_that_lasts_is_told_as_it_is() -> None:
    app = Moody(100)
    assert answered(app).status_code == 503
    assert len(app.bodies) == 3


def test_a_refusal_that_took_its_time_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "_AT_ONCE_SECONDS", 0.0)
    app = Moody(1)
    assert answered(app).status_code == 503
    assert len(app.bodies) == 1


@pytest.mark.parametrize("refusals", [2, 3])
def test_what_the_last_try_raised_is_for_the_log(refusals: int) -> None:
    async def ask() -> None:
        patient = RetryOn503Middleware(Moody(refusals), pauses_seconds=(0.0, 0.0))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(patient), base_url="http://server") as client:
            await client.post("/api")

    with pytest.raises(OSError, match="database is locked") if refusals == 3 else nullcontext():
        anyio.run(ask)


@pytest.mark.parametrize(("error", "is_reported"), [(asyncio.CancelledError, False), (OSError, True)])
def test_a_batch_that_the_end_cuts_short_is_no_error_to_tell_of(
    error: type[BaseException], is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        raise error
    except error:
        logging.getLogger("recorder").exception("Error flushing 35 events (35 to retry, 0 dropped)")
    logging.getLogger("recorder").error("without an exception")
    assert [not is_cut_short(record) for record in caplog.records] == [is_reported, True]
