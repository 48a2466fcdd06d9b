"""A client of the Prefect server for setup commands, with errors of one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import get_current_settings

from prefect_tune.blocks.resolve_target import SET_UP
from prefect_tune.core.errors import InvalidInput, TuneError


@contextmanager
def prefect_server(about: str) -> Iterator[SyncPrefectClient]:
    """Yield a client of the Prefect server, to change objects that it stores.

    Args:
        about: the objects, such as `deployments`: errors begin with it.

    Raises:
        InvalidInput: no server is configured.
        TuneError: the server does not answer, or refuses.
    """
    if not get_current_settings().api.url:
        raise InvalidInput(f"{about}: no Prefect server is set up to store them: {SET_UP}")
    with or_said(about), get_client(sync_client=True) as client:
        yield client


@contextmanager
def or_said(about: str) -> Iterator[None]:
    """Turn an HTTP error of the Prefect client into a message of one line, which begins with `about`.

    Raises:
        TuneError: the server does not answer, or refuses.
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
