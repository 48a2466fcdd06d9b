"""The Prefect server, for whoever sets something up on it; and what is said where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import get_current_settings

from prefect_tune.blocks.resolve import SET_UP
from prefect_tune.core.errors import InvalidInput, TuneError

__all__ = ["or_said", "prefect_server"]


@contextmanager
def prefect_server(about: str) -> Iterator[SyncPrefectClient]:
    """Lend a client of the Prefect server for things that live on it, such as `deployments`.

    Raises:
        InvalidInput: no server is set up.
        TuneError: it does not answer, or it refuses.
    """
    if not get_current_settings().api.url:
        raise InvalidInput(f"{about}: no Prefect server is set up, and they live on one: {SET_UP}")
    with or_said(about), get_client(sync_client=True) as client:
        yield client


@contextmanager
def or_said(about: str) -> Iterator[None]:
    """Say in one line where the Prefect server refuses, and why, or does not answer.

    Raises:
        TuneError: it did one or the other.
    """
    url = get_current_settings().api.url
    server = f"{about}: the Prefect server at {url}" if url else f"{about}: the Prefect server"
    try:
        yield
    except PrefectHTTPStatusError as error:
        raise TuneError(f"{server} refused: {_reason_of(error)}") from error
    except httpx.HTTPError as error:
        raise TuneError(f"{server} did not answer: {str(error) or type(error).__name__}") from error


def _reason_of(error: PrefectHTTPStatusError) -> str:
    """Return the reason that the server gave, or else the status of its answer."""
    try:
        return str(error.response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.response.status_code}"
