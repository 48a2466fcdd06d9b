"""What a Prefect server says when it refuses."""

from __future__ import annotations

from prefect.exceptions import PrefectHTTPStatusError

__all__ = ["reason_of"]


def reason_of(error: PrefectHTTPStatusError) -> str:
    """Return the reason that the server gave, or else the status of its answer."""
    try:
        return str(error.response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.response.status_code}"
