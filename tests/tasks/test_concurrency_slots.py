"""Slots of Prefect's concurrency limits while the API fails: an attempt waits for one, and never fails for one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from uuid import uuid4

import pytest
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED, temporary_settings

from prefect_tune.prefect_api import task_runs as concurrency_slots
from prefect_tune.prefect_api.task_runs import holding_concurrency_limits
from tests.fakes.servers.canned_http import Canned, answering

GRANTED = f'{{"lease_id": "{uuid4()}", "limits": [{{"id": "{uuid4()}", "name": "gpu", "limit": 1}}]}}'.encode()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Canned]:
    """An API that fails, until the test changes its answer."""
    monkeypatch.setattr(concurrency_slots, "_PAUSE", timedelta(seconds=0.05))
    monkeypatch.setattr(concurrency_slots, "_TRY", timedelta(seconds=1))
    with (
        answering(500) as canned,
        temporary_settings({PREFECT_API_URL: f"{canned.url}/api", PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}),
    ):
        yield canned


def limit() -> list[str]:
    """Return a name that no other test uses: Prefect keeps a client for each."""
    return [f"gpu-{uuid4().hex}"]


class _Stop(threading.Event):
    """Heals the API in the first pause between two tries, as the next try begins."""

    def __init__(self, api: Canned) -> None:
        super().__init__()
        self._api = api

    def wait(self, timeout: float | None = None) -> bool:
        self._api.status, self._api.body = 200, GRANTED
        return super().wait(timeout)


def test_an_api_that_fails_is_asked_again_and_cannot_fail_an_attempt_that_has_ended(api: Canned) -> None:
    with holding_concurrency_limits(limit(), _Stop(api)):
        assert api.status == 200, "the slot was granted"
        api.status = 500


def test_an_api_that_cannot_be_reached_is_waited_for_until_the_trial_is_stopped() -> None:
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), holding_concurrency_limits(limit(), stop):
        assert stop.is_set()


@pytest.mark.parametrize("status", [422, 423])
def test_an_answer_that_no_slot_is_free_now_is_waited_for(api: Canned, status: int) -> None:
    api.status = status  # 422: the limit is 0
    with holding_concurrency_limits(limit(), _Stop(api)):
        assert api.status == 200, "the slot was granted"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_request_that_prefect_refuses_is_an_error(api: Canned, status: int) -> None:
    api.status = status
    with (
        pytest.raises(ConcurrencySlotAcquisitionError, match=str(status)),
        holding_concurrency_limits(limit(), _Stop(api)),
    ):
        pass
