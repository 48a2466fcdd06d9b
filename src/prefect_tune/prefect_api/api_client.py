"""A client of Prefect's API with errors of one line, its temporary errors, and the error of a Prefect that has changed.

To ask upstream: a class for temporary errors, and one for what a release lacks.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import prefect
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import get_current_settings

from prefect_tune.blocks.resolve_target import SET_UP
from prefect_tune.core.errors import InvalidInput, TuneError

_TOO_BUSY, _REFUSED = (408, 429), (401, 403)


def is_temporary(error: BaseException | None) -> bool:
    """Whether the same request may succeed later: the API is unreachable, restarts or is too busy."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _TOO_BUSY or error.response.is_server_error
    return isinstance(error, httpx.TransportError)


def is_missing_server(error: RuntimeError) -> bool:
    """Whether Prefect raised it since no server answers; it has no class of its own for that."""
    return "API" in str(error)


# The error of a guard: this Prefect lacks something that the package needs and Prefect does not promise.

OLDEST_TESTED = "3.8.0"
"""The oldest release that `make test-prefect` runs the tests with: the lower bound in pyproject.toml."""


def prefect_changed(what: str) -> TuneError:
    """Return the error that `what` of Prefect is not as it was, with the next move."""
    return TuneError(
        f"Prefect {prefect.__version__} has changed: {what}. This release of prefect-tune is tested with Prefect "
        f"{OLDEST_TESTED} up to the newest 3.x at its release: install one of these, or a newer prefect-tune"
    )


def require_api() -> None:
    """Check by one request that the configured API is Prefect's, and takes the credentials.

    An outage passes: the run waits for the API, or says what fails.

    Raises:
        InvalidInput: a setting is wrong; the message names it.
    """
    try:
        with get_client(sync_client=True) as client:
            client.read_flows(limit=1)
    except Exception as error:
        if (wrong := wrong_setting(error)) is not None:
            raise InvalidInput(wrong) from None
        if isinstance(error, httpx.HTTPError) or isinstance(error.__cause__, httpx.HTTPError):
            return
        raise


def wrong_setting(error: BaseException) -> str | None:
    """Return which setting is wrong, if `error` of a request that every Prefect API serves says so."""
    api = get_current_settings().api
    address = f"PREFECT_API_URL={api.url}"
    expected = "Expected the address of a Prefect API, which ends with /api: http://127.0.0.1:4200/api"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, httpx.HTTPStatusError):
            status = cause.response.status_code
            if status in _REFUSED:
                return (
                    f"the Prefect server at {address} refuses the credentials (HTTP {status}): correct PREFECT_API_KEY "
                    "for Prefect Cloud (prefect cloud login), or PREFECT_API_AUTH_STRING for a server of your own"
                )
            is_wrong = not (status in _TOO_BUSY or cause.response.is_server_error)
            return f"{address} answers HTTP {status}. {expected}" if is_wrong else None
        if isinstance(cause, ssl.SSLError):
            return f"{address} does not speak TLS as expected ({cause}). Correct it, or PREFECT_API_SSL_CERT_FILE"
        if isinstance(cause, ValueError | httpx.RemoteProtocolError | httpx.UnsupportedProtocol | httpx.InvalidURL):
            return f"{address} does not answer as a Prefect API does. {expected}"
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def prefect_server(about: str) -> Iterator[SyncPrefectClient]:
    """Yield a client of the Prefect server, to change objects that it stores.

    Args:
        about: the objects, such as `deployments`: errors begin with it.

    Raises:
        InvalidInput: no server is configured, or a setting is wrong.
        TuneError: the server does not answer, or refuses.
    """
    if not get_current_settings().api.url:
        raise InvalidInput(f"{about}: no Prefect server is set up to store them: {SET_UP}")
    require_api()
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
