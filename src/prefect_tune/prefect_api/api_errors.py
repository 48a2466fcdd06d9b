"""Errors of Prefect's API: which are temporary, and the error where Prefect lacks what this package needs.

To ask upstream: a class for each of the two kinds.
"""

from __future__ import annotations

import httpx
import prefect

from prefect_tune.core.errors import TuneError

_TOO_BUSY = (408, 429)


def is_temporary(error: BaseException | None) -> bool:
    """Whether the same request may succeed later: the API is unreachable, restarts or is too busy."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _TOO_BUSY or error.response.is_server_error
    return isinstance(error, httpx.TransportError)


# The error of a guard: this Prefect lacks something that the package needs and Prefect does not promise.

OLDEST_TESTED = "3.8.0"
"""The oldest release that `make test-prefect` runs the tests with: the lower bound in pyproject.toml."""


def prefect_changed(what: str) -> TuneError:
    """Return the error that `what` of Prefect is not as it was, with the next move."""
    return TuneError(
        f"Prefect {prefect.__version__} has changed: {what}. This release of prefect-tune is tested with Prefect "
        f"{OLDEST_TESTED} up to the newest 3.x at its release: install one of these, or a newer prefect-tune"
    )
