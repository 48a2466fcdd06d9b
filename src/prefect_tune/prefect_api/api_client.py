"""Call Prefect's API with one-line errors, recognize temporary errors, and report an incompatible release.

To ask upstream: an exception class for temporary errors, and another for a feature that a release lacks.
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

from prefect_tune.blocks.resolve_target import SERVER_SETUP_ADVICE
from prefect_tune.core.errors import InvalidInput, TuneError

_BUSY_STATUSES, _REFUSED_STATUSES = (408, 429), (401, 403)


def is_temporary_error(error: BaseException | None) -> bool:
    """Return whether a request that raised `error` may succeed later: the API is down, restarting or too busy."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _BUSY_STATUSES or error.response.is_server_error
    return isinstance(error, httpx.TransportError)


def is_no_server_error(error: RuntimeError) -> bool:
    """Return whether Prefect raised `error` because no server answers, which only the text of the error shows."""
    return "API" in str(error)


# Make the error for a Prefect release that lacks an undocumented detail on which this package relies.

MIN_TESTED_VERSION = "3.8.0"
"""The oldest release of Prefect that `make test-prefect` tests; also the lower bound in pyproject.toml."""


def prefect_changed_error(change: str) -> TuneError:
    """Return an error that says that Prefect has changed, and what to do next."""
    return TuneError(
        f"Prefect {prefect.__version__} has changed: {change}. This release of prefect-tune is tested with Prefect "
        f"{MIN_TESTED_VERSION} up to the newest 3.x at its release: install one of these, or a newer prefect-tune"
    )


def require_api() -> None:
    """Check with one request that the configured URL is a Prefect API that accepts the credentials.

    An outage raises no error, because the run waits for the API or reports the failure itself.

    Raises:
        InvalidInput: a setting is wrong; the message names it.
    """
    try:
        with get_client(sync_client=True) as client:
            client.read_flows(limit=1)
    except Exception as error:
        if (message := _wrong_setting_message(error)) is not None:
            raise InvalidInput(message) from None
        if isinstance(error, httpx.HTTPError) or isinstance(error.__cause__, httpx.HTTPError):
            return
        raise


def _wrong_setting_message(error: BaseException) -> str | None:
    """Return a message that names the setting that caused `error`; None if `error` has another cause."""
    address = f"PREFECT_API_URL={get_current_settings().api.url}"
    expected = "Expected the address of a Prefect API, which ends with /api, as in http://127.0.0.1:4200/api"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, httpx.HTTPStatusError):
            status = cause.response.status_code
            if status in _REFUSED_STATUSES:
                return (
                    f"the Prefect server at {address} rejects the credentials (HTTP {status}): correct PREFECT_API_KEY "
                    "for Prefect Cloud (prefect cloud login), or PREFECT_API_AUTH_STRING for your own server"
                )
            is_wrong = not (status in _BUSY_STATUSES or cause.response.is_server_error)
            return f"{address} answers HTTP {status}. {expected}" if is_wrong else None
        if isinstance(cause, ssl.SSLError):
            return f"{address} does not speak TLS as expected ({cause}). Correct this URL, or PREFECT_API_SSL_CERT_FILE"
        if isinstance(cause, ValueError | httpx.RemoteProtocolError | httpx.UnsupportedProtocol | httpx.InvalidURL):
            return f"{address} does not answer like a Prefect API. {expected}"
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def open_server_client(object_kind: str) -> Iterator[SyncPrefectClient]:
    """Yield a client that can change objects stored on the Prefect server.

    Args:
        object_kind: the kind of the objects, such as `deployments`; error messages begin with it.

    Raises:
        InvalidInput: no server is configured, or a setting is wrong.
        TuneError: the server does not answer, or rejects a request.
    """
    if not get_current_settings().api.url:
        raise InvalidInput(f"{object_kind}: no Prefect server is configured to store them: {SERVER_SETUP_ADVICE}")
    require_api()
    server = f"{object_kind}: the Prefect server at {get_current_settings().api.url}"
    try:
        with get_client(sync_client=True) as client:
            yield client
    except PrefectHTTPStatusError as error:
        raise TuneError(f"{server} rejected the request: {_format_server_reason(error)}") from error
    except httpx.HTTPError as error:
        raise TuneError(f"{server} did not answer: {str(error) or type(error).__name__}") from error


def _format_server_reason(error: PrefectHTTPStatusError) -> str:
    """Return the reason in the server's answer, or the HTTP status if the answer has no reason."""
    try:
        return str(error.response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.response.status_code}"
