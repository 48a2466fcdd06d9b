"""Which errors of Prefect's API are temporary. To ask upstream: a class for each of the two kinds."""

from __future__ import annotations

import httpx

_TOO_BUSY = (408, 429)


def is_temporary(error: BaseException | None) -> bool:
    """Whether the same request may succeed later: the API is unreachable, restarts or is too busy."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _TOO_BUSY or error.response.is_server_error
    return isinstance(error, httpx.TransportError)
